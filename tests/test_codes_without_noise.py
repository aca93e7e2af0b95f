"""Deterministic codes: noise far below what a factorisation resolves."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.guides.collapsed.gaussian_uses import at_inducing_inputs
from numpyro_dgp.math.linalg import jitter

X = np.linspace(0, 1, 12)[:, None]
Y = np.asarray((6 * X[:, 0] - 2) ** 2 * np.sin(12 * X[:, 0] - 4)) / 4.5


def model(X_, y=None, *, noise, variance=3.0, kernel=dgp.kernels.Matern52):
    f = dgp.gp("f", kernel(variance, 0.3), dgp.Points(X))
    with numpyro.plate("data", len(X_)):
        numpyro.sample("y", dgp.Likelihood(f(X_), lambda v: dist.Normal(v, noise)), obs=y)


def exact(noise, variance, kernel=dgp.kernels.Matern52):
    K = np.asarray(kernel(variance, 0.3)(jnp.asarray(X), jnp.asarray(X)), float)
    C = K + (noise**2 + 1e-10 * variance) * np.eye(len(X))
    return -0.5 * (Y @ np.linalg.solve(C, Y) + np.linalg.slogdet(C)[1] + len(X) * np.log(2 * np.pi))


@pytest.mark.parametrize("noise", [1e-6, 1e-2])
def test_inducing_inputs_at_the_data_cost_nothing(noise):
    """The collapsed bound is the evidence of the process with the jitter, also where the noise is below the jitter."""
    with jax.enable_x64(True):
        guide = dgp.guides.Collapsed(model)
        bound = jax.jit(lambda v: -dgp.ELBO().loss(jax.random.key(0), {}, model, guide, X, Y, noise=noise, variance=v))
        for variance in (0.3, 30.0):
            np.testing.assert_allclose(bound(variance), exact(noise, variance), atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [dgp.kernels.RBF, dgp.kernels.Matern52])
def test_rounding_error_is_no_bound(kernel):
    """In single precision a bound is never above that of the same features in double precision, or it is NaN."""

    def bound(A, variances, y, noise):
        return dgp.bounds.from_features(A, variances, dgp.bounds.Observations(y, noise)).bound()

    with jax.enable_x64(True):
        K = np.asarray(kernel(3.0, 0.3)(jnp.asarray(X), jnp.asarray(X)))
        A = np.linalg.solve(np.linalg.cholesky(K + 3e-6 * np.eye(len(X))), K).T
        lost = 0
        for noise in 10.0 ** np.arange(-7, -1, 0.25):
            single = [jnp.asarray(a, jnp.float32) for a in (A, np.diag(K), Y, noise)]
            double = bound(*(jnp.asarray(a, float) for a in single))
            found = bound(*single)
            assert found.dtype == jnp.float32
            assert np.isnan(found) or found < double + 1e-3 * abs(double)
            lost += bool(np.isnan(found))
        assert (lost > 0) == (kernel is dgp.kernels.RBF)


@pytest.mark.slow
def test_a_fit_that_rounding_would_guide_is_refused():
    noisy = lambda X, y=None: model(X, y, noise=np.float32(1e-6), kernel=dgp.kernels.RBF)  # noqa: E731
    svi = SVI(noisy, dgp.guides.Collapsed(noisy), optax.sgd(0.0), dgp.ELBO())
    with jax.enable_x64(False), pytest.raises(ValueError, match="run in float64"):
        dgp.fit(svi, jax.random.key(0), 1, np.float32(X), np.float32(Y), progress_bar=False)


@pytest.mark.slow
def test_data_at_inducing_inputs_see_the_inducing_values():
    """Of equal inducing inputs the first; a datum between them sees what it did."""
    with jax.enable_x64(True):
        kernel, Z = dgp.kernels.Matern52(2.0, 0.3), jnp.asarray(X)[jnp.array([0, 5, 5, 11])]
        rows = jnp.concatenate([jnp.asarray(X[[5, 0, 3]]), Z[3:]])
        small = jitter(Z.dtype, 4) * 2.0
        L = jnp.linalg.cholesky(kernel(Z, Z) + 1e-3 * jnp.eye(4))
        A = jax.scipy.linalg.solve_triangular(L, kernel(Z, rows), lower=True).T
        points = SimpleNamespace(kernel=kernel, Z=Z, whiten=jnp.linalg.inv(L))
        found, left = at_inducing_inputs(A, kernel.diag(rows), points, rows)
        seen = jnp.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1.0]])
        expected = jax.scipy.linalg.solve_triangular(L, (kernel(rows, Z) + small * seen).T, lower=True).T
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        np.testing.assert_array_equal(left[jnp.array([0, 1, 3])], 0.0)
        np.testing.assert_allclose(left[2], 2.0 - (A[2] ** 2).sum(), rtol=1e-9)


@pytest.mark.long
def test_predictions_at_the_data_are_the_data():
    with jax.enable_x64(True):
        noisy = lambda X, y=None: model(X, y, noise=1e-6)  # noqa: E731
        posterior = dgp.Posterior(noisy, dgp.guides.Collapsed(noisy).on(X, Y), {})
        found = posterior.using(num_samples=1).predict(jax.random.key(0), X)
        assert np.sqrt(np.mean((found.mean - Y) ** 2)) < 2e-5  # the root of the jitter of the variance
        assert np.isfinite(found.variance).all()
        assert np.all(found.variance > 0)


@pytest.mark.long
@pytest.mark.parametrize("kernel", [dgp.kernels.RBF, dgp.kernels.Matern52])
def test_hyperparameters_of_a_code_without_noise(kernel):
    """Learned at a noise of 1e-6 and predicting as at a noise that is above the jitter; in single precision refused."""

    def learned(X_, y=None, *, noise):
        variance = numpyro.sample("variance", dist.LogNormal(1.0, 2.0))
        f = dgp.gp("f", kernel(variance, numpyro.sample("scale", dist.LogNormal(-1.0, 1.0))), dgp.Points(X))
        with numpyro.plate("data", len(X_)):
            numpyro.sample("y", dgp.Likelihood(f(X_), lambda v: dist.Normal(v, noise)), obs=y)

    new = np.linspace(0.03, 0.97, 40)[:, None]
    truth = (6 * new[:, 0] - 2) ** 2 * np.sin(12 * new[:, 0] - 4) / 4.5
    guide = dgp.guides.Collapsed(learned)
    svi = SVI(learned, guide, optax.sgd(0.0), dgp.ELBO(), noise=1e-6)
    with jax.enable_x64(False), pytest.raises(ValueError, match="run in float64"):
        dgp.optim.minimize(svi, jax.random.key(0), np.float32(X), np.float32(Y), max_steps=60, progress_bar=False)
    with jax.enable_x64(True):
        found = dgp.optim.minimize(svi, jax.random.key(0), X, Y, max_steps=60, progress_bar=False)
        fitted = lambda X, y=None: learned(X, y, noise=1e-6)  # noqa: E731
        posterior = dgp.Posterior(fitted, dgp.guides.Collapsed(fitted).on(X, Y), found.params)
        at_data, elsewhere = (posterior.using(num_samples=1).predict(jax.random.key(0), x).mean for x in (X, new))
        assert np.sqrt(np.mean((at_data - Y) ** 2)) < 1e-4
        assert np.sqrt(np.mean((elsewhere - truth) ** 2)) < 0.2
