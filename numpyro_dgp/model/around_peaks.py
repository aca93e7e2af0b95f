r"""Which directions of a predictive density are integrated around the largest value of the integrand.

As a function of v, :math:`p(y \mid v)` may be far narrower than what is known of v. :math:`\log E[p(y \mid v)]` of one
function then takes the nodes of :mod:`~numpyro_dgp.algebra.peaked_integral`. Of several functions the one that alone
moves the location of y does, at every node of a grid over the others: a scale, as a function of its logarithm, is never
narrow by itself. Where no single function has the location, as of ``Gamma``, two directions are integrated so, one
inside the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.dependence import Dependence
from numpyro_dgp.algebra.peaked_integral import log_expectation
from numpyro_dgp.algebra.product_grid import ProductGrid
from numpyro_dgp.model.closed_forms import ClosedForm
from numpyro_dgp.model.conditionals import Reading, elementwise
from numpyro_dgp.model.several_conditionals import Part
from numpyro_dgp.model.tails import log_density

__all__ = ["Peaks", "around_peaks"]

_LABELS = ("Bernoulli", "Categorical")
"""Probabilities as functions of their logits are not narrow."""
_NODES = {1: 101, 2: 51}
"""Of each direction, by how many there are, one inside the other; more are left to a grid. 51 give five digits of a
smooth log density."""


class Peaks(NamedTuple):
    """A predictive density, integrated around its peaks over some columns of v, given the others.

    Args:
        columns: of each direction; none where every number of y has its own number of v.
        log_marginal: from (y, all columns, their variances), number by number.
    """

    columns: tuple[range, ...]
    log_marginal: ClosedForm


def around_peaks(conditional: Callable[[Array], dist.Distribution], reading: Reading) -> Peaks | None:
    """How a density is integrated around its peaks; ``None`` where it is not.

    Args:
        conditional: from all columns of v to the distribution of y.
        reading: of it.

    Example:
        >>> from numpyro_dgp.model.conditionals import read
        >>> from numpyro_dgp.model.function_values import FunctionValues
        >>> f_x = FunctionValues(jnp.zeros((5, 2)), jnp.ones((5, 2)))
        >>> conditional = lambda v: dist.StudentT(4.0, v[:, 0], jnp.exp(v[:, 1]))
        >>> around_peaks(conditional, read(conditional, f_x)).columns
        (range(0, 1), range(1, 2))
    """
    if reading.family in _LABELS or elementwise(reading.example).event_dim:
        return None
    directions = () if reading.grid is None else _directions(reading.parts, reading.grid)
    if reading.mixes is not None and not directions:
        return None

    def log_marginal(y: Array, loc: Array, variance: Array) -> Array:
        shape = elementwise(conditional(loc)).batch_shape
        if y.ndim > len(shape):  # several y of one v
            return jax.vmap(lambda one: log_marginal(one, loc, variance))(y)
        density = lambda v: log_density(elementwise(conditional(v)), y)  # noqa: E731
        if not directions:
            return log_expectation(density, loc, variance)
        return _nested(density, directions, loc, variance, _NODES[len(directions)]).reshape(shape)

    return Peaks(directions, log_marginal)


def _directions(parts: Sequence[Part], grid: ProductGrid) -> tuple[range, ...]:
    """The columns of each direction that may be narrow; none where there are too many."""
    ends = itertools.accumulate(part.columns for part in parts)
    columns = [range(end - part.columns, end) for part, end in zip(parts, ends, strict=True)]
    moving = [f for f, part in enumerate(parts) if part.kinds.get("loc") is not Dependence.CONSTANT]
    if len(moving) == 1 and parts[moving[0]].own:
        return (columns[moving[0]],)
    found: list[range] = []
    for part, of_part in zip(parts, columns, strict=True):
        if part.own:
            found.append(of_part)
        elif not grid.shared:  # y has a single number
            found += [range(column, column + 1) for column in of_part]
    return tuple(found) if len(found) in _NODES else ()


def _nested(
    density: Callable[[Array], Array], directions: Sequence[range], v: Array, variance: Array, nodes: int
) -> Array:
    """The log of the expectation over columns of v around where they are, the first outermost; the others stay."""
    if not directions:
        return density(v)
    columns, *inner = directions
    start, end = columns[0], columns[-1] + 1

    def log_value(u: Array) -> Array:
        moved = jnp.concatenate([v[..., :start], u, v[..., end:]], -1)
        return _nested(density, inner, moved, variance, nodes).reshape(u.shape)

    spread = jnp.broadcast_to(variance, v.shape)[..., start:end]
    return log_expectation(log_value, v[..., start:end], spread, nodes=nodes, in_turn=bool(inner))
