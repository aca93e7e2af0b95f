r"""Log densities of censored and truncated observations in the tails.

For an observation censored at y, NumPyro's ``RightCensoredDistribution`` computes :math:`\log(1 - F(y))` from the
difference, which has no digits left where F(y) rounds to one: the result is constant, with a derivative of zero. The
density of a truncated distribution is divided by the probability of its support, which is
zero in NumPyro where that is far in the tail. The outer nodes of a quadrature rule reach these tails.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr

from numpyro_dgp._typing import Array
from numpyro_dgp.likelihoods.families import is_family

__all__ = ["CENSORED", "log_density"]

CENSORED = dist.LeftCensoredDistribution, dist.RightCensoredDistribution
_TRUNCATED = dist.LeftTruncatedDistribution, dist.RightTruncatedDistribution, dist.TwoSidedTruncatedDistribution


def log_density(d: Any, y: Array) -> Array:
    """``d.log_prob(y)``, computed for censored and truncated observations from the log tail probability where it is
    known.

    Args:
        d: a distribution.
        y: observations.

    Example:
        >>> times = dist.RightCensoredDistribution(dist.Exponential(1.0), censored=jnp.array([0, 1]))
        >>> y = jnp.array([1.0, 50.0])
        >>> print(f"{times.log_prob(y)[1]:.1f}", log_density(times, y))  # in single precision
        -15.9 [ -1. -50.]
        >>> positive = dist.TruncatedNormal(-20.0, 1.0, low=0.0)
        >>> print(positive.log_prob(0.1), f"{log_density(positive, 0.1):.2f}")
        inf 0.99
    """
    if is_family(d, *_TRUNCATED):
        inside = _log_inside(d)
        return d.log_prob(y) if inside is None else d.base_dist.log_prob(y) - inside  # log p(y) - log P(inside)
    if not is_family(d, *CENSORED):
        return d.log_prob(y)
    tail = _log_tail(d.base_dist, y, right=isinstance(d, dist.RightCensoredDistribution))
    # log P(more than y), or less
    return d.log_prob(y) if tail is None else jnp.where(d.censored, tail, d.base_dist.log_prob(y))


def _log_inside(d: Any) -> Array | None:
    """The log probability of the support of a truncated distribution under the full one; ``None`` where not known."""
    if isinstance(d, dist.LeftTruncatedDistribution):
        return _log_tail(d.base_dist, d.low, right=True)
    if isinstance(d, dist.RightTruncatedDistribution):
        return _log_tail(d.base_dist, d.high, right=False)
    # From the side where both tails are smaller: their difference has more digits.
    sign = jnp.where(d.low > d.base_dist.loc, -1.0, 1.0)
    # Symmetric about loc: 2 loc - end has below it what the end has above it.
    near, far = jnp.where(sign < 0, d.low, d.high), jnp.where(sign < 0, d.high, d.low)
    larger, smaller = (
        _log_tail(d.base_dist, d.base_dist.loc + sign * (end - d.base_dist.loc), False) for end in (near, far)
    )
    if larger is None or smaller is None:
        return None
    return larger + jax.nn.log1mexp(larger - smaller)  # log(P - p) = log P + log(1 - p / P)


def _log_tail(d: Any, y: Array, right: bool) -> Array | None:
    """The log probability of more than y, or of less; ``None`` where it is not known."""
    if is_family(d, dist.LogNormal, methods=("cdf",)):
        return _log_tail(d.base_dist, jnp.log(y), right)
    if is_family(d, dist.Normal, dist.Logistic, dist.Laplace, methods=("cdf",)):
        z = (y - d.loc) / d.scale
        return _log_lower_tail(d, -z if right else z)  # P(Z > z) = P(Z < -z)
    if is_family(d, dist.Exponential, dist.Weibull, methods=("cdf",)):
        # P(T > y) = e^-H, with H = rate y or (y / scale)^k
        hazard = d.rate * y if isinstance(d, dist.Exponential) else (y / d.scale) ** d.concentration
        return -hazard if right else jnp.log(-jnp.expm1(-hazard))
    return None


def _log_lower_tail(d: Any, z: Array) -> Array:
    """The log probability of less than z of the symmetric distribution with location 0 and scale 1."""
    if isinstance(d, dist.Normal):
        return log_ndtr(z)
    if isinstance(d, dist.Logistic):
        return jax.nn.log_sigmoid(z)
    # Laplace: e^z / 2 below zero, 1 - e^-z / 2 above
    return jnp.where(z < 0, jnp.minimum(z, 0.0) - jnp.log(2.0), jnp.log1p(-0.5 * jnp.exp(-jnp.abs(z))))
