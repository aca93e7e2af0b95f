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
from numpyro_dgp.draws import IndependentDraws
from numpyro_dgp.prediction.row_batches import Rows

__all__ = ["independent_rows"]

_TRIED = 5, 7


def independent_rows(
    run: Callable[..., Any],
    draw: tuple[Array, Any],
    arrays: Sequence[Any],
    by_row: tuple[bool, ...],
    plates: tuple[frozenset[str], ...],
) -> Rows | None:
    """The rows of a prediction; ``None`` if they are not known to be predicted independently of each other.

    Args:
        run: from a key, one draw of MCMC and the arguments to the prediction.
        draw: shapes of a key and a draw.
        arrays: shapes of the arguments, with ``None`` in the places of those that are no arrays.
        by_row: which of them have rows along the first axis.
        plates: the names of the plates of every predicted site.
    """
    numbers = [a for a, own in zip(arrays, by_row, strict=True) if own]
    if not numbers or any(jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in numbers):
        return None

    def traced(count: int) -> tuple[Any, IndependentDraws]:
        tried = [
            None if a is None else jax.ShapeDtypeStruct((count, *a.shape[1:]) if own else a.shape, a.dtype)
            for a, own in zip(arrays, by_row, strict=True)
        ]
        with IndependentDraws() as draws:
            return jax.make_jaxpr(run)(*draw, tried), draws

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # given at the rows that were asked for
            (first, ours), (second, theirs) = map(traced, _TRIED)
    except Exception:  # whatever it is that a program raises which is made for one number of rows
        return None
    if len(ours.sites) != len(theirs.sites):
        return None
    in_plates = True
    for a, b in zip(ours.sites, theirs.sites, strict=True):
        differ = [n != m for n, m in zip(a.batch_shape, b.batch_shape, strict=False)]
        if a.name != b.name or a.event_shape != b.event_shape or len(a.batch_shape) != len(b.batch_shape):
            return None
        if sum(differ) > 1:
            return None
        in_plates &= not any(differ) or any(these and these <= a.plates for these in plates)
    axes = row_axes(first, second)
    return None if axes is None else Rows(0, by_row, tuple(axes), in_plates)
