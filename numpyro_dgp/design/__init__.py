"""Surrogates of simulators: where to look next, designs, and what the function depends on (``dgp.design``)."""

from numpyro_dgp.design.integrals import Integrals
from numpyro_dgp.design.main_effects import MainEffects, main_effects
from numpyro_dgp.design.sobol_indices import SobolIndices, sobol_indices

__all__ = ["Integrals", "MainEffects", "SobolIndices", "main_effects", "sobol_indices"]
