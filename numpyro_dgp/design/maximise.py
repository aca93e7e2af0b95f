"""Maximisation of acquisitions by multi-start ascents, compiled for stacks of points."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_count
from numpyro_dgp._compiled import Compiled
from numpyro_dgp._data import as_numbers, known_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.design.designs import scrambled_points
from numpyro_dgp.design.input_space import Box, as_box, generator

__all__ = [
    "NOT_TRACEABLE",
    "Acquisition",
    "Ascents",
    "CompiledAcquisition",
    "Maximum",
    "Programs",
    "candidate_points",
    "compiled_alone",
    "maximise",
    "maximum",
    "sizes_of",
]

_BATCH = 256
"""Candidates that are evaluated at a time."""


class Maximum(NamedTuple):
    """The result of :func:`maximise`: the best points, and the ascents that led to them.

    Example:
        >>> import jax
        >>> import numpyro_dgp as dgp
        >>> found = dgp.design.maximise(lambda x: -((x - 0.3) ** 2).sum(), [[0.0, 1.0]], jax.random.key(0))
        >>> isinstance(found, dgp.design.Maximum), found.candidates.shape, found.refined.shape
        (True, (1024, 1, 1), (8, 1, 1))
    """

    x: np.ndarray
    """The points (q, D)."""
    value: float
    """The acquisition there."""
    candidates: np.ndarray
    """What the search began with (num_candidates, q, D), ``starts`` first."""
    candidate_values: np.ndarray
    """The acquisition there (num_candidates,)."""
    refined: np.ndarray
    """Where the ascents from the best candidates ended (num_starts, q, D)."""
    refined_values: np.ndarray
    """The acquisition there (num_starts,)."""

    def __repr__(self) -> str:
        return brief(self)


def maximise(
    acquisition: Acquisition,
    bounds: ArrayLike | Box,
    key: Array,
    *,
    q: int = 1,
    num_candidates: int = 1024,
    num_starts: int = 8,
    starts: ArrayLike | None = None,
    max_steps: int = 200,
) -> Maximum:
    """The q points at which an acquisition is largest, all q together.

    The acquisition is evaluated at Sobol points of the q D columns, in batches. From the best of them, first those that
    are better than their neighbours, SciPy's L-BFGS-B goes up, all starts in one program and as one problem, the sum of
    their values; then from the best one alone. Acquisitions that perform the same operations on arrays of the same
    shapes share compiled programs, so that one on a later fit is not compiled again.

    A value of -inf marks an infeasible candidate. An ascent that meets it may stop, and those of the other starts with
    it: to avoid that, exclude such points by the bounds, or return a large negative value that still slopes towards
    the others.

    Of a :class:`Box` with whole numbers or labels, candidates are points of the box. Ascents take whole numbers as
    continuous and leave labels as they are; then numbers are rounded and the ascent goes on in the other columns.
    Then, in the best points, each whole number is tried one lower and one higher and every other label, one change
    at a time, as long as that helps. With q = 1 each combination of labels has equally many candidates, and an ascent
    if ``num_starts`` is as large as their number.

    Args:
        acquisition: from x (q, D) to one number, larger is better; a pure function that JAX can differentiate and
            vectorise.
        bounds: lowest and highest values (D, 2), or a :class:`Box`.
        key: PRNG key; it fixes the Sobol points.
        q: number of points that are chosen together.
        num_candidates: number of Sobol points, ``starts`` included.
        num_starts: number of ascents.
        starts: candidates of one's own (K, q, D), or (K, D) with q = 1, such as points near the best one so far.
        max_steps: steps of an ascent at most.

    Returns:
        The best points with their value, and all that was tried.

    Raises:
        ValueError: bounds as :class:`Box`; an acquisition that gives NaN (with the point), more than one number or a
            complex one, that is finite nowhere, or that JAX cannot trace; numbers that are not positive; starts of
            another shape or outside the bounds.

    Warns:
        UserWarning: an acquisition that has the same value at all candidates.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> def acquisition(x):
        ...     return jnp.sin(3 * x[0, 0]) - (x[0, 1] - 2) ** 2  # of a single point, x (1, D)
        >>> found = dgp.design.maximise(acquisition, [[0.0, 1.0], [0.0, 5.0]], jax.random.key(0))
        >>> print(found.x.round(3), round(found.value, 3))
        [[0.524 2.   ]] 1.0

    Source: Zhu et al. (1997), for L-BFGS-B.
    """
    for name, count in (("q", q), ("num_candidates", num_candidates), ("num_starts", num_starts),
                        ("max_steps", max_steps)):  # fmt: skip
        require_count(name, count, "the default")
    expect(
        callable(acquisition),
        "an acquisition, a function of x (q, D)",
        type(acquisition).__name__,
        "lambda x: posterior.predict(key, x).variance.sum()",
    )
    box, rng = as_box(bounds), generator(key)
    box.require_resolved()
    candidates = candidate_points(box, q, num_candidates, starts, rng)
    sizes = sizes_of(num_candidates, num_starts)
    return maximum(compiled_alone(acquisition, box, q, *sizes), box, candidates, max_steps)


def sizes_of(num_candidates: int, num_starts: int) -> tuple[int, int]:
    """How many candidates are evaluated at a time, and how many ascents there are."""
    return min(_BATCH, num_candidates), min(num_starts, num_candidates)


def maximum(program: CompiledAcquisition, box: Box, candidates: np.ndarray, max_steps: int) -> Maximum:
    """The best points of a compiled acquisition, from candidates (K, q, D) of the box."""
    values = program.values(candidates)
    if not np.isfinite(values).any():
        raise expected(
            "an acquisition with a finite value somewhere",
            f"{values[0]} at all {len(values)} candidates",
            "check the best value so far and the units of the values",
        )
    if len(values) > 1 and np.ptp(values) == 0:
        warnings.warn(
            f"design.maximise: the acquisition is {values[0]:.3g} at all {len(values)} candidates, and the first is as "
            "good as any: of a probability or an expected improvement take the logarithm, computed as such; check that "
            "it depends on x",
            stacklevel=3,
        )
        return Maximum(candidates[0], float(values[0]), candidates, values, candidates[:1], values[:1])
    ascents = Ascents(program, box, candidates.shape[1], max_steps)
    refined, refined_values = ascents.of_all(candidates[ascents.starts(candidates, values)], values)
    x, value = ascents.of_best(refined, refined_values)
    return Maximum(x, value, candidates, values, refined, refined_values)


def candidate_points(box: Box, q: int, num: int, starts: Any, rng: np.random.Generator) -> np.ndarray:
    """Sobol points (num, q, D) of the box, after ``starts``."""
    found = box.from_unit(scrambled_points(q * box.dims, num, rng).reshape(num, q, box.dims))
    if q == 1 and 1 < box.num_combinations <= num:
        # each equally often
        found[:, 0, box.categories] = box.combinations()[rng.permutation(num) % box.num_combinations]
    if starts is None:
        return found
    given = np.asarray(known_numbers("starts", starts), float)
    given = given[:, None] if given.ndim == 2 and q == 1 else given
    expect(
        given.ndim == 3 and given.shape[1:] == (q, box.dims),
        f"starts (K, {q}, {box.dims})",
        np.shape(starts),
        "K sets of q",
    )
    given = box.require_points("starts", given.reshape(-1, box.dims)).reshape(given.shape)
    return np.concatenate([given, found])[: max(num, len(given))]


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
                "a finite acquisition",
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
            expect(not jnp.iscomplexobj(found), "a real acquisition", found.dtype, "take .real, or jnp.abs of it")
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
    """The steps of a search and their shared settings.

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
        extent = np.ptp(values[np.isfinite(values)])
        free = [d for d in range(self.box.dims) if d not in self.box.categories]
        found = self._up(points, free, extent)
        if self.box.integers:
            found = self._up(self.box.snapped(found), [d for d in free if d not in self.box.integers], extent)
        ends = self.program.values(found)
        start = self.program.values(points)
        worse = ~(ends >= start)  # as rounding to whole numbers may make it
        return np.where(worse[:, None, None], points, found), np.where(worse, start, ends)

    def of_best(self, points: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
        """The best of the ascents, after one more alone, and after single changes of whole numbers and labels."""
        best, value = points[values.argmax()][None], values.max()
        numbers = [d for d in range(self.box.dims) if d not in self.box.whole]
        extent = max(np.ptp(values), abs(value) * 1e-3)
        for _ in range(_SWEEPS):
            moved = self._up(best, numbers, extent)
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

    def _up(self, points: np.ndarray, free: list[int], extent: float) -> np.ndarray:
        """Points (K, q, D) after L-BFGS-B on the sum of their values, in columns ``free`` in units of their range."""
        from scipy.optimize import minimize

        if not free:
            return points
        low, width = self.box.low[free], (self.box.high - self.box.low)[free]
        extent = extent if 0 < extent < np.inf else 1.0
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
            low_values = np.where(np.isfinite(values), values, -1e3 * extent)[: len(points)]
            # d/du = width d/dx; in units of that range, for the tolerances of L-BFGS-B.
            return -low_values.sum() / extent, -(slopes * width).ravel() / extent

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
