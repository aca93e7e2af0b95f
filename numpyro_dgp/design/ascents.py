"""Multi-start ascents of an acquisition, compiled for stacks of points."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._compiled import Compiled
from numpyro_dgp._data import as_numbers
from numpyro_dgp._typing import Array
from numpyro_dgp.design.input_space import Box

__all__ = ["NOT_TRACEABLE", "Acquisition", "Ascents", "CompiledAcquisition", "Programs", "compiled_alone"]

Acquisition = Callable[[Array], Array]
"""From q points (q, D) to one number, larger is better: a pure function that JAX can differentiate and vectorise."""

NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""What JAX raises where a function needs values that it is not given while it is traced."""

_SWEEPS = 10


class CompiledAcquisition(NamedTuple):
    """The acquisition, compiled for stacks of points (K, q, D) of two sizes K.

    Args:
        many: values (K,), for ``num_many`` points.
        few: values and gradients, for ``num_few`` points.
        num_many: K of ``many``.
        num_few: K of ``few``.
    """

    many: Callable[[Array], Array]
    few: Callable[[Array], tuple[Array, Array]]
    num_many: int
    num_few: int

    def values(self, points: np.ndarray) -> np.ndarray:
        """The acquisition at points (K, q, D), any K.

        Raises:
            ValueError: NaN or plus infinity.
        """
        few = len(points) <= self.num_few
        run = (lambda batch: self.few(batch)[0]) if few else self.many
        size = self.num_few if few else self.num_many
        found = []
        for start in range(0, len(points), size):
            batch = points[np.minimum(np.arange(start, start + size), len(points) - 1)]
            found.append(np.asarray(run(jnp.asarray(batch)), float))
        values = np.concatenate(found)[: len(points)]
        _require_no_nan(values, points)
        if len(above := np.flatnonzero(values == np.inf)):
            raise expected(
                "an acquisition below infinity",
                f"inf at x = {points[above[0]].tolist()}",
                "divide by a variance plus a small number",
            )
        return values


class Programs:
    """A family of acquisitions, compiled: a program for all that have arrays of the same shapes.

    Args:
        function: from arrays and points x (q, D) to one number.
    """

    def __init__(self, function: Callable[[Any, Array], Any]) -> None:
        def number(arrays: Any, x: Array) -> Array:
            found = function(arrays, x)
            if not isinstance(found, jax.Array):
                found = jnp.asarray(as_numbers("values of the acquisition", found))
            expect(
                not found.shape,
                f"an acquisition that gives one number for q points x {x.shape}",
                f"shape {found.shape}",
                "sum or average over the points, with q=1 take [0]",
            )
            expect(
                not jnp.iscomplexobj(found),
                "an acquisition that gives real numbers",
                found.dtype,
                "take .real, or jnp.abs of it",
            )
            return found.astype(jnp.result_type(float, found.dtype))

        self.values = Compiled(jax.vmap(number, (None, 0)))
        self.slopes = Compiled(jax.vmap(jax.value_and_grad(number, 1), (None, 0)))

    def at(self, arrays: Any, box: Box, q: int, num_many: int, num_few: int) -> CompiledAcquisition:
        """One of them, for two sizes of stacks."""
        many, few = (jnp.asarray(np.broadcast_to(box.low, (size, q, box.dims))) for size in (num_many, num_few))
        values, slopes = self.values.at(arrays, many), self.slopes.at(arrays, few)
        return CompiledAcquisition(partial(values, arrays), partial(slopes, arrays), num_many, num_few)


def compiled_alone(acquisition: Acquisition, box: Box, q: int, num_many: int, num_few: int) -> CompiledAcquisition:
    """An acquisition, compiled for two sizes of stacks.

    Raises:
        ValueError: one that JAX cannot trace.
    """
    try:
        return Programs(lambda _, x: acquisition(x)).at((), box, q, num_many, num_few)
    except NOT_TRACEABLE as error:
        raise expected(
            "an acquisition of JAX operations",
            f"one that needs the values of x while JAX traces it ({type(error).__name__})",
            "jnp.sin in place of np.sin, no float(), and jnp.where in place of if",
        ) from error


