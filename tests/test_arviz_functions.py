"""Every function of ArviZ that takes a tree, called on trees of a chain and of guides; the table of docs/arviz.md."""

import inspect
import pathlib
import warnings
from importlib import metadata

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI

import numpyro_dgp as dgp

arviz_plots = pytest.importorskip("arviz_plots")

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "arviz.md"
HEAD = "| function | chains | guide, corrected | guide, not corrected |"
X = jnp.linspace(-1, 1, 24)[:, None]
Y = jnp.sin(3 * X[:, 0]) + 0.3 * jax.random.normal(jax.random.key(0), (24,))
KEY = jax.random.key(1)


def model(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.5, 0.3))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, lengthscale), dgp.Points(jnp.linspace(-1, 1, 8)[:, None]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)


def fitted(guide):
    svi = SVI(model, guide, optax.adam(0.03), dgp.ELBO())
    return dgp.Posterior(model, guide, dgp.fit(svi, KEY, 1500, X, Y, progress_bar=False).params)


def chains_and_guides():
    """Posteriors by the column of the table."""
    mcmc = MCMC(
        NUTS(dgp.for_mcmc(model)), num_warmup=200, num_samples=200, num_chains=2, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    mcmc.run(KEY, X, Y, extra_fields=("energy", "diverging"))
    guides = dgp.guides
    return {
        "chains": mcmc,
        "guide, corrected": fitted(AutoMultivariateNormal(model)),
        "guide, not corrected": fitted(guides.InducingPoint(model, inducing=guides.Diagonal(), other=guides.Normal())),
    }
