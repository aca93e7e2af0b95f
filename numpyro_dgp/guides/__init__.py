"""Guides: variational posteriors over the sites of a program, built from rules."""

from numpyro_dgp.guides.collapsed.collapsed_guide import Collapsed
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.presets import ImportanceWeighted, InducingPoint, MeanField
from numpyro_dgp.guides.rules.latents import Amortised, Quadrature
from numpyro_dgp.guides.rules.markov_inducing import MarkovInducing
from numpyro_dgp.guides.rules.ring_families import (
    Circulant,
    ScaledCirculant,
    ScaledPrior,
    ScaledProduct,
    SiteDiagonal,
    WhitenedSites,
)
from numpyro_dgp.guides.rules.rules import (
    Delta,
    Diagonal,
    Full,
    Normal,
    OpperArchambeau,
    Prior,
    Propagate,
    Rule,
    Site,
)
from numpyro_dgp.guides.rules.structured import GivenBelow, GivenInducing, JointOutputs

__all__ = [
    "Amortised",
    "Circulant",
    "Collapsed",
    "Delta",
    "Diagonal",
    "Full",
    "GivenBelow",
    "GivenInducing",
    "Guide",
    "ImportanceWeighted",
    "InducingPoint",
    "JointOutputs",
    "MarkovInducing",
    "MeanField",
    "Normal",
    "OpperArchambeau",
    "Prior",
    "Propagate",
    "Quadrature",
    "Rule",
    "ScaledCirculant",
    "ScaledPrior",
    "ScaledProduct",
    "Site",
    "SiteDiagonal",
    "WhitenedSites",
]
