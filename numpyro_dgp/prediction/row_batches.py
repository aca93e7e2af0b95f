"""Rows of a prediction, filled up to one of a few numbers of rows, or taken a batch at a time.

A compiled program is for one number of rows. Where rows are predicted independently of each other
(:mod:`numpyro_dgp.algebra.row_by_row`), one program serves many numbers: the last row is repeated, and what is
predicted for the copies is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from numpyro_dgp._typing import Array

__all__ = ["Rows", "filled", "in_batches", "round_up"]

_FEW = 1, 5, 10, 20, 40, 70, 100
_QUARTERS = 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40


class Rows(NamedTuple):
    """Where the rows of a prediction are.

    Args:
        total: the number of rows, N.
        arguments: for every array argument, whether its first axis is that of the rows.
        results: the axis of rows of every result, or ``None``.
        size: how many rows the program runs at.
        in_plates: whether the program draws all that it draws per row in the plates of the rows.
    """

    total: int
    arguments: tuple[bool, ...]
    results: tuple[int | None, ...]
    size: int
    in_plates: bool

    @property
    def are_found(self) -> bool:
        """Whether the results have these rows too: an argument with one row may be a table of one row."""
        return not self.results or any(axis is not None for axis in self.results)

    def take(self, arrays: Sequence[Any], start: int = 0) -> list[Any]:
        """``size`` rows of the arguments from row ``start`` on; beyond the end, copies of the last one."""
        index = np.minimum(np.arange(start, start + self.size), self.total - 1)
        return [_on_its_device(a, index) if by_row else a for a, by_row in zip(arrays, self.arguments, strict=True)]


def round_up(count: int) -> int:
    """The number of rows that ``count`` rows are filled up to: round numbers, above 100 at most a quarter more.

    Example:
        >>> [round_up(n) for n in (1, 3, 9, 200, 301, 1000, 10_001)]
        [1, 5, 10, 200, 350, 1000, 12500]
    """
    if count <= _FEW[-1]:
        return next(n for n in _FEW if n >= count)
    decade = 10 ** (len(str(count - 1)) - 1)
    return next(n for n in (quarters * decade // 4 for quarters in _QUARTERS) if n >= count)


def filled(run: Callable[..., Any], arrays: Sequence[Any], rows: Rows) -> Any:
    """``run(arrays, None)``, run at more rows."""
    found, tree = jax.tree.flatten(run(rows.take(arrays), None))
    # Slices of arrays in NumPy need no program for every number of rows.
    kept = [_slice(np.asarray(value), axis, rows.total) for value, axis in zip(found, rows.results, strict=True)]
    return jax.tree.unflatten(tree, map(jnp.asarray, kept))


def in_batches(run: Callable[..., Any], arrays: Sequence[Any], rows: Rows, progress_bar: bool) -> Any:
    """``run(arrays, b)`` of every batch b of rows, put together in host memory.

    Args:
        run: from arguments and the number of the batch to results.
        arrays: the arguments.
        rows: which of them have rows, and how many are a batch.
        progress_bar: show progress.
    """
    size = rows.size
    out: list[np.ndarray] = []
    for start in tqdm.trange(0, rows.total, size, desc="batches of rows", disable=not progress_bar):
        batch = np.uint32(start // size)
        found, tree = jax.tree.flatten(run(rows.take(arrays, start), batch))
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


def _on_its_device(array: Any, index: np.ndarray) -> Array | np.ndarray:
    """Rows of an array, in host memory unless the array was put on one device."""
    rows = np.asarray(array)[index]
    placed = getattr(array, "committed", False) and len(array.devices()) == 1
    return jax.device_put(rows, *array.devices()) if placed else rows


def _slice(array: np.ndarray, axis: int | None, stop: int, start: int = 0) -> Array | np.ndarray:
    return array if axis is None else array[(slice(None),) * axis + (slice(start, stop),)]
