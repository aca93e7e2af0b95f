"""Guides: variational posteriors over the sites of a program, built from rules."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.guides.collapsed.collapsed_guide import Collapsed
from numpyro_dgp.guides.collapsed.markov import Markov
from numpyro_dgp.guides.collapsed.nested import Nested
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.importance import Importance
from numpyro_dgp.guides.presets import ImportanceWeighted, InducingPoint, MeanField
from numpyro_dgp.guides.rules.by_kind import Rules
from numpyro_dgp.guides.rules.exact_gp import OpperArchambeau
from numpyro_dgp.guides.rules.flow_inducing import Flow
from numpyro_dgp.guides.rules.global_inducing import GlobalInducing
from numpyro_dgp.guides.rules.inducing_values import Diagonal, Full, SparseFactor
from numpyro_dgp.guides.rules.joint_inducing import FullJoint, MarkovInducing
from numpyro_dgp.guides.rules.latents import Amortised, Quadrature
from numpyro_dgp.guides.rules.low_rank_inducing import LowRank
from numpyro_dgp.guides.rules.mixture_inducing import MixtureOfGaussians
from numpyro_dgp.guides.rules.model_conditional import Prior, Propagate
from numpyro_dgp.guides.rules.pointwise import Delta, Normal
from numpyro_dgp.guides.rules.ring_families import (
    Circulant,
    ScaledCirculant,
    ScaledPrior,
    ScaledProduct,
    WhitenedSites,
)
from numpyro_dgp.guides.rules.structured import GivenBelow, GivenInducing, JointOutputs

__all__ = [
    "Amortised",
    "Circulant",
    "Collapsed",
    "Delta",
    "Diagonal",
    "Flow",
    "Full",
    "FullJoint",
    "GivenBelow",
    "GivenInducing",
    "GlobalInducing",
    "Guide",
    "Importance",
    "ImportanceWeighted",
    "InducingPoint",
    "JointOutputs",
    "LowRank",
    "Markov",
    "MarkovInducing",
    "MeanField",
    "MixtureOfGaussians",
    "Nested",
    "Normal",
    "OpperArchambeau",
    "Prior",
    "Propagate",
    "Quadrature",
    "Rules",
    "ScaledCirculant",
    "ScaledPrior",
    "ScaledProduct",
    "SparseFactor",
    "WhitenedSites",
]
__dir__ = public_dir(globals())
