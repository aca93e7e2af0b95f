"""Squared distances between the rows of two matrices, and their derivatives."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.math.tuning import tuned

__all__ = ["squared_distances"]


def squared_distances(X1: Array, X2: Array) -> Array:
    r"""Squared distances :math:`\lVert x_i - x'_j \rVert^2`, shape (..., N1, N2), without an N1 x N2 x D array.

    Up to three columns the differences are squared and summed column by column: exact where the product form loses
    digits, and as fast, because XLA fuses the sum into one pass over the result. Beyond that, one matrix product:
    inputs are centred first, since the product form loses the digits of :math:`\lVert x \rVert^2`, and the result is
    clipped at zero. Where both are *one* array, the matrix is one that will be factorised, and in single precision the
    digits that the product loses can be more than its jitter: these are sums of squared differences again.

    Args:
        X1: inputs (..., N1, D), already divided by the lengthscales.
        X2: inputs (..., N2, D); ``X1`` itself for the distances between its own rows.
    """
    if X1 is X2 and jnp.finfo(X1.dtype).bits <= 32 and X1.shape[-1] > tuned().few_columns:
        return _within(X1)
    return _between(X1, X2)


@partial(jax.jit, inline=True)
def _between(X1: Array, X2: Array) -> Array:
    if X1.shape[-1] <= tuned().few_columns:
        columns = range(X1.shape[-1])
        # r^2_ij = sum_d (x_id - x'_jd)^2
        return sum(jnp.square(X1[..., :, None, d] - X2[..., None, :, d]) for d in columns)  # type: ignore[return-value]
    # Distances do not depend on the centre, so it has no derivative.
    centre = jax.lax.stop_gradient(X2.mean(-2, keepdims=True))
    return _squared_distances(X1 - centre, X2 - centre)


@jax.custom_jvp
def _squared_distances(X1: Array, X2: Array) -> Array:
    # r^2_ij = |x_i|^2 + |x'_j|^2 - 2 x_i . x'_j
    norms = jnp.square(X1).sum(-1)[..., :, None] + jnp.square(X2).sum(-1)[..., None, :]
    return jnp.maximum(norms - 2 * matmul(X1, X2.mT), 0)


@_squared_distances.defjvp
def _squared_distances_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # d r^2_ij = 2 (x_i . dx_i - x'_j . dx_i) + 2 (x'_j . dx'_j - x_i . dx'_j), each bracket one product with a column
    # of ones. Transposed, the sums over rows and columns of the N1 x N2 derivatives are columns of these products too,
    # for which automatic differentiation would make separate passes.
    def side(x: Array, dx: Array, other: Array) -> Array:
        ones = jnp.ones((*other.shape[:-1], 1), other.dtype)
        # 2 (x_i . dx_i, dx_i) (1, -x'_j)'
        own = jnp.concatenate([(x * dx).sum(-1, keepdims=True), dx], -1)
        return 2 * matmul(own, jnp.concatenate([ones, -other], -1).mT)

    (X1, X2), (dX1, dX2) = primals, tangents
    return _squared_distances(X1, X2), side(X1, dX1, X2) + side(X2, dX2, X1).mT


@jax.custom_jvp
def _within(X: Array) -> Array:
    return jnp.square(X[..., :, None, :] - X[..., None, :, :]).sum(-1)


@_within.defjvp
def _within_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # The derivative in the product form: the differences, (..., N, N, D), would be kept for it.
    (X,), (dX,) = primals, tangents
    X0 = X - jax.lax.stop_gradient(X.mean(-2, keepdims=True))
    return _within(X), jax.jvp(_squared_distances, (X0, X0), (dX, dX))[1]
