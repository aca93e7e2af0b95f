"""A log-Gaussian Cox process on a ring: counts at three of four points, scored at the others."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from implementations.mcmc_dense import root
from implementations.mcmc_target import Target, Values

import numpyro_dgp as dgp

PRIORS = {"sd": dist.LogNormal(0.0, 0.5), "lengthscale": dist.LogNormal(math.log(6.0), 0.4)}
NUGGET = 1e-3


def cox(size: int, seed: int) -> Target:
    """The process is a periodic Matern-3/2 one; test inputs are the points without counts."""
    points = np.arange(size)
    counts = np.random.default_rng(seed).poisson(np.exp(1 + np.sin(4 * np.pi * points / size)))
    held = points % 4 == 2
    seen, unseen = jnp.asarray(points[~held]), jnp.asarray(points[held])
    y, y_test = jnp.asarray(counts[~held], float), jnp.asarray(counts[held], float)
    ring = dgp.rings.Ring(0.0, float(size), size)

    def observed(f: jax.Array, y: Any) -> None:
        numpyro.sample("y", dist.Poisson(jnp.exp(1 + f[seen])).to_event(1), obs=y)

    def model(y: Any = None) -> None:
        values = {name: numpyro.sample(name, prior) for name, prior in PRIORS.items()}
        kernel = dgp.kernels.Matern32(values["sd"] ** 2, values["lengthscale"])
        observed(numpyro.sample("f", dgp.rings.RingNormal(kernel, ring, noise=NUGGET)), y)

    def dense(y: Any = None) -> None:
        values = {name: numpyro.sample(name, prior) for name, prior in PRIORS.items()}
        turns = points[:, None, None] - points[None, :, None] + size * np.arange(-4, 5)
        r = math.sqrt(3.0) * np.abs(turns) / values["lengthscale"]
        factor = root(values["sd"] ** 2 * ((1 + r) * jnp.exp(-r)).sum(-1), NUGGET)
        white = numpyro.sample("white", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
        observed(numpyro.deterministic("f", factor @ white), y)

    def score(samples: Values, key: jax.Array) -> dict[str, float]:
        rate = jnp.exp(1 + samples["f"][:, unseen])
        density = jax.nn.logsumexp(dist.Poisson(rate).log_prob(y_test), axis=0) - math.log(len(rate))
        draws = np.asarray(jax.random.poisson(key, rate), float)
        spread = np.abs(draws[:, None] - draws[None]).mean((0, 1))
        crps = np.abs(draws - np.asarray(y_test)).mean(0) - 0.5 * spread
        return {
            "density": float(density.mean()),
            "density_error": float(density.std() / math.sqrt(len(density))),
            "rmse": float(jnp.sqrt(jnp.square(rate.mean(0) - y_test).mean())),
            "crps": float(crps.mean()),
        }

    def function(values: Values) -> jax.Array:
        return values["f"][unseen]

    target = Target(dense, (y,), tuple(PRIORS), function, score, start={})
    return target._replace(model=model, gaussian=("f",), dense=target)
