from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import sizes
from sizes import mostly_long, tune

from numpyro_dgp import kernels
from numpyro_dgp.math import linalg, row_blocks, whitening
from numpyro_dgp.math.distances import squared_distances
from numpyro_dgp.math.quadratic_forms import quadratic_forms, quadratic_forms_reference
from numpyro_dgp.math.row_blocks import in_blocks


@pytest.mark.slow
def test_squared_distances_both_ways(key):
    for columns in (1, 3, 4, 9):
        X = jax.random.normal(key, (2, 7, columns))
        Z = X[0, :5] + 1.0
        expected = ((X[:, :, None] - Z[None, None]) ** 2).sum(-1)
        np.testing.assert_allclose(squared_distances(X, Z), expected, rtol=1e-12, atol=1e-12)


def test_squared_distances_keep_digits_in_float32():
    """Few columns: near neighbours far from the origin, where the product form has no digits left."""
    X = jnp.linspace(1000.0, 1000.1, 11, dtype=jnp.float32)[:, None]
    exact = (np.asarray(X, float) - np.asarray(X, float).T) ** 2
    np.testing.assert_allclose(squared_distances(X, X), exact, rtol=1e-5)


def near_rows():
    """Groups of rows in six columns, a thousandth apart, the groups fifty."""
    rng = np.random.default_rng(0)
    centres = 50.0 * rng.normal(size=(5, 1, 6))
    return jnp.asarray((centres + 1e-3 * rng.normal(size=(5, 4, 6))).reshape(20, 6), jnp.float32)


def test_squared_distances_within_one_array_keep_digits_in_float32():
    """Many columns: the product form of two arrays loses what is small, differences of one array do not."""
    X = near_rows()
    exact = np.square(np.asarray(X, float)[:, None] - np.asarray(X, float)).sum(-1)
    np.testing.assert_allclose(squared_distances(X, X), exact, rtol=1e-5)
    assert np.max(np.abs(squared_distances(X, X + 0) - exact)) > 1e-4


