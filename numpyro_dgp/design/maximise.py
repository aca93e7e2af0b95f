"""Search of the inputs at which an acquisition is largest."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from numpyro_dgp._checks import expect, expected, require_count
from numpyro_dgp._data import known_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.design.ascents import Acquisition, Ascents, CompiledAcquisition, compiled_alone
from numpyro_dgp.design.designs import scrambled_points
from numpyro_dgp.design.input_space import Box, as_box, generator

__all__ = ["Maximum", "candidate_points", "maximise", "maximum", "sizes_of"]

_BATCH = 256
"""Candidates that are evaluated at a time."""


class Maximum(NamedTuple):
    """The best points that :func:`maximise` found, and what it tried.

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

    A value of -inf says that a candidate is none. An ascent that meets it may stop, and those of the other starts with
    it: where they should go on, leave such points out by the bounds, or give a large negative number that still slopes
    towards the others.

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
        ValueError: bounds as :class:`Box`; an acquisition that gives NaN, says where, more than one number or a complex
            one, that has no finite value anywhere, or that JAX cannot trace; numbers that are not positive; starts of
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
    given = np.asarray(known_numbers("starts of design.maximise", starts), float)
    given = given[:, None] if given.ndim == 2 and q == 1 else given
    expect(
        given.ndim == 3 and given.shape[1:] == (q, box.dims),
        f"starts of shape (K, {q}, {box.dims})",
        np.shape(starts),
        "K sets of q points",
    )
    given = box.require_points("starts", given.reshape(-1, box.dims)).reshape(given.shape)
    return np.concatenate([given, found])[: max(num, len(given))]
