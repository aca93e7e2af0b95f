"""Functions of one datum applied to many data in blocks, to bound the memory of intermediate results.

Blocks change memory and speed, not results: :func:`each_row` is ``jax.vmap(row)`` of all data at once,
:func:`in_blocks` is ``function(rows)``, and :func:`sum_symmetric` is :func:`sum_symmetric_reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.math.tuning import tuned

__all__ = ["each_row", "in_blocks", "rows_in_block", "rows_in_cache", "sum_symmetric", "sum_symmetric_reference"]


def rows_in_cache(dtype: jnp.dtype) -> int:
    """Rows in one block: on a CPU, their moments under a layer of about 100 inducing points fit in the cache."""
    return tuned().rows(dtype)


def each_row(loc: Array, variance: Array, cells: int, row: Callable[..., Array], *others: Array) -> Array:
    """A function of one Gaussian, for N of them: results (N, ...), those of ``jax.vmap(row)(loc, variance, *others)``.

    Args:
        loc: means (N, D).
        variance: their variances (N, D) or covariances (N, D, D).
        cells: the largest number of values that ``row`` has in memory for one datum; it sets the size of a block.
        row: from one mean, one variance and one row of each of ``others`` to an array.
        *others: arrays (N, ...).
    """
    block = max(1, tuned().cells // cells)
    if len(loc) <= block:
        return jax.vmap(row)(loc, variance, *others)
    return jax.lax.map(lambda x: row(*x), (loc, variance, *others), batch_size=block)


def sum_symmetric(size: int, weights: Array, cells: int, row: Callable[..., Array], *data: Array) -> Array:
    r"""Weighted sum over data of symmetric matrices, :math:`\sum_n \beta_n F(d_n)`: shape (M, M).

    Only entries on and above the diagonal are computed. For the derivative the matrices of a block are computed again
    instead of being held.

    Args:
        size: M.
        weights: :math:`\beta`, one per datum (N,).
        cells: numbers that one entry of one matrix needs.
        row: ``row((i, j), *datum)`` are the entries :math:`F_{ij}` of one datum, for arrays i and j of indices.
        *data: arrays (N, ...).
    """
    pairs = np.triu_indices(size)  # i <= j
    N = len(weights)
    block = min(N, max(1, tuned().cells // (len(pairs[0]) * cells)))
    count = -(-N // block)

    def split(a: Array, mode: str) -> Array:
        padded = jnp.pad(a, [(0, count * block - N)] + [(0, 0)] * (a.ndim - 1), mode=mode)
        return padded.reshape(count, block, *a.shape[1:])

    @jax.checkpoint
    def add(total: Array, part: tuple[Array, Any]) -> tuple[Array, None]:
        # sum_n β_n F_ij(d_n) over the data of one block
        return total + matmul(part[0], jax.vmap(partial(row, pairs))(*part[1])), None

    # The last block is filled up with copies of the last datum, which have no weight.
    parts = split(weights, "constant"), [split(a, "edge") for a in data]
    upper, _ = jax.lax.scan(add, jnp.zeros(len(pairs[0]), weights.dtype), parts)
    full = jnp.zeros((size, size), weights.dtype).at[pairs].set(upper)
    return full + jnp.triu(full, 1).T  # F_ji = F_ij


def sum_symmetric_reference(size: int, weights: Array, row: Callable[..., Array], *data: Array) -> Array:
    r"""What :func:`sum_symmetric` computes, all entries of all matrices at once: the reference in its tests.

    .. math:: \sum_n \beta_n F(d_n)
    """
    i, j = jnp.indices((size, size))
    matrices = jax.vmap(lambda *datum: row((i.ravel(), j.ravel()), *datum))(*data)
    return matmul(weights, matrices).reshape(size, size)


def rows_in_block(rows: Array, cells: int = 1, outputs: int = 0, size: int = 0) -> int:
    """Rows in one block of :func:`in_blocks`: all of them where they are few, else about :func:`rows_in_cache`, fewer
    where every one of them needs many ``cells`` or is long, and more where it has few products."""
    N, in_cache, sizes = len(rows), rows_in_cache(rows.dtype), tuned()
    most = in_cache
    if outputs:
        most = max(most, sizes.block_bytes // (outputs * size * rows.dtype.itemsize))
    if in_cache < N and size >= sizes.large:
        most = min(most, sizes.large_block // size)
    most = max(1, min(most, sizes.cells // cells))
    least = max(1, -(-N // most))
    # The fewest blocks of equal size, unless these are twice as many as needed.
    count = next((c for c in range(least, 2 * least) if N % c == 0), least)
    return -(-N // count)


def in_blocks(
    function: Callable[[Array], Any], rows: Array, keep: str = "", cells: int = 1, outputs: int = 0, size: int = 0
) -> Any:
    """``function(rows)`` for a function that treats rows (N, D) one by one, computed in blocks where they are many.

    For the derivative each block is computed again instead of being held. Block number i of c takes the rows i, i + c,
    i + 2c, and so on: where the rows are sharded over devices, every device then has a share of every block.

    Args:
        function: from rows (n, D) to arrays (n, ...), any n.
        rows: all of them.
        keep: the checkpoint name of intermediate results that are stored after all.
        cells: the largest number of values that one row needs in memory.
        outputs: P in a layer; where one row has few products, P M, blocks have more rows. 0: not known.
        size: M in a layer; where it is large, blocks have fewer rows.

    Example:
        >>> import jax.numpy as jnp
        >>> in_blocks(lambda x: x.sum(-1), jnp.ones((5000, 2))).shape
        (5000,)
    """
    N, size = len(rows), rows_in_block(rows, cells, outputs, size)
    if size == N:
        return function(rows)
    count = -(-N // size)
    if count * size > N:  # padding by zero rows would still cost arrays of this size in the derivative
        rows = jnp.pad(rows, [(0, count * size - N), (0, 0)], mode="edge")
    blocks = rows.reshape(size, count, -1).swapaxes(0, 1)
    policy = jax.checkpoint_policies.save_only_these_names(keep)
    found = jax.lax.map(jax.checkpoint(function, policy=policy), blocks)
    return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(count * size, *a.shape[2:])[:N], found)
