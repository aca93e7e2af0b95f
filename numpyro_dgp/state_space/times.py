"""Times of a series: checked, in order, and the time that passes between them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import is_concrete, require_finite, violated
from numpyro_dgp._data import own_numbers
from numpyro_dgp._typing import Array, ArrayLike

__all__ = ["checked_times", "merged", "passing"]


def checked_times(owner: str, times: ArrayLike, *, in_order: bool = True) -> Any:
    """Times (N,) or (N, 1) as (N,): an array of NumPy in the precision that they have, where they are known.

    Raises:
        ValueError: other shapes, NaN, and times that are not in order.
    """
    found = own_numbers(f"times of {owner}", times)
    shape = np.shape(found)
    if len(shape) == 2 and shape[1] == 1:
        found = found[:, 0]
    elif len(shape) != 1:
        raise ValueError(
            f"{owner}: expected times of shape (N,) or (N, 1), got {shape}: a state space has one input column; for "
            "more columns take dgp.Points or dgp.Grid"
        )
    if not shape[0]:
        raise ValueError(f"{owner}: expected times of at least one point, got none: check how the data were selected")
    require_finite(f"times of {owner}", found, "leave out the rows without a time")
    if in_order and violated(lambda t: t[1:] >= t[:-1], found):
        raise ValueError(
            f"{owner}: expected times in order, got {_first_wrong(np.asarray(found))}: order = np.argsort(times); "
            "times, y = times[order], y[order]"
        )
    return np.asarray(found) if is_concrete(found) else found


def _first_wrong(times: np.ndarray) -> str:
    n = int(np.flatnonzero(times[1:] < times[:-1])[0])
    return f"{times[n + 1]:g} after {times[n]:g} at index {n + 1}"


def passing(times: Any, dtype: Any) -> Array:
    """The time that passes before each of the times (N,), zero before the first; NaN where traced ones go back."""
    library: Any = np if isinstance(times, np.ndarray) else jnp
    before = library.concatenate([times[:1], times[:-1]])
    # The times themselves are compared: the difference of equal ones, computed with them, may round below zero.
    steps = library.where(times >= before, library.maximum(times - before, 0), library.nan)
    return jnp.asarray(steps, dtype)


def merged(times: Any, others: Any) -> tuple[Any, Any]:
    """Both times in order, and the place of each: first those of ``times``, then of ``others``."""
    library: Any = np if isinstance(times, np.ndarray) and isinstance(others, np.ndarray) else jnp
    both = library.concatenate([times, others])
    order = library.argsort(both, stable=True)
    places = library.argsort(order, stable=True)
    return both[order], places
