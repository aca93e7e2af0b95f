"""Exact regression on regular grids, closed forms for layers on such grids, and the length that a ring needs."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.rings.every_pth import Subsampled
from numpyro_dgp.rings.optimum import optimal_gain, optimal_mean
from numpyro_dgp.rings.pattern import Solver
from numpyro_dgp.rings.ring_normal import RingNormal
from numpyro_dgp.rings.series import regular, wraparound
from numpyro_dgp.rings.spectra import Ring

__all__ = ["Ring", "RingNormal", "Solver", "Subsampled", "optimal_gain", "optimal_mean", "regular", "wraparound"]
__dir__ = public_dir(globals())
