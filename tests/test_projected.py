"""The fast paths of a training step against their references: quadratic forms, and moments under a Gaussian belief."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.handlers import seed, substitute
from sizes import mostly_long, tune

import numpyro_dgp as dgp
from numpyro_dgp.functions.weights import FullBelief
from numpyro_dgp.math.belief_moments import belief_moments, belief_moments_reference
from numpyro_dgp.math.linalg import rows_times
from numpyro_dgp.math.quadratic_forms import keeps_products, quadratic_forms, quadratic_forms_reference
from numpyro_dgp.math.row_blocks import rows_in_cache
from numpyro_dgp.math.whitening import inverse_cholesky, relative_change

# Few products, which are kept; more rows than numbers in the means; fewer rows than that.
SHAPES = {"kept": (40, 70, 3), "many rows": (6000, 40, 8), "large matrices": (900, 90, 20)}


def setting(shape):
    N, M, P = shape
    rng = np.random.default_rng(1)
    Z, X = jnp.array(rng.uniform(-6, 6, size=(M, 2))), jnp.array(rng.normal(size=(N, 2)))
    root = jnp.tril(jnp.array(rng.normal(size=(P, M, M)))) / np.sqrt(M)
    weights = [jnp.array(rng.normal(size=s)) for s in ((N, P), (N,), (N, P))]
    return X, weights, (Z, jnp.array(1.3), jnp.array(rng.normal(size=(P, M))), root)


def weighted(held, X, weights, Z, lengthscale, loc, root):
    kernel = dgp.kernels.RBF(1.7, lengthscale)
    whiten = inverse_cholesky(kernel.gram(Z))
    change = relative_change(kernel.gram(Z), whiten)
    root = jnp.tril(root)
    if held:
        found = belief_moments(len(X), change, jax.lax.stop_gradient(whiten), loc, root)(kernel(X, Z))
    else:
        found = belief_moments_reference(whiten, loc, root, kernel(X, Z))
    return sum((w * m).sum() for w, m in zip(weights, found, strict=True))


# One block of columns up to M = 48, a block and a rest from 49 on, wider ones above 128; rows around those of a single
# block.
COLUMNS = [16, 32, 47, 48, 49, 100, 150]
ROWS_AND_OUTPUTS = [(1, 1), (7, 5), (3000, 1), (3000, 5)]


def same(fast, reference, arguments, weights):
    """Values, and derivatives of their weighted sum by all arguments, each relative to the largest entry or to one."""

    def total(f, *arguments):
        found = f(*arguments)
        return sum((w * m).sum() for w, m in zip(weights, found, strict=True)), found

    every = tuple(range(len(arguments)))
    of = lambda f: jax.jit(jax.grad(partial(total, f), every, has_aux=True))(*arguments)  # noqa: E731
    tolerance = 100 * float(jnp.finfo(arguments[-1].dtype).eps)
    for a, b in zip(jax.tree.leaves(of(fast)), jax.tree.leaves(of(reference)), strict=True):
        assert a.dtype == b.dtype == arguments[-1].dtype
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(jnp.abs(b).max())))


def numbers(dtype, N, M, P):
    """Weights of three moments, a lower triangular W (M, M), means, lower triangular factors and rows, of size one."""
    rng = np.random.default_rng(M + N)
    W, *roots = np.tril(rng.normal(size=(1 + P, M, M))) / np.sqrt(M)
    arrays = W, rng.normal(size=(P, M)), np.stack(roots), rng.normal(size=(N, M))
    weights = [rng.normal(size=s) for s in ((N, P), N, (N, P))]
    return [jnp.array(a, dtype) for a in weights], *(jnp.array(a, dtype) for a in arrays)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("M", mostly_long([16, 49], COLUMNS))
@pytest.mark.parametrize("kept", [True, False], ids=["products kept", "products not kept"])
def test_quadratic_forms_are_those_of_the_reference(monkeypatch, dtype, M, kept):
    tune(monkeypatch, kept_products=2**30 if kept else 0, single_rows=5000)
    for N, P in ROWS_AND_OUTPUTS:
        weights, _, _, root, A = numbers(dtype, N, M, P)
        S = root @ root.mT
        assert keeps_products(N, S) == kept
        same(lambda S, A: [quadratic_forms(S, A)], lambda S, A: [quadratic_forms_reference(S, A)], (S, A), weights[:1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("M", mostly_long([49], COLUMNS))
@pytest.mark.parametrize("way", ["few", "many", "many, variance only"])
@pytest.mark.parametrize("halves", [49, 1000], ids=["by halves", "whole"])
def test_moments_are_those_of_the_reference(monkeypatch, dtype, M, way, halves):
    """All ways to compute them. The derivative by W comes through E = 0 in (I + E) W, of which the triangle counts."""
    tune(monkeypatch, kept_products=2**30 if way == "few" else 0, single_rows=5000, halves=halves)
    for N, P in ROWS_AND_OUTPUTS:
        weights, W, loc, root, cross = numbers(dtype, N, M, P)
        weights[1] = 0 * weights[1] if "only" in way else weights[1]

        def fast(change, loc, root, cross, W=W):
            return belief_moments(len(cross), change, W, loc, root)(cross)

        def reference(change, loc, root, cross, W=W):
            return belief_moments_reference(W + jnp.tril(change) @ W, loc, jnp.tril(root), cross)

        same(fast, reference, (jnp.zeros_like(W), loc, root, cross), weights)


@pytest.mark.slow
@pytest.mark.parametrize("explained", [0.0, 1.0], ids=["variance only", "its parts too"])
@pytest.mark.parametrize("shape", mostly_long(["many rows"], SHAPES))
def test_derivatives_by_everything(shape, explained):
    X, weights, parameters = setting(SHAPES[shape])
    weights[1] = weights[1] * explained
    every = tuple(range(len(parameters)))

    def both(held):
        return jax.jit(jax.value_and_grad(lambda *p: weighted(held, X, weights, *p), every))(*parameters)

    for a, b in zip(jax.tree.leaves(both(True)), jax.tree.leaves(both(False)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7 * float(jnp.abs(b).max()))


def test_relative_change_is_zero_with_the_derivative_of_the_whitening_matrix():
    Z, kernel = jnp.linspace(0, 5, 6)[:, None], dgp.kernels.Matern32

    def whiten(lengthscale):
        return inverse_cholesky(kernel(1.2, lengthscale).gram(Z))

    W, dW = jax.jvp(whiten, (0.9,), (1.0,))
    zero, change = jax.jvp(lambda s: relative_change(kernel(1.2, s).gram(Z), whiten(s)), (0.9,), (1.0,))
    assert not zero.any()
    np.testing.assert_allclose(change @ W, dW, atol=1e-12)


@pytest.mark.parametrize("N", [10, 701, 1000, 2000])
def test_rows_times_is_a_product(N):
    rng = np.random.default_rng(N)
    A, B = jnp.array(rng.normal(size=(N, 5))), jnp.array(rng.normal(size=(5, 4)))
    np.testing.assert_allclose(rows_times(A, B), np.asarray(A) @ np.asarray(B), rtol=1e-12, atol=1e-12)
    for argument in (0, 1):
        found, expected = (
            jax.grad(lambda A, B, f=f: jnp.sin(f(A, B)).sum(), argument)(A, B) for f in (rows_times, jnp.matmul)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [None, 3])
def test_variance_is_the_sum_of_its_parts(monkeypatch, outputs):
    """Also over several blocks of rows, and where the inputs are the inducing ones."""
    tune(monkeypatch, block_bytes=0)
    rng = np.random.default_rng(4)
    Z, P = jnp.array(rng.normal(size=(12, 2))), outputs or 1
    root = jnp.tril(jnp.array(rng.normal(size=(P, 12, 12)))) / 3
    loc = jnp.array(rng.normal(size=(P, 12)))
    belief = FullBelief(loc, root) if outputs else FullBelief(loc[0], root[0])
    extra = jnp.array(rng.normal(size=(rows_in_cache(Z.dtype), 2)))

    def layer():
        return dgp.gp("f", dgp.kernels.RBF(1.5, 0.8), dgp.Points(Z), outputs=outputs)

    with seed(rng_seed=0), substitute(data={"f": belief}):
        f = layer()
        values = f(jnp.concatenate([Z, extra]))
        joint = f.joint(Z)
    np.testing.assert_allclose(values.variance, values.conditional_variance + values.belief_variance, atol=1e-12)
    diagonal = jnp.diagonal(joint.conditional_covariance + joint.belief_covariance, axis1=-2, axis2=-1)
    np.testing.assert_allclose(values.variance[:12], diagonal.T if outputs else diagonal.reshape(-1), atol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("single", ["inputs", "layer"])
def test_layers_and_inputs_of_two_precisions(single):
    rng = np.random.default_rng(5)
    first, second = (np.float32, np.float64) if single == "inputs" else (np.float64, np.float32)
    x, Z = rng.normal(size=(20, 2)).astype(first), rng.normal(size=(6, 2)).astype(second)

    def variance(root, lengthscale):
        belief = FullBelief(jnp.ones(6, second), root)
        with seed(rng_seed=0), substitute(data={"f": belief}):
            return dgp.gp("f", dgp.kernels.RBF(1.5, lengthscale), dgp.Points(Z))(x).variance.sum()

    value, (by_root, by_lengthscale) = jax.value_and_grad(variance, (0, 1))(jnp.eye(6, dtype=second), jnp.asarray(1.0))
    assert value.dtype == jnp.float64
    assert by_root.dtype == second
    np.testing.assert_allclose(value, 20 * 1.5, rtol=1e-5)
    assert abs(float(by_lengthscale)) < 1e-4  # S = I: the variance is that of the prior


@pytest.mark.long
@pytest.mark.parametrize("extra", [0, 1], ids=["blocks", "blocks that do not divide the rows"])
def test_derivatives_through_blocks_of_rows(extra):
    """What is prepared before the loop over blocks and finished after it, against dense autodiff without blocks."""
    rng = np.random.default_rng(6)
    M, P = 100, 8
    X = jnp.array(rng.normal(size=(2 * rows_in_cache(jnp.float64) + extra, 2)))
    Z = jnp.array(rng.uniform(-3, 3, size=(M, 2)))
    loc, root = jnp.array(rng.normal(size=(P, M))), jnp.tril(jnp.array(rng.normal(size=(P, M, M)))) / 10
    weights = [jnp.array(rng.normal(size=(len(X), P))) for _ in range(2)]
    kernel = dgp.kernels.Matern12(1.7, 1.3)

    def of_layer(X, Z, loc, root):
        with seed(rng_seed=0), substitute(data={"f": FullBelief(loc, root)}):
            values = dgp.gp("f", kernel, dgp.Points(Z), outputs=P)(X)
        return (weights[0] * values.loc).sum() + (weights[1] * values.variance).sum()

    def of_dense(X, Z, loc, root):
        mean, _, gain = belief_moments_reference(inverse_cholesky(kernel.gram(Z)), loc, root, kernel(X, Z))
        return (weights[0] * mean).sum() + (weights[1] * (1.7 + gain)).sum()

    def both(f):
        return jax.jit(jax.value_and_grad(lambda X, Z, loc, root: f(X, Z, loc, jnp.tril(root)), (0, 1, 2, 3)))

    found, expected = (both(f)(X, Z, loc, root) for f in (of_layer, of_dense))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8 * float(jnp.abs(b).max()))
