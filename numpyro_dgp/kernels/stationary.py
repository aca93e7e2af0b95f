r"""Stationary kernels, functions of the scaled distance

.. math:: r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2 .

Source: Salimbeni (2020), section 1.4; spectral densities from the Fourier transform of each profile.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

from numpyro_dgp._checks import require_count, require_positive, require_scalar, violated
from numpyro_dgp._typing import Array, Number, pytree
from numpyro_dgp.algebra.bessel import scaled_bessel
from numpyro_dgp.algebra.distances import squared_distances
from numpyro_dgp.algebra.linalg import matmul, products_in_rows, safe_sqrt
from numpyro_dgp.algebra.matern import matern12, matern32, matern52
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.state_space_forms import (
    ConstantState,
    MaternState,
    RotatingState,
    StateSpaceForm,
    SumState,
    no_state_space,
    periodic_weights,
)
from numpyro_dgp.kernels.terms import Term

__all__ = ["RBF", "Cosine", "Matern12", "Matern32", "Matern52", "Periodic", "RationalQuadratic"]


def _phase_features(key: Array, projected: Array) -> Array:
    """``sqrt(2) cos(omega x + phase)`` with a uniform phase: one random function per frequency."""
    phase = jax.random.uniform(key, projected.shape[-1:], projected.dtype, maxval=2 * jnp.pi)
    return math.sqrt(2) * jnp.cos(projected + phase)


@pytree
class Stationary(Kernel):
    """A kernel ``variance * profile(r^2)``.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.
    """

    variance: Number = 1.0
    lengthscale: Number = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.lengthscale, list | tuple):
            object.__setattr__(self, "lengthscale", jnp.asarray(self.lengthscale))
        require_scalar(type(self).__name__, "variance", self.variance)
        require_positive(type(self).__name__, "variance", self.variance)
        require_positive(type(self).__name__, "lengthscale", self.lengthscale)

    def profile(self, r2: Array) -> Array:
        """The correlation as a function of the squared scaled distance."""
        raise NotImplementedError

    def frequencies(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        """Draws from the normalised spectral density at unit lengthscale, shape (D, num)."""
        raise ValueError(
            f"{type(self).__name__} has no frequencies, which function draws need: define "
            "frequencies(key, shape, dtype) on the kernel, or draw at fixed inputs with f.joint(x)"
        )

    def _scale(self, X: Array) -> Array:
        lengthscale = jnp.asarray(self.lengthscale)
        if lengthscale.ndim > 1 or (lengthscale.ndim == 1 and lengthscale.shape[0] not in (1, X.shape[-1])):
            raise ValueError(
                f"{type(self).__name__}: expected a lengthscale of shape () or ({X.shape[-1]},) for inputs "
                f"of shape {X.shape}, got {lengthscale.shape}: one lengthscale per input column"
            )
        return X / lengthscale

    def _one_lengthscale(self) -> Array:
        """The lengthscale as a single number, for kernels of time."""
        if jnp.size(self.lengthscale) != 1:
            raise no_state_space(type(self).__name__, f" with lengthscales of shape {jnp.shape(self.lengthscale)}")
        return jnp.reshape(self.lengthscale, ())

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.variance * self.profile(squared_distances(self._scale(X1), self._scale(X2)))

    def diagonal(self, X: Array) -> Array:
        return jnp.broadcast_to(self.variance, X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        frequency_key, phase_key = jax.random.split(key)
        omega = self.frequencies(frequency_key, (X.shape[-1], num), X.dtype)
        return jnp.sqrt(self.variance) * _phase_features(phase_key, matmul(self._scale(X), omega))


@pytree
class RBF(Stationary):
    r"""Squared exponential (exponentiated quadratic): :math:`\sigma^2 \exp(-r^2 / 2)`.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import RBF
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(RBF(variance=2.0, lengthscale=0.5)(x[:1], x)).round(3))
        [[2.    1.213 0.271]]

    Source: Salimbeni (2020), section 1.4.
    """

    def profile(self, r2: Array) -> Array:
        return jnp.exp(-0.5 * r2)

    def frequencies(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return jax.random.normal(key, shape, dtype)

    def spectral_density(self, omega: Array) -> Array:
        lengthscale = jnp.broadcast_to(self.lengthscale, omega.shape[-1:])
        volume = jnp.prod(lengthscale * math.sqrt(2 * math.pi))
        return self.variance * volume * jnp.exp(-0.5 * jnp.square(lengthscale * omega).sum(-1))

    def tilts(self, dims: int) -> tuple[Term, ...]:
        if type(self) is not RBF:
            return super().tilts(dims)
        variance = jnp.asarray(self.variance)
        return (Term(jnp.log(variance), jnp.zeros(dims, variance.dtype) + 1 / jnp.square(self.lengthscale)),)


@pytree
class _Matern(Stationary):
    """Shared by the half-integer Materns: a Student-t spectrum with ``2 nu`` degrees of freedom."""

    @property
    def nu(self) -> float:
        raise NotImplementedError

    @property
    def num_derivatives(self) -> int:
        """How many derivatives the random functions have, in mean square."""
        return math.ceil(self.nu) - 1

    def frequencies(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        normal_key, gamma_key = jax.random.split(key)
        precision = jax.random.gamma(gamma_key, self.nu, shape[-1:], dtype) / self.nu
        return jax.random.normal(normal_key, shape, dtype) / jnp.sqrt(precision)

    def spectral_density(self, omega: Array) -> Array:
        D, nu = omega.shape[-1], self.nu
        lengthscale = jnp.broadcast_to(self.lengthscale, omega.shape[-1:])
        log_constant = (
            D * math.log(2) + 0.5 * D * math.log(math.pi) + gammaln(nu + 0.5 * D) - gammaln(nu) + nu * math.log(2 * nu)
        )
        base = 2 * nu + jnp.square(lengthscale * omega).sum(-1)
        volume = self.variance * jnp.prod(lengthscale)
        return volume * jnp.exp(log_constant - (nu + 0.5 * D) * jnp.log(base))

    def state_space(self, order: int = 8) -> StateSpaceForm:
        rate = math.sqrt(2 * self.nu) / self._one_lengthscale()
        return MaternState(jnp.asarray(self.variance), rate, self.num_derivatives + 1)


@pytree
class Matern12(_Matern):
    r"""Exponential (Ornstein-Uhlenbeck): :math:`\sigma^2 e^{-r}`; draws are continuous only.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Matern12
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(Matern12(variance=2.0, lengthscale=0.5)(x[:1], x)).round(3))
        [[2.    0.736 0.271]]

    Source: Salimbeni (2020), section 1.4.
    """

    nu = 0.5

    def profile(self, r2: Array) -> Array:
        return matern12(r2)


@pytree
class Matern32(_Matern):
    r"""Matern 3/2: :math:`\sigma^2 (1 + \sqrt 3 r)\, e^{-\sqrt 3 r}`; draws differentiable once.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Matern32
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(Matern32(variance=2.0, lengthscale=0.5)(x[:1], x)).round(3))
        [[2.    0.967 0.279]]

    Source: Salimbeni (2020), section 1.4.
    """

    nu = 1.5

    def profile(self, r2: Array) -> Array:
        return matern32(3 * r2)


@pytree
class Matern52(_Matern):
    r"""Matern 5/2: :math:`\sigma^2 (1 + \sqrt 5 r + \tfrac53 r^2)\, e^{-\sqrt 5 r}`; differentiable twice.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Matern52
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(Matern52(variance=2.0, lengthscale=0.5)(x[:1], x)).round(3))
        [[2.    1.048 0.277]]

    Source: Salimbeni (2020), section 1.4.
    """

    nu = 2.5

    def profile(self, r2: Array) -> Array:
        return matern52(5 * r2)


@pytree
class RationalQuadratic(Stationary):
    r"""Rational quadratic: :math:`\sigma^2 (1 + r^2 / 2\alpha)^{-\alpha}`, a mixture of RBFs over lengthscales.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).
        alpha: :math:`\alpha`, a number; the smaller, the slower the decay.

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import RationalQuadratic
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(RationalQuadratic(alpha=0.5)(x[:1], x)).round(3))
        [[1.    0.894 0.707]]

    Source: Salimbeni (2020), section 1.4.
    """

    alpha: Number = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(type(self).__name__, "alpha", self.alpha)

    def profile(self, r2: Array) -> Array:
        return jnp.exp(-self.alpha * jnp.log1p(0.5 * r2 / self.alpha))

    def frequencies(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        normal_key, gamma_key = jax.random.split(key)
        precision = jax.random.gamma(gamma_key, self.alpha, shape[-1:], dtype) / self.alpha
        return jax.random.normal(normal_key, shape, dtype) * jnp.sqrt(precision)


@pytree
class Periodic(Stationary):
    r"""Periodic: :math:`\sigma^2 \exp\bigl(-2 \sum_d \sin^2(\pi (x_d - x'_d)/\tau_d) / \ell_d^2\bigr)`.

    It is an RBF on the circle :math:`(\cos 2\pi x/\tau, \sin 2\pi x/\tau)`, and computed as one.

    Args:
        period: :math:`\tau`, units of the input; a number, or (D,).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Periodic
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(Periodic(period=1.0)(x[:1], x)).round(3))
        [[1.    0.135 1.   ]]

    Source: Salimbeni (2020), section 1.4.
    """

    period: Number = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(type(self).__name__, "period", self.period)

    def _scale(self, X: Array) -> Array:
        angle = 2 * math.pi * X / self.period
        return jnp.concatenate([super()._scale(jnp.cos(angle)), super()._scale(jnp.sin(angle))], -1)

    def profile(self, r2: Array) -> Array:
        return jnp.exp(-0.5 * r2)

    def features(self, key: Array, X: Array, num: int) -> Array:
        frequency_key, phase_key = jax.random.split(key)
        omega = jax.random.normal(frequency_key, (2 * X.shape[-1], num), X.dtype)
        return jnp.sqrt(self.variance) * _phase_features(phase_key, matmul(self._scale(X), omega))

    def series(self, X: Array, sizes: tuple[int, ...]) -> Array:
        r"""Of each column :math:`e^{-a} I_0(a) + 2 e^{-a} \sum_n I_n(a) \cos(2\pi n (x - x') / \tau)`, where
        :math:`a = \ell^{-2}`: a constant, and a cosine and a sine of each frequency."""
        D = X.shape[-1]
        rates = 1 / jnp.square(jnp.broadcast_to(self.lengthscale, (D,)))
        total = jnp.sqrt(self.variance) * jnp.ones_like(X[..., :1])
        for angle, rate, size in zip(jnp.moveaxis(2 * math.pi * X / self.period, -1, 0), rates, sizes, strict=True):
            num = (size - 1) // 2
            phase = angle[..., None] * jnp.arange(1, num + 1)
            weights = safe_sqrt(scaled_bessel(rate, num + 1))
            waves = math.sqrt(2) * weights[1:] * jnp.stack([jnp.cos(phase), jnp.sin(phase)])
            constant = jnp.broadcast_to(weights[0], (*X.shape[:-1], 1))
            total = products_in_rows(total, jnp.concatenate([constant, *waves], -1))
        return total

    def state_space(self, order: int = 8) -> StateSpaceForm:
        require_count("Periodic.state_space", "order", order, "order=8")
        if jnp.size(self.period) != 1:
            raise no_state_space("Periodic", f" with periods of shape {jnp.shape(self.period)}")
        weights = periodic_weights(1 / jnp.square(self._one_lengthscale()), order)
        if violated(_holds_enough, weights.sum(-1)):
            raise ValueError(
                f"Periodic.state_space: expected order to be the number of waves that hold all but {_LEFT_OUT:g} of "
                f"the variance, got order={order}, which leaves {1 - float(weights.sum()):.1e} at the lengthscale "
                f"{float(self._one_lengthscale()):.3g}: pass a larger order, or give the lengthscale a prior above"
            )
        frequencies = 2 * math.pi / jnp.reshape(self.period, ()) * jnp.arange(1, order + 1)
        offset, waves = self.variance * weights[0], self.variance * weights[1:]
        return SumState(ConstantState(offset), RotatingState(waves, frequencies.astype(waves.dtype)))


# The share of the variance that a truncated series of a Periodic kernel may lack.
_LEFT_OUT = 1e-4


def _holds_enough(share: Any) -> Any:
    return share > 1 - _LEFT_OUT


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
        return jnp.sqrt(self.variance) * _phase_features(key, angle)

    def series(self, X: Array, sizes: tuple[int, ...]) -> Array:
        angle = self._angle(X)
        return jnp.sqrt(self.variance) * jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)

    def state_space(self, order: int = 8) -> StateSpaceForm:
        weights = jnp.reshape(self.variance, (1,))
        return RotatingState(weights, jnp.reshape(2 * math.pi / self._one_lengthscale(), (1,)))
