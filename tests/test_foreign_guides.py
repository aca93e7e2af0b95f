"""Guides that are not of this package, on the program of the README: they know hidden values of the rows of the fit."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_dgp as dgp

N = 40
X = jnp.linspace(-1, 1, N)[:, None]
Y = jnp.sign(X[:, 0]) + 0.1 * jax.random.normal(jax.random.key(0), (N,))
Z = X[::5]
NEW = jnp.array([[0.7], [-0.9], [0.1], [-0.3], [0.95], [-0.6], [0.4], [-0.05], [0.25]])


def model(X, y=None, batch_size=None, process_noise=None, last=dgp.kernels.Matern52()):
    """As in the README."""
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = dgp.gp("f", dgp.kernels.RBF(lengthscale=lengthscale), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", last, dgp.Points(Z))
    with numpyro.plate("data", len(X), subsample_size=batch_size) as rows:
        h = numpyro.sample("h", f(X[rows], noise=process_noise))
        likelihood = dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise))
        numpyro.sample("y", likelihood, obs=None if y is None else y[rows])


def by_hand(X, y=None, batch_size=None, process_noise=None):
    """Points for hyperparameters, Gaussians for inducing values and for hidden values of the fit; returns nothing."""
    for name in ("noise", "lengthscale"):
        value = numpyro.param(f"{name}_point", jnp.array(0.3), constraint=constraints.positive)
        numpyro.sample(name, dist.Delta(value))
    for name, shape in (("f", (1, len(Z))), ("g", (len(Z),))):
        loc = numpyro.param(f"{name}_loc", jnp.zeros(shape))
        scale = numpyro.param(f"{name}_scale", jnp.full(shape, 0.1), constraint=constraints.positive)
        numpyro.sample(name, dist.Normal(loc, scale).to_event(len(shape)))
    with numpyro.plate("data", N):
        loc = numpyro.param("h_loc", globals()["X"])
        scale = numpyro.param("h_scale", jnp.full((N, 1), 0.05), constraint=constraints.positive)
        numpyro.sample("h", dist.Normal(loc, scale).to_event(1))


def fitted(make, steps=400, settings=None, **options):
    program = partial(model, **(settings or {}))
    guide = by_hand if make is None else make(program)
    svi = SVI(program, guide, optax.adam(0.02), dgp.ELBO())
    result = svi.run(jax.random.key(1), steps, X, Y, progress_bar=False, **options)
    bound = guide.on(X, Y) if isinstance(guide, dgp.guides.Guide) else guide
    return dgp.Posterior(program, bound, result.params)


MAKERS = [
    pytest.param(AutoNormal, marks=pytest.mark.long),
    pytest.param(AutoDelta, marks=pytest.mark.long),
    pytest.param(AutoMultivariateNormal, marks=pytest.mark.long),
    pytest.param(AutoLowRankMultivariateNormal, marks=pytest.mark.long),
    pytest.param(None, id="by hand", marks=pytest.mark.long),
]


@pytest.mark.parametrize("make", MAKERS)
def test_predictions_are_those_of_their_own_inputs(make, key):
    posterior = fitted(make)
    S = 400
    found = posterior.using(num_samples=S).predict(key, NEW)
    assert found.mean.shape == found.variance.shape == (9,)
    order = np.array([3, 1, 4, 0, 8, 5, 2, 7, 6])
    again = posterior.using(num_samples=S).predict(jax.random.key(9), NEW[order])
    error = jnp.sqrt((found.means.var(0)[order] + again.means.var(0)) / S) + 1e-6
    assert (abs(found.mean[order] - again.mean) < 5 * error).all()
    error = jnp.sqrt((found.variances.var(0)[order] + again.variances.var(0)) / S)
    error = error + jnp.sqrt(2 / S) * (found.means.var(0)[order] + again.means.var(0)) + 1e-6
    assert (abs(found.variance[order] - again.variance) < 5 * error).all()
    assert posterior.using(num_samples=5).sample(key, NEW).shape == (5, 9)
    assert posterior.using(num_samples=5).log_density(key, jnp.sign(NEW[:, 0]), NEW).shape == (9,)
    assert posterior.using(num_samples=5).hidden(key, NEW)["h"].shape == (5, 9, 1)
    functions = posterior.using(num_samples=5).functions(key)
    assert functions(NEW)["y"].shape == (5, 9)
    np.testing.assert_allclose(functions(NEW[order])["y"], functions(NEW)["y"][:, order], rtol=1e-6, atol=1e-8)
    layers = posterior.layers(key, NEW)
    assert {name: rows.shape for name, (_, rows) in layers.items()} == {"h": (9, 1), "y": (9, 1)}
    at_fit = posterior.predict(key, X)
    assert jnp.square(at_fit.mean - Y).mean() < 0.8 * Y.var()


def with_laplace(model):
    """The noise by Laplace's approximation, all other sites by Gaussians."""
    guide = AutoGuideList(model)
    guide.append(AutoNormal(handlers.block(model, hide=["noise"])))
    guide.append(AutoLaplaceApproximation(handlers.block(model, expose=["noise"])))
    return guide


@pytest.mark.slow
@pytest.mark.parametrize("make", [AutoLaplaceApproximation, with_laplace], ids=["alone", "in a list"])
def test_a_guide_that_draws_only_its_mode_does_not_predict(make):
    with pytest.raises(ValueError, match=r"the mode without any uncertainty: Posterior\(model, samples="):
        dgp.Posterior(model, make(model), {})
    with pytest.raises(ValueError, match=r"expected a guide that draws from its posterior"):
        dgp.guides.InducingPoint(model, other=make)


# What the guides that the README names need: Collapsed what docs/guides.md says.
NEEDS = {
    "InducingPoint": {},
    "AutoNormal": {},
    "MeanField": {"process_noise": 0.1},
    "Collapsed": {"process_noise": 0.1, "last": dgp.kernels.RBF()},
}


@pytest.mark.long
def test_every_guide_that_the_readme_names_runs():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    line = next(line for line in readme.splitlines() if line.startswith("guide = "))
    named = re.findall("InducingPoint|MeanField|Collapsed|Auto[A-Z][a-z]+", line)
    assert named
    assert set(named) <= set(NEEDS)
    for name, settings in NEEDS.items():
        make = AutoNormal if name == "AutoNormal" else getattr(dgp.guides, name)
        posterior = fitted(make, 5, settings, **({} if name == "Collapsed" else {"batch_size": 20}))
        found = posterior.predict(jax.random.key(0), NEW).mean
        assert found.shape == (9,), name
        assert np.isfinite(found).all(), name
