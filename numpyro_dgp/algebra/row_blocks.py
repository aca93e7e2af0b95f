"""Functions of one datum over many data, in blocks, so that what one datum needs is never held for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array

__all__ = ["each_row", "in_blocks", "rows_in_block", "rows_in_cache", "sum_symmetric"]

# Numbers held at once.
_CELLS = 2**20


def rows_in_cache(dtype: jnp.dtype) -> int:
    """Rows whose moments under a layer stay in cache."""
    return 2000 if jnp.dtype(dtype).itemsize <= 4 else 1250


def each_row(loc: Array, variance: Array, cells: int, row: Callable[..., Array], *others: Array) -> Array:
    """``row`` of every mean (N, D), variance (N, D) or (N, D, D) and row of ``others``; it holds ``cells`` numbers
    for each."""
    block = max(1, _CELLS // cells)
    if len(loc) <= block:
        return jax.vmap(row)(loc, variance, *others)
    return jax.lax.map(lambda x: row(*x), (loc, variance, *others), batch_size=block)


def sum_symmetric(size: int, weights: Array, cells: int, row: Callable[..., Array], *data: Array) -> Array:
    """Weighted sum over data of symmetric matrices: shape (M, M).

    Backwards, the matrices of a block are computed again.

    Args:
        size: M.
        weights: one per datum (N,).
        cells: numbers that one entry of one matrix needs.
        row: from the indices of the entries on and above the diagonal, two arrays, and one row of each array of
            ``data`` to these entries.
        *data: arrays (N, ...).
    """
    pairs = np.triu_indices(size)
    N = len(weights)
    block = min(N, max(1, _CELLS // (len(pairs[0]) * cells)))
    count = -(-N // block)

    def split(a: Array, mode: str) -> Array:
        padded = jnp.pad(a, [(0, count * block - N)] + [(0, 0)] * (a.ndim - 1), mode=mode)
        return padded.reshape(count, block, *a.shape[1:])

    @jax.checkpoint
    def add(total: Array, part: tuple[Array, Any]) -> tuple[Array, None]:
        return total + part[0] @ jax.vmap(partial(row, pairs))(*part[1]), None

    # The last block is filled up with copies of the last datum, which have no weight.
    parts = split(weights, "constant"), [split(a, "edge") for a in data]
    upper, _ = jax.lax.scan(add, jnp.zeros(len(pairs[0]), weights.dtype), parts)
    full = jnp.zeros((size, size), weights.dtype).at[pairs].set(upper)
    return full + jnp.triu(full, 1).T


def rows_in_block(rows: Array) -> int:
    """Rows in one block of :func:`in_blocks`, all of them where they are few."""
    N, most = len(rows), rows_in_cache(rows.dtype)
    least = max(1, -(-N // most))
    count = next((c for c in range(least, 2 * least) if N % c == 0), least)
    return -(-N // count)


def in_blocks(function: Callable[[Array], Any], rows: Array, keep: str = "") -> Any:
    """``function`` of rows (N, D), block by block where they are many; what it computes is computed again backwards.

    A block has rows from everywhere, so that every device has its share where the rows are spread over devices.

    Args:
        function: what to compute of some of the rows.
        rows: all of them.
        keep: the checkpoint name of what is not computed again.
    """
    N, size = len(rows), rows_in_block(rows)
    if size == N:
        return function(rows)
    count = -(-N // size)
    if count * size > N:  # a pad by nothing would still cost arrays of this size backwards
        rows = jnp.pad(rows, [(0, count * size - N), (0, 0)], mode="edge")
    blocks = rows.reshape(size, count, -1).swapaxes(0, 1)
    policy = jax.checkpoint_policies.save_only_these_names(keep)
    found = jax.lax.map(jax.checkpoint(function, policy=policy), blocks)
    return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(count * size, *a.shape[2:])[:N], found)
