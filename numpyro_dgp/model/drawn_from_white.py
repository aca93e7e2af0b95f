"""Distributions whose draws are a function of standard normal numbers, of which there may be more than values."""

from __future__ import annotations

import numpyro.distributions as dist

from numpyro_dgp._typing import Array

__all__ = ["DrawnFromWhite"]


class DrawnFromWhite(dist.Distribution):
    """A Gaussian process at given points as a distribution of its own; chains sample it by independent numbers."""

    loc: Array

    @property
    def white_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal numbers behind a draw."""
        raise NotImplementedError

    def from_white(self, white: Array) -> Array:
        """The draw that standard normal numbers of this shape give."""
        raise NotImplementedError
