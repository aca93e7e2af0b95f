import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import kl, log_normal
from numpyro.distributions import kl_divergence

from numpyro_dgp.algebra import gaussians
from numpyro_dgp.model.beliefs import FullBelief, InducingPrior
from numpyro_dgp.model.shared_belief import SharedBelief


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_expected_kl_is_the_average_of_divergences(dtype):
    """Of divergences by dense algebra, over means with a given mean and variance of their distance."""
    S, c, gap, spread = (jnp.array(a, dtype) for a in ([0.3, 2.0], [0.7, 0.7], [0.5, -1.0], [0.0, 0.4]))
    found = gaussians.expected_kl(S, gap**2 + spread, c)
    for n in range(2):
        distances = gap[n] + jnp.sqrt(spread[n]) * jnp.array([-1, 1])
        numbers = [kl(np.array([d]), S[n].reshape(1, 1), np.zeros(1), c[n].reshape(1, 1)) for d in distances]
        np.testing.assert_allclose(found[n], np.mean(numbers), rtol=10 * jnp.finfo(dtype).eps)
    assert found.dtype == dtype


def test_expected_kl_of_many_numbers_is_the_divergence_of_vectors(key):
    m, s = jax.random.normal(key, (2, 5))
    np.testing.assert_allclose(gaussians.expected_kl(s**2, m**2, 1.0).sum(), gaussians.kl_diagonal(m, s), rtol=1e-12)
    p = jax.random.normal(jax.random.key(1), (2, 5))
    between = gaussians.kl_between((m, jnp.diag(s)), (p[0], jnp.diag(p[1])))
    np.testing.assert_allclose(gaussians.expected_kl(s**2, (m - p[0]) ** 2, p[1] ** 2).sum(), between, rtol=1e-10)


def test_entropy_is_minus_the_expected_log_density(key):
    """About a wide prior N(0, c) the divergence is the expected -log p(x) less the entropy."""
    S, c = jnp.exp(jax.random.normal(key, (2, 5)))
    cross = 0.5 * (S / c + jnp.log(2 * np.pi * c))
    np.testing.assert_allclose(gaussians.expected_kl(S, 0.0, c), cross - gaussians.entropy(S), rtol=1e-12)


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


@pytest.mark.slow
def test_a_covariance_for_all_outputs_is_one_for_each():
    rng, (P, N, M) = np.random.default_rng(0), (3, 5, 4)
    loc, value, white = (jnp.array(rng.normal(size=(P, M))) for _ in range(3))
    root = jnp.array(np.tril(rng.normal(size=(M, M))) + 2 * np.eye(M))
    one, each = SharedBelief(loc, root), FullBelief(loc, jnp.broadcast_to(root, (P, M, M)))
    np.testing.assert_allclose(one.from_white(white), each.from_white(white))
    np.testing.assert_allclose(one.white(one.from_white(white)), white)
    np.testing.assert_allclose(one.log_prob(value), each.log_prob(value))
    np.testing.assert_allclose(one.around(value).loc, value)
    np.testing.assert_allclose(one.variance, each.variance)
    prior = InducingPrior((P, M), loc.dtype)
    np.testing.assert_allclose(kl_divergence(one, prior), kl_divergence(each, prior))
    for A in (jnp.array(rng.normal(size=(N, M))), jnp.array(rng.normal(size=(P, N, M)))):
        np.testing.assert_allclose(one.spread(A), each.spread(A))
        np.testing.assert_allclose(one.spread_covariance(A), each.spread_covariance(A))
