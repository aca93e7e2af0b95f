"""Exact regression on regular grids, what has a closed form for layers on them, and how long a ring must be."""

from numpyro_dgp.rings.every_pth import Subsampled
from numpyro_dgp.rings.optimum import optimal_gain, optimal_mean
from numpyro_dgp.rings.ring_normal import RingNormal
from numpyro_dgp.rings.series import regular, wraparound
from numpyro_dgp.rings.spectra import Ring

__all__ = ["Ring", "RingNormal", "Subsampled", "optimal_gain", "optimal_mean", "regular", "wraparound"]
