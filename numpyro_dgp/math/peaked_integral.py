r"""Adaptive quadrature for the log of a Gaussian expectation: narrow, multimodal, heavy-tailed or kinked integrands.

Nodes of Gauss-Hermite quadrature cover the Gaussian. A density :math:`p(y \mid v)` as a function of v may be a thousand
times narrower, and have several peaks, none of them where the Gaussian has its mass: it then falls between the nodes.
Here, in :math:`z = (v - \mu) / \sigma`,

.. math:: \int N(z; 0, 1)\, p(y \mid \mu + \sigma z)\, dz

is taken over intervals. Each is measured by a rule of 13 nodes and by one of 7 among them. Where the two differ, or a
peak rises between two nodes, the interval is cut in two: at that peak, near an end where the integrand falls steeply,
or in the middle. The final intervals are integrated by Gauss-Legendre quadrature. A peak between all nodes, such as a
narrow component of a mixture, is found by functions that are zero at its centre.

Source: Gander and Gautschi (2000), for the rules and the estimate of their error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_dgp._typing import Array
from numpyro_dgp.jaxprs.row_by_row import rows_apart
from numpyro_dgp.math.linalg import safe_sqrt, tensordot

__all__ = ["log_expectation", "log_expectation_around_peak"]

Function = Callable[[Array], Array]

_ENDS = (1.5, 3.0, 5.0, 8.0, 13.0, 25.0, 80.0, 1e4)
"""Of the first intervals, on both sides of zero, in standard deviations of the Gaussian."""
_ROUNDS = 100
"""How often intervals are cut."""
_CHUNK = 16
"""Intervals that are added up at a time; as many chunks are computed as are needed."""
_REACH, _AROUND = 9.0, 41
"""How far from its mean the Gaussian is integrated around a peak, in standard deviations, and at how many points."""
_SEARCHED, _ZOOMS, _STRETCH = 13, 5, 5.0
"""Points of each search for a peak, at sinh of numbers that begin at -5 and 5, and how many there are."""
_STEEP = 0.2
"""A value between two nodes that exceeds both by more is a peak that the nodes miss."""


def _symmetric(halves: list[float], sign: float = 1.0) -> np.ndarray:
    return np.array([*(sign * x for x in halves[:0:-1]), *halves])


# The rule of 13 nodes on [-1, 1], from its middle to its right end, and that of 7 nodes.
_NODES = _symmetric(
    [0.0, 0.23638319966215, 5**-0.5, 0.641853342345781, (2 / 3) ** 0.5, 0.94288241569548, 1.0], sign=-1.0
)
_WEIGHTS = _symmetric(
    [
        0.242611071901408,
        0.224926465333340,
        0.199773405226859,
        0.188821573960182,
        0.155071987336585,
        0.0942738402188500,
        0.0158271919734802,
    ]
)
_DIFFERENCE = _WEIGHTS - _symmetric([16 / 35, 0.0, 125 / 294, 0.0, 72 / 245, 0.0, 11 / 210])
_LEGENDRE = np.polynomial.legendre.leggauss(10)


class _Intervals(NamedTuple):
    """Intervals (P, ...), where each is to be cut, and what is known of the integral over it."""

    low: Array
    high: Array
    cut: Array
    log_integral: Array
    log_error: Array


# Intervals, how many there are, the ends and places of those that are measured next, and how often some were cut.
_State = tuple[_Intervals, Array, Array, Array, Array, Array]


def log_expectation(
    log_value: Function,
    loc: Array,
    variance: Array,
    *,
    centres: Function | None = None,
    affine: bool = False,
    most: int = 128,
) -> Array:
    r"""The log of :math:`E[g(v)]` for :math:`v \sim N(\mu, \sigma^2)`, elementwise.

    The intervals are found without derivatives; that of the result is exact for the sum over their nodes, which keep
    their places in units of :math:`\sigma`.

    Args:
        log_value: from points of the shape of ``loc`` to :math:`\log g` there, elementwise.
        loc: :math:`\mu`.
        variance: :math:`\sigma^2`.
        centres: from such points to numbers (Q, ...), each zero where :math:`\log g` may have a peak or a kink.
        affine: whether ``centres`` are affine, so that each has a single zero.
        most: intervals; the worst are cut until there are as many.

    Returns:
        Logarithms, of the shape of ``loc``.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.scipy.stats import norm
        >>> narrow = lambda v: norm.logpdf(0.7, v, 0.01)
        >>> exact = norm.logpdf(0.7, 0.0, jnp.sqrt(1 + 0.01**2))
        >>> print(f"{log_expectation(narrow, jnp.zeros(1), jnp.ones(1))[0]:.3f} {exact:.3f}")
        -1.164 -1.164
    """
    # Compiled as a whole: outside of a compiled program its hundreds of operations would be compiled one by one.
    take = partial(_log_expectation, log_value, centres, affine, most)
    loc, variance = jnp.broadcast_arrays(loc, variance)
    # An integral keeps the rows apart that its integrand keeps apart: this one value is examined in its place.
    return rows_apart(lambda loc, variance, _: take(loc, variance))(loc, variance, log_value(loc))


def _log_expectation(
    log_value: Function, centres: Function | None, affine: bool, most: int, loc: Array, variance: Array
) -> Array:
    scale = safe_sqrt(variance)

    def each(function: Function, z: Array) -> Array:
        """A function of points of the shape of ``loc`` at points (..., *loc.shape), along the first axis."""
        return jax.vmap(function)((loc + scale * z).reshape(-1, *loc.shape))

    def integrand(z: Array) -> Array:
        # log g(mu + σ z) + log N(z; 0, 1)
        values = each(log_value, z).reshape(z.shape) - 0.5 * jnp.square(z) - 0.5 * math.log(2 * math.pi)
        return jnp.where(values < jnp.inf, values, -jnp.inf)  # NaN where something rounds to zero

    def offsets(z: Array) -> Array:
        assert centres is not None
        return jnp.moveaxis(each(centres, z), 1, 0).reshape(-1, *z.shape)

    ends = jnp.array(_symmetric([0.0, *_ENDS], sign=-1.0), loc.dtype).reshape(-1, *(1,) * loc.ndim)
    ends = jnp.broadcast_to(ends, (len(ends), *loc.shape))
    if centres is not None and affine:
        ends = jnp.sort(jnp.concatenate([ends, jnp.clip(_zeros(offsets, loc), -_ENDS[-1], _ENDS[-1])]), 0)
    probed = None if centres is None or affine else offsets
    found = _cut(integrand, probed, jax.lax.stop_gradient(ends), max(most, len(ends)))
    return _added_up(integrand, jax.lax.stop_gradient(found))


def log_expectation_around_peak(log_value: Function, loc: Array, variance: Array) -> Array:
    r"""The same for a smooth integrand with one peak, at few points, one after the other.

    The trapezoidal rule is applied to :math:`z = c + w \sinh u`, with c the mode of the integrand and w the width of
    the peak, estimated from its decay around c.

    Args:
        log_value: from points of the shape of ``loc`` to :math:`\log g` there, elementwise.
        loc: :math:`\mu`.
        variance: :math:`\sigma^2`.

    Returns:
        Logarithms, of the shape of ``loc``.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.scipy.stats import norm
        >>> found = log_expectation_around_peak(lambda v: norm.logpdf(0.7, v, 0.5), jnp.zeros(1), jnp.ones(1))
        >>> print(f"{found[0]:.5f} {norm.logpdf(0.7, 0.0, jnp.sqrt(1.25)):.5f}")
        -1.22651 -1.22651

    Source: Trefethen and Weideman (2014), for the trapezoidal rule.
    """
    loc, variance = jnp.broadcast_arrays(loc, variance)
    scale = safe_sqrt(variance)

    def integrand(z: Array) -> Array:
        # log g(mu + σ z) + log N(z; 0, 1)
        values = jax.lax.map(log_value, loc + scale * z) - 0.5 * jnp.square(z) - 0.5 * math.log(2 * math.pi)
        return jnp.where(values < jnp.inf, values, -jnp.inf)

    def along(low: Array, high: Array, size: int) -> Array:
        share = jnp.linspace(0, 1, size, dtype=loc.dtype).reshape(-1, *(1,) * loc.ndim)
        return low + share * (high - low)

    def nearer(ends: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        # The next search is between the neighbours of the largest value, at z = sinh(u).
        u = along(*ends, _SEARCHED)
        at = integrand(jnp.sinh(u)).argmax(0)[None]
        places = jnp.maximum(at - 1, 0), jnp.minimum(at + 1, _SEARCHED - 1)
        return tuple(jnp.take_along_axis(u, place, 0)[0] for place in places), None  # type: ignore[return-value]

    reach = jnp.full_like(loc, _STRETCH)
    low, high = jax.lax.scan(nearer, (-reach, reach), None, length=_ZOOMS)[0]
    centre = jnp.sinh(0.5 * (low + high))
    steps = jnp.array([0.001, 0.01, 0.1], loc.dtype).reshape(-1, *(1,) * loc.ndim)
    nearby = integrand(jnp.concatenate([centre - steps, centre[None], centre + steps]))
    # 2 f(c) - f(c - s) - f(c + s) = s^2 / w^2 for a peak of width w, which is 1 at most
    falls = 2 * nearby[3] - nearby[:3] - nearby[4:]
    width = jnp.where(falls > 0.01, jnp.minimum(steps * jax.lax.rsqrt(jnp.maximum(falls, 0.01)), 1), 1).min(0)
    centre, width = jax.lax.stop_gradient((centre, width))
    end = jnp.arcsinh((_REACH + jnp.abs(centre)) / width)  # w sinh(end) = 9 + |c|: to both sides, 9 beyond zero
    u = along(-end, end, _AROUND)
    # dz = w cosh(u) du
    logs = integrand(centre + width * jnp.sinh(u)) + jnp.log(width * jnp.cosh(u) * 2 * end / (_AROUND - 1))
    return logsumexp(logs, 0)


def _zeros(offsets: Function, like: Array) -> Array:
    """Where affine functions of z are zero (Q, ...), or something else where they are constant."""
    at_zero, at_one = jnp.moveaxis(offsets(jnp.stack([jnp.zeros_like(like), jnp.ones_like(like)])), 1, 0)
    # a + b z = 0 at z = -a / b
    slope = at_one - at_zero
    zeros = -at_zero / jnp.where(slope == 0, 1, slope)
    return jnp.where(jnp.isfinite(zeros), zeros, 0)


def _cut(integrand: Function, offsets: Function | None, ends: Array, most: int) -> _Intervals:
    """Cuts intervals with the given ends until their integrals are known, or there are too many."""
    dtype, shape = ends.dtype, ends.shape[1:]
    cuts = len(ends) // 2  # at a time: their parts are as many as the first intervals
    start = jnp.concatenate([ends[:-1], jnp.broadcast_to(ends[-1:], (2 * cuts - len(ends) + 1, *shape))])
    stop = jnp.concatenate([ends[1:], jnp.broadcast_to(ends[-1:], (2 * cuts - len(ends) + 1, *shape))])
    tolerance = math.log(max(1e-8, 50 * float(jnp.finfo(dtype).eps)))
    rows = tuple(row[None] for row in jnp.indices(shape, sparse=True))
    order = jnp.arange(2 * cuts).reshape(-1, *(1,) * len(shape))

    def ongoing(state: _State) -> Array:
        *_, places, rounds = state
        return (rounds < _ROUNDS) & (places < most).any()

    def step(state: _State) -> _State:
        found, count, low, high, places, rounds = state
        parts, here = _measured(integrand, offsets, low, high), (places, *rows)  # what is beyond the end is dropped
        found = _Intervals(*(x.at[here].set(part, mode="drop") for x, part in zip(found, parts, strict=True)))
        errors, worst = (jnp.moveaxis(x, -1, 0) for x in jax.lax.top_k(jnp.moveaxis(found.log_error, 0, -1), cuts))
        new = count + order[:cuts]
        needed = (errors > logsumexp(found.log_integral, 0) + tolerance) & (new < most)
        low, high, cut = (jnp.take_along_axis(x, worst, 0) for x in found[:3])
        # One part takes the place of the interval, the other a new place.
        places = jnp.where(jnp.concatenate([needed, needed]), jnp.concatenate([worst, new]), most)
        low, high = jnp.concatenate([low, cut]), jnp.concatenate([cut, high])
        return found, count + needed.sum(0), low, high, places, rounds + 1

    nothing, zeros = jnp.full((most, *shape), -jnp.inf, dtype), jnp.zeros((most, *shape), dtype)
    first = jnp.broadcast_to(order, start.shape)
    found = _Intervals(zeros, zeros, zeros, nothing, nothing)
    state = found, jnp.full(shape, 2 * cuts), start, stop, first, jnp.zeros((), int)
    return jax.lax.while_loop(ongoing, lambda state: jax.lax.stop_gradient(step(state)), state)[0]


def _measured(integrand: Function, offsets: Function | None, low: Array, high: Array) -> _Intervals:
    """What is known of intervals (P, ...)."""
    half, middle = 0.5 * (high - low), 0.5 * (low + high)
    nodes = jnp.array(_NODES, low.dtype).reshape(-1, *(1,) * low.ndim)
    z = middle + half * nodes
    values = integrand(z)
    top = values.max(0)
    p = jnp.exp(values - jnp.where(top > -jnp.inf, top, 0))  # scaled so that the largest is one
    total = tensordot(jnp.asarray(_WEIGHTS, p.dtype), p)  # the integral over [-1, 1] by 13 nodes
    error = jnp.abs(tensordot(jnp.asarray(_DIFFERENCE, p.dtype), p))  # its difference from the rule of 7 nodes
    positive = jnp.maximum(total, jnp.finfo(total.dtype).tiny)
    log_integral = jnp.where(total > 0, jnp.log(positive * half) + top, -jnp.inf)
    # δ = |I_13 - I_7| / I_13 is nearly the error of the rule of 7 nodes;
    # that of the rule of 13 is taken as min((10 δ)^1.5, 1), relative to I_13.
    log_error = log_integral + jnp.minimum(1.5 * jnp.log(10 * error / positive + 1e-30), 0)
    # Near an end where the integrand is largest, the nearer the more steeply it falls.
    at = values.argmax(0)
    fall = top - values[len(_NODES) // 2]
    share = jnp.clip(4 / jnp.maximum(fall, 1), 0.125, 0.5)
    last = len(_NODES) - 1
    cut = low + 2 * half * jnp.where(at == 0, share, jnp.where(at == last, 1 - share, 0.5))
    highest = jnp.take_along_axis(z, at[None], 0)[0]
    aside = (jnp.abs(highest - middle) > 0.2 * half) & (at > 0) & (at < last) & (error > 0.01 * total)
    cut = jnp.where(aside, highest, cut)
    hidden = jnp.full_like(cut, -jnp.inf)
    if offsets is not None:
        hidden, place = _hidden_peak(integrand, offsets, z, values)
        cut = jnp.where(hidden > -jnp.inf, place, cut)
    # A cut at an end would leave the interval as it is.
    edge = 1e-6 * half
    cut = jnp.where((cut > low + edge) & (cut < high - edge), cut, middle)
    # Its ends are no further apart than their rounding.
    known = half <= 4 * jnp.finfo(low.dtype).eps * jnp.maximum(jnp.abs(middle), 1)
    return _Intervals(low, high, cut, log_integral, jnp.where(known, -jnp.inf, jnp.maximum(log_error, hidden)))


def _hidden_peak(integrand: Function, offsets: Function, z: Array, values: Array) -> tuple[Array, Array]:
    """A bound on the log mass of the highest peak between two nodes, -inf if there is none, and its place (P, ...)."""
    before, after, width = values[:-1], values[1:], jnp.diff(z, axis=0)
    numbers = offsets(z)
    left, right = numbers[:, :-1], numbers[:, 1:]
    change = (left < 0) != (right < 0)
    # Where the line between the numbers at two nodes is zero, as a share of the way.
    zero = jnp.where(change, left / jnp.where(change, left - right, 1), 0.5)
    share = jnp.take_along_axis(zero, change.argmax(0)[None], 0)[0]
    places = z[:-1] + share * width
    between = integrand(places)
    seen = (before > -jnp.inf) & (after > -jnp.inf)
    rise = between - jnp.maximum(before, after)
    # The value between may be on the slope of a higher one: as much again as it exceeds the line between the nodes.
    line = jnp.where(seen, before + share * (after - before), between)
    highest = jnp.where(seen & (rise > _STEEP), 2 * between - line + jnp.log(width), -jnp.inf)
    best = highest.argmax(0)[None]
    return tuple(jnp.take_along_axis(x, best, 0)[0] for x in (highest, places))  # type: ignore[return-value]


def _added_up(integrand: Function, found: _Intervals) -> Array:
    """The log of the integral over all intervals; those of negligible mass are left out."""
    shape, most = found.low.shape[1:], len(found.low)
    total = logsumexp(found.log_integral, 0)
    kept = found.log_integral > total - 30  # e^-30 of the whole is below rounding, or near it
    place = jnp.where(kept, jnp.cumsum(kept, 0) - 1, most)
    size = -(-most // _CHUNK) * _CHUNK
    where = (place, *jnp.indices(found.low.shape, sparse=True)[1:])
    low, high = (jnp.zeros((size, *shape), x.dtype).at[where].set(x, mode="drop") for x in (found.low, found.high))
    nodes, weights = (jnp.asarray(a, low.dtype).reshape(-1, *(1,) * low.ndim) for a in _LEGENDRE)

    def added(low: Array, high: Array) -> Array:
        half = 0.5 * (high - low)
        # An interval of no width is in the place of each that is not needed, where the integrand is finite.
        logs = integrand(0.5 * (low + high) + half * nodes) + jnp.log(weights * half)
        return _log_sum(logs, (0, 1))

    def chunk(_: None, ends: tuple[Array, Array]) -> tuple[None, Array]:
        needed = (ends[1] > ends[0]).any()
        nothing = jnp.full(shape, -jnp.inf, low.dtype)
        return None, jax.lax.cond(needed, jax.checkpoint(added), lambda *_: nothing, *ends)

    ends = low.reshape(-1, _CHUNK, *shape), high.reshape(-1, _CHUNK, *shape)
    return _log_sum(jax.lax.scan(chunk, None, ends)[1], 0)


def _log_sum(logs: Array, axis: int | tuple[int, ...]) -> Array:
    """``logsumexp``, with slope zero where all are -inf: rows with few intervals in chunks that others fill."""
    top = jax.lax.stop_gradient(logs.max(axis, keepdims=True))
    top = jnp.where(top > -jnp.inf, top, 0)
    total = jnp.exp(logs - top).sum(axis)
    return jnp.where(
        total > 0, jnp.log(jnp.maximum(total, jnp.finfo(total.dtype).tiny)) + top.reshape(total.shape), -jnp.inf
    )
