"""Moments, labels and range of the values of an observed distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_dgp._checks import expected, violated
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.functions.site_distribution import declared
from numpyro_dgp.likelihoods.families import is_family
from numpyro_dgp.likelihoods.multiclass import RobustMax
from numpyro_dgp.likelihoods.tails import CENSORED

__all__ = ["NoMomentsError", "Range", "labels", "moments", "require_in_range", "value_range"]

# Labels and counts.
_WHOLE = constraints.integer_interval, constraints.integer_greater_than
_OF_CLASSES = dist.CategoricalLogits, dist.CategoricalProbs, RobustMax
_ANGLES = "angles"
_MOMENTS = "mean", "variance"
# Their mean or variance in NumPyro is NaN or infinite, whatever their parameters.
_WITHOUT_MOMENTS = (dist.CategoricalLogits, dist.CategoricalProbs, dist.Cauchy, dist.HalfCauchy)


def _nested(d: dist.Distribution) -> Iterator[dist.Distribution]:
    """``d`` and what is inside the wrappers that plates, masks and ``to_event`` put around a distribution."""
    yield d
    while isinstance(d, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent):
        d = d.base_dist
        yield d


class NoMomentsError(ValueError):
    """The distribution has no mean or variance."""


def moments(d: dist.Distribution) -> tuple[Array, Array]:
    """Mean and variance of a distribution.

    Raises:
        NoMomentsError: it has none, or none that are known.
    """
    inner = list(_nested(d))[-1]
    if _unordered(inner) == _ANGLES:
        raise NoMomentsError(
            "mean and variance: expected a y on a line, got angles, whose average depends on where the circle is cut: "
            "the mean direction is jnp.angle(jnp.exp(1j * posterior.sample(key, X)).mean(0))"
        )
    if is_family(inner, *CENSORED, methods=_MOMENTS):  # of the times themselves, as its draws are
        return moments(inner.base_dist.expand(inner.batch_shape))
    try:
        found = None if is_family(inner, *_WITHOUT_MOMENTS, methods=_MOMENTS) else (d.mean, d.variance)
    except NotImplementedError:
        found = None
    if found is None:
        raise NoMomentsError(
            f"mean and variance: expected a distribution of y that has them, got {type(inner).__name__}: use "
            "posterior.probs(key, X) for the probabilities of labels, posterior.quantile(key, q, X) for quantiles, "
            "posterior.sample(key, X) for draws, posterior.log_density(key, y, X) for scores"
        )
    return found


class Range(NamedTuple):
    """Numbers that an observation may lie between; ``finite`` where they are labels, whole and with both ends known;
    ``whole`` where they are labels or counts; ``unordered`` names their kind where they have no order.

    The ends of an open range count as inside, since a density there may be finite.
    """

    low: float | None = None
    high: float | None = None
    finite: bool = False
    whole: bool = False
    unordered: str | None = None

    def require_order(self) -> None:
        """Raise unless observations are numbers on a line."""
        if self.unordered is not None:
            raise expected(
                "a y whose values are in order",
                self.unordered,
                "posterior.probs(key, X) has the probabilities of labels, posterior.sample(key, X) draws of angles",
            )

    def require(self, value: ArrayLike, at: str | None = None) -> None:
        """Raise where a concrete observation is outside: a label, a count, a positive number."""
        if violated(lambda y: ~self._outside(y), value):
            array = np.asarray(value)
            outside = self._outside(array)
            where = tuple(int(i) for i in np.argwhere(outside)[0])
            ends = [f"{word} {end:g}" for word, end in (("from", self.low), ("to", self.high)) if end is not None]
            raise expected(
                f"observations y {' '.join(ends)}",
                f"{array[where]} at index {where} ({int(outside.sum())} outside)",
                "labels of K classes are 0, ..., K - 1; counts are whole, from 0 on",
                at,
            )

    def _outside(self, array: Any) -> Any:
        outside: Any = np.zeros(array.shape, bool)
        if self.low is not None:
            outside = outside | (array < self.low)
        if self.high is not None:
            outside = outside | (array > self.high)
        if self.whole:
            outside = outside | (array % 1 != 0)
        return outside


def value_range(d: dist.Distribution) -> Range:
    """The range of an observation, as far as its bounds are known numbers; unlimited under a mask."""
    parts = list(_nested(d))
    if any(isinstance(part, dist.MaskedDistribution) for part in parts):
        return Range(unordered=_unordered(parts[-1]))
    if (known := declared(parts[-1]).outcomes) is not None:  # a likelihood has looked before
        return known
    support, unordered = _support(d), _unordered(parts[-1])
    if support is constraints.boolean:
        return Range(0, 1, finite=True)  # not whole: soft labels are in use
    if unordered == _ANGLES:  # its densities are periodic
        return Range(unordered=unordered)
    ends = [getattr(support, name, None) for name in ("lower_bound", "upper_bound")]
    low, high = (float(end) if isinstance(end, int | float | np.number) else None for end in ends)
    finite = isinstance(support, constraints.integer_interval) and None not in (low, high)
    return Range(low, high, finite, isinstance(support, _WHOLE), unordered)


def _support(d: dist.Distribution) -> Any:
    """The constraint on single numbers of an observation."""
    support: Any = d.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def _unordered(d: dist.Distribution) -> str | None:
    """What the values of a distribution are if one is not below another."""
    if (known := declared(d).outcomes) is not None:
        return known.unordered
    if isinstance(_support(d), type(constraints.circular)):
        return _ANGLES
    classes = isinstance(d, _OF_CLASSES) and not isinstance(d, dist.OrderedLogistic)
    return "labels of classes" if classes else None


def labels(d: dist.Distribution) -> np.ndarray:
    """The labels that one observation may have (K,).

    Args:
        d: the distribution of y.

    Raises:
        ValueError: the distribution has no finite set of labels, or has several numbers per datum.
    """
    found = value_range(d)
    if d.event_shape or not found.finite or found.low is None or found.high is None:
        raise expected(
            "an observed site with one label of K per datum (Categorical, Bernoulli, RobustMax)",
            f"{d!r} with event shape {d.event_shape}",
            "use posterior.predict(key, X) for means and variances, posterior.log_density(key, y, X) for densities",
        )
    return np.arange(int(found.low), int(found.high) + 1)


def require_in_range(site: str, value: ArrayLike, d: dist.Distribution) -> None:
    """Raise where a concrete observation of ``site`` is out of the range of its distribution."""
    inner = list(_nested(d))[-1]
    if getattr(inner, "observed", None) is None:  # a likelihood looks at the entries that are there itself
        value_range(d).require(value, f"observed site {site!r}")
