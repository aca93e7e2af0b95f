"""Simulation-based calibration of NUTS on one- and two-layer programs."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS

import numpyro_dgp as dgp
from numpyro_dgp.diagnostics import uniformity

rng = np.random.default_rng(0)
X = jnp.linspace(-1, 1, 8)[:, None]
Z = dgp.Points(jnp.linspace(-1, 1, 4)[:, None])
DRAWS = 50


def program(layers, X, y=None):
    """Every function is drawn, the last one too: the observations have the density that the chain sees."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scale), Z, outputs=1, mean=dgp.means.Identity())
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 0.7), Z) if layers == 2 else None
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        mean = h[:, 0] if g is None else numpyro.sample("v", g(h))
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def under_a_likelihood(layers, X, y=None):
    """The last function under a Gaussian likelihood with its normalised density: ``for_mcmc`` integrates it."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.5))
    g = dgp.gp("g", dgp.kernels.RBF(1.0, scale), Z)
    f = dgp.gp("f", dgp.kernels.RBF(0.3, 0.7), Z, outputs=1, mean=dgp.means.Identity()) if layers == 2 else None
    with numpyro.plate("data", len(X)):
        h = X if f is None else numpyro.sample("h", f(X))
        likelihood = dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise), collapse="marginal")
        numpyro.sample("y", likelihood, obs=y)


def ranks(layers, repeats, error=1.0, program=program, sites=("noise", "scale", "f")):
    """Ranks of true values among draws by NUTS given data simulated with them, by site: (repeats, ...)."""
    transformed = dgp.for_mcmc(lambda X, y=None: program(layers, X, y))

    def once(key):
        truth_key, chain_key = jax.random.split(key)
        truth = handlers.trace(handlers.seed(transformed, truth_key)).get_trace(X)
        mcmc = MCMC(
            NUTS(transformed, max_tree_depth=6), num_warmup=200, num_samples=4 * DRAWS, thinning=4, progress_bar=False
        )
        mcmc.run(chain_key, X, error * truth["y"]["value"])
        found = mcmc.get_samples()
        return {name: (found[name] < truth[name]["value"]).sum(0) for name in sites}

    found = jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(layers), repeats))
    return {name: np.asarray(value).reshape(repeats, -1) for name, value in found.items()}


def p_values(found):
    return [
        uniformity((column + rng.uniform(size=len(column))) / (DRAWS + 1))
        for value in found.values()
        for column in value.T
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "repeats"), [(1, 240), (2, 120)])
def test_ranks_of_the_truth_are_uniform(layers, repeats):
    found = p_values(ranks(layers, repeats))
    assert min(found) > 0.01 / len(found)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "repeats"), [(1, 240), (2, 120)])
def test_ranks_with_an_integrated_layer_are_uniform(layers, repeats):
    """Of its inducing values too, which are drawn after the chain."""
    found = p_values(ranks(layers, repeats, program=under_a_likelihood, sites=("noise", "scale", "g")))
    assert min(found) > 0.01 / len(found)


@pytest.mark.slow
def test_wrong_data_are_noticed():
    """The same test sees data that are half as large again as the program makes them."""
    assert min(p_values(ranks(1, 120, error=1.5))) < 1e-4
