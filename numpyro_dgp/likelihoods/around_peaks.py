r"""Adaptive quadrature of predictive densities, centred at the peaks of the integrand instead of the mean of p(v).

As a function of v, :math:`p(y \mid v)` may be far narrower than p(v), far from its mean, and have several peaks.
:math:`\log E[p(y \mid v)]` over one function uses the intervals of :mod:`~numpyro_dgp.math.peaked_integral`. Where a
density depends on two directions, such as a location and a scale, the location is integrated so at every node of the
scale, whose nodes are around the peak.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dgp._typing import Array
from numpyro_dgp.jaxprs.dependence import Dependence
from numpyro_dgp.likelihoods.conditionals import Reading
from numpyro_dgp.likelihoods.families import elementwise, of_numpyro
from numpyro_dgp.likelihoods.several_conditionals import Given, Part
from numpyro_dgp.likelihoods.tails import log_density
from numpyro_dgp.math.peaked_integral import log_expectation, log_expectation_around_peak
from numpyro_dgp.math.quadrature import ProductGrid

__all__ = ["Peaks", "around_peaks"]

_MOST_DIRECTIONS = 2
"""One inside the other; of more, the location is integrated so and the others by a grid."""
_LABELS = ("Bernoulli", "Categorical")
"""Their probabilities are smooth in their logits, wherever the label is."""
_INTERVALS, _ONE_PEAK = 384, 64
"""At most, for any density, and for one with a single peak."""


class _Direction(NamedTuple):
    """Columns of v that are integrated together, ``shared`` by all entries of y or one per entry."""

    columns: range
    shared: bool
    location: bool


class Peaks(NamedTuple):
    """A predictive density, integrated by adaptive quadrature over some columns of v, given the others.

    Args:
        columns: of each direction, and of what is in closed form; none where every entry of y has its own entry of v.
        of_rows: whether numbers of a row share a direction, so that densities are those of rows.
        log_marginal: from (the sum over the numbers of a row, y, all columns, their variances), elementwise, or row by
            row.
    """

    columns: tuple[range, ...]
    of_rows: bool
    log_marginal: Callable[[Callable[[Array], Array], Array, Array, Array], Array]


def around_peaks(
    conditional: Callable[[Array], dist.Distribution], reading: Reading, given: Given | None = None
) -> Peaks | None:
    """The adaptive quadrature of a density; ``None`` where it does not apply.

    Args:
        conditional: from all columns of v to the distribution of y.
        reading: of it.
        given: its closed forms given the others.

    Example:
        >>> from numpyro_dgp.likelihoods.conditionals import read
        >>> from numpyro_dgp.functions.function_values import FunctionValues
        >>> f_x = FunctionValues(jnp.zeros((5, 2)), jnp.ones((5, 2)))
        >>> conditional = lambda v: dist.StudentT(4.0, v[:, 0], jnp.exp(v[:, 1]))
        >>> around_peaks(conditional, read(conditional, f_x)).columns
        (range(0, 1), range(1, 2))
    """
    if elementwise(reading.example).event_dim:
        return None
    directions = () if reading.grid is None else _directions(reading.parts, reading.grid, given)
    if reading.mixes is not None and not directions:
        return None
    affine = _has_one_peak(reading.example, reading.kinds)

    def log_marginal(total: Callable[[Array], Array], y: Array, loc: Array, variance: Array) -> Array:
        shape = elementwise(conditional(loc)).batch_shape
        if y.ndim > len(shape):  # several y of one v
            return jax.vmap(lambda one: log_marginal(total, one, loc, variance))(y)

        def density(v: Array) -> Array:
            if given is not None:
                return given.log_marginal(y, v, variance)
            return log_density(elementwise(conditional(v)), y)  # log p(y | v)

        def centres(v: Array) -> Array:
            return _offsets(elementwise(conditional(v)), y)  # zero where a parameter is y

        known = None if given is not None or reading.family in _LABELS else centres
        if directions:
            found = _nested(density, known, directions, total, loc, variance)
            return found if directions[0].shared else found.reshape(shape)
        most = _ONE_PEAK if affine or known is None else _INTERVALS
        return log_expectation(density, loc, variance, centres=known, affine=affine, most=most)

    columns = (*(() if given is None else given.columns), *(direction.columns for direction in directions))
    return Peaks(columns, any(direction.shared for direction in directions), log_marginal)


def _has_one_peak(example: dist.Distribution, kinds: Any) -> bool:
    """Whether only an affine location of a distribution of NumPyro depends on v."""
    others = all(kind in (Dependence.CONSTANT, Dependence.AFFINE) for kind in kinds.values())
    return of_numpyro(elementwise(example)) and kinds.get("loc") is Dependence.AFFINE and others


def _directions(parts: Sequence[Part], grid: ProductGrid, given: Given | None) -> tuple[_Direction, ...]:
    """The directions in their order, the outermost first; none where there are too many."""
    ends = itertools.accumulate(part.columns for part in parts)
    columns = [range(end - part.columns, end) for part, end in zip(parts, ends, strict=True)]
    moving = [f for f, part in enumerate(parts) if part.kinds.get("loc") is not Dependence.CONSTANT]
    alone = len(moving) == 1 and parts[moving[0]].own
    found: list[_Direction] = []
    for f, (part, of_part) in enumerate(zip(parts, columns, strict=True)):
        if given is not None and of_part in given.columns:
            continue
        if part.own:
            found.append(_Direction(of_part, False, f in moving))
        else:
            found += [_Direction(range(c, c + 1), grid.shared > 0, f in moving) for c in of_part]
    if len(found) > _MOST_DIRECTIONS:
        return tuple(d for d in found if alone and d.location)
    return tuple(sorted(found, key=lambda d: (not d.shared, d.location)))


def _offsets(d: Any, y: Array) -> Array:
    """Parameters of a distribution minus y (Q, ...): its density may have a peak where one is zero."""
    shape = d.batch_shape
    while isinstance(d, dist.TransformedDistribution):
        for transform in reversed(d.transforms):
            y = transform.inv(y)  # y = T(u): u goes with the parameters of the base
        d = elementwise(d.base_dist)
    y = jnp.broadcast_to(y, shape)
    fields = [d.__dict__.get(name) for name in sorted(type(d).gather_pytree_data_fields())]  # not by a set's order
    found = [
        leaf.reshape(*shape, -1) - y[..., None]
        for leaf in map(jnp.asarray, jax.tree.leaves(fields))
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.shape[: len(shape)] == shape and shape
    ]
    return jnp.moveaxis(jnp.concatenate(found, -1), -1, 0) if found else jnp.ones((1, *shape))


def _nested(
    density: Callable[[Array], Array],
    centres: Callable[[Array], Array] | None,
    directions: Sequence[_Direction],
    total: Callable[[Array], Array],
    v: Array,
    variance: Array,
) -> Array:
    """The log of the expectation over columns of v, the first outermost; the others stay."""
    (columns, shared, _), *inner = directions
    start, end = columns[0], columns[-1] + 1

    def moved(u: Array) -> Array:
        return jnp.concatenate([v[..., :start], u, v[..., end:]], -1)  # v with other numbers in these columns

    def log_value(u: Array) -> Array:
        # log E over the inner directions, summed over a row's numbers once none of these is shared.
        values = _nested(density, centres, inner, total, moved(u), variance) if inner else density(moved(u))
        return (total(values) if shared and not (inner and inner[0].shared) else values).reshape(u.shape)

    loc = v[..., start:end]
    variances = jnp.broadcast_to(variance, v.shape)[..., start:end]
    if inner:
        found = log_expectation_around_peak(log_value, loc, variances)
    else:
        at = None if centres is None or shared else lambda u: centres(moved(u)).reshape(-1, *u.shape)
        found = log_expectation(log_value, loc, variances, centres=at, most=_ONE_PEAK if at is None else _INTERVALS)
    return found[..., 0] if shared else found
