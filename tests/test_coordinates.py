"""Coordinates of Gaussians: every pair of them, dense and diagonal, against dense algebra."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import kl
from sizes import mostly_long

from numpyro_dgp.math.gaussians import kl_between, kl_full
from numpyro_dgp.optim.natural import Coordinates, convert, natural_gradient, natural_step, sample

ALL = get_args(Coordinates)


def gaussian(key, diagonal, batch=(3,), n=4):
    a, b = jax.random.split(key)
    m = jax.random.normal(a, (*batch, n))
    if diagonal:
        return m, 0.2 + jax.random.uniform(b, m.shape)
    root = jnp.tril(jax.random.normal(b, (*batch, n, n)), -1)
    return m, 0.5 * root + jnp.eye(n) * (0.5 + jax.random.uniform(b, (*batch, n, 1)))


def by_definition(name, m, S):
    """The coordinates of one Gaussian by NumPy's and SciPy's own functions."""
    from scipy.linalg import logm

    P = np.linalg.inv(S)
    return {
        "mean/sqrt": (m, np.linalg.cholesky(S)),
        "mean/cov": (m, S),
        "mean/log": (m, logm(S)),
        "natural": (P @ m, -P / 2),
        "natural/sqrt": (P @ m, np.linalg.cholesky(P / 2)),
        "natural/log": (P @ m, logm(P / 2)),
        "expectation": (m, S + np.outer(m, m)),
    }[name]


@pytest.mark.smoke
@pytest.mark.parametrize("name", ALL)
def test_coordinates_are_what_they_say(key, name):
    m, L = gaussian(key, False)
    found = convert((m, L), "mean/sqrt", name)
    for i in range(3):
        expected = by_definition(name, np.asarray(m[i]), np.asarray(L[i] @ L[i].T))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_round_trips(key, name, diagonal):
    pair = gaussian(key, diagonal)
    there = convert(pair, "mean/sqrt", name, diagonal=diagonal)
    for other in ALL:
        elsewhere = convert(there, name, other, diagonal=diagonal)
        back = convert(elsewhere, other, "mean/sqrt", diagonal=diagonal)
        for a, b in zip(back, pair, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ALL)
def test_diagonal_is_dense_number_by_number(key, name):
    m, s = gaussian(key, True)
    dense = convert((m[..., None], s[..., None, None]), "mean/sqrt", name)
    diagonal = convert((m, s), "mean/sqrt", name, diagonal=True)
    np.testing.assert_allclose(dense[0][..., 0], diagonal[0], rtol=1e-10)
    np.testing.assert_allclose(dense[1][..., 0, 0], diagonal[1], rtol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_long(["mean/sqrt", "natural", "expectation"], ALL))
@pytest.mark.parametrize("start", mostly_long(["random"], ["random", "prior"]))
def test_natural_gradient_is_the_gradient_scaled_by_the_inverse_fisher_information(key, name, start):
    """Equation 3.8 by brute force: Fisher information as the Hessian of the divergence, over free numbers.

    At the prior all eigenvalues coincide, where naive derivatives of eigenvectors are not finite.
    """
    n = 3
    m, L = gaussian(key, False, batch=(), n=n)
    if start == "prior":
        m, L = m, jnp.eye(n)
    low = jnp.tril_indices(n)
    triangular = name.endswith("sqrt")

    def unpack(free):
        A = jnp.zeros((n, n)).at[low].set(free[n:])
        return free[:n], A if triangular else A + jnp.tril(A, -1).T

    point = convert((m, L), "mean/sqrt", name)
    free = jnp.concatenate([point[0], point[1][low]])
    target = gaussian(jax.random.key(5), False, batch=(), n=n)

    def loss(q):
        return kl_between(convert(q, name, "mean/sqrt"), target) + jnp.sin(q[0]).sum() * jnp.sum(q[1])

    divergence = lambda x: kl_between((m, L), convert(unpack(x), name, "mean/sqrt"))  # noqa: E731
    exactly = jax.jit(jax.jacfwd(jax.grad(divergence)))
    fisher = exactly(free) if start == "random" else hessian(jax.jit(jax.grad(divergence)), free)
    expected = jnp.linalg.solve(fisher, jax.grad(lambda x: loss(unpack(x)))(free))
    eta = convert((m, L), "mean/sqrt", "expectation")
    slope = jax.grad(lambda e: loss(convert(e, "expectation", name)))(eta)
    again, found = natural_gradient(convert((m, L), "mean/sqrt", "natural"), slope, name)
    np.testing.assert_allclose(again[1], point[1], atol=1e-10)
    got = jnp.concatenate([found[0], found[1][low]])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", ["mean/sqrt", "mean/cov", "natural", "expectation"])
def test_a_step_in_units_of_the_gaussian_itself_is_the_step_in_the_coordinates(key, name, diagonal):
    pair, target = gaussian(key, diagonal), gaussian(jax.random.key(5), diagonal)

    def loss(q):
        roots = (q, target) if not diagonal else [(m, jax.vmap(jnp.diag)(s)) for m, s in (q, target)]
        return kl_between(*roots).sum() + jnp.sin(q[0]).sum()

    sizes = jnp.array([0.01, 0.02, 0.03])
    found = natural_step(pair, jax.grad(loss)(pair), sizes[:, None] * jnp.ones(4) if diagonal else sizes, name,
                         diagonal=diagonal)  # fmt: skip
    eta = convert(pair, "mean/sqrt", "expectation", diagonal=diagonal)
    slope = jax.grad(lambda e: loss(convert(e, "expectation", "mean/sqrt", diagonal=diagonal)))(eta)
    natural = convert(pair, "mean/sqrt", "natural", diagonal=diagonal)
    point, direction = natural_gradient(natural, slope, name, diagonal=diagonal)
    moved = [a - sizes.reshape(3, *(1,) * (a.ndim - 1)) * d for a, d in zip(point, direction, strict=True)]
    for a, b in zip(found, convert(tuple(moved), name, "mean/sqrt", diagonal=diagonal), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_steps_in_single_precision_keep_digits_where_the_covariance_is_small(key, name):
    """A mean of 100 and a standard deviation of 1e-3: m m' + S would lose S altogether."""
    m, root = gaussian(key, False, ())
    pair = 100 + m, 1e-3 * root
    gradient = jax.random.normal(key, (4,)), jnp.tril(100 * jax.random.normal(key, (4, 4)))
    exact = natural_step(pair, gradient, jnp.array(0.1), name)
    single = jax.tree.map(lambda a: a.astype(jnp.float32), (pair, gradient))
    found = natural_step(*single, jnp.float32(0.1), name)
    np.testing.assert_allclose(found[1], exact[1], rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(found[0], exact[0], rtol=1e-6)


def hessian(gradient, x, step=1e-4):
    """By central differences of the gradient: second derivatives of eigenvectors are not finite at the prior."""
    return jnp.stack([(gradient(x + step * e) - gradient(x - step * e)) / (2 * step) for e in jnp.eye(len(x))])


@pytest.mark.slow
@pytest.mark.parametrize("diagonal", [False, True])
def test_draws_have_the_moments(key, diagonal):
    pair = gaussian(key, diagonal, ())
    draws = np.asarray(sample(key, convert(pair, "mean/sqrt", "natural", diagonal=diagonal), "natural", (4000,),
                              diagonal=diagonal))  # fmt: skip
    covariance = np.diag(pair[1] ** 2) if diagonal else np.asarray(pair[1] @ pair[1].T)
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_array_less(np.abs(draws.mean(0) - pair[0]), 4 * sd / 4000**0.5)
    error = np.sqrt((covariance**2 + np.outer(sd, sd) ** 2) / 4000)  # of a covariance of Gaussian draws
    np.testing.assert_array_less(np.abs(np.cov(draws.T) - covariance), 4 * error)


def test_divergence_between_two_gaussians(key):
    q, p = gaussian(key, False, ()), gaussian(jax.random.key(1), False, ())
    covariances = [np.asarray(L @ L.T) for _, L in (q, p)]
    expected = kl(np.asarray(q[0]), covariances[0], np.asarray(p[0]), covariances[1])
    np.testing.assert_allclose(kl_between(q, p), expected, rtol=1e-10)
    np.testing.assert_allclose(kl_between(q, (jnp.zeros(4), jnp.eye(4))), kl_full(*q), rtol=1e-10)


def test_not_a_gaussian_is_not_a_number():
    bad = jnp.ones(2), jnp.diag(jnp.array([1.0, -1.0]))
    assert not np.isfinite(convert(bad, "mean/cov", "mean/sqrt")[1]).all()
    assert not np.isfinite(convert(bad, "natural", "mean/sqrt")[1]).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("diagonal", [False, True])
def test_single_precision_stays(key, name, diagonal):
    m, root = (a.astype(jnp.float32) for a in gaussian(key, diagonal))
    there = convert((m, root), "mean/sqrt", name, diagonal=diagonal)
    back = convert(there, name, "mean/sqrt", diagonal=diagonal)
    assert {a.dtype for a in (*there, *back)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(back[1], root, atol=2e-4)


@pytest.mark.slow
def test_unknown_coordinates():
    with pytest.raises(ValueError, match="expected coordinates among mean/sqrt"):
        convert((jnp.ones(1), jnp.ones((1, 1))), "mean/variance", "natural")
