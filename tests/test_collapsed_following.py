"""Collapsed bounds whose hidden layers follow their inducing values, against draws, mean field and the evidence."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.distributions import kl_divergence
from numpyro.infer import SVI
from programs import X, Y, Z, agree, random_params

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k
from numpyro_dgp.beliefs import InducingPrior
from numpyro_dgp.collapsed import from_features
from numpyro_dgp.linalg import inverse_cholesky
from numpyro_dgp.values import FunctionValues

N = 12
X, Y = X[::3][:N], Y[::3][:N]
N = len(X)
Z2 = jnp.hstack([Z, jnp.cos(5 * Z)])


def deep(X, y=None, *, layers=2):
    """Two outputs per hidden layer, data beside the hidden values, mean functions, masks and scales."""
    x, functions = X, []
    for depth in range(1, layers):
        points = Z if depth == 1 else jnp.hstack([Z, Z2])
        mean = (
            dgp.means.Linear(jnp.array([[1.0, -0.5]]), 0.1) if depth == 1 else dgp.means.Linear(0.3 * jnp.ones((3, 2)))
        )
        with handlers.scale(scale=1.0 if depth == 1 else 0.8):
            functions.append(dgp.gp(f"f{depth}", k.RBF(0.5, 0.9), dgp.Points(points), outputs=2, mean=mean))
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(jnp.hstack([Z, Z2])), mean=dgp.means.Constant(0.2))
    keep = jnp.arange(len(X)) != 3
    with numpyro.plate("data", len(X)), handlers.mask(mask=keep), handlers.scale(scale=0.9):
        for depth, f in enumerate(functions, 1):
            h = numpyro.sample(f"h{depth}", f(x, noise=jnp.array([0.3, 0.1 + 0.1 * depth])))
            x = jnp.concatenate([X, h], -1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(0.8 * v + 0.1, 0.3)), obs=y)


def scalar(X, y=None):
    """A scalar hidden layer, shared kernels, one noise."""
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), mean=dgp.means.Identity())
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.3))
        numpyro.sample("y", dgp.Likelihood(g(h[:, None]), lambda v: dist.Normal(v, 0.3)), obs=y)


def per_output(X, y=None):
    kernels = [k.RBF(1.2, 0.7), k.RBF(0.6, 1.5) + k.Linear(0.2)]
    f = dgp.gp("f", kernels, dgp.Points(jnp.stack([Z, Z + 0.1])), outputs=2)
    g = dgp.gp("g", k.RBF(1.0, 1.0), dgp.Points(Z2))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=jnp.array([0.2, 0.4])))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)


PROGRAMS = {
    "two layers": (deep, ["h1"]),
    "three layers": (lambda X, y=None: deep(X, y, layers=3), ["h1", "h2"]),
    "one of two": (lambda X, y=None: deep(X, y, layers=3), ["h2"]),
    "scalar": (scalar, ["h"]),
    "per output": (per_output, ["h"]),
}


def guide_of(name):
    model, sites = PROGRAMS[name]
    return model, G.Collapsed(model, sites={site: G.GivenInducing() for site in sites})


def value(model, guide, params, key=0):
    return -dgp.ELBO().loss(jax.random.key(key), params, model, guide, X, Y)


def drawn(model, guide, params, key):
    """A draw of the guide, v included, as NumPyro sees it."""
    with handlers.seed(rng_seed=key), handlers.substitute(data=params), handlers.trace() as sites:
        guide(X, Y)
    return {n: s for n, s in sites.items() if s["type"] == "sample"}


def unwrapped(fn):
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def sampled_bound(model, guide, params, num=4000):
    """E[log N(h; f(x), s^2)] given v, row by row, with v and h drawn from the guide, less log q(h | v) and KL[q(v)]."""

    def draw(key):
        posterior = drawn(model, guide, params, key)
        values = {n: s["value"] for n, s in posterior.items()}
        with handlers.seed(rng_seed=0), handlers.substitute(data=values), handlers.trace() as sites:
            model(X, Y)
        total = 0.0
        for name, site in sites.items():
            if site["type"] != "sample":
                continue
            fn, weight = unwrapped(site["fn"]), 1.0 if site["scale"] is None else site["scale"]
            if isinstance(fn, InducingPrior):
                term = -kl_divergence(posterior[name]["fn"], fn)
            elif isinstance(fn, FunctionValues):
                open_ = fn.conditional_variance - fn.noise**2
                term = dist.Normal(fn.loc, fn.noise).log_prob(site["value"]) - 0.5 * open_ / fn.noise**2
                q = unwrapped(posterior[name]["fn"])
                term = (term - dist.Normal(q.loc, q.variance**0.5).log_prob(site["value"])).reshape(len(X), -1).sum(-1)
            else:
                term = fn.log_prob(site["value"])
            mask = site["fn"]._mask if isinstance(site["fn"], dist.MaskedDistribution) else True
            total = total + weight * jnp.where(mask, term, 0).sum()
        return total

    return jax.lax.map(jax.jit(draw), jax.random.split(jax.random.key(5), num), batch_size=200)


@pytest.mark.parametrize(
    "name", [name if name == "two layers" else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_bound_against_draws_of_everything(name):
    """Check 24 for q(h | v): the closed form is the expectation of what the guide's own draws give."""
    model, guide = guide_of(name)
    params = random_params(model, guide, X, Y)
    params |= {n: jnp.clip(v, 0.05, 0.95) for n, v in params.items() if n.endswith("_ratio")}
    exact = jax.jit(lambda key: value(model, guide, params, key))(0)
    draws = sampled_bound(model, guide, params)
    assert agree(draws, np.array([exact]))
    assert draws.std() / np.sqrt(len(draws)) < 0.02 * abs(exact)
