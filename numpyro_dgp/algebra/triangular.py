"""Products with lower triangular matrices, which leave out zeros where the matrices are large.

Every function is a product in blocks of columns or rows: one block, the plain product, or two halves, of which one
meets only half of the triangular matrix. :func:`~numpyro_dgp.algebra.tuning.tuned` says from which size on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import matmul, rows_times
from numpyro_dgp.algebra.tuning import tuned

__all__ = ["covariance_of", "halves", "lower_congruence", "lower_product", "times_lower", "times_transposed"]


def halves(size: int) -> list[tuple[int, int]]:
    """Bounds ``start:end`` of the two halves of large matrices, or of all of a small one."""
    half = size // 2
    return [(0, size)] if size < tuned().halves else [(0, half), (half, size)]


def times_lower(A: Array, L: Array) -> Array:
    """``A @ L`` for A (..., N, M) and lower triangular L (..., M, M)."""
    return _side_by_side([_product(A[..., start:], L[..., start:, start:end]) for start, end in halves(L.shape[-1])])


def times_transposed(A: Array, L: Array) -> Array:
    """``A @ L.mT`` for A (..., N, M) and lower triangular L (..., M, M)."""
    return _side_by_side([_product(A[..., :end], L[..., start:end, :end].mT) for start, end in halves(L.shape[-1])])


def lower_product(A: Array, B: Array) -> Array:
    """``jnp.tril(A @ B)`` for A (..., M, N) and B (..., N, M)."""
    return _lower([matmul(A[..., start:end, :], B[..., :end]) for start, end in halves(B.shape[-1])])


def lower_congruence(L: Array, K: Array) -> Array:
    """``jnp.tril(L @ K @ L.mT)`` for lower triangular L (..., M, M) and K (..., M, M)."""
    return _lower(
        [
            matmul(matmul(L[..., start:end, :end], K[..., :end, :end]), L[..., :end, :end].mT)
            for start, end in halves(L.shape[-1])
        ]
    )


@jax.custom_vjp
def covariance_of(R: Array) -> Array:
    r""":math:`R R^\top` of lower triangular factors (..., M, M), for functions whose derivative by it is symmetric.

    In reverse mode only. The derivative by R, :math:`2 G R` with that symmetric derivative G, is lower triangular too.
    """
    return times_transposed(R, R)


def _covariance_forward(R: Array) -> tuple[Array, Array]:
    return covariance_of(R), R


def _covariance_backward(R: Array, G: Array) -> tuple[Array]:
    return (2 * lower_product(G, R),)


covariance_of.defvjp(_covariance_forward, _covariance_backward)


def _product(A: Array, B: Array) -> Array:
    return rows_times(A, B) if A.ndim == B.ndim == 2 else matmul(A, B)


def _lower(rows: list[Array]) -> Array:
    """The lower triangle of a matrix in blocks of rows, without the zeros to the right of each."""
    size = rows[-1].shape[-1]
    full = [jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, size - a.shape[-1])]) for a in rows]
    return jnp.tril(full[0] if len(full) == 1 else jnp.concatenate(full, -2))


def _side_by_side(columns: list[Array]) -> Array:
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, -1)
