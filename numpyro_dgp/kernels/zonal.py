r"""Kernels of directions: of two inputs they see the angle between unit vectors, and a factor of each.

.. math:: k(x, x') = r(x)\, r(x')\, \kappa(\theta), \qquad \cos\theta = \hat x \cdot \hat x'
"""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_dgp._typing import Array, Number, pytree, static
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.covariance import of_both
from numpyro_dgp.kernels.hyperparameters import by_column, require_number, require_positive_array
from numpyro_dgp.kernels.stationary import Matern52, Stationary

__all__ = ["Zonal", "ZonalKernel", "by_chord", "extended", "extended_directions", "squared_length"]


class ZonalKernel(Kernel):
    r"""A kernel of directions; layers on ``dgp.Harmonics`` take them.

    .. math:: k(x, x') = r(x)\, r(x')\, \kappa(\theta), \qquad \cos\theta = \hat x \cdot \hat x'

    A subclass defines these methods beside those of every kernel.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import ArcCosine, ZonalKernel
        >>> kernel = ArcCosine(order=1)
        >>> isinstance(kernel, ZonalKernel), float(kernel.by_angle(jnp.zeros(())))
        (True, 1.0)
    """

    def directions(self, X: Array) -> Array:
        """Unit vectors (..., N, E) of inputs (..., N, D)."""
        raise NotImplementedError

    def factor(self, X: Array) -> Array:
        """The factor r(x), (..., N): one by default."""
        return jnp.ones(X.shape[:-1], X.dtype)

    def by_angle(self, angle: Array) -> Array:
        r"""The function :math:`\kappa` of angles between 0 and pi."""
        raise NotImplementedError


def extended(X: Array, weight_variances: Number, bias_variance: Number) -> Array:
    r"""Inputs with a bias, :math:`(\sigma_1 x_1, \dots, \sigma_D x_D, \sigma_0)`: (..., N, D + 1)."""
    bias = jnp.broadcast_to(jnp.sqrt(bias_variance), (*X.shape[:-1], 1))
    return jnp.concatenate([X * jnp.sqrt(weight_variances), bias], -1)


def squared_length(X: Array, weight_variances: Number, bias_variance: Number) -> Array:
    """The squared length of :func:`extended` inputs, (..., N)."""
    return (jnp.square(X) * weight_variances).sum(-1) + bias_variance


def extended_directions(X: Array, weight_variances: Number, bias_variance: Number) -> Array:
    """:func:`extended` inputs as unit vectors."""
    length = jnp.sqrt(squared_length(X, weight_variances, bias_variance))
    return extended(X, weight_variances, bias_variance) / length[..., None]


def by_chord(owner: str, kernel: Kernel, angle: Array, radius: Number = 1.0) -> Array:
    """A kernel of space between points on a sphere, from the angle between them.

    Raises:
        ValueError: a kernel that is not a function of the distance.
    """
    if not isinstance(kernel, Stationary) or not _of_distance(kernel) or jnp.size(kernel.lengthscale) != 1:
        raise ValueError(
            f"{owner}: expected a stationary kernel with a single lengthscale, a function of the distance, got "
            f"{type(kernel).__name__}: dgp.kernels.Matern52(1.0, 0.5)"
        )
    squares = jnp.square(2 * radius * jnp.sin(angle / 2))
    return kernel.variance * kernel.profile(squares / jnp.square(jnp.reshape(kernel.lengthscale, ())))


def _of_distance(kernel: Stationary) -> bool:
    """Whether it has a profile of scaled distances, and not of waves."""
    own = type(kernel)
    return own._scale is Stationary._scale and own.profile is not Stationary.profile


@pytree
class Zonal(ZonalKernel):
    r"""A stationary kernel of directions, which grows with the length of the input: rectified units made smooth.

    .. math:: k(x, x') = \lVert \tilde x\rVert^n \lVert \tilde x'\rVert^n
              \kappa\bigl(\lVert \hat x - \hat x' \rVert\bigr), \qquad
              \tilde x = (\sigma_1 x_1, \dots, \sigma_D x_D, \sigma_0), \quad \hat x = \tilde x / \lVert \tilde x \rVert

    Every function is one on the sphere in D + 1 dimensions, times a power of the length: it is homogeneous, as a layer
    of units :math:`\tau^n` is. Far from the origin, functions of order 1 grow in proportion, and lengthscales of inputs
    with them: standardise inputs.

    Args:
        kernel: :math:`\kappa`, a stationary kernel with a single lengthscale, in units of the unit sphere, on which no
            distance exceeds 2.
        weight_variances: :math:`\sigma_d^2`, a number or (D,): large where the column matters.
        bias_variance: :math:`\sigma_0^2`, a positive number.
        order: n, 0, 1 or 2.

    Raises:
        ValueError: another kernel, a variance that is not positive or of another shape, or another order; where it is
            called, weight variances that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Matern52, Zonal
        >>> x = jnp.array([[0.0], [1.0], [10.0]])
        >>> print(np.array(Zonal(Matern52(1.0, 0.5))(x, x)).round(2))
        [[  1.     0.38   0.47]
         [  0.38   2.     4.93]
         [  0.47   4.93 101.  ]]

    Source: Dutordoir et al. (2020b), section 3.
    """

    kernel: Kernel = Matern52()
    weight_variances: Number = 1.0
    bias_variance: Number = 1.0
    order: int = static(default=1)

    def __post_init__(self) -> None:
        by_chord("Zonal", self.kernel, jnp.zeros(()))
        require_positive_array(self, "weight_variances")
        require_number(self, "bias_variance")
        if self.order not in (0, 1, 2):
            raise ValueError(f"expected Zonal(order=...) to be 0, 1 or 2, got {self.order!r}: 1 grows in proportion")

    def directions(self, X: Array) -> Array:
        return extended_directions(X, by_column(self, "weight_variances", X.shape[-1]), self.bias_variance)

    def factor(self, X: Array) -> Array:
        weights = by_column(self, "weight_variances", X.shape[-1])
        return squared_length(X, weights, self.bias_variance) ** (self.order / 2)

    def by_angle(self, angle: Array) -> Array:
        return by_chord("Zonal", self.kernel, angle)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        between = self.kernel.evaluate(*of_both(self.directions, X1, X2))
        return self.factor(X1)[..., :, None] * self.factor(X2)[..., None, :] * between

    def diagonal(self, X: Array) -> Array:
        return jnp.square(self.factor(X)) * self.kernel.diagonal(X)

    def features(self, key: Array, X: Array, num: int) -> Array:
        return self.factor(X)[..., None] * self.kernel.features(key, self.directions(X), num)
