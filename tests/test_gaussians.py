import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import kl, log_normal
from numpyro.distributions import kl_divergence

from numpyro_dgp.functions.weights import FullBelief, InducingPrior
from numpyro_dgp.guides.collapsed.gaussian_uses import SharedBelief
from numpyro_dgp.math import gaussians


def random_gaussian(key, n=4):
    a, b = jax.random.split(key)
    return jax.random.normal(a, (n,)), jnp.tril(jax.random.normal(b, (n, n)))


@pytest.mark.slow
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
    S, c, gap, between = (jnp.array(a, dtype) for a in ([0.3, 2.0], [0.7, 0.7], [0.5, -1.0], [0.0, 0.4]))
    found = gaussians.expected_kl(S, gap**2 + between, c)
    for n in range(2):
        distances = gap[n] + jnp.sqrt(between[n]) * jnp.array([-1, 1])
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


@pytest.mark.slow
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


def covariances_and_residuals(key, n, shared):
    a, b = jax.random.split(key)
    root = jax.random.normal(a, (1 if shared else 3, n, n + 5)) / jnp.sqrt(n)
    return root @ root.mT + 0.1 * jnp.eye(n), jax.random.normal(b, (3, n))


def by_factorisation(C, r):
    """The same density by LAPACK's factor and a triangular solve, which JAX differentiates."""
    L = jnp.broadcast_to(jnp.linalg.cholesky(C), (*r.shape, r.shape[-1]))
    white = jax.lax.linalg.triangular_solve(L, r[..., None], left_side=True, lower=True)[..., 0]
    return -0.5 * jnp.square(white).sum(-1) - gaussians.log_determinant(L) - 0.5 * r.shape[-1] * jnp.log(2 * jnp.pi)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("n", [5, 230])  # the second is factorised by halves
def test_density_given_a_covariance(key, n, shared):
    C, r = covariances_and_residuals(key, n, shared)
    density, whiten = gaussians.given_covariance(C, r)
    expected = [log_normal(a, np.zeros(n), b) for a, b in zip(r, C.repeat(3 // len(C), 0), strict=True)]
    np.testing.assert_allclose(density, expected)
    np.testing.assert_allclose(whiten @ C @ whiten.mT, jnp.broadcast_to(jnp.eye(n), C.shape), atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_derivatives_of_the_density_given_a_covariance(key, shared):
    C, r = covariances_and_residuals(key, 4, shared)
    weights = jnp.array([1.0, -2.0, 0.5])
    fast, slow = (
        lambda C, r, f=f: (weights * f(C + C.mT, r)).sum()
        for f in (lambda C, r: gaussians.given_covariance(C, r)[0], by_factorisation)
    )
    for derivative in (jax.grad, jax.jacfwd, jax.hessian):
        found, expected = derivative(fast, (0, 1))(C, r), derivative(slow, (0, 1))(C, r)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), found, expected)
    whiten = lambda f: lambda C: jnp.sin(f(C + C.mT)).sum()  # noqa: E731
    found = jax.grad(whiten(lambda C: gaussians.given_covariance(C, r)[1]))(C)
    expected = jax.grad(whiten(lambda C: jnp.linalg.inv(jnp.linalg.cholesky(C))))(C)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_density_given_a_covariance_in_single_precision(key):
    C, r = (a.astype(jnp.float32) for a in covariances_and_residuals(key, 60, False))
    density = lambda C, r: gaussians.given_covariance(C, r)[0].sum()  # noqa: E731
    found = jax.value_and_grad(density, (0, 1))(C, r)
    expected = jax.value_and_grad(lambda C, r: by_factorisation(C, r).sum(), (0, 1))(C.astype(float), r.astype(float))
    assert {a.dtype for a in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1][1], expected[1][1], rtol=1e-3, atol=1e-3)
    symmetric = [g + g.mT for g in (found[1][0], expected[1][0])]
    np.testing.assert_allclose(*symmetric, rtol=1e-3, atol=1e-3 * jnp.abs(symmetric[1]).max())


@pytest.mark.slow
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


@pytest.mark.long
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
        np.testing.assert_allclose(one.feature_variance(A), each.feature_variance(A))
        np.testing.assert_allclose(one.feature_covariance(A), each.feature_covariance(A))
