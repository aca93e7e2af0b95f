"""Quadratic forms of many rows with many symmetric matrices: most of the arithmetic of a training step."""

from __future__ import annotations

import functools
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import computed_once, fused, rows_times

__all__ = [
    "Columns",
    "Rows",
    "column_sums",
    "columns",
    "forms_backward",
    "forms_forward",
    "forms_of_columns",
    "keeps_products",
    "pull_back",
    "quadratic_forms",
    "rows_of_blocks",
    "symmetric",
    "weighted_rows",
]

# Symmetric matrices (P, M, M) in blocks of columns, without what is below the diagonal: (end, P * width) each.
Columns = tuple[Array, ...]
# Weighted rows (N, P * width), or what these are multiplied with, (P * width, K), block by block.
Rows = tuple[Array, ...]
# Bytes of products S_p a_n that are kept for the derivative. More would leave the cache, and with a few layers make the
# step's memory one that the C library gives back to the system, page by page, every time.
_KEPT = 2**22
# Columns in a block.
_WIDTH = 32


def _blocks(M: int) -> list[tuple[int, int]]:
    """First and last column of every block; a small rest belongs to the last."""
    return list(pairwise([*range(0, max(M - _WIDTH // 2, 1), _WIDTH), M]))


def _side_by_side(S: Array) -> Array:
    """Matrices (P, K, M) as one (K, P * M)."""
    return jnp.moveaxis(S, 0, 1).reshape(S.shape[1], -1)


def _products(A: Array, matrices: Array, P: int) -> Array:
    """Products of rows A (N, K) with P matrices side by side, by one matrix product: (N, P, M)."""
    return rows_times(A, matrices, jax.lax.Precision.DEFAULT).reshape(len(A), P, -1)


def _forms(A: Array, products: Array) -> Array:
    return jnp.einsum("nm,npm->np", A, products)


def columns(S: Array) -> Columns:
    """Symmetric matrices (P, M, M) as :data:`Columns`, with twice what is above the blocks on the diagonal."""
    return tuple(
        _side_by_side(jnp.concatenate([2 * S[:, :start, start:end], S[:, start:end, start:end]], 1))
        for start, end in _blocks(S.shape[1])
    )


def forms_of_columns(A: Array, matrices: Columns, P: int) -> Array:
    """Quadratic forms (N, P) of rows with matrices in :func:`columns`."""
    total = jnp.zeros((len(A), P), A.dtype)
    for (start, end), block in zip(_blocks(A.shape[1]), matrices, strict=True):
        total = total + _forms(A[:, start:end], _products(A[:, :end], block, P))
    return total


def weighted_rows(A: Array, weights: Array) -> Rows:
    """w_np a_n, in blocks of columns (N, P * width)."""
    weights = computed_once(weights)
    return tuple((A[:, None, start:end] * weights[..., None]).reshape(len(A), -1) for start, end in _blocks(A.shape[1]))


def column_sums(A: Array, weighted: Rows) -> Columns:
    r""":math:`\sum_n w_{np} a_n a_n^\top`: the derivative of :func:`forms_of_columns` by the columns."""
    return tuple(A[:, :end].T @ block for (_, end), block in zip(_blocks(A.shape[1]), weighted, strict=True))


def symmetric(sums: Columns, P: int) -> Array:
    """The symmetric matrices (P, M, M) that have these columns on and above the diagonal."""
    M = len(sums[-1])
    apart = [jnp.moveaxis(block.reshape(len(block), P, -1), 1, 0) for block in sums]
    upper = jnp.concatenate([jnp.pad(a, ((0, 0), (0, M - a.shape[1]), (0, 0))) for a in apart], 2)
    number = np.repeat(np.arange(len(sums)), [a.shape[2] for a in apart])
    return upper + (upper * (number[:, None] < number)).mT


def rows_of_blocks(R: Array) -> Rows:
    """R (P, M, K) in blocks of rows (P * width, K), for :func:`pull_back`."""
    return tuple(R[:, start:end].reshape(-1, R.shape[2]) for start, end in _blocks(R.shape[1]))


def pull_back(weighted: Rows, matrices: Rows) -> Array:
    r""":math:`\sum_p w_{np} R_p^\top a_n` (N, K) from :func:`weighted_rows` and :func:`rows_of_blocks`."""
    return functools.reduce(jnp.add, map(jnp.matmul, weighted, matrices))


@jax.custom_vjp
@fused
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
    return forms_of_columns(A, columns(S), len(S))


def keeps_products(rows: int, S: Array) -> bool:
    """Whether the products of that many rows with matrices S are few."""
    return bool(rows * S.nbytes <= _KEPT * S.shape[1])


def forms_forward(S: Array, A: Array) -> tuple[Array, tuple[Array, Array, Array | None]]:
    """:func:`quadratic_forms`, and what :func:`forms_backward` needs: the products S_p a_n too where they are few."""
    if not keeps_products(len(A), S):
        return quadratic_forms(S, A), (S, A, None)
    products = _products(A, _side_by_side(S), len(S))
    return _forms(A, products), (S, A, products)


def forms_backward(kept: tuple[Array, Array, Array | None], weights: Array) -> tuple[Array, Array]:
    """Derivatives of weighted quadratic forms by S and by A."""
    S, A, products = kept
    weighted = weighted_rows(A, weights)
    by_S = symmetric(column_sums(A, weighted), len(S))
    if products is None:
        return by_S, 2 * pull_back(weighted, rows_of_blocks(S))
    return by_S, 2 * jnp.einsum("np,npm->nm", weights, products)


quadratic_forms.defvjp(forms_forward, forms_backward)
