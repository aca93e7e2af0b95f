"""What is predicted, from how many draws, and how many rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Options", "Quantity"]


class Options(NamedTuple):
    """How many draws, and how many rows at a time.

    Args:
        num_samples: S; ``None`` for ``default``, or as many as there are, or one where all are the same.
        batch_size: rows at a time; ``None`` for all.
        progress_bar: show progress over batches.
        X_variance: variances of the inputs; ``None`` where they are known.
        default: number of draws.
        every: that many also where all are the same.
    """

    num_samples: int | None = None
    batch_size: int | None = None
    progress_bar: bool = True
    X_variance: Any = None
    default: int = 100
    every: bool = False


class Quantity(NamedTuple):
    """What is predicted.

    Args:
        of_draw: a function of :mod:`~numpyro_dgp.prediction.quantities`.
        settings: its first arguments.
        finish: from the quantities of all draws, along the first axis, to the result; ``None`` to leave them.
        needs_site: whether it is of a single observed site.
        observations: how many of the arguments come before those of the model.
        leading: how many axes ``finish`` puts before those of one draw.
    """

    of_draw: Callable[..., Any]
    settings: tuple[Any, ...] = ()
    finish: Callable[[Any], Any] | None = None
    needs_site: bool = True
    observations: int = 0
    leading: int = 0

    def axes_of_rows(self, of_draw: Sequence[int | None]) -> tuple[int | None, ...]:
        """The axis of rows of every result, given that of everything computed from one draw."""
        leading = self.leading if self.finish else 1
        axes = tuple(None if axis is None else axis + leading for axis in of_draw)
        return axes[:1] if self.finish else axes
