"""Which arguments of a prediction have one value per row, and whether rows are predicted independently of each other.

The program runs on shapes, at two small numbers of rows; :mod:`numpyro_dgp.algebra.row_by_row` compares the two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.row_by_row import row_axes
from numpyro_dgp.draws import DrawnSite, IndependentDraws
from numpyro_dgp.prediction.row_batches import Rows

__all__ = ["ALL_COMPARED", "IndependentRows"]

_TRIED = 5, 7
ALL_COMPARED = 500
"""Up to this number of rows, the program is compared at every number of rows that is asked for or run: it may branch on
them, ``if len(X) > 100``. Above, loops over blocks of rows make one program look different, and a branch is not seen.
"""

_Traced = tuple[Any, list[DrawnSite]]


class IndependentRows:
    """Whether rows of a prediction are independent of each other, and at which numbers of rows it is the same program.

    Args:
        run: from a key, one draw of MCMC and the arguments to the prediction.
        draw: shapes of a key and a draw.
        arrays: shapes of the arguments, with ``None`` in the places of those that are no arrays.
        by_row: which of them have rows along the first axis.
        plates: the names of the plates of every predicted site.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        draw: tuple[Array, Any],
        arrays: Sequence[Any],
        by_row: tuple[bool, ...],
        plates: tuple[frozenset[str], ...],
    ) -> None:
        self.run, self.draw, self.arrays, self.by_row, self.plates = run, draw, arrays, by_row, plates
        self.rows: Rows | None = None
        self._few: _Traced | None = None
        self._compared: dict[int, bool] = {}
        numbers = [a for a, own in zip(arrays, by_row, strict=True) if own]
        if numbers and not any(jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in numbers):
            self._few, more = map(self._traced, _TRIED)
            self.rows = self._compare(more)

    def at(self, count: int) -> bool:
        """Whether the program does the same at this number of rows as at others, as far as this can be seen."""
        if count > ALL_COMPARED or count in _TRIED:
            return True
        if count not in self._compared:
            self._compared[count] = self._compare(self._traced(count)) is not None
        return self._compared[count]

    def _traced(self, count: int) -> _Traced | None:
        tried = [
            None if a is None else jax.ShapeDtypeStruct((count, *a.shape[1:]) if own else a.shape, a.dtype)
            for a, own in zip(self.arrays, self.by_row, strict=True)
        ]
        try:
            with warnings.catch_warnings(), IndependentDraws() as draws:
                warnings.simplefilter("ignore")  # given at the rows that were asked for
                return jax.make_jaxpr(self.run)(*self.draw, tried), draws.sites
        except Exception:  # whatever it is that a program raises which is made for one number of rows
            return None

    def _compare(self, other: _Traced | None) -> Rows | None:
        if self._few is None or other is None or len(self._few[1]) != len(other[1]):
            return None
        in_plates = True
        for a, b in zip(self._few[1], other[1], strict=True):
            if a.name != b.name or a.event_shape != b.event_shape or len(a.batch_shape) != len(b.batch_shape):
                return None
            differ = [n != m for n, m in zip(a.batch_shape, b.batch_shape, strict=True)]
            if sum(differ) > 1:
                return None
            in_plates &= not any(differ) or any(these and these <= a.plates for these in self.plates)
        axes = row_axes(self._few[0], other[0])
        return None if axes is None else Rows(0, self.by_row, tuple(axes), 0, in_plates)
