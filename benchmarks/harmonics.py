"""Spherical harmonics beside inducing points.

``python benchmarks/harmonics.py`` prints a table: one layer on sets of scikit-learn and statsmodels, hyperparameters by
L-BFGS on the collapsed bound, with as many harmonics as inducing points.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["friedman1", "friedman2", "diabetes", "heart", "ccard"])
    parser.add_argument("--size", type=int, default=120, help="harmonics at most")
    parser.add_argument("--most", type=int, default=500, help="rows")
    arguments = parser.parse_args()
    numpyro.enable_x64()
    representations(arguments.sets, arguments.size, arguments.most, 200)


if __name__ == "__main__":
    main()
