r"""The logarithm of a Gaussian expectation whose integrand may be far narrower than the Gaussian.

Nodes of Gauss-Hermite quadrature cover the Gaussian. A density :math:`p(y \mid v)` as a function of v may be a hundred
times narrower, as where a function is not known away from the data and the noise is small: it then falls between the
nodes, or on one of them. Here the nodes gather around the largest value of the integrand, wherever and however narrow
it is: in :math:`z = (v - \mu) / \sigma`, the trapezoidal rule is applied to

.. math:: \int N(z; 0, 1)\, p(y \mid \mu + \sigma z)\, dz, \qquad z = c + w \sinh u ,

with c the place of the largest value, to about w. The nodes around c are w times their distance in u apart, those
further away by a fixed share of their distance to c. For smooth integrands the error falls exponentially with the
number of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import safe_sqrt

__all__ = ["log_expectation"]

_WIDTH = 1e-3
"""Of the narrowest peaks that are resolved, w, in standard deviations of the Gaussian."""
_REACH = 9.0
"""How far from its mean the Gaussian is integrated, in standard deviations."""
_FIRST, _STRETCH = 33, 5.0
"""Points of the first search for the peak, at sinh of numbers between -5 and 5: up to 74 standard deviations."""
_ZOOMS, _ZOOMED = 4, 9
"""Further searches, between the neighbours of the best point, each four times as fine."""


def log_expectation(
    log_value: Callable[[Array], Array], loc: Array, variance: Array, *, nodes: int = 101, in_turn: bool = False
) -> Array:
    r"""The log of :math:`E[g(v)]` for :math:`v \sim N(\mu, \sigma^2)`, number by number.

    Args:
        log_value: from points of the shape of ``loc`` to :math:`\log g` there, number by number.
        loc: :math:`\mu`.
        variance: :math:`\sigma^2`.
        nodes: of the trapezoidal rule.
        in_turn: points one after the other, where one needs much memory.

    Returns:
        Logarithms, of the shape of ``loc``.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.scipy.stats import norm
        >>> narrow = lambda v: norm.logpdf(0.7, v, 0.01)
        >>> exact = norm.logpdf(0.7, 0.0, jnp.sqrt(1 + 0.01**2))
        >>> print(f"{log_expectation(narrow, jnp.zeros(1), jnp.ones(1))[0]:.3f} {exact:.3f}")
        -1.164 -1.164

    Source: Trefethen and Weideman (2014), for the trapezoidal rule.
    """
    loc, variance = jnp.broadcast_arrays(loc, variance)
    scale = safe_sqrt(variance)

    def integrand(z: Array) -> Array:
        """Logarithms at points (K, ...)."""
        points = loc + scale * z
        values = jax.lax.map(log_value, points) if in_turn else jax.vmap(log_value)(points)
        return values - 0.5 * jnp.square(z) - 0.5 * math.log(2 * math.pi)

    centre = jax.lax.stop_gradient(_peak(integrand, loc))
    end = jnp.arcsinh((_REACH + jnp.abs(centre)) / _WIDTH)
    u = jnp.linspace(-1, 1, nodes, dtype=loc.dtype).reshape(-1, *(1,) * loc.ndim) * end
    step = 2 * end / (nodes - 1)
    return logsumexp(integrand(centre + _WIDTH * jnp.sinh(u)) + jnp.log(_WIDTH * jnp.cosh(u) * step), 0)


def _peak(integrand: Callable[[Array], Array], like: Array) -> Array:
    """Where the integrand is largest, of the shape of ``like``."""
    first = jnp.sinh(jnp.linspace(-_STRETCH, _STRETCH, _FIRST, dtype=like.dtype))
    z = jnp.broadcast_to(first.reshape(-1, *(1,) * like.ndim), (_FIRST, *like.shape))
    share = jnp.linspace(0, 1, _ZOOMED, dtype=like.dtype).reshape(-1, *(1,) * like.ndim)
    best, low, high = _best(integrand, z)
    for _ in range(_ZOOMS):
        best, low, high = _best(integrand, low + share * (high - low))
    return best


def _best(integrand: Callable[[Array], Array], z: Array) -> tuple[Array, Array, Array]:
    """The point (...) of the largest value among (K, ...), and its neighbours.

    Some densities are NaN or infinite far away, where what they are divided by rounds to zero.
    """
    values = integrand(z)
    at = jnp.argmax(jnp.where(values < jnp.inf, values, -jnp.inf), 0)[None]
    places = at, jnp.maximum(at - 1, 0), jnp.minimum(at + 1, len(z) - 1)
    best, low, high = (jnp.take_along_axis(z, place, 0)[0] for place in places)
    return best, low, high
