"""Random walks: Brownian motion and its integral."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import expect
from numpyro_dgp._fields import finite, number
from numpyro_dgp._typing import Array, Number, pytree
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.math.linalg import safe_sqrt

__all__ = ["Brownian", "IntegratedBrownian"]


@pytree
class Brownian(Kernel):
    r"""Brownian motion (Wiener process) from :math:`x_0`, both ways:

    .. math:: k(x, x') = \sigma^2 \min(|x - x_0|, |x' - x_0|) \text{ on one side of } x_0,
              \quad 0 \text{ across it} .

    It is zero at :math:`x_0` and has independent increments; ``Brownian() + Constant()`` starts anywhere. In units of
    mean zero (``dgp.initial.Standardizer``) the origin is in the middle of the data unless you set it. It has no
    spectral density; random features are waves of :math:`\log |x - x_0|`, in which
    :math:`f(x) / \sqrt{|x - x_0|}` is stationary.

    Args:
        variance: :math:`\sigma^2`, squared units of the output per unit of input.
        origin: :math:`x_0`, units of the input.

    Raises:
        ValueError: a variance that is not positive, an origin that is not finite; where it is called, more than one
            column.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Brownian
        >>> x = jnp.array([[-1.0], [0.5], [2.0]])
        >>> print(Brownian()(x, x))
        [[1.  0.  0. ]
         [0.  0.5 0.5]
         [0.  0.5 2. ]]

    Source: Rasmussen and Williams (2006), appendix B.
    """

    num_derivatives = 0

    variance: Number = number(1.0)
    origin: Number = finite(0.0, "a place along the input, 0.0")

    def _from_origin(self, X: Array) -> Array:
        """The column of inputs (..., N, 1), counted from the origin: (..., N)."""
        expect(X.shape[-1] == 1, "one input column", f"shape {X.shape}", "pick one, kernel.on(0)", type(self).__name__)
        return X[..., 0] - self.origin

    def covariance(self, nearer: Array, further: Array) -> Array:
        """Of two values on one side of the origin, at distances from it of which the first is not the larger one."""
        return nearer

    def _weights(self, omega: Array) -> Array:
        """Relative to a Cauchy distribution of scale 1/2, the spectral density in logarithms of distances."""
        return jnp.ones_like(omega)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        a, b = self._from_origin(X1)[..., :, None], self._from_origin(X2)[..., None, :]
        near, far = jnp.minimum(jnp.abs(a), jnp.abs(b)), jnp.maximum(jnp.abs(a), jnp.abs(b))
        return self.variance * jnp.where(a * b > 0, self.covariance(near, far), 0)  # a b > 0: on one side of the origin

    def diagonal(self, X: Array) -> Array:
        distance = jnp.abs(self._from_origin(X))
        return self.variance * self.covariance(distance, distance)

    def features(self, key: Array, X: Array, num: int) -> Array:
        frequency_key, phase_key = jax.random.split(key)
        # E[cos(ω u)] = e^(-u/2) for ω from a Cauchy distribution of scale 1/2
        omega = 0.5 * jax.random.cauchy(frequency_key, (num,), X.dtype)
        right, left = jax.random.uniform(phase_key, (2, num), X.dtype, maxval=2 * math.pi)
        x = self._from_origin(X)[..., None]
        distance = jnp.abs(x)
        # sqrt(2 k(x, x) w(ω)) cos(ω log|x - x_0| + phase)
        scale = safe_sqrt(2 * self.variance * self.covariance(distance, distance) * self._weights(omega))
        time = jnp.log(jnp.maximum(distance, jnp.finfo(x.dtype).tiny))
        return scale * jnp.cos(omega * time + jnp.where(x > 0, right, left))  # both sides are independent


@pytree
class IntegratedBrownian(Brownian):
    r"""The integral of Brownian motion from :math:`x_0`, both ways; its mean given data is a cubic spline.

    .. math:: k(x, x') = \tfrac16 \sigma^2 a^2 (3 b - a), \quad a \le b \text{ the distances of x and x' from } x_0

    on one side of :math:`x_0`, and zero across it. Value and slope are zero at :math:`x_0`:
    ``IntegratedBrownian() + Linear() + Constant()`` starts anywhere, in any direction.

    Args:
        variance: :math:`\sigma^2`, squared units of the output per cubed unit of input.
        origin: :math:`x_0`, units of the input.

    Raises:
        ValueError: as :class:`Brownian`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import IntegratedBrownian
        >>> x = jnp.array([[1.0], [3.0]])
        >>> print(IntegratedBrownian(6.0)(x, x))
        [[ 2.  8.]
         [ 8. 54.]]

    Source: Rasmussen and Williams (2006), section 6.3.1.
    """

    def covariance(self, nearer: Array, further: Array) -> Array:
        return jnp.square(nearer) * (3 * further - nearer) / 6  # a^2 (3 b - a) / 6

    def _weights(self, omega: Array) -> Array:
        r"""The correlation is :math:`\tfrac32 e^{-u/2} - \tfrac12 e^{-3u/2}` at logarithms of distances u apart."""
        # Its density, 3 / (2 π (1/4 + ω^2) (9/4 + ω^2)), over Cauchy's, 1 / (2 π (1/4 + ω^2)).
        return 3 / (2.25 + jnp.square(omega))