@pytest.mark.long
def test_derivatives_within_one_array(key):
    X = jax.random.normal(key, (2, 7, 6), jnp.float32)
    direct = lambda X: jnp.square(X[:, :, None] - X[:, None]).sum(-1)  # noqa: E731
    weights = jax.random.normal(key, (2, 7, 7))
    tangent = jnp.cos(X)
    for derivative in (
        lambda f: jax.grad(lambda X: (weights * jnp.exp(-f(X))).sum())(X),
        lambda f: jax.jvp(f, (X,), (tangent,))[1],
        lambda f: jax.hessian(lambda t: jnp.exp(-f(X + t * tangent)).sum())(0.3),
    ):
        found, expected = derivative(lambda X: squared_distances(X, X)), derivative(direct)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "kernel",
    [
        kernels.RBF(1.5, 0.7),
        kernels.Matern32(1.5, 0.7).on(0, 1, 2, 3, 4, 5),
        kernels.RBF(1.5, 0.7) * kernels.Matern52() + kernels.Matern12(0.3),
        kernels.Transformed(kernels.RBF(1.5, 0.7), lambda X: 2 * X),
        kernels.SpectralMixture(jnp.ones(2), jnp.full((2, 6), 1e-3), jnp.ones((2, 6))),
    ],
    ids=["stationary", "columns", "sum of products", "transformed", "spectral mixture"],
)
def test_gram_matrices_keep_digits_in_float32(kernel):
    """What a kernel does with its inputs leaves both one array, and one of double precision agrees."""
    X = near_rows()
    exact = kernel.gram(jnp.asarray(X, jnp.float64))
    np.testing.assert_allclose(kernel.gram(X), exact, atol=3e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("lengthscale", [0.05, 0.3, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("columns", [1, 2, 8])
def test_cholesky_of_rbf_gram_matrices(dtype, lengthscale, columns):
    """The jitter policy holds from nearly diagonal to nearly constant matrices, in both precisions."""
    Z = np.random.default_rng(0).normal(size=(256, columns)) / lengthscale
    Z = jnp.asarray(Z, dtype)
    K = linalg.set_diagonal(jnp.exp(-0.5 * squared_distances(Z, Z)), jnp.ones(256, dtype))
    for scale in (1e-6, 1.0, 1e6):
        L = linalg.cholesky(dtype(scale) * K)
        assert L.dtype == dtype
        bound = scale * 3 * linalg.jitter(dtype, 256)
        np.testing.assert_allclose(L @ L.T, scale * K, atol=bound)


def test_cholesky_failure_is_reported():
    K = jnp.array([[1.0, 2.0], [2.0, 1.0]])
    with pytest.raises(ValueError, match=r"Cholesky factorisation of k\(Z, Z\) of gp 'f' failed: expected a positive"):
        linalg.cholesky(K, "k(Z, Z) of gp 'f'")
    assert jnp.isnan(jax.jit(linalg.cholesky)(K)).any()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5, 60])
def test_inverse_cholesky_and_its_derivative(key, size):
    root = jax.random.normal(key, (3, size, size)) + 3 * jnp.sqrt(size) * jnp.eye(size)

    def fast(root):
        return whitening.inverse_cholesky(root @ root.mT)

    def slow(root):
        return jnp.linalg.inv(linalg.cholesky(root @ root.mT))

    np.testing.assert_allclose(fast(root), slow(root), rtol=1e-8, atol=1e-10)
    weights = jax.random.normal(jax.random.key(1), (3, size, size))
    gradients = [jax.grad(lambda r, f=f: (weights * f(r)).sum())(root) for f in (fast, slow)]
    np.testing.assert_allclose(*gradients, rtol=1e-6, atol=1e-8)
    tangents = [jax.jvp(f, (root,), (weights,))[1] for f in (fast, slow)]
    np.testing.assert_allclose(*tangents, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match="Cholesky factorisation of K failed"):
        whitening.inverse_cholesky(jnp.array([[1.0, 2.0], [2.0, 1.0]]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 5, 18, 61])
def test_factors_by_halves_are_those_of_one_call(monkeypatch, key, size):
    tune(monkeypatch, single_factor=4, small_solve=3)
    root = jax.random.normal(key, (2, size, size))
    K = root @ root.mT + 0.1 * jnp.eye(size)
    L = jnp.linalg.cholesky(K)
    factor, inverse = whitening.factor_and_inverse(K)
    np.testing.assert_allclose(factor, L, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(inverse, jnp.linalg.inv(L), rtol=1e-9, atol=1e-11)
    broken = whitening.factor_and_inverse(K.at[0, -1, -1].set(-1.0))[1]
    assert not jnp.isfinite(broken[0]).all()
    assert jnp.isfinite(broken[1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("lengthscale", mostly_long([1.0], [0.05, 0.3, 1.0, 10.0, 100.0]))
def test_factors_by_halves_are_as_accurate_as_one_call(monkeypatch, dtype, lengthscale):
    """Of the matrix with the largest condition number that the jitter allows: L^{-1} K L^{-T} is the identity."""
    x = jnp.linspace(-1, 1, 300, dtype=dtype)[:, None]
    K = linalg.with_jitter(kernels.RBF(1.7, lengthscale).gram(x))
    errors = []
    for single_factor in (200, 1000):
        tune(monkeypatch, single_factor=single_factor)
        whiten = np.asarray(whitening.factor_and_inverse(K)[1], float)
        errors.append(np.abs(whiten @ np.asarray(K, float) @ whiten.T - np.eye(len(x))).max())
    assert errors[0] < 2 * errors[1] + 10 * jnp.finfo(dtype).eps


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("size", mostly_long([5], [1, 4, 5, 25]))
def test_inverse_factors_of_many_small_matrices(key, dtype, size):
    """They take a way of their own; one of them that is not positive definite leaves the others alone."""
    root = jax.random.normal(key, (2, 6, size, size), dtype)
    K = root @ root.mT + 0.1 * jnp.eye(size, dtype=dtype)
    exact = np.linalg.inv(np.linalg.cholesky(np.asarray(K, float)))
    found = whitening.inverse_factor(K)
    assert found.dtype == dtype
    error = np.linalg.norm(found - exact, axis=(-2, -1)) / np.linalg.norm(exact, axis=(-2, -1))
    np.testing.assert_array_less(error, 10 * jnp.finfo(dtype).eps * np.linalg.cond(np.asarray(K, float)))
    np.testing.assert_array_equal(jnp.triu(found, 1), 0)
    one_by_one = jax.vmap(jax.vmap(jax.grad(lambda K: jnp.sin(whitening.inverse_factor(K)).sum())))(K)
    together = jax.grad(lambda K: jnp.sin(whitening.inverse_factor(K)).sum())(K)
    np.testing.assert_allclose(
        together, one_by_one, rtol=1e-2 if dtype == jnp.float32 else 1e-8, atol=1e-3 * float(jnp.abs(one_by_one).max())
    )
    broken = whitening.inverse_factor(K.at[0, 0, -1, -1].set(-1.0))
    assert not jnp.isfinite(broken[0, 0]).all()
    np.testing.assert_array_equal(broken[1], found[1])


@pytest.mark.parametrize("transpose", [False, True])
def test_solve_lower_broadcasts(key, transpose):
    L = jnp.tril(jax.random.normal(key, (3, 4, 4))) + 3 * jnp.eye(4)
    B = jax.random.normal(key, (4, 5))
    full = jnp.swapaxes(L, -1, -2) if transpose else L
    np.testing.assert_allclose(linalg.solve_lower(L, B, transpose=transpose), jnp.linalg.solve(full, B), rtol=1e-10)
    np.testing.assert_allclose(
        linalg.solve_lower(L[0], B, transpose=transpose), jnp.linalg.solve(full[0], B), rtol=1e-10
    )


SIZES = [(1, 4), (6, 32), (9, 70), (2000, 4), (2001, 4), (4501, 5), (2500, 200)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", mostly_long([(9, 70), (4501, 5)], SIZES))
def test_blocks_of_quadratic_forms(key, sizes):
    """In one block of rows, in several, and in several that do not divide the rows."""
    rows, size = sizes
    a, b, c = jax.random.split(key, 3)
    root = jax.random.normal(a, (3, size, size))
    A = jax.random.normal(b, (rows, size))
    weights = jax.random.normal(c, (rows, 3))

    def dense(root, A):
        return quadratic_forms_reference(root @ root.mT, A)

    def fast(root, A):
        return in_blocks(partial(quadratic_forms, root @ root.mT), A)

    np.testing.assert_allclose(fast(root, A), dense(root, A), rtol=1e-11, atol=1e-13)
    for argnum in (0, 1):
        gradient, expected = (jax.grad(lambda *x, f=f: (weights * f(*x)).sum(), argnum)(root, A) for f in (fast, dense))
        np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.long
def test_quadratic_forms_have_second_derivatives(key):
    root, A = jax.random.normal(key, (2, 3, 3)), jax.random.normal(jax.random.key(1), (5, 3))

    def hessian(f):
        return jax.hessian(lambda r: jnp.sin(f(r @ r.mT, A)).sum())(root)

    expected = hessian(quadratic_forms_reference)
    np.testing.assert_allclose(hessian(quadratic_forms), expected, rtol=1e-9, atol=1e-10)


def test_quadratic_forms_have_no_forward_mode():
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(quadratic_forms, (jnp.ones((1, 2, 2)), jnp.ones((3, 2))), (jnp.ones((1, 2, 2)), jnp.ones((3, 2))))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("shape", mostly_long([(5, 21)], [(1, 1), (3, 20), (5, 21)]))
def test_sums_of_symmetric_matrices_in_blocks(monkeypatch, dtype, shape):
    """Value and derivatives in both modes; blocks of 2 to 20 data, the last one not always full."""
    size, N = shape
    rng = np.random.default_rng(N)
    weights, x, Z = (jnp.array(rng.normal(size=s), dtype) for s in (N, (N, 2), (size, 2)))

    def row(pairs, x, Z):
        a = jnp.exp(-0.5 * jnp.square(x - Z).sum(-1))
        return a[pairs[0]] * a[pairs[1]]

    def blocks(weights, x, Z):
        return row_blocks.sum_symmetric(size, weights, 1, lambda pairs, x: row(pairs, x, Z), x)

    def reference(weights, x, Z):
        return row_blocks.sum_symmetric_reference(size, weights, lambda pairs, x: row(pairs, x, Z), x)

    arguments, tolerance = (weights, x, Z), 100 * jnp.finfo(dtype).eps
    tune(monkeypatch, cells=30)
    for derivative in (lambda f: f, jax.jacrev, jax.jacfwd):
        found, expected = (derivative(f)(*arguments) for f in (blocks, reference))
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("full", [False, True])
def test_each_row_in_blocks(monkeypatch, full):
    """Against all rows at once, where blocks hold 3 of 8 data."""
    rng = np.random.default_rng(0)
    loc, other = jnp.array(rng.normal(size=(8, 2))), jnp.array(rng.normal(size=8))
    variance = jnp.array(rng.normal(size=(8, 2, 2) if full else (8, 2)))

    def row(m, v, c):
        return c * (v * m).sum(-1)

    expected = jax.vmap(row)(loc, variance, other)
    tune(monkeypatch, cells=12)
    np.testing.assert_allclose(row_blocks.each_row(loc, variance, 4, row, other), expected, rtol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_conditional_variance_is_positive(dtype):
    """At inducing inputs, in between, and where nearly everything is known; rounding of both signs occurs there."""
    Z = jnp.linspace(0, 3, 40, dtype=dtype)[:, None]
    x = jnp.concatenate([Z, Z + 0.03, Z + 10])
    kernel = lambda x: 1.7 * jnp.exp(-0.5 * squared_distances(x, Z))  # noqa: E731
    A = kernel(x) @ whitening.inverse_cholesky(linalg.set_diagonal(kernel(Z), jnp.full(40, 1.7, dtype))).T
    k, explained = jnp.full(len(x), 1.7, dtype), jnp.square(A).sum(-1)
    found, least = whitening.residual_variance(k, explained, 40), 1.7 * linalg.jitter(dtype, 40)
    assert found.dtype == dtype
    assert found.min() >= 0.999 * least
    np.testing.assert_allclose(found[:40], 0, atol=30 * least)
    np.testing.assert_array_equal(found[80:], (k - explained)[80:])  # far away nothing is clipped


def test_blocks_of_rows_hold_no_more_than_a_block(monkeypatch):
    """Forwards and backwards no array has as many numbers as N x P x M."""
    N, P, M = 20_000, 3, 50
    tune(monkeypatch, double_rows=2000, block_bytes=0)

    def loss(S, A):
        return jnp.square(in_blocks(partial(quadratic_forms, S), A)).sum()

    found = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((P, M, M)), jnp.ones((N, M)))
    assert 2000 * P * M <= max(sizes(found.jaxpr)) <= N * M


@pytest.mark.parametrize("mode", mostly_long([jax.jacrev], [jax.jacfwd, jax.jacrev]))
@pytest.mark.long
def test_derivatives_written_by_hand(mode, key):
    """Of squared distances by one matrix product, and of L L', in both modes and twice."""
    X, Z = jax.random.normal(key, (4, 5)), jax.random.normal(jax.random.key(1), (3, 5))

    def direct(X, Z):
        return jnp.square(X[:, None] - Z).sum(-1)

    pairs = [
        (lambda *a: jnp.exp(-squared_distances(*a)), lambda *a: jnp.exp(-direct(*a)), (X, Z)),
        (lambda Z: jnp.exp(-squared_distances(Z, Z)), lambda Z: jnp.exp(-direct(Z, Z)), (Z,)),
        (linalg.times_transpose, lambda L: jnp.einsum("pmk,pnk->pmn", L, L), (jnp.stack([Z, Z + 1]),)),
    ]
    for fast, dense, args in pairs:
        for derivative in (mode, lambda f, argnums: jax.jacfwd(mode(f, argnums), argnums)):
            found, expected = (derivative(f, tuple(range(len(args))))(*args) for f in (fast, dense))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), found, expected)


def test_safe_sqrt_has_finite_derivative_at_zero():
    value, slope = jax.vmap(jax.value_and_grad(linalg.safe_sqrt))(jnp.array([-1.0, 0.0, 4.0]))
    np.testing.assert_allclose(value, [0, 0, 2])
    np.testing.assert_allclose(slope, [0, 0, 0.25])


@pytest.mark.slow
def test_derivatives_of_safe_sqrt_of_any_order():
    """Forwards, backwards and in batches: those of the root above zero, and zero below."""
    x = jnp.array([-1.0, 0.0, 4.0])
    for first in (jax.grad, jax.jacfwd):
        for second in (jax.grad, jax.jacfwd):
            np.testing.assert_allclose(jax.vmap(second(first(linalg.safe_sqrt)))(x), [0, 0, -1 / 32], rtol=1e-14)
    third = jax.vmap(jax.grad(jax.grad(jax.grad(linalg.safe_sqrt))))(x.astype(jnp.float32))
    assert third.dtype == jnp.float32
    np.testing.assert_allclose(third, [0, 0, 3 / 256], rtol=1e-6)
    assert np.isnan(linalg.safe_sqrt(jnp.nan))