@dataclasses.dataclass(frozen=True)
class Ascents:
    """The steps of a search, with what they share.

    Args:
        program: the acquisition, compiled.
        box: the space.
        q: number of points.
        max_steps: of an ascent.
    """

    program: CompiledAcquisition
    box: Box
    q: int
    max_steps: int

    def starts(self, points: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The candidates that ascents start from: the best of every combination of labels, then local maxima, best
        first."""
        from scipy.spatial import cKDTree

        places = self.box.places(points).reshape(len(points), -1)
        number = min(len(points), 2 * places.shape[1] + 2)
        near = cKDTree(places).query(places, k=[*range(1, number + 1)])[1]
        local = values >= values[near].max(1)  # no neighbour is better
        order = np.lexsort((-values, ~local))
        labels = points[:, 0, self.box.categories]
        by_label = np.argsort(-values, kind="stable")
        _, first = np.unique(labels[by_label], axis=0, return_index=True)
        if self.q > 1 or not 1 < len(first) <= self.program.num_few:
            first = first[:0]
        wanted = np.concatenate([by_label[np.sort(first)], order])
        wanted = wanted[np.isfinite(values[wanted])]
        _, where = np.unique(wanted, return_index=True)
        return wanted[np.sort(where)][: self.program.num_few]

    def of_all(self, points: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where ascents from points (K, q, D) end, points of the box, and the values there."""
        spread = np.ptp(values[np.isfinite(values)])
        free = [d for d in range(self.box.dims) if d not in self.box.categories]
        found = self._up(points, free, spread)
        if self.box.integers:
            found = self._up(self.box.snapped(found), [d for d in free if d not in self.box.integers], spread)
        ends = self.program.values(found)
        start = self.program.values(points)
        worse = ~(ends >= start)  # as rounding to whole numbers may make it
        return np.where(worse[:, None, None], points, found), np.where(worse, start, ends)

    def of_best(self, points: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
        """The best of the ascents, after one of its own, and after single changes of whole numbers and labels."""
        best, value = points[values.argmax()][None], values.max()
        numbers = [d for d in range(self.box.dims) if d not in self.box.whole]
        spread = max(np.ptp(values), abs(value) * 1e-3)
        for _ in range(_SWEEPS):
            moved = self._up(best, numbers, spread)
            found = self.program.values(moved)[0]
            best, value = (moved, found) if found > value else (best, value)
            changed = self._changes(best[0])
            if not len(changed):
                break
            found = self.program.values(changed)
            if not found.max() > value:
                break
            best, value = changed[found.argmax()][None], found.max()
        return best[0], float(value)

    def _changes(self, x: np.ndarray) -> np.ndarray:
        """The points (q, D) with one whole number one lower or higher, or one label another: (K, q, D)."""
        found = [np.zeros((0, *x.shape))]
        for d in self.box.whole:
            for i in range(self.q):
                old = x[i, d]
                values = (
                    {old - 1, old + 1}
                    if d in self.box.integers
                    else set(np.arange(self.box.low[d], self.box.high[d] + 1))
                )
                for value in sorted(values - {old}):
                    if self.box.low[d] <= value <= self.box.high[d]:
                        found.append(x[None].copy())
                        found[-1][0, i, d] = value
        return np.concatenate(found)

    def _up(self, points: np.ndarray, free: list[int], spread: float) -> np.ndarray:
        """Points (K, q, D) after L-BFGS-B on the sum of their values, in columns ``free`` in units of their range."""
        from scipy.optimize import minimize

        if not free:
            return points
        low, width = self.box.low[free], (self.box.high - self.box.low)[free]
        spread = spread if 0 < spread < np.inf else 1.0
        filled = np.concatenate([points, np.repeat(points[-1:], self.program.num_few - len(points), 0)])
        kept = filled[: len(points)]

        def at(u: np.ndarray) -> np.ndarray:
            moved = filled.copy()
            moved[: len(points), :, free] = low + u.reshape(*kept.shape[:2], -1) * width
            return np.clip(moved, self.box.low, self.box.high)

        def objective(u: np.ndarray) -> tuple[float, np.ndarray]:
            moved = at(u)
            values, slopes = (np.asarray(a, float) for a in self.program.few(jnp.asarray(moved)))
            _require_no_nan(values[: len(points)], moved)
            slopes = np.where(np.isfinite(slopes), slopes, 0.0)[: len(points), :, free]
            # -inf counts as far below all values: a line search steps back from it.
            low_values = np.where(np.isfinite(values), values, -1e3 * spread)[: len(points)]
            # d/du = width d/dx; in units of the spread, for the tolerances of L-BFGS-B.
            return -low_values.sum() / spread, -(slopes * width).ravel() / spread

        start = ((kept[..., free] - low) / width).ravel()
        options = {"maxiter": self.max_steps, "maxfun": 2 * self.max_steps, "maxcor": 10, "ftol": 1e-12, "gtol": 1e-7}
        found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=[(0, 1)] * start.size, options=options)
        return at(found.x)[: len(points)]


def _require_no_nan(values: np.ndarray, points: np.ndarray) -> None:
    if np.isnan(values).any():
        where = points[np.flatnonzero(np.isnan(values))[0]]
        raise expected(
            "an acquisition without NaN",
            f"NaN at {np.isnan(values).sum()} of {len(values)} points, the first at x = {where.tolist()}",
            "check the fit there, posterior.predict(key, x), and that logarithms and roots get positive numbers",
        )
