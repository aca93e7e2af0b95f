"""Operations on covariances for the coordinates of Gaussians: dense and diagonal."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.math.whitening import inverse_factor, inverse_lower

__all__ = ["DenseOperations", "DiagonalOperations"]


def _divided_difference(a: Array, b: Array) -> Array:
    r""":math:`(e^a - e^b) / (a - b)`, also where a = b."""
    # (e^a - e^b) / (a - b) = e^((a + b) / 2) sinh(h) / h with h = (a - b) / 2
    half = 0.5 * (a - b)
    small = jnp.abs(half) < 1e-4
    away = jnp.where(small, 1e-4, half)
    ratio = jnp.where(small, 1 + jnp.square(half) / 6, jnp.sinh(away) / away)  # sinh(h) / h = 1 + h^2 / 6 + ...
    return jnp.exp(0.5 * (a + b)) * ratio


def _at_least_rounding(values: Array) -> Array:
    """Eigenvalues of a positive-definite matrix, at least as large as the rounding error of the largest."""
    return jnp.maximum(values, jnp.finfo(values.dtype).eps * values[..., -1:])


def _spectral(
    function: Callable[[Array], Array],
    slopes: Callable[[Array, Array], Array],
    clip: Callable[[Array], Array] = lambda values: values,
) -> Callable[[Array], Array]:
    """A function of symmetric matrices through their eigenvalues, with its derivative by divided differences
    (Daleckii and Krein), which stays finite where eigenvalues coincide, as at the prior."""

    def decompose(A: Array) -> tuple[Array, Array]:
        values, vectors = jnp.linalg.eigh(A)
        return clip(values), vectors

    @jax.custom_jvp
    def apply(A: Array) -> Array:
        values, vectors = decompose(A)
        return matmul(vectors * function(values)[..., None, :], vectors.mT)  # f(A) = Y diag(f(θ)) Y'

    @apply.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        values, vectors = decompose(primals[0])
        # df = Y (f[θ_i, θ_j] * (Y' dA Y)_ij) Y'
        inner = matmul(matmul(vectors.mT, tangents[0]), vectors)
        inner = inner * slopes(values[..., :, None], values[..., None, :])
        value = matmul(vectors * function(values)[..., None, :], vectors.mT)
        return value, matmul(matmul(vectors, inner), vectors.mT)

    return apply


class DenseOperations:
    """The operations for matrices (..., n, n) and vectors (..., n)."""

    exp = staticmethod(_spectral(jnp.exp, _divided_difference))
    log = staticmethod(
        # f[a, b] = (log a - log b) / (a - b), with a = e^(log a)
        _spectral(jnp.log, lambda a, b: 1 / _divided_difference(jnp.log(a), jnp.log(b)), _at_least_rounding)
    )
    root = staticmethod(jnp.linalg.cholesky)
    product = staticmethod(matmul)

    @staticmethod
    def gram(R: Array) -> Array:
        return matmul(R, R.mT)

    @staticmethod
    def transpose(R: Array) -> Array:
        return R.mT

    @staticmethod
    def outer(m: Array) -> Array:
        return m[..., :, None] * m[..., None, :]

    @staticmethod
    def apply(A: Array, m: Array) -> Array:
        return matmul(A, m[..., None])[..., 0]

    @staticmethod
    def inverse(R: Array) -> Array:
        """Of a triangular factor."""
        return inverse_lower(R)

    @staticmethod
    def inverse_root(precision: Array) -> Array:
        """Lower triangular R with R R' the inverse, from the inverse Cholesky factor with rows and columns reversed."""
        even = 0.5 * (precision + precision.mT)
        return jnp.flip(inverse_factor(jnp.flip(even, (-2, -1))), (-2, -1)).mT

    @staticmethod
    def slope_of_gram(R: Array, slope: Array) -> Array:
        """From the derivative by R to that by V at V = I, where Σ = R V R'."""
        # Σ = (R F) (R F)' with F F' = V; at V = I, dF is tril(dV) with half its diagonal.
        inner = jnp.tril(matmul(R.mT, slope))
        return 0.5 * (inner + jnp.tril(inner, -1).mT)

    @staticmethod
    def like_identity(value: float, R: Array) -> Array:
        return jnp.broadcast_to(value * jnp.eye(R.shape[-1], dtype=R.dtype), R.shape)

    @staticmethod
    def positive(R: Array) -> Array:
        """The factor of R R' with a positive diagonal."""
        R = jnp.tril(R)
        return R * jnp.sign(jnp.diagonal(R, axis1=-2, axis2=-1))[..., None, :]  # R S with signs S, and R S S' R' = R R'


class DiagonalOperations:
    """The operations for standard deviations (..., n), elementwise."""

    exp = staticmethod(jnp.exp)
    log = staticmethod(jnp.log)
    root = staticmethod(jnp.sqrt)
    gram = staticmethod(jnp.square)
    outer = staticmethod(jnp.square)
    apply = staticmethod(jnp.multiply)
    inverse = staticmethod(jnp.reciprocal)
    positive = staticmethod(jnp.abs)
    product = staticmethod(jnp.multiply)

    @staticmethod
    def slope_of_gram(s: Array, slope: Array) -> Array:
        return 0.5 * s * slope  # Σ = s V s and ds = s dV / 2 at V = 1

    @staticmethod
    def like_identity(value: float, s: Array) -> Array:
        return jnp.full_like(s, value)

    @staticmethod
    def transpose(s: Array) -> Array:
        return s

    @staticmethod
    def inverse_root(P: Array) -> Array:
        return jax.lax.rsqrt(P)
