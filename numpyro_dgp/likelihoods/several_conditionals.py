r"""Quadrature grids for conditionals of several functions, or of several outputs of one.

Each entry of y depends on some of the function values of its row. A function used elementwise, one output per entry of
y, adds one dimension to the grid; a column that all entries of y may depend on adds a dimension that is shared
between the entries. A normal y with a mean affine in some functions v is integrated over these in closed form at every
node of the others. The whole integral has a closed form where the scale is constant, or log-affine in another function
s:

.. math:: E[\log N(y; \textstyle\sum_i \alpha_i v_i + \beta, e^{2(\gamma s + \delta)})]
          = -\tfrac12 \log 2\pi - \gamma \mu_s - \delta
            - \tfrac12 \bigl((y - \sum_i \alpha_i \mu_i - \beta)^2 + \sum_i \alpha_i^2 \sigma_i^2\bigr)
              e^{-2(\gamma \mu_s + \delta) + 2 \gamma^2 \sigma_s^2} .

Source: Lazaro-Gredilla and Titsias (2011); Saul et al. (2016) for quadrature over several functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_dgp._typing import Array
from numpyro_dgp.jaxprs.dependence import Dependence, dependence
from numpyro_dgp.likelihoods.closed_forms import ClosedForm, normal_bound, normal_density, with_slope
from numpyro_dgp.likelihoods.families import is_family
from numpyro_dgp.math.quadrature import MOST_DIRECTIONS, ProductGrid

__all__ = ["Given", "Part", "Split", "given_others", "grid_of"]


class Split:
    """Where the values of each function are among the columns of all of them.

    Args:
        outputs: of each function, ``None`` for a scalar one.

    Example:
        >>> import jax.numpy as jnp
        >>> [part.shape for part in Split((2, None)).parts(jnp.zeros((5, 3)))]
        [(5, 2), (5,)]
    """

    def __init__(self, outputs: Sequence[int | None]) -> None:
        ends = np.cumsum([1 if P is None else P for P in outputs]).tolist()
        self.columns = [range(end - (P or 1), end) for end, P in zip(ends, outputs, strict=True)]
        self.scalar = [P is None for P in outputs]

    def parts(self, v: Array) -> list[Array]:
        """The values of each function (..., P) or (...,), from all columns."""
        return [
            v[..., own[0]] if scalar else v[..., own[0] : own[-1] + 1]
            for own, scalar in zip(self.columns, self.scalar, strict=True)
        ]

    def whole(self, parts: Sequence[Array]) -> Array:
        """All columns, from the values of each function."""
        wide = [part[..., None] if scalar else part for part, scalar in zip(parts, self.scalar, strict=True)]
        return jnp.concatenate(wide, -1)


class Part(NamedTuple):
    """How a density depends on the values of one function.

    Args:
        columns: how many it has.
        own: whether every entry of y depends on its own column only.
        kinds: how each parameter depends on them entry by entry; empty where that is not known.
    """

    columns: int
    own: bool
    kinds: Mapping[str, Dependence]


def grid_of(parts: Sequence[Part], numbers: int) -> ProductGrid | None:
    """The grid that integrates a density, ``None`` where it would have too many dimensions.

    Args:
        parts: how the density depends on each function.
        numbers: how many entries y has per row.

    Example:
        >>> grid_of([Part(3, True, {}), Part(1, False, {})], numbers=3)  # three means, one scale for all of them
        ProductGrid(directions=(1, 1, 1, 0), shared=1)
    """
    each = sum(part.columns for part in parts if not part.own)
    if each + sum(part.own for part in parts) > MOST_DIRECTIONS:
        return None
    # Dimensions 0 to each - 1: columns that all entries of y depend on. Then one for each function whose column p
    # enters y_p only.
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
    """A normal y, integrated over the functions of its mean in closed form, given the others.

    Args:
        columns: of each of these functions.
        expected_log_prob: from (y, all columns, their variances), elementwise.
        log_marginal: likewise.
        altogether: the expected log density with the others integrated out too, where that has a closed form.
        moments: mean and variance of y from all columns and their variances, where no other function is left.
    """

    columns: tuple[range, ...]
    expected_log_prob: ClosedForm
    log_marginal: ClosedForm
    altogether: ClosedForm | None
    moments: Callable[[Array, Array], tuple[Array, Array]] | None


def given_others(
    conditional: Callable[..., dist.Distribution],
    example: dist.Distribution,
    seen: Sequence[Part],
    split: Split,
    v: Array,
) -> Given | None:
    """The closed forms of a conditional of several functions; ``None`` if there are none.

    Args:
        conditional: from the values of each function to a distribution without ``to_event``.
        example: one such distribution.
        seen: how it depends on each function.
        split: where the values of each function are among all columns.
        v: an example of all columns.
    """
    if not is_family(example, dist.Normal, methods=("log_prob", "mean", "variance")):
        return None
    means = _affine_together(conditional, seen, split.parts(v))
    if not means or any(seen[f].kinds["scale"] is not Dependence.CONSTANT for f in means):
        return None
    scale = _only(seen, "scale", Dependence.LOG_AFFINE)

    def at(parts: list[Array], f: int) -> Callable[[Array], Any]:
        return lambda u: conditional(*parts[:f], u, *parts[f + 1 :])

    def given(v: Array, variance: Array) -> tuple[Array, Array, Array]:
        """The mean of y, the variance of that mean, and the scale at the other functions."""
        parts, variances = split.parts(v), split.parts(variance)
        found = {f: with_slope(at(parts, f), parts[f], "loc", "scale") for f in means}
        centre, _, (noise,) = found[means[0]]
        each = (jnp.square(slope) * variances[f] for f, (_, slope, _) in found.items())  # alpha_i^2 sigma_i^2
        return centre, sum(each, jnp.zeros_like(centre)), noise

    def expected_log_prob(y: Array, v: Array, variance: Array) -> Array:
        centre, explained, noise = given(v, variance)
        # log N(y; centre, tau^2) - explained / (2 tau^2)
        return normal_bound(y, centre, noise, explained / jnp.square(noise))

    def moments(v: Array, variance: Array) -> tuple[Array, Array]:
        centre, explained, noise = given(v, variance)
        return centre, jnp.square(noise) + explained  # tau^2 + sum_i alpha_i^2 sigma_i^2

    def log_marginal(y: Array, v: Array, variance: Array) -> Array:
        return normal_density(y, *moments(v, variance))

    def with_log_scale(y: Array, v: Array, variance: Array) -> Array:
        assert scale is not None
        parts = split.parts(v)
        centre, explained, _ = given(v, variance)
        noise, change, _ = with_slope(at(parts, scale), parts[scale], "scale")
        # tau = e^(gamma s + delta): rate = gamma^2 sigma_s^2, E[1 / tau^2] = e^(2 rate) / tau(mu_s)^2.
        rate = jnp.square(change / noise) * split.parts(variance)[scale]
        square = (jnp.square(y - centre) + explained) / jnp.square(noise)
        return -0.5 * (square * jnp.exp(2 * rate) + math.log(2 * math.pi)) - jnp.log(noise)

    columns = tuple(split.columns[f] for f in means)
    if all(part.kinds.get("scale") is Dependence.CONSTANT for part in seen):
        return Given(columns, expected_log_prob, log_marginal, expected_log_prob, moments)
    return Given(columns, expected_log_prob, log_marginal, None if scale is None else with_log_scale, None)


def _affine_together(conditional: Callable[..., Any], seen: Sequence[Part], values: Sequence[Array]) -> tuple[int, ...]:
    """The functions that the mean depends on, if it is jointly affine in them, entry by entry."""
    means = tuple(f for f, part in enumerate(seen) if part.kinds.get("loc") is not Dependence.CONSTANT)
    if any(not seen[f].own or seen[f].kinds["loc"] is not Dependence.AFFINE for f in means):
        return ()
    if len(means) == 1:
        return means

    def moved(u: Array) -> Array:  # each by as much: no product of two is affine in u
        return conditional(*(v + u if f in means else v for f, v in enumerate(values))).loc

    (kind,) = dependence(moved, jnp.zeros_like(values[means[0]]))
    return means if kind is Dependence.AFFINE else ()


def _only(seen: Sequence[Part], name: str, wanted: Dependence) -> int | None:
    """The function that a parameter depends on, in the given way, if it is the only one."""
    found = [part.kinds.get(name) for part in seen]
    others = [f for f, kind in enumerate(found) if kind is not Dependence.CONSTANT]
    return others[0] if len(others) == 1 and found[others[0]] is wanted else None
