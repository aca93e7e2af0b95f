"""Kernels of places on the earth or another sphere: columns latitude and longitude, in degrees."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import violated
from numpyro_dgp._typing import Array, Number, pytree
from numpyro_dgp.algebra.distances import squared_distances
from numpyro_dgp.algebra.linalg import matmul, safe_sqrt
from numpyro_dgp.kernels.base import Kernel, as_kernel
from numpyro_dgp.kernels.covariance import of_both
from numpyro_dgp.kernels.hyperparameters import require_number
from numpyro_dgp.kernels.stationary import Matern32
from numpyro_dgp.kernels.zonal import ZonalKernel, by_chord

__all__ = ["Chordal", "GreatCircle"]

_PLANES = 10_000  # most planes of a random function: lengthscales below a six thousandth of the radius have no draws


def _require_degrees(owner: str, X: Any) -> None:
    """Raise where known inputs (..., N, D) are no latitudes and longitudes."""
    if np.shape(X)[-1] != 2:
        raise ValueError(
            f"kernel {owner}: expected two columns, latitude and longitude in degrees, got inputs of shape "
            f"{np.shape(X)}: kernel.on(0, 1) picks columns"
        )
    for column, (name, most) in enumerate((("latitudes", 90), ("longitudes", 360))):
        if violated(lambda x, most=most: abs(x) <= most, values := X[..., column]):
            known = np.asarray(values)
            raise ValueError(
                f"kernel {owner}: expected {name} from -{most} to {most} degrees in column {column}, got "
                f"{known[~(abs(known) <= most)][0]:g}: kernel.on(1, 0) swaps columns, numpy.degrees converts radians"
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
        arrivals = arrivals + jax.random.exponential(when, (num,), directions.dtype)
        side = matmul(directions, jax.random.normal(where, (3, num), directions.dtype)) < 0
        return step + 1, arrivals, jnp.where(side & (arrivals < rate), -signs, signs)

    _, arrivals, signs = jax.lax.while_loop(unfinished, one_more, (jnp.zeros((), int), arrivals, signs))
    return jnp.where(arrivals >= rate, signs, jnp.nan)


@_signs.defjvp
def _no_slopes(key: Array, num: int, primals: Any, tangents: Any) -> NoReturn:
    raise ValueError(
        "kernel GreatCircle: expected draws of its functions to be evaluated, got a derivative of them, which does not "
        "exist: kernels.Chordal(kernels.Matern32(...)) has smooth draws"
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
    radius: Number = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", as_kernel(self.kernel))
        require_number(self, "radius")

    def check_inputs(self, X: Any) -> None:
        _require_degrees("Chordal", X)

    def directions(self, X: Array) -> Array:
        self.check_inputs(X)
        return _directions(X)

    def by_angle(self, angle: Array) -> Array:
        return by_chord("Chordal", self.kernel, angle, self.radius)

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

    variance: Number = 1.0
    lengthscale: Number = 1.0
    radius: Number = 1.0

    def __post_init__(self) -> None:
        for name in ("variance", "lengthscale", "radius"):
            require_number(self, name)

    def check_inputs(self, X: Any) -> None:
        _require_degrees("GreatCircle", X)

    def directions(self, X: Array) -> Array:
        self.check_inputs(X)
        return _directions(X)

    def by_angle(self, angle: Array) -> Array:
        return self.variance * jnp.exp(-self.radius * angle / self.lengthscale)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        chord2 = squared_distances(*of_both(self.directions, X1, X2))
        return self.by_angle(2 * jnp.arctan2(safe_sqrt(chord2), safe_sqrt(4 - chord2)))

    def diagonal(self, X: Array) -> Array:
        return jnp.broadcast_to(self.variance, X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        rate = jnp.asarray(0.5 * math.pi * self.radius / self.lengthscale, X.dtype)
        return jnp.sqrt(self.variance) * _signs(self.directions(X), rate, key, num)
