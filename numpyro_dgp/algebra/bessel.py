"""Modified Bessel functions of all orders up to a given one, in any precision and with derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import i0e

from numpyro_dgp._typing import Array

__all__ = ["scaled_bessel"]

# Orders above the last one at which the recurrence starts: it forgets the error of its start within a few.
_AHEAD = 20


def scaled_bessel(a: Array, num: int) -> Array:
    r""":math:`e^{-a} I_n(a)` for the orders n from 0 to ``num`` - 1: shape (num,).

    The ratios :math:`r_n = I_n / I_{n-1}` obey :math:`r_n = a / (2n + a\, r_{n+1})`. Taken downwards, errors shrink at
    every order and no digits cancel. It starts at Amos' bound, :math:`a / (n - 1/2 + \sqrt{(n + 1/2)^2 + a^2})`.

    Args:
        a: a positive number.
        num: how many orders.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> print(np.array(scaled_bessel(jnp.array(1.0), 3)).round(3))
        [0.466 0.208 0.05 ]

    Source: Amos (1974).
    """
    last = num + _AHEAD
    start = a / (last - 0.5 + jnp.sqrt((last + 0.5) ** 2 + jnp.square(a)))

    def ratio(above: Array, n: Array) -> tuple[Array, Array]:
        found = a / (2 * n + a * above)
        return found, found

    _, ratios = jax.lax.scan(ratio, start, jnp.arange(1, last, dtype=start.dtype), reverse=True)
    return i0e(a) * jnp.concatenate([jnp.ones(1, start.dtype), jnp.cumprod(ratios[: num - 1])])
