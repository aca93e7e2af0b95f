r"""Distribution functions and quantiles of mixtures of Gaussians with equal weights, entry by entry.

.. math:: F(y) = \tfrac1S \sum_s \Phi\Big(\frac{y - \mu_s}{\sigma_s}\Big), \qquad F(y_q) = q
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr, ndtri
from jax.scipy.stats import norm

from numpyro_dgp._checks import is_concrete
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.linalg import safe_sqrt

__all__ = ["levels", "mixture_cdf", "mixture_quantiles"]

_NARROW = 1e-12  # the standard deviation of a certain value, whose distribution function is a step
_FAR = 50.0  # standard deviations, beyond which a tail is zero in both precisions


@jax.jit
def mixture_cdf(means: Array, variances: Array, y: Array) -> Array:
    """The probability of at most y.

    Args:
        means: of the Gaussians (S, ...).
        variances: of them (S, ...); zero for a certain value.
        y: numbers that broadcast against (...,).

    Example:
        >>> print(mixture_cdf(jnp.array([-1.0, 1.0]), jnp.ones(2), jnp.array([-9.0, 0.0, 9.0])).round(3))
        [0.  0.5 1. ]
    """
    return _beyond(means, safe_sqrt(variances), y, 1)


def levels(q: ArrayLike) -> Any:
    """Levels in double precision where they are known, a NumPy array; traced ones below 1, to which some are rounded.

    Args:
        q: levels between 0 and 1, of any shape.

    Example:
        >>> bool(levels(1 - 1e-8) < 1)
        True
    """
    if is_concrete(q):
        return np.asarray(q, float)
    q = jnp.asarray(q)
    return jnp.where(q == 1, 1 - jnp.finfo(jnp.result_type(q, float)).epsneg, q)


@jax.jit
def mixture_quantiles(means: Array, variances: Array, tail: ArrayLike, upper: ArrayLike) -> Array:
    """The numbers beyond which there is the probability ``tail``. Their derivatives are those of the equation.

    The smaller tail has more digits: of the level q this is q up to a half, and 1 - q above.

    Args:
        means: of the Gaussians (S, ...).
        variances: of them (S, ...).
        tail: probabilities, of any shape; below the smallest normal number, that one.
        upper: whether they are those of larger numbers, of this shape too.

    Returns:
        Quantiles, (*tail.shape, ...).

    Example:
        >>> sides = jnp.array([False, True])
        >>> found = mixture_quantiles(jnp.array([-1.0, 1.0]), jnp.ones(2), jnp.array([0.1, 0.1]), sides)
        >>> print(f"{found[0]:.3f} {found[1]:.3f}")
        -1.849 1.849
    """
    dtype = jnp.result_type(means, variances, jnp.float32)
    means, scales = means.astype(dtype), safe_sqrt(variances.astype(dtype))
    tails, tiny = jnp.asarray(tail, dtype), jnp.finfo(dtype).tiny
    tails = jnp.where(jnp.abs(tails) < tiny, tiny, tails)
    sides = jnp.where(jnp.asarray(upper), -1, 1)
    found = jax.lax.map(lambda each: _quantile(means, scales, *each), (tails.ravel(), sides.ravel()))
    return found.reshape(*tails.shape, *means.shape[1:])


def _beyond(means: Array, scales: Array, y: Array, side: Array | int) -> Array:
    """The probability of less than y (``side`` 1), or of more (-1)."""

    def of_one(mean: Array, scale: Array) -> Array:
        away, certain = side * (y - mean), scale <= 0
        z = jnp.clip(away / jnp.where(certain, _NARROW, scale), -_FAR, _FAR)
        return jnp.where(certain, away >= 0, ndtr(z))

    return jax.vmap(of_one)(means, scales).mean(0)


def _quantile(means: Array, scales: Array, tail: Array, side: Array) -> Array:
    def excess(means: Array, scales: Array, y: Array) -> Array:
        return side * (_beyond(means, scales, y, side) - tail)

    fixed = jax.lax.stop_gradient((means, scales))
    y = jax.lax.stop_gradient(_root(partial(excess, *fixed), fixed, side * ndtri(tail)))
    # The theorem of implicit functions, in a term whose value is zero.
    step = -excess(means, scales, y) * _inverse(_density(*fixed, y))
    return y + step - jax.lax.stop_gradient(step)


def _density(means: Array, scales: Array, y: Array) -> Array:
    return jax.vmap(lambda mean, scale: norm.pdf(y, mean, scale))(means, scales).mean(0)


def _inverse(slope: Array) -> Array:
    return 1 / jnp.where(slope > jnp.finfo(slope.dtype).tiny, slope, jnp.inf)


def _root(excess: Callable[[Array], Array], gaussians: tuple[Array, Array], standard: Array) -> Array:
    """Newton's steps where they stay between the ends and get shorter, halves elsewhere; ``standard`` is the quantile
    of N(0, 1)."""
    of_each = gaussians[0] + gaussians[1] * standard
    info = jnp.finfo(of_each.dtype)
    close = 0.1 * info.eps**0.5 * gaussians[1].min(0)

    def unfinished(state: tuple[Array, ...]) -> Array:
        _, low, high, _, step = state
        return (jnp.abs(step) > close) & (high - low > close)

    def some_unfinished(state: tuple[Array, ...]) -> Array:
        return (state[0] < info.nmant + 12) & unfinished(state).any()

    def halve_or_step(state: tuple[Array, ...]) -> tuple[Array, ...]:
        count, low, high, y, before = state
        above, going = excess(y), unfinished(state)
        low, high = jnp.where(going & (above < 0), y, low), jnp.where(going & (above >= 0), y, high)
        slope = _inverse(_density(*gaussians, y))
        step = -above * slope
        newton = (slope > 0) & (y + step >= low) & (y + step <= high) & (jnp.abs(step) < 0.5 * jnp.abs(before))
        step = jnp.where(newton, step, low + 0.5 * (high - low) - y)
        return count + 1, low, high, jnp.where(going, y + step, y), jnp.where(going, step, 0)

    low, high = of_each.min(0), of_each.max(0)
    start: tuple[Array, ...] = jnp.zeros((), int), low, high, low + 0.5 * (high - low), high - low
    return jax.lax.while_loop(some_unfinished, halve_or_step, start)[3]
