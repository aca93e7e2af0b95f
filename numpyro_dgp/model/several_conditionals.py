r"""How a conditional of several functions, or of several outputs together, is integrated over a grid.

Every number of y depends on some of the function values of its row. A function of which it sees its own output only,
as the mean of every column, takes one direction of the grid; a column that all numbers of y may see takes a direction
of its own, and is shared where y has several numbers. A normal y with a mean affine in one function is integrated over
that function in closed form at every node of the others, and altogether where its log scale is affine in another one:

.. math:: E[\log N(y; \alpha v + \beta, e^{2(\gamma s + \delta)})]
          = -\tfrac12 \log 2\pi - \gamma \mu_s - \delta
            - \tfrac12 \bigl((y - \alpha \mu_v - \beta)^2 + \alpha^2 \sigma_v^2\bigr)
              e^{-2(\gamma \mu_s + \delta) + 2 \gamma^2 \sigma_s^2} .

Source: Lazaro-Gredilla and Titsias (2011); Saul et al. (2016) for quadrature over several functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.dependence import Dependence
from numpyro_dgp.algebra.product_grid import MOST_DIRECTIONS, ProductGrid
from numpyro_dgp.model.closed_forms import ClosedForm, normal_forms
from numpyro_dgp.model.several_values import Split

__all__ = ["Given", "Part", "given_others", "grid_of"]


class Part(NamedTuple):
    """How a density depends on the values of one function.

    Args:
        columns: how many it has.
        own: whether every number of y sees its own column only.
        kinds: how each parameter depends on them number by number; empty where that is not known.
    """

    columns: int
    own: bool
    kinds: Mapping[str, Dependence]


def grid_of(parts: Sequence[Part], numbers: int) -> ProductGrid | None:
    """The grid that integrates a density, ``None`` where it would have too many directions.

    Args:
        parts: how the density depends on each function.
        numbers: how many numbers y has per row.

    Example:
        >>> grid_of([Part(3, True, {}), Part(1, False, {})], numbers=3)  # three means, one scale for all of them
        ProductGrid(directions=(1, 1, 1, 0), shared=1)
    """
    each = sum(part.columns for part in parts if not part.own)
    if each + sum(part.own for part in parts) > MOST_DIRECTIONS:
        return None
    directions: list[int] = []
    together, apart = 0, each
    for part in parts:
        if part.own:
            directions += [apart] * part.columns
            apart += 1
        else:
            directions += range(together, together + part.columns)
            together += part.columns
    return ProductGrid(tuple(directions), each if numbers > 1 else 0)


class Given(NamedTuple):
    """A normal y, integrated over one function in closed form, given the others.

    Args:
        columns: of that function, the only entry.
        expected_log_prob: from (y, all columns, their variances), number by number.
        log_marginal: likewise.
        altogether: the expected log density with the others integrated too, where that has a closed form.
    """

    columns: tuple[range]
    expected_log_prob: ClosedForm
    log_marginal: ClosedForm
    altogether: ClosedForm | None


def given_others(
    conditional: Callable[..., dist.Distribution],
    example: dist.Distribution,
    seen: Sequence[Part],
    split: Split,
) -> Given | None:
    """What is in closed form of a conditional of several functions; ``None`` if nothing is.

    Args:
        conditional: from the values of each function to a distribution without ``to_event``.
        example: one such distribution.
        seen: how it depends on each function.
        split: where the values of each function are among all columns.
    """
    if not isinstance(example, dist.Normal):
        return None
    mean = _only(seen, "loc", Dependence.AFFINE)
    if mean is None or not seen[mean].own or seen[mean].kinds["scale"] is not Dependence.CONSTANT:
        return None
    scale = _only(seen, "scale", Dependence.LOG_AFFINE)

    def at(parts: list[Array], f: int, u: Array) -> Any:
        return conditional(*parts[:f], u, *parts[f + 1 :])

    def form(name: str) -> ClosedForm:
        def value(y: Array, v: Array, variance: Array) -> Array:
            parts = split.parts(v)
            forms = normal_forms(lambda u: at(parts, mean, u))
            return getattr(forms, name)(y, parts[mean], split.parts(variance)[mean])

        return value

    def altogether(y: Array, loc: Array, variance: Array) -> Array:
        assert scale is not None
        parts, variances = split.parts(loc), split.parts(variance)
        centre, slope = _slope(lambda u: at(parts, mean, u).loc, parts[mean])
        spread, change = _slope(lambda u: at(parts, scale, u).scale, parts[scale])
        rate = jnp.square(change / spread) * variances[scale]
        square = (jnp.square(y - centre) + jnp.square(slope) * variances[mean]) / jnp.square(spread)
        return -0.5 * (square * jnp.exp(2 * rate) + math.log(2 * math.pi)) - jnp.log(spread)

    return Given(
        (split.columns[mean],),
        form("expected_log_prob"),
        form("log_marginal"),
        altogether if scale is not None else None,
    )


def _slope(function: Callable[[Array], Array], v: Array) -> tuple[Array, Array]:
    """A parameter and its derivative number by number."""
    return jax.jvp(function, (v,), (jnp.ones_like(v),))


def _only(seen: Sequence[Part], name: str, wanted: Dependence) -> int | None:
    """The function that a parameter depends on, in the way that is wanted, where it depends on no other one."""
    found = [part.kinds.get(name) for part in seen]
    others = [f for f, kind in enumerate(found) if kind is not Dependence.CONSTANT]
    return others[0] if len(others) == 1 and found[others[0]] is wanted else None
