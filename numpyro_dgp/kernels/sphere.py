r"""Kernels on the sphere: of latitude and longitude in degrees, or of directions, which depend on the angle between
unit vectors and a factor of each input.

.. math:: k(x, x') = r(x)\, r(x')\, \kappa(\theta), \qquad \cos\theta = \hat x \cdot \hat x'
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, violated
from numpyro_dgp._fields import number, one_of, positive
from numpyro_dgp._typing import Array, Number, pytree
from numpyro_dgp.kernels.base import Kernel, as_kernel, of_both
from numpyro_dgp.kernels.hyperparameters import by_column
from numpyro_dgp.kernels.stationary import Matern32, Matern52, Stationary
from numpyro_dgp.math.distances import squared_distances
from numpyro_dgp.math.linalg import matmul, safe_sqrt

__all__ = [
    "Chordal",
    "GreatCircle",
    "Zonal",
    "ZonalKernel",
    "by_chord",
    "extended",
    "extended_directions",
    "squared_length",
]


class ZonalKernel(Kernel):
    r"""A kernel of directions; layers on ``dgp.Harmonics`` take them.

    .. math:: k(x, x') = r(x)\, r(x')\, \kappa(\theta), \qquad \cos\theta = \hat x \cdot \hat x'

    A subclass defines these methods in addition to those of every kernel.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.extend import ZonalKernel
        >>> from numpyro_dgp.kernels import ArcCosine
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


def by_chord(kernel: Kernel, angle: Array, radius: Number = 1.0) -> Array:
    """A kernel of space between points on a sphere, from the angle between them.

    Raises:
        ValueError: a kernel that is not a function of the distance.
    """
    if not isinstance(kernel, Stationary) or not _of_distance(kernel) or jnp.size(kernel.lengthscale) != 1:
        raise expected(
            "a stationary kernel with a single lengthscale", type(kernel).__name__, "dgp.kernels.Matern52(1.0, 0.5)"
        )
    squares = jnp.square(2 * radius * jnp.sin(angle / 2))  # squared chords (2 R sin(θ / 2))^2
    return kernel.variance * kernel.profile(squares / jnp.square(jnp.reshape(kernel.lengthscale, ())))


def _of_distance(kernel: Stationary) -> bool:
    """Whether it has a profile of scaled distances, and not of waves."""
    own = type(kernel)
    return own._scale is Stationary._scale and own.profile is not Stationary.profile


