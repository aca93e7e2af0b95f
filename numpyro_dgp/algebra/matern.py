r"""Profiles of the half-integer Matern kernels as functions of :math:`q = s^2 = 2 \nu r^2`, with exact derivatives.

.. math:: M_{1/2} = e^{-s}, \quad M_{3/2} = (1 + s)\, e^{-s}, \quad M_{5/2} = (1 + s + \tfrac13 s^2)\, e^{-s}, \qquad
          \frac{dM_{5/2}}{dq} = -\tfrac16 M_{3/2}, \quad \frac{dM_{3/2}}{dq} = -\tfrac12 M_{1/2}, \quad
          \frac{dM_{1/2}}{dq} = -\frac{e^{-s}}{2 s} .

In s the first two cancel at zero distance, where the derivative of the square root is infinite: differentiated as they
are written, the profiles give slopes of a random function the variance zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import safe_sqrt

__all__ = ["matern12", "matern32", "matern52"]

_Pair = tuple[Array, Array]
_COINCIDENT = 32.0  # units in the last place of one lengthscale, within which two points count as one


@jax.custom_jvp
def matern12(q: Array) -> Array:
    """exp(-s), whose derivative at zero counts as zero."""
    return jnp.exp(-safe_sqrt(q))


@matern12.defjvp
def _matern12_jvp(primals: tuple[Array], tangents: tuple[Array]) -> _Pair:
    # The slope has another sign on each side of zero. In a compiled program the distance of equal points may be a
    # rounding error: x / l - x / l with a fused multiply-add.
    s, value = safe_sqrt(*primals), matern12(*primals)
    apart = s > _COINCIDENT * jnp.finfo(s.dtype).eps
    return value, -0.5 * value / jnp.where(apart, s, jnp.inf) * tangents[0]


@jax.custom_jvp
def matern32(q: Array) -> Array:
    """(1 + s) exp(-s)."""
    s = safe_sqrt(q)
    return (1 + s) * jnp.exp(-s)


@matern32.defjvp
def _matern32_jvp(primals: tuple[Array], tangents: tuple[Array]) -> _Pair:
    return matern32(*primals), -0.5 * matern12(*primals) * tangents[0]


@jax.custom_jvp
def matern52(q: Array) -> Array:
    """(1 + s + s^2 / 3) exp(-s)."""
    s = safe_sqrt(q)
    return (1 + s + jnp.square(s) / 3) * jnp.exp(-s)


@matern52.defjvp
def _matern52_jvp(primals: tuple[Array], tangents: tuple[Array]) -> _Pair:
    return matern52(*primals), -matern32(*primals) / 6 * tangents[0]
