"""Spherical harmonics beside inducing points, and the start at a trained network.

``python benchmarks/harmonics.py`` prints two tables, ``--only starts`` the second alone. The first: one layer on sets
of scikit-learn and statsmodels, hyperparameters by L-BFGS on the collapsed bound, with as many harmonics as inducing
points. The second: the bound of a layer on harmonics, a row, after steps of Adam (means of ten steps), from the start
of the package and from a dense layer of rectified units that was trained on the same rows.
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
from library_sets import load
from numpyro.infer import SVI

import numpyro_dgp as dgp

UNITS = 64


def split(name: str, most: int) -> tuple[np.ndarray, ...]:
    X, y = load(name, most)
    order = np.random.default_rng(0).permutation(len(X))
    train, test = order[len(X) // 5 :], order[: len(X) // 5]
    to_x, to_y = dgp.initial.Standardizer.fit(X[train]), dgp.initial.Standardizer.fit(y[train])
    return to_x(X[train]), to_y(y[train]), to_x(X[test]), to_y(y[test])


def regression(kernel: Callable[..., Any], inducing: Any, D: int) -> Callable[..., None]:
    def model(X: Any, y: Any = None) -> None:
        noise = numpyro.sample("noise", dist.LogNormal(-1.5, 1.0))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        scales = numpyro.sample("scales", dist.LogNormal(jnp.zeros(D), 1.0).to_event(1))
        width = numpyro.sample("width", dist.LogNormal(-0.3, 0.5))
        f = dgp.gp("f", kernel(variance, scales, width), inducing)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)

    return model


def matern(variance: Any, scales: Any, width: Any) -> Any:
    return dgp.kernels.Matern52(variance, scales * jnp.sqrt(1.0 * scales.size))


def zonal(variance: Any, scales: Any, width: Any) -> Any:
    return dgp.kernels.Zonal(dgp.kernels.Matern52(variance, width), scales**-2 / scales.size, 1.0)


def rectified(variance: Any, scales: Any, width: Any) -> Any:
    return dgp.kernels.ArcCosine(variance, scales**-2 / scales.size, 1.0)


METHODS = {
    "Matern-5/2, points": (matern, False),
    "zonal, points": (zonal, False),
    "zonal, harmonics": (zonal, True),
    "arc-cosine, points": (rectified, False),
    "arc-cosine, harmonics": (rectified, True),
}


def representations(names: list[str], size: int, most: int, steps: int) -> None:
    print("| set | rows, columns | method | M | bound, a row | test density | RMSE |\n|---|---|---|---|---|---|---|")
    for name in names:
        X, y, X_test, y_test = split(name, most)
        D = X.shape[1]
        for label, (kernel, on_sphere) in METHODS.items():
            directions = zonal if kernel is matern else kernel
            harmonics = dgp.Harmonics.around(directions(1.0, jnp.ones(D), 0.74), D, size)
            M = inducing_values(regression(directions, harmonics, D), X)
            inducing = harmonics if on_sphere else dgp.Points(dgp.initial.kmeans(X, min(M, len(X))))
            model = regression(kernel, inducing, D)
            guide = dgp.guides.Collapsed(model)
            svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
            found = dgp.optim.minimize(svi, jax.random.key(0), X, y, max_steps=steps, progress_bar=False)
            posterior = dgp.Posterior(model, guide.on(X, y), found.params)
            density = posterior.using(num_samples=1).log_density(jax.random.key(1), y_test, X_test).mean()
            error = jnp.sqrt(
                jnp.square(posterior.using(num_samples=1).predict(jax.random.key(1), X_test).mean - y_test).mean()
            )
            M = inducing_values(model, X)
            row = f"{-found.losses[-1] / len(X):.3f} | {density:.3f} | {error:.3f} |"
            print(f"| {name} | {len(X)}, {D} | {label} | {M} | {row}", flush=True)


def inducing_values(model: Callable[..., None], X: Any) -> int:
    seeded = numpyro.handlers.seed(model, 0)
    return numpyro.handlers.trace(seeded).get_trace(X[:2])["f"]["value"].size


def trained(X: Any, y: Any, steps: int) -> tuple[jax.Array, ...]:
    """A layer of rectified units, by Adam on squared errors with a little weight decay."""
    first, second = jax.random.split(jax.random.key(0))
    scale = X.shape[1] ** -0.5
    start = (scale * jax.random.normal(first, (X.shape[1], UNITS)), jnp.zeros(UNITS),
             UNITS**-0.5 * jax.random.normal(second, (UNITS,)))  # fmt: skip
    optimizer = optax.adamw(0.01, weight_decay=0.01)

    def loss(weights: tuple[jax.Array, ...]) -> jax.Array:
        W, b, a = weights
        return jnp.square(jnp.maximum(X @ W + b, 0) @ a - y).mean()

    def step(state: Any, _: Any) -> Any:
        weights, opt = state
        updates, opt = optimizer.update(jax.grad(loss)(weights), opt, weights)
        return (optax.apply_updates(weights, updates), opt), None

    return jax.jit(lambda s: jax.lax.scan(step, s, length=steps)[0][0])((start, optimizer.init(start)))


def starts(names: list[str], size: int, most: int, steps: int) -> None:
    at = [step for step in (0, 100, 300, 1000, 3000) if step < steps] + [steps - 1]
    print("| set | start | " + " | ".join(f"bound after {step}" for step in at) + " |\n|" + "---|" * (2 + len(at)))
    for name in names:
        X, y = split(name, most)[:2]
        D = X.shape[1]
        harmonics = dgp.Harmonics.around(rectified(1.0, jnp.ones(D), 1.0), D, size)
        model = regression(rectified, harmonics, D)
        guide = dgp.guides.InducingPoint(model)
        v = dgp.initial.from_dense(harmonics, rectified(1.0, jnp.ones(D), 1.0), *trained(X, y, 2000))
        begin = {"variance_auto_loc": jnp.ones(()), "scales_auto_loc": jnp.ones(D)}
        for label, more in (("prior", {}), ("trained network", {"f_auto_loc": v})):
            svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
            result = dgp.fit(svi, jax.random.key(1), steps, X, y, init_params=begin | more, progress_bar=False)
            losses = " | ".join(f"{-np.asarray(result.losses)[max(0, s - 9) : s + 1].mean() / len(X):.3f}" for s in at)
            print(f"| {name} | {label} | {losses} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["friedman1", "friedman2", "diabetes", "heart", "ccard"])
    parser.add_argument("--size", type=int, default=120, help="harmonics at most")
    parser.add_argument("--most", type=int, default=500, help="rows")
    parser.add_argument("--steps", type=int, default=3000, help="of Adam")
    parser.add_argument("--only", choices=["points", "starts"], help="one of the tables")
    arguments = parser.parse_args()
    numpyro.enable_x64()
    if arguments.only != "starts":
        representations(arguments.sets, arguments.size, arguments.most, 200)
    if arguments.only is None:
        print()
    if arguments.only != "points":
        starts(arguments.sets[:3], arguments.size, arguments.most, arguments.steps)


if __name__ == "__main__":
    main()