@pytree
class Zonal(ZonalKernel):
    r"""A stationary kernel of directions times the length of the inputs: a smooth version of the arc-cosine kernel.

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
    weight_variances: Number = positive(1.0)
    bias_variance: Number = number(1.0)
    order: int = one_of(0, 1, 2, default=1, hint="1 grows in proportion", static=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        by_chord(self.kernel, jnp.zeros(()))

    def directions(self, X: Array) -> Array:
        return extended_directions(X, by_column(self, "weight_variances", X.shape[-1]), self.bias_variance)

    def factor(self, X: Array) -> Array:
        weights = by_column(self, "weight_variances", X.shape[-1])
        return squared_length(X, weights, self.bias_variance) ** (self.order / 2)

    def by_angle(self, angle: Array) -> Array:
        return by_chord(self.kernel, angle)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        between = self.kernel.evaluate(*of_both(self.directions, X1, X2))  # κ(|x^ - x'^|)
        return self.factor(X1)[..., :, None] * self.factor(X2)[..., None, :] * between  # r(x) r(x') κ

    def diagonal(self, X: Array) -> Array:
        return jnp.square(self.factor(X)) * self.kernel.diagonal(X)

    def features(self, key: Array, X: Array, num: int) -> Array:
        return self.factor(X)[..., None] * self.kernel.features(key, self.directions(X), num)


_PLANES = 10_000  # most planes of a random function: lengthscales below a six thousandth of the radius have no draws


def _require_degrees(X: Any) -> None:
    """Raise where known inputs (..., N, D) are no latitudes and longitudes."""
    expect(
        np.shape(X)[-1] == 2, "latitude and longitude in degrees", f"shape {np.shape(X)}", "pick them, kernel.on(0, 1)"
    )
    for column, (name, most) in enumerate((("latitudes", 90), ("longitudes", 360))):
        if violated(lambda x, most=most: abs(x) <= most, values := X[..., column]):
            known = np.asarray(values)
            raise expected(
                f"{name} from -{most} to {most} degrees in column {column}",
                f"{known[~(abs(known) <= most)][0]:g}",
                "kernel.on(1, 0) swaps columns, numpy.degrees converts radians",
            )


def _directions(X: Array) -> Array:
    """Unit vectors (..., N, 3) of latitudes and longitudes (..., N, 2) in degrees."""
    latitude, longitude = jnp.moveaxis(X * (math.pi / 180), -1, 0)
    level = jnp.cos(latitude)
    return jnp.stack([level * jnp.cos(longitude), level * jnp.sin(longitude), jnp.sin(latitude)], -1)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _signs(directions: Array, rate: Array, key: Array, num: int) -> Array:
    r"""Random functions (..., N, num) of values -1 and 1 with covariance :math:`e^{-2 \lambda \theta / \pi}`.

    Each is a product of the sides of :math:`K \sim \mathrm{Poisson}(\lambda)` random planes, of which one divides two
    directions with probability :math:`\theta / \pi`. Where more than ``_PLANES`` would be needed it is NaN.
    """
    first, key = jax.random.split(key)
    signs = jnp.broadcast_to(jax.random.rademacher(first, (num,), directions.dtype), (*directions.shape[:-1], num))
    arrivals = jnp.zeros(num, directions.dtype)

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[0] < _PLANES) & (carry[1] < rate).any()

    def one_more(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, arrivals, signs = carry
        when, where = jax.random.split(jax.random.fold_in(key, step))
        # Arrivals of a Poisson process of rate one: those before λ are Poisson(λ) in number.
        arrivals = arrivals + jax.random.exponential(when, (num,), directions.dtype)
        side = matmul(directions, jax.random.normal(where, (3, num), directions.dtype)) < 0
        return step + 1, arrivals, jnp.where(side & (arrivals < rate), -signs, signs)

    _, arrivals, signs = jax.lax.while_loop(unfinished, one_more, (jnp.zeros((), int), arrivals, signs))
    return jnp.where(arrivals >= rate, signs, jnp.nan)


@_signs.defjvp
def _no_slopes(key: Array, num: int, primals: Any, tangents: Any) -> NoReturn:
    raise expected(
        "draws of its functions to be evaluated",
        "a derivative of them, which does not exist",
        "kernels.Chordal(kernels.Matern32(...)) has smooth draws",
    )


@pytree
class Chordal(ZonalKernel):
    r"""A kernel of space, on a sphere of radius R: distances are chords, :math:`2 R \sin(\theta / 2)`.

    Any kernel of three columns is valid on the sphere in it, of whatever smoothness, and has its draws of functions.
    Below a tenth of the radius chords and great circles agree to one part in two thousand. Columns are latitude and
    longitude in degrees: keep them out of changes of units, ``dgp.initial.Standardizer.fit(X, keep=[0, 1])``, and take
    inducing inputs from rows of X, since a mean of longitudes around 180 is on the other side of the earth.

    Args:
        kernel: k, a kernel of three columns; a Matern 3/2 by default.
        radius: R, the unit of lengthscales: 6371.0 for kilometres on earth.

    Raises:
        ValueError: no kernel, a radius that is not a positive number; where it is called, inputs without two columns,
            latitudes beyond 90 or longitudes beyond 360 degrees.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Chordal, Matern52
        >>> cities = jnp.array([[51.51, -0.13], [48.86, 2.35], [35.68, 139.69]])  # London, Paris, Tokyo
        >>> print(np.array(Chordal(Matern52(lengthscale=1000.0), 6371.0)(cities[:1], cities)).round(3))
        [[1.    0.911 0.   ]]

    Source: Gneiting (2013).
    """

    kernel: Kernel = Matern32()
    radius: Number = number(1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kernel", as_kernel(self.kernel))

    def check_inputs(self, X: Any) -> None:
        _require_degrees(X)

    def directions(self, X: Array) -> Array:
        self.check_inputs(X)
        return _directions(X)

    def by_angle(self, angle: Array) -> Array:
        return by_chord(self.kernel, angle, self.radius)

    def _places(self, X: Array) -> Array:
        return self.radius * self.directions(X)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.kernel.evaluate(*of_both(self._places, X1, X2))

    def diagonal(self, X: Array) -> Array:
        return self.kernel.diagonal(self._places(X))

    def features(self, key: Array, X: Array, num: int) -> Array:
        return self.kernel.features(key, self._places(X), num)


@pytree
class GreatCircle(ZonalKernel):
    r"""Exponential in the great-circle distance: :math:`\sigma^2 e^{-R\,\theta / \ell}`, on a sphere of radius R.

    It is valid for every lengthscale. Smoother functions of the great-circle distance mostly are not: of the Matern
    family only those with :math:`\nu \le \tfrac12` are, and an RBF is never valid; :class:`Chordal` takes all of them
    instead. Draws are continuous only. A random feature changes its sign at great circles, a Poisson number of them
    with mean :math:`\pi R / 2 \ell`; a sum of them, as a draw of a function is, has steps that become smaller with
    their number, and no slopes. It costs some that many times what one of ``Chordal`` costs.

    Args:
        variance: :math:`\sigma^2`, squared units of the output.
        lengthscale: :math:`\ell`, units of the radius.
        radius: R: 6371.0 for kilometres on earth.

    Raises:
        ValueError: a value that is not a positive number; where it is called, inputs without two columns, latitudes
            beyond 90 or longitudes beyond 360 degrees.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import GreatCircle
        >>> poles = jnp.array([[90.0, 0.0], [0.0, 0.0], [-90.0, 0.0]])
        >>> print(np.array(GreatCircle(lengthscale=jnp.pi)(poles[:1], poles)).round(3))
        [[1.    0.607 0.368]]

    Source: Gneiting (2013), table 1.
    """

    num_derivatives = 0

    variance: Number = number(1.0)
    lengthscale: Number = number(1.0)
    radius: Number = number(1.0)

    def check_inputs(self, X: Any) -> None:
        _require_degrees(X)

    def directions(self, X: Array) -> Array:
        self.check_inputs(X)
        return _directions(X)

    def by_angle(self, angle: Array) -> Array:
        return self.variance * jnp.exp(-self.radius * angle / self.lengthscale)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        chord2 = squared_distances(*of_both(self.directions, X1, X2))
        # θ = 2 atan(c / sqrt(4 - c^2)) of the chord c, accurate near 0 and near π
        return self.by_angle(2 * jnp.arctan2(safe_sqrt(chord2), safe_sqrt(4 - chord2)))

    def diagonal(self, X: Array) -> Array:
        return jnp.broadcast_to(self.variance, X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        # e^(-2 λ θ / π) = e^(-R θ / l) at λ = π R / 2 l
        rate = jnp.asarray(0.5 * math.pi * self.radius / self.lengthscale, X.dtype)
        return jnp.sqrt(self.variance) * _signs(self.directions(X), rate, key, num)
