"""Structured rules on grids of additive kernels, which hold one ring per term and not one value per grid point."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.functions.weights import FunctionDraw
from numpyro_dgp.testing import check_guide

X = jax.random.uniform(jax.random.key(0), (12, 2), minval=-1.0)
Y = jnp.sin(2 * X[:, 0]) - X[:, 1]
KERNEL = dgp.kernels.RBF(0.7).on(0) + dgp.kernels.RBF(0.9).on(1)


def model(X, y=None):
    f = dgp.gp("f", KERNEL, dgp.Grid(-4.0, 4.0, (12, 10)), outputs=2)
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-2, 2, 6)[:, None] * jnp.ones(2)))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.1))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)


@pytest.mark.parametrize(
    ("rule", "shapes"),
    [
        pytest.param(G.GivenInducing("free"), {"weights": (12, 2, 22)}, marks=pytest.mark.long),
        pytest.param(G.GivenInducing(3), {"basis": (2, 3, 22), "weights": (12, 2, 3)}, marks=pytest.mark.long),
        pytest.param(G.JointOutputs(), {"weights": (12, 2, 2, 22)}, marks=pytest.mark.long),
    ],
    ids=["free", "rank", "joint outputs"],
)
def test_weights_are_of_the_values_that_the_site_holds(rule, shapes):
    guide = G.InducingPoint(model, sites={"h": rule})
    with handlers.seed(rng_seed=0), handlers.trace() as sites:
        guide(X, Y)
    assert sites["f"]["value"].shape == (2, 22)
    found = {name: site["value"].shape for name, site in sites.items() if site["type"] == "param"}
    for part, shape in shapes.items():
        assert found[f"h_auto_{part}"] == shape
    check_guide(model, guide, X, Y, num=100)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda u: u, lambda u: FunctionDraw(u, jax.random.key(0), 8)])
def test_values_of_another_shape_are_refused(wrap):
    data = {"g": wrap(jnp.zeros(5))}
    with (
        pytest.raises(ValueError, match=r"gp 'g': expected inducing values of shape \(6,\), got \(5,\)"),
        handlers.seed(rng_seed=0),
        handlers.substitute(data=data),
    ):
        model(X)
