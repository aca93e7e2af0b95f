"""Distributions whose draws are functions of standard normal numbers, possibly more numbers than values."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_dgp._checks import expected, require_finite
from numpyro_dgp._data import as_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.functions.open_plates import require_outside
from numpyro_dgp.functions.site_distribution import SiteDistribution

__all__ = ["DrawnFromWhite"]


class DrawnFromWhite(SiteDistribution):
    """A Gaussian process at given places as a distribution; chains sample it non-centred.

    A subclass gives words for messages: for a ``place``, the order of values, and advice on missing ones.
    """

    place: ClassVar[str]
    order_of_values: ClassVar[str]
    missing_values: ClassVar[str]
    loc: Array
    each_by_its_own = False
    """Whether each number of a draw depends on one standard normal number, the one at its place."""

    __repr__ = brief

    @property
    def white_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal numbers behind a draw."""
        raise NotImplementedError

    def from_white(self, white: Array) -> Array:
        """The draw for given standard normal numbers of this shape."""
        raise NotImplementedError

    @property
    def support(self) -> constraints.Constraint:
        return constraints.real_vector

    @property
    def mean(self) -> Array:
        return jnp.broadcast_to(self.loc, self.event_shape)

    def expand(self, batch_shape: Any) -> dist.Distribution:
        require_outside(type(self).__name__, self.event_shape[0], self.batch_shape, tuple(batch_shape))
        return super().expand(batch_shape)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.from_white(jax.random.normal(key, sample_shape + self.white_shape, self.loc.dtype))

    def one_per_place(self, name: str, value: ArrayLike, count: int, one: bool = False) -> Any:
        """``value`` if it has one finite number for each of ``count`` observed places, or is the ``one`` for all."""
        found = as_numbers(name, value)
        if not one and np.shape(found)[-1:] != (count,):
            raise expected(
                f"{name} of shape ({count},), one number per observed {self.place}",
                np.shape(found),
                f"they go in the order of {self.order_of_values}; of a column take y[:, 0]",
            )
        require_finite(name, found, self.missing_values)
        return found
