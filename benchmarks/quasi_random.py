"""Variance of the bound and of its gradient with quasi-random and with plain random numbers, by depth and particles.

``python benchmarks/quasi_random.py`` fits programs of two and three layers with one and with two columns in between to
a step, and prints the variance of independent estimates with quasi-random numbers, relative to that with plain ones:
of the bound, and of its gradient by all parameters, summed. Below one is better; the cost of a step is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp


def make_model(X: jax.Array, depth: int, width: int) -> Callable[..., None]:
    """A deep GP with layers of ``width`` columns between."""
    starts = dgp.initial.layers(X, [width] * (depth - 1), 15)

    def model(X: Any, y: Any = None) -> None:
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        functions = [
            dgp.gp(
                f"f{i}",
                dgp.kernels.RBF(1.0, start.lengthscale),
                dgp.Points(start.Z),
                outputs=width if i < depth - 1 else None,
                mean=start.mean,
            )
            for i, start in enumerate(starts)
        ]
        with numpyro.plate("data", len(X)):
            h = X
            for i, f in enumerate(functions[:-1]):
                h = numpyro.sample(f"h{i}", f(h))
            numpyro.sample("y", dgp.Likelihood(functions[-1](h), lambda v: dist.Normal(v, noise)), obs=y)

    return model


def variances(objective: Any, params: Any, model: Any, guide: Any, data: Any, repeats: int) -> tuple[float, float]:
    """Of the bound, and of its gradient summed over parameters."""

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(lambda p: objective.loss(key, p, model, guide, *data))(params)
        return value, jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(gradient)])

    values, gradients = jax.lax.map(one, jax.random.split(jax.random.key(5), repeats))
    return float(values.var()), float(gradients.var(0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--particles", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--smoke", action="store_true", help="a few steps and draws, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.particles, options.steps, options.repeats = [2], 3, 4
    rng = np.random.default_rng(0)
    x = jnp.array(np.sort(rng.uniform(-1, 1, 60)))
    data = jnp.stack([x, x**2], 1), jnp.sign(x) + 0.1 * jnp.array(rng.normal(size=60))
    print("| layers | columns | of | " + " | ".join(f"S = {s}" for s in options.particles) + " |")
    print("|" + "---|" * (3 + len(options.particles)))
    for depth, width in ((2, 1), (2, 2), (3, 1), (3, 2)):
        model = make_model(data[0], depth, width)
        guide = dgp.guides.InducingPoint(model)
        svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
        params = dgp.fit(svi, jax.random.key(0), options.steps, *data, progress_bar=False).params
        ratios = []
        for particles in options.particles:
            both = [
                variances(dgp.ELBO(particles, quasi_random=even), params, model, guide, data, options.repeats)
                for even in (True, False)
            ]
            ratios.append([a / b for a, b in zip(*both, strict=True)])
        for name, row in zip(("bound", "gradient"), zip(*ratios, strict=True), strict=True):
            print(f"| {depth} | {width} | {name} | " + " | ".join(f"{r:.2f}" for r in row) + " |", flush=True)


if __name__ == "__main__":
    main()
