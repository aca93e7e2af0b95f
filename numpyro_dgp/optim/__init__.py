"""Optimisers: natural gradients for Gaussian posteriors, quasi-Newton methods for whole data sets."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.optim.full_batch import Minimum, minimize
from numpyro_dgp.optim.natural import NaturalGradient, log_linear

__all__ = ["Minimum", "NaturalGradient", "log_linear", "minimize"]
__dir__ = public_dir(globals())
