"""Inputs with a known error: latents whose prior is the measurement (docs/recipes/inputs.md)."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from scipy.special import roots_hermite

import numpyro_dgp as dgp

rng = np.random.default_rng(0)
X = jnp.array(rng.uniform(-1, 1, size=(15, 1)))
y = jnp.sin(3 * X[:, 0])
Z = jnp.linspace(-2, 2, 7)[:, None]
KERNEL = dgp.kernels.RBF(1.0, 0.6)
ERROR, NOISE = 0.3, 0.2


def model(X, y=None, known=False):
    f = dgp.gp("f", KERNEL, dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        x = numpyro.sample("x", dist.Normal(X, ERROR).to_event(1), obs=X if known else None)
        numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.long
def test_predictions_hold_the_error_of_the_input(key):
    """Means and variances of y are those of a sum over nodes of the input, of the function's own moments."""
    guide = dgp.guides.InducingPoint(model)
    params = SVI(model, guide, optax.adam(0.03), dgp.ELBO()).run(key, 300, X, y, progress_bar=False).params
    posterior = dgp.Posterior(model, guide, params)
    x = jnp.array([[-0.7], [0.1], [0.6]])
    nodes, weights = roots_hermite(60)
    weights /= weights.sum()
    at = posterior.using(num_samples=1).predict(key, (x + np.sqrt(2) * ERROR * nodes).reshape(-1, 1), known=True)
    means, variances = (np.asarray(a).reshape(3, 60) for a in (at.mean, at.variance))
    mean = means @ weights
    found = posterior.using(num_samples=20_000).predict(key, x)
    error = found.means.std(0) / np.sqrt(20_000)
    assert (np.abs(found.mean - mean) < 4 * error).all()
    variance = variances @ weights + (means - mean[:, None]) ** 2 @ weights
    np.testing.assert_allclose(found.variance, variance, rtol=0.05)
    exact = posterior.predict(key, x, known=True)
    assert (exact.variance < 0.8 * found.variance).all()


@pytest.mark.long
def test_the_collapsed_bound_is_above_any_other(key):
    """At the same q(x) and hyperparameters, up to the noise of the other."""
    guide, collapsed = dgp.guides.InducingPoint(model), dgp.guides.Collapsed(model)
    params = SVI(model, guide, optax.adam(0.03), dgp.ELBO()).run(key, 500, X, y, progress_bar=False).params
    losses = jax.vmap(lambda k: dgp.ELBO().loss(k, params, model, guide, X, y))(jax.random.split(key, 2000))
    shared = {name: value for name, value in params.items() if name.startswith("x_")}
    best = dgp.ELBO().loss(key, shared, model, collapsed, X, y)
    assert best < losses.mean() + 4 * losses.std() / np.sqrt(2000)
    assert best > losses.mean() - 5.0
