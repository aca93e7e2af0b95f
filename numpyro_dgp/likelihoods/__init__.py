"""Conditionals for classes, missing entries, rules of integration and robust losses, for ``dgp.Likelihood``."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.likelihoods.missing import missing
from numpyro_dgp.likelihoods.multiclass import OneVsEach, RobustMax
from numpyro_dgp.likelihoods.robust_losses import Robust
from numpyro_dgp.math.quadrature import GaussHermite, MonteCarlo

__all__ = ["GaussHermite", "MonteCarlo", "OneVsEach", "Robust", "RobustMax", "missing"]
__dir__ = public_dir(globals())
