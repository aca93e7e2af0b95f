r"""What a standard normal number is above a threshold on average, and its logarithm; the largest of some numbers.

.. math:: h(z) = E[(z + \epsilon)_+] = \varphi(z) + z\, \Phi(z), \qquad \epsilon \sim N(0, 1)
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

from numpyro_dgp._typing import Array

__all__ = ["largest", "log_expected_excess"]

_TAIL = -4.0
_TERMS = 24


def log_expected_excess(z: Array) -> Array:
    r""":math:`\log h(z)`, with all digits and finite derivatives for any z whose square is finite.

    Below -4 the two terms of h cancel. There, with :math:`t = -z` and the continued fraction of Mills' ratio,
    :math:`\Phi(-t) / \varphi(t) = 1 / (t + r)`, :math:`r = 1 / (t + 2 / (t + 3 / (t + \dots)))`, nothing is subtracted:

    .. math:: h(-t) = \varphi(t)\, \frac{r}{t + r} .

    Args:
        z: numbers of any shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.algebra.expected_excess import log_expected_excess
        >>> print(log_expected_excess(jnp.array([0.0, -40.0])).round(3))  # log(1 / sqrt(2 pi)), and -800 - ...
        [  -0.919 -808.299]

    Source: Ament et al. (2023), section 4.1, for the logarithm; here by a continued fraction.
    """
    tail = z < _TAIL
    near, t = jnp.maximum(z, _TAIL), jnp.maximum(-z, -_TAIL)
    r = jnp.zeros_like(t)
    for k in range(_TERMS, 0, -1):
        r = k / (t + r)
    far = -0.5 * (jnp.square(t) + math.log(2 * math.pi)) + jnp.log(r) - jnp.log(t + r)
    density = jnp.exp(-0.5 * jnp.square(near)) / math.sqrt(2 * math.pi)
    return jnp.where(tail, far, jnp.log(density + near * ndtr(near)))


def largest(values: Array) -> Array:
    """The largest numbers along the last axis, by their places.

    The derivative of ``values.max(-1)`` looks for the entries that equal the maximum. XLA may compute these anew, with
    other rounding, so that there are none, and divides zero by zero.
    """
    place = jax.lax.stop_gradient(values).argmax(-1)
    return jnp.take_along_axis(values, place[..., None], -1)[..., 0]
