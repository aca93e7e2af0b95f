"""Periodic stationary kernels, as Fourier series with weights from modified Bessel functions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import i0e

from numpyro_dgp._checks import expected, require_count, violated
from numpyro_dgp._fields import positive
from numpyro_dgp._typing import Array, Number, pytree
from numpyro_dgp.kernels.hyperparameters import by_column
from numpyro_dgp.kernels.state_space_forms import (
    ConstantState,
    RotatingState,
    StateSpaceForm,
    SumState,
    no_state_space,
)
from numpyro_dgp.kernels.stationary import Stationary, phase_features
from numpyro_dgp.math.linalg import matmul, products_in_rows, safe_sqrt

__all__ = ["Cosine", "Periodic", "scaled_bessel"]

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
    start = a / (last - 0.5 + jnp.sqrt((last + 0.5) ** 2 + jnp.square(a)))  # Amos' bound on r_n at the last n

    def ratio(above: Array, n: Array) -> tuple[Array, Array]:
        found = a / (2 * n + a * above)
        return found, found

    _, ratios = jax.lax.scan(ratio, start, jnp.arange(1, last, dtype=start.dtype), reverse=True)
    # e^-a I_n(a) = e^-a I_0(a) r_1 ... r_n
    return i0e(a) * jnp.concatenate([jnp.ones(1, start.dtype), jnp.cumprod(ratios[: num - 1])])


# The share of the variance that a truncated series of a Periodic kernel may lack.
_LEFT_OUT = 1e-4


@pytree
class Periodic(Stationary):
    r"""Periodic: :math:`\sigma^2 \exp\bigl(-2 \sum_d \sin^2(\pi (x_d - x'_d)/\tau_d) / \ell_d^2\bigr)`.

    It is an RBF on the circle :math:`(\cos 2\pi x/\tau, \sin 2\pi x/\tau)`, and computed as one.

    Args:
        period: :math:`\tau`, units of the input; a number, or (D,).

    Raises:
        ValueError: a value that is not positive, or lengthscales or periods that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Periodic
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(Periodic(period=1.0)(x[:1], x)).round(3))
        [[1.    0.135 1.   ]]

    Source: Salimbeni (2020), section 1.4.
    """

    period: Number = positive(1.0)

    def _require_columns(self, columns: int) -> None:
        super()._require_columns(columns)
        by_column(self, "period", columns)

    def _angle(self, X: Array) -> Array:
        return 2 * math.pi * X / by_column(self, "period", X.shape[-1])

    def _scale(self, X: Array) -> Array:
        angle = self._angle(X)
        # Squared distance of points on circles: 4 sin^2(π (x - x') / τ) / l^2 in each column
        return jnp.concatenate([super()._scale(jnp.cos(angle)), super()._scale(jnp.sin(angle))], -1)

    def profile(self, r2: Array) -> Array:
        return jnp.exp(-0.5 * r2)

    def features(self, key: Array, X: Array, num: int) -> Array:
        frequency_key, phase_key = jax.random.split(key)
        omega = jax.random.normal(frequency_key, (2 * X.shape[-1], num), X.dtype)
        return jnp.sqrt(self.variance) * phase_features(phase_key, matmul(self._scale(X), omega))

    def series(self, X: Array, sizes: tuple[int, ...]) -> Array:
        r"""Of each column :math:`e^{-a} I_0(a) + 2 e^{-a} \sum_n I_n(a) \cos(2\pi n (x - x') / \tau)`, where
        :math:`a = \ell^{-2}`: a constant, and a cosine and a sine of each frequency."""
        rates = 1 / jnp.square(self._lengthscales(X.shape[-1]))
        total = jnp.sqrt(self.variance) * jnp.ones_like(X[..., :1])
        for angle, rate, size in zip(jnp.moveaxis(self._angle(X), -1, 0), rates, sizes, strict=True):
            num = (size - 1) // 2
            phase = angle[..., None] * jnp.arange(1, num + 1)
            weights = safe_sqrt(scaled_bessel(rate, num + 1))  # sqrt(e^-a I_n(a))
            waves = math.sqrt(2) * weights[1:] * jnp.stack([jnp.cos(phase), jnp.sin(phase)])
            constant = jnp.broadcast_to(weights[0], (*X.shape[:-1], 1))
            # A product over columns has all products of their functions.
            total = products_in_rows(total, jnp.concatenate([constant, *waves], -1))
        return total

    def state_space(self, order: int = 8) -> StateSpaceForm:
        require_count("order", order, "order=8")
        if jnp.size(self.period) != 1:
            raise no_state_space("Periodic", f" with periods of shape {jnp.shape(self.period)}")
        # Variances of the waves, e^-a I_0(a) and 2 e^-a I_n(a): all of them add up to one.
        weights = scaled_bessel(1 / jnp.square(self._one_lengthscale()), order + 1).at[1:].multiply(2)
        if violated(_holds_enough, weights.sum(-1)):
            raise expected(
                f"an order with all but {_LEFT_OUT:g} of the variance",
                f"order={order}, which leaves {1 - float(weights.sum()):.1e} at {float(self._one_lengthscale()):.3g}",
                "pass a larger order, or a prior of larger lengthscales",
            )
        frequencies = 2 * math.pi / jnp.reshape(self.period, ()) * jnp.arange(1, order + 1)
        offset, waves = self.variance * weights[0], self.variance * weights[1:]
        return SumState(ConstantState(offset), RotatingState(waves, frequencies.astype(waves.dtype)))


@pytree
class Cosine(Stationary):
    r"""Cosine: :math:`\sigma^2 \cos\bigl(2\pi \sum_d (x_d - x'_d)/\ell_d\bigr)`; rank two.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: the period in every column, in units of the input; a number, or (D,).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Cosine
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(Cosine(lengthscale=3.0)(x[:1], x)).round(3))
        [[ 1.   0.5 -0.5]]

    Source: Salimbeni (2020), section 1.4.
    """

    def _angle(self, X: Array) -> Array:
        return 2 * math.pi * self._scale(X).sum(-1)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.variance * jnp.cos(self._angle(X1)[..., :, None] - self._angle(X2)[..., None, :])

    def features(self, key: Array, X: Array, num: int) -> Array:
        angle = jnp.broadcast_to(self._angle(X)[..., None], (*X.shape[:-1], num))
        return jnp.sqrt(self.variance) * phase_features(key, angle)

    def series(self, X: Array, sizes: tuple[int, ...]) -> Array:
        angle = self._angle(X)
        # cos(u - u') = cos u cos u' + sin u sin u'
        return jnp.sqrt(self.variance) * jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)

    def state_space(self, order: int = 8) -> StateSpaceForm:
        weights = jnp.reshape(self.variance, (1,))
        return RotatingState(weights, jnp.reshape(2 * math.pi / self._one_lengthscale(), (1,)))


def _holds_enough(share: Any) -> Any:
    return share > 1 - _LEFT_OUT
