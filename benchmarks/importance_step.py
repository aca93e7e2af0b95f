"""The cost of an importance-weighted step: three layers, 128 inducing points, 512 data, K samples of a latent each.

``python benchmarks/importance_step.py`` prints the median time of a step of Adam, and that of two others beside it: one
of the plain bound on K times as many data, which has as many rows but no weights, and one whose K draws of inner layers
are independent, which is no bound and only shows what drawing them jointly costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.guides import importance

WIDTH = 5


def make_model(dims: int, layers: int, num_inducing: int, dtype: str) -> Callable[..., None]:
    """A latent, inner layers of five outputs, a scalar last layer; hyperparameters and inducing inputs learned."""
    rng = np.random.default_rng(0)
    positive = dist.constraints.positive

    def model(X: jax.Array, y: jax.Array) -> None:
        functions = []
        columns = dims + 1
        for i in range(layers):
            scales = numpyro.param(f"scales{i}", jnp.full(columns, columns**0.5, dtype), constraint=positive)
            Z = dgp.Points(rng.normal(size=(num_inducing, columns)).astype(dtype), learn=True)
            last = i == layers - 1
            mean = None if last else dgp.means.LinearMean(jnp.eye(columns, WIDTH, dtype=dtype))
            functions.append(
                dgp.gp(f"f{i}", dgp.kernels.RBF(1.0, scales), Z, outputs=None if last else WIDTH, mean=mean)
            )
            columns = WIDTH
        with numpyro.plate("data", len(X)):
            h = dgp.latent("w", X, 1)
            for i, f in enumerate(functions[:-1]):
                h = numpyro.sample(f"h{i}", f(h))
            numpyro.sample("y", dgp.Likelihood(functions[-1](h), lambda v: dist.Normal(v, 0.1)), obs=y)

    return model


def make_step(model: Any, guide: Any, X: np.ndarray, y: np.ndarray) -> Callable[[], Any]:
    """One compiled step of Adam."""
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    data = jnp.asarray(X), jnp.asarray(y)
    state = [svi.init(jax.random.key(0), *data)]
    update = jax.jit(svi.update)

    def step() -> Any:
        state[0], loss = jax.block_until_ready(update(state[0], *data))
        return loss

    step()
    return step


def medians(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds, the steps taking turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--dims", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--num-inducing", type=int, default=128)
    parser.add_argument("--num-samples", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--dtype", nargs="+", choices=["float32", "float64"], default=["float32", "float64"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="a small model, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.batch, arguments.layers, arguments.num_inducing, arguments.rounds = 20, 2, 10, 2
        arguments.num_samples, arguments.dtype = [2], ["float32"]
    rng = np.random.default_rng(0)
    print(f"device: {jax.devices()[0].device_kind}; {arguments.batch} data, {arguments.layers} layers, ms per step")
    print(
        "| dtype | K | plain, one sample | weighted | doubly reparameterised | plain, K times the data | independent |"
    )
    print("|---|---|---|---|---|---|---|")
    joint = importance.ReplicatedValues
    for dtype in arguments.dtype:
        jax.config.update("jax_enable_x64", dtype == "float64")
        model = make_model(arguments.dims, arguments.layers, arguments.num_inducing, dtype)
        X = rng.normal(size=(arguments.batch, arguments.dims)).astype(dtype)
        y = X[:, 0] ** 2
        for K in arguments.num_samples:
            weighted = partial(
                dgp.guides.ImportanceWeighted, model, num_samples=K, latent=dgp.guides.Amortised(hidden=(20, 20))
            )
            plain = dgp.guides.InducingPoint(model, latent=dgp.guides.Amortised())
            steps = {
                "plain": make_step(model, plain, X, y),
                "weighted": make_step(model, weighted(), X, y),
                "doubly": make_step(model, weighted(doubly_reparameterised=True), X, y),
                "rows": make_step(model, plain, np.tile(X, (K, 1)), np.tile(y, K)),
            }
            importance.ReplicatedValues = lambda values: values  # type: ignore[assignment, misc]
            steps["independent"] = make_step(model, weighted(), X, y)
            importance.ReplicatedValues = joint  # type: ignore[misc]
            found = medians(steps, arguments.rounds)
            print(f"| {dtype} | {K} | " + " | ".join(f"{found[name]:.1f}" for name in steps) + " |", flush=True)


if __name__ == "__main__":
    main()
