"""A stationary kernel whose spectral density is a mixture of Gaussians."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import require_finite
from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.algebra.distances import squared_distances
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.covariance import of_both
from numpyro_dgp.kernels.hyperparameters import lists_as_arrays, require_positive_array

__all__ = ["SpectralMixture"]


@pytree
class SpectralMixture(Kernel):
    r"""Waves that lose their phase, one for each component q of a Gaussian mixture over frequencies:

    .. math:: k(x, x') = \sum_q \sigma_q^2 \exp\Bigl(-\tfrac12 \sum_d \frac{r_d^2}{\ell_{qd}^2}\Bigr)
              \cos\Bigl(2\pi \sum_d \mu_{qd}\, r_d\Bigr), \qquad r = x - x' .

    The spectral density is that of Gaussians around :math:`\pm 2\pi\mu_q` with standard deviations
    :math:`1 / \ell_{qd}` in radians per unit. The bound has many optima in the frequencies: start them at peaks of a
    periodogram, or at several places.

    Args:
        variance: :math:`\sigma^2` (Q,), squared units of the output.
        frequency: :math:`\mu` (Q, D), or (Q,) for one column; turns per unit of input, of either sign.
        lengthscale: :math:`\ell` (Q, D), or (Q,) for the same in all columns, units of the input: after about so long
            a wave has forgotten its phase.

    Raises:
        ValueError: variances or lengthscales that are not positive, frequencies that are not finite, shapes that do not
            fit together or to the inputs.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import SpectralMixture
        >>> kernel = SpectralMixture([1.0, 0.5], frequency=[1.0, 0.0], lengthscale=[2.0, 1.0])
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(kernel(x[:1], x)).round(3))
        [[ 1.5   -0.528  1.186]]

    Source: Wilson and Adams (2013); in several columns the cosine of the sum, which belongs to Gaussians
    at plus and minus :math:`\mu_q`, takes the place of a product of cosines.
    """

    variance: Any
    frequency: Any
    lengthscale: Any

    def __post_init__(self) -> None:
        lists_as_arrays(self, "variance", "frequency", "lengthscale")
        shapes = [jnp.shape(a) for a in (self.variance, self.frequency, self.lengthscale)]
        widths = {shape[1] for shape in shapes[1:] if len(shape) == 2}
        if len(shapes[0]) != 1 or any(s[:1] != shapes[0] or len(s) > 2 for s in shapes) or len(widths) > 1:
            raise ValueError(
                "SpectralMixture: expected variance (Q,), frequency (Q, D) or (Q,) and lengthscale (Q, D) or (Q,), got "
                f"{', '.join(map(str, shapes))}: one row per component"
            )
        require_positive_array(self, "variance")
        require_positive_array(self, "lengthscale")
        require_finite("frequency of SpectralMixture", self.frequency, "turns per unit of input, one over the period")

    def _by_component(self, columns: int) -> tuple[Array, Array]:
        """Frequencies (Q, D), and lengthscales (Q, D) or (Q, 1)."""
        frequency, lengthscale = map(jnp.asarray, (self.frequency, self.lengthscale))
        frequency = frequency[:, None] if frequency.ndim == 1 else frequency
        lengthscale = lengthscale[:, None] if lengthscale.ndim == 1 else lengthscale
        if frequency.shape[1] != columns or lengthscale.shape[1] not in (1, columns):
            raise ValueError(
                f"kernel SpectralMixture: expected inputs with {frequency.shape[1]} column(s), as of frequency, got "
                f"{columns}: frequency has shape (Q, D)"
            )
        return frequency, lengthscale

    def _components(self, columns: int) -> list[tuple[Array, Array, Array]]:
        """Variance (), angular frequency (D,) and lengthscale (D,) of every component."""
        frequency, lengthscale = self._by_component(columns)
        lengthscale = jnp.broadcast_to(lengthscale, frequency.shape)
        return list(zip(jnp.asarray(self.variance), 2 * math.pi * frequency, lengthscale, strict=True))

    def evaluate(self, X1: Array, X2: Array) -> Array:
        total: Any = 0
        for variance, omega, lengthscale in self._components(X1.shape[-1]):
            phase = matmul(X1, omega)[..., :, None] - matmul(X2, omega)[..., None, :]
            r2 = squared_distances(*of_both(partial(jnp.multiply, 1 / lengthscale), X1, X2))
            total = total + variance * jnp.exp(-0.5 * r2) * jnp.cos(phase)
        return total

    def diagonal(self, X: Array) -> Array:
        self._by_component(X.shape[-1])
        return jnp.broadcast_to(jnp.sum(self.variance), X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        components = self._components(X.shape[-1])
        total: Any = 0
        for (variance, omega, lengthscale), own in zip(components, jax.random.split(key, len(components)), strict=True):
            frequency_key, phase_key = jax.random.split(own)
            around = jax.random.normal(frequency_key, (X.shape[-1], num), X.dtype) / lengthscale[:, None]
            phase = jax.random.uniform(phase_key, (num,), X.dtype, maxval=2 * math.pi)
            total = total + jnp.sqrt(2 * variance) * jnp.cos(matmul(X, omega[:, None] + around) + phase)
        return total

    def spectral_density(self, omega: Array) -> Array:
        total: Any = 0
        for variance, centre, lengthscale in self._components(omega.shape[-1]):
            peak = variance * jnp.prod(lengthscale * math.sqrt(2 * math.pi))
            for sign in (1, -1):
                z = lengthscale * (omega + sign * centre)
                total = total + 0.5 * peak * jnp.exp(-0.5 * jnp.square(z).sum(-1))
        return total
