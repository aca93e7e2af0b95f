"""Value and gradient of the potential of exact processes, beside NumPyro's multivariate normal.

``python benchmarks/exact_gradient.py`` times, for exact regression with a Matern-5/2 kernel and two hyperparameters,
what one leapfrog of NUTS costs: with ``f(X, noise=s)`` of ``dgp.gp(..., inducing=None)``, with
``dist.MultivariateNormal`` on the same covariance matrix, and for two exact layers. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import initialize_model

import numpyro_dgp as dgp


def hyperparameters() -> tuple[Any, Any]:
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 1.0))
    return noise, dgp.kernels.Matern52(1.0, scale)


def exact(X: jax.Array, y: Any = None) -> None:
    noise, kernel = hyperparameters()
    numpyro.sample("y", dgp.gp("f", kernel, inducing=None)(X, noise=noise), obs=y)


def dense(X: jax.Array, y: Any = None) -> None:
    noise, kernel = hyperparameters()
    covariance = kernel.gram(X) + jnp.square(noise) * jnp.eye(len(X))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(X)), covariance), obs=y)


def two_layers(X: jax.Array, y: Any = None) -> None:
    noise, kernel = hyperparameters()
    f = dgp.gp("f", kernel, inducing=None, outputs=X.shape[1], mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.Matern52(), inducing=None)
    numpyro.sample("y", g(numpyro.sample("h", f(X)), noise=noise), obs=y)


PROGRAMS: dict[str, Callable[..., None]] = {
    "exact": dgp.for_mcmc(exact),
    "MultivariateNormal": dense,
    "two exact layers": dgp.for_mcmc(two_layers),
}


def milliseconds(rows: int, repeats: int) -> dict[str, float]:
    """Of one evaluation, the programs in turn."""
    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.uniform(size=(rows, 2)))
    y = jnp.sin(5 * X[:, 0]) + 0.1 * rng.normal(size=rows)
    slopes, times = {}, {name: [] for name in PROGRAMS}
    for name, program in PROGRAMS.items():
        info = initialize_model(jax.random.key(0), program, model_args=(X, y))
        slopes[name] = (
            jax.jit(jax.value_and_grad(info.potential_fn)).lower(info.param_info.z).compile(),
            info.param_info.z,
        )
    inner = max(1, round((600 / rows) ** 2))
    for _ in range(repeats):
        for name, (slope, z) in slopes.items():
            began = time.perf_counter()
            for _ in range(inner):
                found = slope(z)
            jax.block_until_ready(found)
            times[name].append(1000 * (time.perf_counter() - began) / inner)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[50, 100, 200, 400, 800])
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    numpyro.enable_x64()
    print("| rows | " + " | ".join(PROGRAMS) + " |\n" + "|---" * (1 + len(PROGRAMS)) + "|")
    for rows in options.rows:
        found = milliseconds(rows, options.repeats)
        print(f"| {rows} | " + " | ".join(f"{value:.3g}" for value in found.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
