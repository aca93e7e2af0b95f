r"""Stationary kernels, functions of the scaled distance

.. math:: r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2 .

Source: Salimbeni (2020), section 1.4; spectral densities from the Fourier transform of each profile.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

from numpyro_dgp._typing import Array, Number, pytree
from numpyro_dgp.algebra.distances import squared_distances
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.algebra.matern import matern12, matern32, matern52
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.covariance import of_both
from numpyro_dgp.kernels.hyperparameters import by_column, require_number, require_positive_array
from numpyro_dgp.kernels.state_space_forms import MaternState, StateSpaceForm, no_state_space
from numpyro_dgp.kernels.terms import Term

__all__ = ["RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic", "Stationary", "phase_features"]


def phase_features(key: Array, projected: Array) -> Array:
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
        require_number(self, "variance")
        require_positive_array(self, "lengthscale")

    def profile(self, r2: Array) -> Array:
        """The correlation as a function of the squared scaled distance."""
        raise NotImplementedError

    def frequencies(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        """Draws from the normalised spectral density at unit lengthscale, shape (D, num)."""
        raise ValueError(
            f"{type(self).__name__} has no frequencies, which function draws need: define "
            "frequencies(key, shape, dtype) on the kernel, or draw at fixed inputs with f.joint(x)"
        )

    def _require_columns(self, columns: int) -> None:
        """Raise unless the hyperparameters fit to inputs with so many columns."""
        by_column(self, "lengthscale", columns)

    def _scale(self, X: Array) -> Array:
        return X / by_column(self, "lengthscale", X.shape[-1])

    def _lengthscales(self, columns: int) -> Array:
        """The lengthscale of every column, (columns,)."""
        return jnp.broadcast_to(by_column(self, "lengthscale", columns), (columns,))

    def _one_lengthscale(self) -> Array:
        """The lengthscale as a single number, for kernels of time."""
        if jnp.size(self.lengthscale) != 1:
            raise no_state_space(type(self).__name__, f" with lengthscales of shape {jnp.shape(self.lengthscale)}")
        return jnp.reshape(self.lengthscale, ())

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.variance * self.profile(squared_distances(*of_both(self._scale, X1, X2)))

    def diagonal(self, X: Array) -> Array:
        self._require_columns(X.shape[-1])
        return jnp.broadcast_to(self.variance, X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        frequency_key, phase_key = jax.random.split(key)
        omega = self.frequencies(frequency_key, (X.shape[-1], num), X.dtype)
        return jnp.sqrt(self.variance) * phase_features(phase_key, matmul(self._scale(X), omega))


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
        lengthscale = self._lengthscales(omega.shape[-1])
        volume = jnp.prod(lengthscale * math.sqrt(2 * math.pi))
        return self.variance * volume * jnp.exp(-0.5 * jnp.square(lengthscale * omega).sum(-1))

    def tilts(self, dims: int) -> tuple[Term, ...]:
        if type(self) is not RBF:
            return super().tilts(dims)
        variance = jnp.asarray(self.variance)
        return (Term(jnp.log(variance), jnp.zeros(dims, variance.dtype) + 1 / jnp.square(self._lengthscales(dims))),)


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
        lengthscale = self._lengthscales(omega.shape[-1])
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
        ValueError: a value that is not positive, an alpha that is not a single number, or lengthscales that do not
            match the columns.

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
        require_number(self, "alpha")

    def profile(self, r2: Array) -> Array:
        return jnp.exp(-self.alpha * jnp.log1p(0.5 * r2 / self.alpha))

    def frequencies(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        normal_key, gamma_key = jax.random.split(key)
        precision = jax.random.gamma(gamma_key, self.alpha, shape[-1:], dtype) / self.alpha
        return jax.random.normal(normal_key, shape, dtype) * jnp.sqrt(precision)
