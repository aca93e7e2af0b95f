"""Surrogates of simulators: where to look next, designs, and what the function depends on (``dgp.design``)."""

from numpyro_dgp.design.active_learning import ALC, ALM, IMSE
from numpyro_dgp.design.confidence import UpperConfidence
from numpyro_dgp.design.contours import ContourEntropy
from numpyro_dgp.design.global_fit import VIGF
from numpyro_dgp.design.improvement import ExpectedImprovement, LogExpectedImprovement
from numpyro_dgp.design.knowledge_gradient import KnowledgeGradient
from numpyro_dgp.design.mutual_information import MICE
from numpyro_dgp.design.thompson import ThompsonSampling

__all__ = [
    "ALC",
    "ALM",
    "IMSE",
    "MICE",
    "VIGF",
    "ContourEntropy",
    "ExpectedImprovement",
    "KnowledgeGradient",
    "LogExpectedImprovement",
    "ThompsonSampling",
    "UpperConfidence",
]
