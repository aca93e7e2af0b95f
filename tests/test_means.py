import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest

import numpyro_dgp as dgp
from numpyro_dgp import means

X = np.random.default_rng(0).normal(size=(40, 3)) * [1.0, 3.0, 0.5]


@pytest.mark.smoke
def test_values():
    np.testing.assert_array_equal(means.ZeroMean()(X), np.zeros((40, 1)))
    np.testing.assert_array_equal(means.ConstantMean([1.0, 2.0])(X), np.tile([1.0, 2.0], (40, 1)))
    np.testing.assert_array_equal(means.IdentityMean()(X), X)
    W = np.arange(6.0).reshape(3, 2)
    np.testing.assert_allclose(means.LinearMean(W, 1.0)(X), X @ W + 1, rtol=1e-12)


@pytest.mark.parametrize("outputs", [None, 1, 2])
@pytest.mark.parametrize("mean", [0.5, 1, np.float32(0.5), jnp.asarray(0.5), lambda x: 0.5, lambda x: jnp.asarray(0.5)])
def test_a_number_is_the_mean_at_all_rows(mean, outputs):
    """In every representation, and in draws of functions."""
    c = float(mean(X)) if callable(mean) else float(mean)
    shape = () if outputs is None else (outputs,)
    for inducing in (None, dgp.Points(X[:4]), dgp.Points(X[:4], learn=True)):
        with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data={"f": jnp.zeros((*shape, 4))}):
            f = dgp.gp("f", dgp.kernels.RBF(), inducing, outputs=outputs, mean=mean)
        np.testing.assert_allclose(f(X[:7]).mean, np.full((7, *shape), c), atol=1e-12)
        np.testing.assert_allclose(f.joint(X[:7]).mean, np.full((7, *shape), c), atol=1e-12)
    given = dgp.gp("g", dgp.kernels.RBF(), None, outputs=outputs, mean=mean).condition(X[:1], np.full((1, *shape), c))
    np.testing.assert_allclose(given(X[:7]).mean, np.full((7, *shape), c), atol=1e-12)


def test_numbers_one_per_output_and_traced_ones():
    def means_of(m):
        return dgp.gp("f", dgp.kernels.RBF(), None, outputs=2, mean=m)(X[:3]).mean

    np.testing.assert_array_equal(means_of([1.0, 2.0]), np.tile([1.0, 2.0], (3, 1)))
    np.testing.assert_array_equal(jax.jit(means_of)(jnp.array([1.0, 2.0])), np.tile([1.0, 2.0], (3, 1)))
    np.testing.assert_array_equal(jax.grad(lambda m: means_of(m).sum())(2.0), 6.0)


def test_pca_uses_the_principal_directions():
    W = means.pca(X, 2).W
    values, vectors = np.linalg.eigh(np.cov(X.T))
    for column, direction in zip(W.T, vectors[:, ::-1].T, strict=False):
        np.testing.assert_allclose(abs(column @ direction), 1, rtol=1e-12)
    assert (W.sum(0) >= 0).all()
    projected = means.pca(X, 2)(X)
    np.testing.assert_allclose(np.var(projected, 0, ddof=1), values[::-1][:2], rtol=1e-10)


def test_pca_keeps_and_pads():
    assert isinstance(means.pca(X, 3), means.IdentityMean)
    np.testing.assert_array_equal(means.pca(X, 5)(X), np.hstack([X, np.zeros((40, 2))]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: means.LinearMean(np.ones(3)), r"expected W of shape \(D, P\), got \(3,\)"),
        (lambda: means.LinearMean(np.full((3, 1), np.nan)), "expected finite weights W, got 3 NaN"),
        (lambda: means.LinearMean(np.ones((2, 1)))(X), "expected inputs with D = 2 columns"),
        (lambda: means.pca(X, 0), "expected a positive integer number of outputs, got 0"),
        (lambda: means.pca(X[:, 0], 1), r"expected inputs of shape \(..., N, D\)"),
        (lambda: means.pca(np.where(X > 2, np.nan, X), 1), "expected finite inputs X"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()
