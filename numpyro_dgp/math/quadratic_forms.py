r"""Quadratic forms of many rows with many symmetric matrices, which are most of the arithmetic of a training step.

:func:`quadratic_forms_reference` is the equation; :func:`quadratic_forms` is the same in blocks of columns, with a
derivative written by hand. The other functions are its pieces, which :mod:`~numpyro_dgp.math.belief_moments` puts
together in another way.
"""

from __future__ import annotations

import functools
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array
from numpyro_dgp.math.linalg import computed_once, einsum, fused, halves, matmul, row_sums, rows_times
from numpyro_dgp.math.tuning import tuned

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
    "quadratic_forms_reference",
    "rows_of_blocks",
    "symmetric",
    "weighted_rows",
]

# Symmetric matrices (P, M, M) in blocks of columns. The block of columns start:end has rows :end only, without the part
# below the diagonal: an array (end, P * (end - start)) each.
Columns = tuple[Array, ...]
# Weighted rows (N, P * width), or their factors in a product (P * width, columns), block by block.
Rows = tuple[Array, ...]


def _blocks(M: int) -> list[tuple[int, int]]:
    """Bounds ``start:end`` of every block of columns; a remainder of up to half a block goes to the last one.

    Four blocks leave out three eighths of all products; more of them leave out little more, up to a half. The halves of
    large matrices leave out a quarter, and need copies of one half of the rows only.
    """
    if len(two := halves(M)) > 1:
        return two
    unit = tuned().block_columns
    width = unit * -(-M // (4 * unit))
    return list(pairwise([*range(0, max(M - width // 2, 1), width), M]))


def _side_by_side(S: Array) -> Array:
    """Matrices (P, rows, M) as one (rows, P * M)."""
    return jnp.moveaxis(S, 0, 1).reshape(S.shape[1], -1)


def _products(A: Array, matrices: Array, P: int) -> Array:
    """Products of all rows of A with P matrices side by side, by one matrix product: (N, P, M)."""
    return rows_times(A, matrices).reshape(len(A), P, -1)


def _forms(A: Array, products: Array) -> Array:
    if products.shape[1] <= tuned().summed:
        return row_sums(A[:, None] * products)
    return einsum("nm,npm->np", A, products)


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
        # a_j' (Σ_jj a_j + 2 sum_{i<j} Σ_ji a_i)
        total = total + _forms(A[:, start:end], _products(A[:, :end], block, P))
    return total


def weighted_rows(A: Array, weights: Array) -> Rows:
    """β_np a_n with weights β, in blocks of columns (N, P * width)."""
    weights = computed_once(weights)
    return tuple((A[:, None, start:end] * weights[..., None]).reshape(len(A), -1) for start, end in _blocks(A.shape[1]))


def column_sums(A: Array, weighted: Rows) -> Columns:
    r""":math:`\sum_n \beta_{np} a_n a_n^\top`: the derivative of :func:`forms_of_columns` by the columns."""
    return tuple(matmul(A[:, :end].T, block) for (_, end), block in zip(_blocks(A.shape[1]), weighted, strict=True))


def symmetric(sums: Columns, P: int) -> Array:
    """The symmetric matrices (P, M, M) that have these columns on and above the diagonal."""
    M = len(sums[-1])
    apart = [jnp.moveaxis(block.reshape(len(block), P, -1), 1, 0) for block in sums]
    # Zero below the blocks on the diagonal.
    upper = jnp.concatenate([jnp.pad(a, ((0, 0), (0, M - a.shape[1]), (0, 0))) for a in apart], 2)
    number = np.repeat(np.arange(len(sums)), [a.shape[2] for a in apart])  # of the block that a column belongs to
    # The blocks on the diagonal are whole; those above it are mirrored.
    return upper + (upper * (number[:, None] < number)).mT


def rows_of_blocks(factors: Array) -> Rows:
    """Matrices (P, M, columns) in blocks of rows (P * width, columns), for :func:`pull_back`; one matrix is a block."""
    if len(factors) == 1:
        return (factors[0],)
    return tuple(factors[:, start:end].reshape(-1, factors.shape[2]) for start, end in _blocks(factors.shape[1]))


def pull_back(A: Array, weights: Array, weighted: Rows, matrices: Rows) -> Array:
    r""":math:`\sum_p \beta_{np} F_p^\top a_n`, from :func:`weighted_rows` and :func:`rows_of_blocks` of matrices F.

    With one output the product comes before its weights: one for all columns, and no weighted rows for it.
    """
    if weights.shape[1] == 1:
        return weights * matmul(A, *matrices)  # β_n F' a_n
    return functools.reduce(jnp.add, map(matmul, weighted, matrices))


def quadratic_forms_reference(S: Array, A: Array) -> Array:
    r"""What :func:`quadratic_forms` computes, without its blocks and its derivative: the reference in its tests.

    .. math:: a_n^\top \Sigma_p\, a_n

    Args:
        S: symmetric matrices :math:`\Sigma_p` (P, M, M).
        A: rows :math:`a_n` (N, M).
    """
    products = einsum("pij,nj->npi", S, A)
    return einsum("ni,npi->np", A, products)


@jax.custom_vjp
@fused
def quadratic_forms(S: Array, A: Array) -> Array:
    r"""All quadratic forms :math:`a_n^\top \Sigma_p\, a_n` at once, shape (N, P).

    By matrix products over all p, with blocks j of columns of one matrix and the same blocks of a row:
    :math:`\sum_j (\Sigma_{jj} a_j + 2 \sum_{i < j} \Sigma_{ji} a_i)^\top a_j`. Leaving out the other blocks saves a
    third of the value and of the derivative by :math:`\Sigma`. Automatic differentiation does not use symmetry, and
    needs a third product for the derivative :math:`2\, \Sigma_p a_n` by the row. Where the products
    :math:`\Sigma_p a_n` are few they are kept for that; otherwise rows times their weights are used for both
    derivatives.

    The derivative by :math:`\Sigma` is symmetric, as :math:`\Sigma` is. In reverse mode only (``jax.grad``,
    ``jax.vjp``); ``jax.jvp`` raises.

    Args:
        S: symmetric matrices :math:`\Sigma_p` (P, M, M).
        A: rows :math:`a_n` (N, M).

    Example:
        >>> import jax.numpy as jnp
        >>> print(quadratic_forms(jnp.array([[[2.0, 1.0], [1.0, 3.0]]]), jnp.array([[1.0, 0.0], [1.0, 1.0]])))
        [[2.]
         [7.]]

    Source: ``docs/results/speed.md``, what makes a step fast.
    """
    return forms_of_columns(A, columns(S), len(S))


def keeps_products(rows: int, S: Array) -> bool:
    """Whether the products of that many rows with the matrices are kept: they are few, and need little memory."""
    sizes = tuned()
    return bool(rows <= sizes.single_rows and rows * S.nbytes <= sizes.kept_products * S.shape[1])


def forms_forward(S: Array, A: Array) -> tuple[Array, tuple[Array, Array, Array | None]]:
    """:func:`quadratic_forms`, and what :func:`forms_backward` needs: the products Σ_p a_n too where they are few."""
    if not keeps_products(len(A), S):
        return quadratic_forms(S, A), (S, A, None)
    products = _products(A, _side_by_side(S), len(S))  # Σ_p a_n (N, P, M)
    return _forms(A, products), (S, A, products)


def forms_backward(kept: tuple[Array, Array, Array | None], weights: Array) -> tuple[Array, Array]:
    """Derivatives of weighted quadratic forms by the matrices and by the rows."""
    S, A, products = kept
    weighted = weighted_rows(A, weights)
    by_S = symmetric(column_sums(A, weighted), len(S))  # sum_n β_np a_n a_n'
    if products is None:
        return by_S, 2 * pull_back(A, weights, weighted, rows_of_blocks(S))  # 2 sum_p β_np Σ_p a_n
    return by_S, 2 * einsum("np,npm->nm", weights, products)


quadratic_forms.defvjp(forms_forward, forms_backward)
