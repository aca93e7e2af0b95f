import jax
import jax.numpy as jnp
import numpy as np
from dense import kl, log_normal

from numpyro_dgp.algebra import gaussians


def random_gaussian(key, n=4):
    a, b = jax.random.split(key)
    return jax.random.normal(a, (n,)), jnp.tril(jax.random.normal(b, (n, n)))


def test_kl_full_against_dense_algebra(key):
    m, L = random_gaussian(key)
    np.testing.assert_allclose(
        gaussians.kl_full(m, L), kl(np.asarray(m), np.asarray(L @ L.T), np.zeros(4), np.eye(4)), rtol=1e-12
    )


def test_kl_is_exactly_zero_at_the_prior():
    assert gaussians.kl_full(jnp.zeros(5), jnp.eye(5)) == 0
    assert gaussians.kl_diagonal(jnp.zeros(5), jnp.ones(5)) == 0


def test_dense_equals_diagonal(key):
    m, s = jax.random.normal(key, (2, 5))
    np.testing.assert_allclose(gaussians.kl_full(m, jnp.diag(s)), gaussians.kl_diagonal(m, s), rtol=1e-12)


def test_batch_equals_sum_of_parts(key):
    keys = jax.random.split(key, 3)
    m, L = jax.vmap(random_gaussian)(keys)
    np.testing.assert_allclose(
        gaussians.kl_full(m, L).sum(), sum(gaussians.kl_full(*random_gaussian(k)) for k in keys), rtol=1e-12
    )


def test_log_density_from_the_draw(key):
    m, L = random_gaussian(key)
    white = jax.random.normal(key, (4,))
    expected = log_normal(np.asarray(m + L @ white), np.asarray(m), np.asarray(L @ L.T))
    np.testing.assert_allclose(gaussians.log_density(white, gaussians.log_determinant(L)), expected, rtol=1e-10)


def test_opper_archambeau_against_dense_algebra(key):
    """The form of Hensman (2016), with zeros among the lambdas, where the formula printed there divides by zero."""
    root = jax.random.normal(key, (6, 6))
    K = root @ root.T + jnp.eye(6)
    alpha, lam = jax.random.normal(jax.random.key(1), (2, 6))
    for values in (lam, lam.at[2].set(0.0)):
        L = jnp.linalg.cholesky(K)
        m, R = gaussians.opper_archambeau(L, alpha, values)
        covariance = np.linalg.inv(np.linalg.inv(np.asarray(K)) + np.diag(np.asarray(values) ** 2))
        np.testing.assert_allclose(L @ m, K @ alpha, rtol=1e-10)
        np.testing.assert_allclose(L @ R @ R.T @ L.T, covariance, rtol=1e-8, atol=1e-10)
        expected = kl(np.asarray(K @ alpha), covariance, np.zeros(6), np.asarray(K))
        np.testing.assert_allclose(gaussians.kl_full(m, R), expected, rtol=1e-8)
        A = values[:, None] * K * values + jnp.eye(6)  # the form printed there
        printed = 0.5 * (jnp.linalg.slogdet(A)[1] + alpha @ K @ alpha + jnp.trace(jnp.linalg.inv(A)) - 6)
        np.testing.assert_allclose(printed, expected, rtol=1e-8)
