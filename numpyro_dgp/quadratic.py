"""S1: quadratic forms of many rows with many symmetric matrices: most of the arithmetic of a training step."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.linalg import matmul, rows_times

__all__ = ["forms_backward", "forms_forward", "pull_back", "quadratic_forms"]

# Bytes of products S_p a_n that are kept for the derivative. More would leave the cache, and with a few layers make the
# step's memory one that the C library gives back to the system, page by page, every time.
_KEPT = 2**22
# Columns in a block; blocks below the diagonal are left out.
_WIDTH = 32


def _blocks(M: int) -> list[tuple[int, int]]:
    """First and last column of every block."""
    return list(pairwise([*range(0, M, _WIDTH), M]))


def _products(A: Array, S: Array) -> Array:
    """Products of rows A (N, K) with matrices (P, K, M), by one matrix product: (N, P, M)."""
    side_by_side = jnp.moveaxis(S, 0, 1).reshape(S.shape[1], -1)
    return rows_times(A, side_by_side, jax.lax.Precision.DEFAULT).reshape(len(A), len(S), -1)


def _forms(A: Array, products: Array) -> Array:
    return jnp.einsum("nm,npm->np", A, products)


@jax.custom_vjp
@partial(jax.jit, inline=True)
def quadratic_forms(S: Array, A: Array) -> Array:
    r"""All quadratic forms :math:`v_{np} = a_n^\top S_p\, a_n` at once, shape (N, P).

    By matrix products over all p, with blocks j of columns:
    :math:`\sum_j (S_{jj} a_j + 2 \sum_{i < j} S_{ji} a_i)^\top a_j`. Leaving out the other blocks saves a third of
    the value and of the derivative by S. Autodiff does not know about symmetry, and spends a third product on
    :math:`\partial v / \partial A = 2 S_p A`. Where the products :math:`S_p a_n` are few they are kept for that;
    otherwise rows times their weights serve both derivatives.

    Args:
        S: symmetric matrices (P, M, M).
        A: rows (N, M).

    Source: measured in ``docs/performance.md``.
    """
    total = jnp.zeros((len(A), len(S)), A.dtype)
    for start, end in _blocks(A.shape[1]):
        above = jnp.concatenate([2 * S[:, :start, start:end], S[:, start:end, start:end]], 1)
        total = total + _forms(A[:, start:end], _products(A[:, :end], above))
    return total


def _weighted_rows(A: Array, weights: Array) -> list[Array]:
    """w_np a_n, as blocks of columns (N, P * width)."""
    # The identity: what a product returns is computed once, where XLA would compute weights again for every column.
    weights = matmul(weights, jnp.eye(weights.shape[1], dtype=weights.dtype))
    return [(A[:, None, start:end] * weights[..., None]).reshape(len(A), -1) for start, end in _blocks(A.shape[1])]


def _squares(A: Array, weighted: list[Array], P: int) -> Array:
    r""":math:`\sum_n w_{np} a_n a_n^\top` (P, M, M), without the blocks below the diagonal."""
    M, columns = A.shape[1], []
    for (start, end), block in zip(_blocks(M), weighted, strict=True):
        sums = (A[:, :end].T @ block).reshape(end, P, end - start)
        columns.append(jnp.pad(jnp.moveaxis(sums, 1, 0), ((0, 0), (0, M - end), (0, 0))))
    upper = jnp.concatenate(columns, 2)
    number = jnp.arange(M) // _WIDTH
    return upper + (upper * (number[:, None] < number)).mT


def pull_back(A: Array, weights: Array, R: Array) -> tuple[Array, Array]:
    r""":math:`\sum_n w_{np} a_n a_n^\top` (P, M, M), and :math:`\sum_p w_{np} R_p^\top a_n` (N, K) for R (P, M, K)."""
    weighted = _weighted_rows(A, weights)
    parts = zip(_blocks(A.shape[1]), weighted, strict=True)
    product = sum(block @ R[:, start:end].reshape(-1, R.shape[2]) for (start, end), block in parts)
    return _squares(A, weighted, len(R)), product  # type: ignore[return-value]


def forms_forward(S: Array, A: Array) -> tuple[Array, tuple[Array, Array, Array | None]]:
    """:func:`quadratic_forms`, and what :func:`forms_backward` needs: the products S_p a_n too where they are few."""
    if len(A) * S.nbytes > _KEPT * S.shape[1]:
        return quadratic_forms(S, A), (S, A, None)
    products = _products(A, S)
    return _forms(A, products), (S, A, products)


def forms_backward(kept: tuple[Array, Array, Array | None], weights: Array) -> tuple[Array, Array]:
    """Derivatives of weighted quadratic forms by S and by A."""
    S, A, products = kept
    if products is None:
        dS, half = pull_back(A, weights, S)
    else:
        dS = _squares(A, _weighted_rows(A, weights), len(S))
        half = jnp.einsum("np,npm->nm", weights, products)
    return dS, 2 * half


quadratic_forms.defvjp(forms_forward, forms_backward)
