"""What a natural step costs beside one of Adam: medians of alternating calls in one process.

``XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0 python benchmarks/natural_step.py`` measures on one core.
One layer, a normal likelihood, learned hyperparameters and inducing inputs; only the posterior of the inducing values
changes hands. Both with rates that fall by a cosine.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient

SIZES = ((57, 25, 100), (1, 100, 256), (5, 100, 256), (1, 128, 1000))  # outputs, inducing points, rows
STEPS = 50  # of one call
positive = dist.constraints.positive


def advance(outputs: int, points: int, rows: int, natural: bool, dtype: Any) -> tuple[Any, Any]:
    """A compiled call of some steps, and the state that it takes and returns."""
    draws = np.random.default_rng(0)
    X = jnp.asarray(draws.normal(size=(rows, 2)), dtype)
    Y = jnp.sin(X @ jnp.asarray(draws.normal(size=(2, outputs)), dtype))
    Z = jnp.asarray(draws.normal(size=(points, 2)), dtype)

    def model(X: jax.Array, Y: jax.Array) -> None:
        variance, noise = (
            numpyro.param(n, jnp.asarray(v, dtype), constraint=positive) for n, v in (("variance", 1.0), ("noise", 0.3))
        )
        scales = numpyro.param("scales", jnp.ones(2, dtype), constraint=positive)
        f = dgp.gp("f", dgp.kernels.RBF(variance, scales), dgp.Points(Z, learn=True), outputs=outputs)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise).to_event(1)), obs=Y)

    guide = dgp.guides.InducingPoint(model)
    adam = optax.adam(optax.cosine_decay_schedule(1e-3, 10**6))
    sizes = optax.cosine_decay_schedule(0.1, 10**6)
    svi = SVI(model, guide, NaturalGradient(guide, sizes, adam) if natural else adam, dgp.ELBO())
    state = svi.init(jax.random.key(0), X, Y)

    def steps(state: Any, X: jax.Array, Y: jax.Array) -> Any:
        return jax.lax.fori_loop(0, STEPS, lambda _, s: svi.update(s, X, Y)[0], state)

    compiled = jax.jit(steps).lower(state, X, Y).compile()
    return lambda s: jax.block_until_ready(compiled(s, X, Y)), state


def measure(size: tuple[int, int, int], dtype: Any, repeats: int) -> np.ndarray:
    """Milliseconds per step of Adam and of natural gradients, (repeats, 2)."""
    programs = [advance(*size, natural, dtype) for natural in (False, True)]
    states = [call(state) for call, state in programs]
    seconds = np.zeros((repeats, 2))
    for row in seconds:
        for i, (call, _) in enumerate(programs):
            start = time.perf_counter()
            states[i] = call(states[i])
            row[i] = time.perf_counter() - start
    return 1e3 * seconds / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    print(f"{jax.devices()[0].device_kind}\n")
    print("| dtype | outputs | inducing points | rows | Adam, ms | natural gradient, ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    for dtype in (jnp.float32, jnp.float64):
        jax.config.update("jax_enable_x64", dtype is jnp.float64)
        for size in SIZES:
            times = measure(size, dtype, repeats)
            adam, natural = np.median(times, 0)
            ratio = np.median(times[:, 1] / times[:, 0])
            cells = " | ".join(map(str, size))
            print(f"| {jnp.dtype(dtype).name} | {cells} | {adam:.3f} | {natural:.3f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
