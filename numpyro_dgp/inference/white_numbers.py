r"""Standard normal numbers behind the values of a site.

A Gaussian, or a function of one, draws its value from standard normal numbers by an affine map and a bijection,
:math:`z = g(A \epsilon + b)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.transforms import ComposeTransform

from numpyro_dgp._typing import Array
from numpyro_dgp.functions.drawn_from_white import DrawnFromWhite
from numpyro_dgp.functions.function_values import Values
from numpyro_dgp.functions.weights import Belief, StandardNormal
from numpyro_dgp.likelihoods.families import is_family
from numpyro_dgp.math.linalg import matmul

__all__ = ["Coordinates", "coordinates_of", "is_drawn_from_white"]

_DRAWS = "log_prob", "sample"


class Coordinates(NamedTuple):
    """The numbers of a site, and its values as a function of them.

    Args:
        shape: of the numbers.
        dtype: of the numbers.
        draw: the affine map.
        each: whether it maps every number on its own.
        transforms: the bijection, as transforms that are applied one after the other.
    """

    shape: tuple[int, ...]
    dtype: Any
    draw: Callable[[Array], Array]
    each: bool = False
    transforms: tuple[Any, ...] = ()

    def value(self, white: Array) -> Array:
        """The value that numbers give."""
        return ComposeTransform(list(self.transforms))(self.draw(white)) if self.transforms else self.draw(white)

    def white(self, value: Array) -> Array:
        """The numbers behind a value. It needs as many of them as the value has, and unless each has its own, takes
        the cube of their number."""
        drawn = ComposeTransform(list(self.transforms)).inv(value) if self.transforms else value
        zeros = jnp.zeros(self.shape, self.dtype)
        origin = self.draw(zeros)
        if self.each:
            return (drawn - origin) / jax.jvp(self.draw, (zeros,), (zeros + 1,))[1]
        matrix = jax.jacfwd(lambda white: self.draw(white.reshape(self.shape)).reshape(-1))(zeros.reshape(-1))
        return jnp.linalg.solve(matrix, (drawn - origin).reshape(-1)).reshape(self.shape)


def is_drawn_from_white(fn: Any) -> bool:
    """Whether a distribution of this package draws its values from standard normal numbers by an affine map."""
    return isinstance(fn, StandardNormal | Belief | Values | DrawnFromWhite)


def coordinates_of(fn: Any) -> Coordinates | None:
    """Those of a Gaussian, or of a function of one; ``None`` of other distributions."""
    if is_family(fn, dist.MaskedDistribution, dist.Independent):
        return coordinates_of(fn.base_dist)
    if is_family(fn, dist.ExpandedDistribution, dist.TransformedDistribution):
        base = coordinates_of(fn.base_dist)
        if base is None or isinstance(fn, dist.ExpandedDistribution):
            own = fn.base_dist.batch_shape
            return base and base._replace(shape=(*fn.batch_shape, *base.shape[len(own) :]))
        return base._replace(transforms=(*base.transforms, *fn.transforms))
    if is_drawn_from_white(fn):
        return Coordinates(fn.white_shape, fn.mean.dtype, fn.from_white, fn.each_by_its_own)
    if is_family(fn, dist.Normal, methods=_DRAWS):
        dtype = jnp.result_type(fn.loc, fn.scale)
        return Coordinates(fn.shape(), dtype, lambda white: fn.loc + fn.scale * white, True)
    if is_family(fn, dist.MultivariateNormal, dist.LowRankMultivariateNormal, methods=_DRAWS):
        low_rank = isinstance(fn, dist.LowRankMultivariateNormal)
        root = jnp.linalg.cholesky(fn.covariance_matrix) if low_rank else fn.scale_tril
        return Coordinates(fn.shape(), fn.loc.dtype, lambda white: fn.loc + matmul(root, white[..., None])[..., 0])
    return None
