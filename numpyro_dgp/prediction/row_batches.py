"""Rows of a prediction, filled up to one of a few numbers of rows, or taken a batch at a time.

A compiled program is for one number of rows. Where rows are predicted independently of each other
(:mod:`numpyro_dgp.algebra.row_by_row`), one program serves many numbers: the last row is repeated, and what is
predicted for the copies is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from numpyro_dgp._typing import Array

__all__ = ["Rows", "filled", "in_batches", "round_up"]

_SMALL = 256


class Rows(NamedTuple):
    """Where the rows of a prediction are.

    Args:
        total: N.
        arguments: for every array argument, whether its first axis is that of the rows.
        results: the axis of rows of every result, or ``None``.
        in_plates: whether the program draws all that it draws per row in the plates of the rows.
    """

    total: int
    arguments: tuple[bool, ...]
    results: tuple[int | None, ...]
    in_plates: bool

    def take(self, arrays: Sequence[Any], start: int, size: int) -> list[Any]:
        """``size`` rows of the arguments from row ``start`` on; beyond the end, copies of the last one."""
        index = np.minimum(np.arange(start, start + size), self.total - 1)
        return [np.asarray(a)[index] if by_row else a for a, by_row in zip(arrays, self.arguments, strict=True)]


def round_up(count: int) -> int:
    """The number of rows that ``count`` rows are filled up to: at most twice as many, above 256 a quarter more.

    Example:
        >>> [round_up(n) for n in (1, 5, 9, 200, 300, 1000, 10_000)]
        [1, 8, 16, 256, 320, 1024, 10240]
    """
    if count <= 1:
        return count
    power = max(8, 2 ** math.ceil(math.log2(count)))
    step = power // 8 if power > _SMALL else power
    return -(-count // step) * step


def filled(run: Callable[..., Any], arrays: Sequence[Any], rows: Rows) -> Any:
    """``run(arrays, None)``, run at a rounded number of rows."""
    size = round_up(rows.total)
    if size == rows.total:
        return run(arrays, None)
    found, tree = jax.tree.flatten(run(rows.take(arrays, 0, size), None))
    # Slices of arrays in NumPy need no program for every number of rows.
    kept = [_slice(np.asarray(value), axis, rows.total) for value, axis in zip(found, rows.results, strict=True)]
    return jax.tree.unflatten(tree, map(jnp.asarray, kept))


def in_batches(run: Callable[..., Any], arrays: Sequence[Any], rows: Rows, size: int, progress_bar: bool) -> Any:
    """``run(arrays, b)`` of every batch b of rows, put together in host memory.

    Args:
        run: from arguments and the number of the batch to results.
        arrays: the arguments.
        rows: which of them have rows.
        size: rows in a batch.
        progress_bar: show progress.
    """
    size = min(size, round_up(rows.total))
    out: list[np.ndarray] = []
    for start in tqdm.trange(0, rows.total, size, desc="batches of rows", disable=not progress_bar):
        batch = np.uint32(start // size)
        found, tree = jax.tree.flatten(run(rows.take(arrays, start, size), batch))
        stop = min(size, rows.total - start)
        for i, (value, axis) in enumerate(zip(map(np.asarray, found), rows.results, strict=True)):
            if start == 0:
                shape = tuple(rows.total if j == axis else n for j, n in enumerate(value.shape))
                out.append(np.empty(shape, value.dtype))
            if axis is None:
                out[i] = value
            else:
                _slice(out[i], axis, start + stop, start)[...] = _slice(value, axis, stop)
    return jax.tree.unflatten(tree, out)


def _slice(array: np.ndarray, axis: int | None, stop: int, start: int = 0) -> Array | np.ndarray:
    return array if axis is None else array[(slice(None),) * axis + (slice(start, stop),)]
