"""Surrogates of simulators: where to look next, designs, and what the function depends on (``dgp.design``)."""

from numpyro_dgp.design.active_learning import ALC, ALM, IMSE
from numpyro_dgp.design.confidence import UpperConfidence
from numpyro_dgp.design.contours import ContourEntropy
from numpyro_dgp.design.global_fit import VIGF
from numpyro_dgp.design.improvement import ExpectedImprovement, LogExpectedImprovement
from numpyro_dgp.design.integrals import Integrals
from numpyro_dgp.design.knowledge_gradient import KnowledgeGradient
from numpyro_dgp.design.main_effects import MainEffects, main_effects
from numpyro_dgp.design.mutual_information import MICE
from numpyro_dgp.design.sobol_indices import SobolIndices, sobol_indices
from numpyro_dgp.design.thompson import ThompsonSampling

__all__ = [
    "ALC",
    "ALM",
    "ContourEntropy",
    "ExpectedImprovement",
    "IMSE",
    "Integrals",
    "KnowledgeGradient",
    "LogExpectedImprovement",
    "MICE",
    "MainEffects",
    "SobolIndices",
    "ThompsonSampling",
    "UpperConfidence",
    "VIGF",
    "main_effects",
    "sobol_indices",
]
