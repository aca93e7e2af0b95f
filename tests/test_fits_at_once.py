"""Many fits in one compiled program, ``jax.vmap`` of a whole fit: each is the fit that is run alone."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient

rng = np.random.default_rng(0)
X = np.sort(rng.uniform(-1, 1, (30, 1)), 0)
Y = np.sign(X[:, 0]) + 0.1 * rng.normal(size=30)


def model(X, y=None, noise=0.1):
    kernel = dgp.kernels.Matern52(1.0, numpyro.sample("scale", dist.LogNormal(0.0, 0.5)))
    f = dgp.gp("f", kernel, dgp.Points(X[::6]), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", kernel, dgp.Points(X[::6], learn=True))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)


def require_same(together, alone):
    assert together.shape == (3, 40)
    np.testing.assert_allclose(together, alone, rtol=1e-6)
    assert np.ptp(together[:, -1]) > 1e-3, "three different fits"


@pytest.mark.slow
@pytest.mark.parametrize("natural", [False, True], ids=["Adam", "natural gradients"])
def test_fits_of_several_seeds(natural):
    guide = dgp.guides.InducingPoint(model)
    adam = optax.adam(0.02)
    svi = SVI(model, guide, NaturalGradient(guide, 0.1, adam) if natural else adam, dgp.ELBO())

    def fit(key):
        return svi.run(key, 40, X, Y, progress_bar=False).losses

    keys = jax.random.split(jax.random.key(1), 3)
    require_same(jax.jit(jax.vmap(fit))(keys), jnp.stack([jax.jit(fit)(key) for key in keys]))


@pytest.mark.slow
def test_fits_of_several_settings():
    """A setting of the program and one of the optimiser, for every fit."""

    def fit(noise, rate):
        svi = SVI(model, dgp.guides.InducingPoint(model), optax.adam(rate), dgp.ELBO())
        return svi.run(jax.random.key(2), 40, X, Y, noise, progress_bar=False).losses

    settings = jnp.array([0.05, 0.1, 0.3]), jnp.array([0.01, 0.02, 0.03])
    together = jax.jit(jax.vmap(fit))(*settings)
    require_same(together, jnp.stack([jax.jit(fit)(*one) for one in zip(*settings, strict=True)]))
