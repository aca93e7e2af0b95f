"""Optimisers: natural gradients for Gaussian posteriors, quasi-Newton methods for bounds over all data."""

from numpyro_dgp.optim.full_batch import Minimum, minimize
from numpyro_dgp.optim.natural import NaturalGradient, log_linear

__all__ = ["Minimum", "NaturalGradient", "log_linear", "minimize"]
