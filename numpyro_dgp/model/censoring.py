r"""Log densities of censored observations in the tails.

Of an observation that is censored at y, NumPyro's ``RightCensoredDistribution`` knows :math:`\log(1 - F(y))` by the
difference, which has no digits left where F(y) rounds to one: it stays at the logarithm of the rounding error, with
a derivative of zero. The outer nodes of a quadrature rule are there.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr

from numpyro_dgp._typing import Array

__all__ = ["CENSORED", "log_density"]

CENSORED = dist.LeftCensoredDistribution, dist.RightCensoredDistribution


def log_density(d: Any, y: Array) -> Array:
    """``d.log_prob(y)``, of censored observations by the logarithm of the tail itself where it is known.

    Args:
        d: a distribution.
        y: observations.

    Example:
        >>> times = dist.RightCensoredDistribution(dist.Exponential(1.0), censored=jnp.array([0, 1]))
        >>> y = jnp.array([1.0, 50.0])
        >>> print(f"{times.log_prob(y)[1]:.1f}", log_density(times, y))  # in single precision
        -15.9 [ -1. -50.]
    """
    if not isinstance(d, CENSORED):
        return d.log_prob(y)
    tail = _log_tail(d.base_dist, y, right=isinstance(d, dist.RightCensoredDistribution))
    return d.log_prob(y) if tail is None else jnp.where(d.censored, tail, d.base_dist.log_prob(y))


def _log_tail(d: Any, y: Array, right: bool) -> Array | None:
    """The log probability of more than y, or of less; ``None`` where it is not known."""
    if isinstance(d, dist.LogNormal):
        return _log_tail(d.base_dist, jnp.log(y), right)
    if isinstance(d, dist.Normal):
        z = (y - d.loc) / d.scale
        return log_ndtr(-z if right else z)
    if isinstance(d, dist.Exponential | dist.Weibull):
        hazard = d.rate * y if isinstance(d, dist.Exponential) else (y / d.scale) ** d.concentration
        return -hazard if right else jnp.log(-jnp.expm1(-hazard))
    return None
