"""Sources of minibatches: the protocol that ``fit_stream`` uses, and shuffled minibatches of arrays on disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._fields import Checked, count
from numpyro_dgp._repr import brief

__all__ = ["BatchSource", "Stream"]


@runtime_checkable
class BatchSource(Protocol):
    """The protocol of a source of batches for ``dgp.fit_stream``; :class:`Stream` is one.

    Any class with these two members will do, without a base class.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.extend import BatchSource
        >>> class Simulated:
        ...     num_rows = 1_000_000
        ...
        ...     def batch(self, step):
        ...         x = np.random.default_rng(step).normal(size=(100, 1))
        ...         return x, np.sin(x[:, 0])
        >>> isinstance(Simulated(), BatchSource)
        True
    """

    @property
    def num_rows(self) -> int:
        """N, the number of rows that the batches are taken from, to be passed to ``dgp.minibatch``."""
        ...

    def batch(self, step: int) -> tuple[Any, ...]:
        """The batch of a step 0, 1, 2, ...: the positional arguments of the model, arrays with a row per datum.

        All batches have the same shapes. The batch depends on the step and on nothing else: batches are read ahead,
        again after an interruption, and again where a loss is not finite. This method is called by one thread, one call
        at a time; with several hosts, each host calls it for every step and must get the same rows.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Stream(Checked, BatchSource):
    """Minibatches of rows of arrays on disk, in a random order that is a pure function of the seed and the step.

    An epoch takes blocks of neighbouring rows in random order. Several blocks at a time are read and their rows
    shuffled together, so that reads are sequential and memory holds two such windows. Rows left over at the end of
    an epoch are skipped in that epoch, so that all batches have one size; the order of every epoch is another one, so
    that all rows are used equally often on average.

    Args:
        arrays: arrays of equal length N; anything that is sliced like an array will do, such as what
            ``np.load(..., mmap_mode="r")`` gives, or data sets of h5py or zarr.
        batch_size: rows per batch.
        seed: of the order.
        block: neighbouring rows that are read together.
        window: blocks whose rows are shuffled together. If the rows on disk are sorted in some way,
            ``block * window`` should be well above ``batch_size``.

    Raises:
        ValueError: something else than arrays, arrays of different lengths or none, sizes that are not positive
            integers, a negative seed, or a batch larger than an epoch.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp import Stream
        >>> X, y = np.arange(1000.0)[:, None], np.arange(1000.0)
        >>> stream = Stream((X, y), batch_size=100, block=10, window=20)
        >>> stream.num_rows, stream.steps_per_epoch
        (1000, 10)
        >>> x, t = stream.batch(12)  # the third batch of the second epoch
        >>> x.shape, bool((x[:, 0] == t).all())
        ((100, 1), True)
    """

    arrays: Sequence[Any]
    batch_size: int = count(hint="256")
    seed: int = 0
    block: int = count(256)
    window: int = count(256)

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        arrays = self.arrays if isinstance(self.arrays, tuple | list) else None
        if arrays is None or any(isinstance(a, str | os.PathLike) or not np.ndim(a) for a in arrays):
            kinds = type(self.arrays).__name__ if arrays is None else [type(a).__name__ for a in arrays]
            raise expected("a tuple of arrays with a row per datum", kinds, "pass (X, y), or paths to Stream.open")
        if not isinstance(self.seed, int | np.integer) or self.seed < 0:
            raise expected("seed to be an integer that is not negative", repr(self.seed), "try 0")
        lengths = [len(a) for a in arrays]
        expect(lengths and len(set(lengths)) <= 1, "arrays of equal length", f"lengths {lengths}", "pass (X, y)")
        if self.batch_size > lengths[0]:
            raise expected(
                f"at most {lengths[0]} rows per batch, one epoch", f"batch_size={self.batch_size}", "make it smaller"
            )

    @classmethod
    def open(
        cls, *paths: str | os.PathLike[str], batch_size: int, seed: int = 0, block: int = 256, window: int = 256
    ) -> Stream:
        """From ``.npy`` files, mapped into memory instead of read.

        Args:
            *paths: one file per array, in the order of the model's arguments.
            batch_size: rows per batch.
            seed: of the order of the rows.
            block: rows of a file that are read together.
            window: blocks that are shuffled together.
        """
        return cls(tuple(np.load(path, mmap_mode="r") for path in paths), batch_size, seed, block, window)

    @property
    def num_rows(self) -> int:
        """N, the length of the arrays."""
        return len(self.arrays[0])

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch."""
        return self.num_rows // self.batch_size

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """The rows of a step: of every array, ``batch_size`` rows of the same indices."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.batch_size
        stop = start + self.batch_size
        _, ends = self._order(epoch)
        parts = []
        for window in range(int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, stop)) + 1):
            before = int(ends[window - 1]) if window else 0
            parts.append([a[max(start - before, 0) : stop - before] for a in self._rows(epoch, window)])
        return tuple(np.concatenate(found) for found in zip(*parts, strict=True))

    @cached_property
    def _order(self) -> Any:
        """A function of the epoch: its blocks in their order, and the number of rows up to the end of each window."""

        @lru_cache(maxsize=1)
        def order(epoch: int) -> tuple[np.ndarray, np.ndarray]:
            blocks = np.random.default_rng((self.seed, epoch)).permutation(-(-self.num_rows // self.block))
            sizes = np.minimum(self.block, self.num_rows - blocks * self.block)
            return blocks, np.cumsum(np.add.reduceat(sizes, np.arange(0, len(blocks), self.window)))

        return order

    @cached_property
    def _rows(self) -> Any:
        """A function of the epoch and a window: the rows of the window in random order, of every array."""

        @lru_cache(maxsize=2)
        def rows(epoch: int, window: int) -> list[np.ndarray]:
            blocks, ends = self._order(epoch)
            starts = blocks[window * self.window : (window + 1) * self.window] * self.block
            shuffle = np.random.default_rng((self.seed, epoch, window)).permutation(
                int(np.diff(ends, prepend=0)[window])
            )
            return [np.concatenate([a[s : s + self.block] for s in starts.tolist()])[shuffle] for a in self.arrays]

        return rows
