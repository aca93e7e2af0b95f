"""Guides: variational posteriors over the sites of a program, built from rules."""

from numpyro_dgp.guides.collapsed import Collapsed
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.latents import Amortised, Quadrature
from numpyro_dgp.guides.markov import MarkovInducing
from numpyro_dgp.guides.presets import ImportanceWeighted, InducingPoint, MeanField
from numpyro_dgp.guides.ring_rules import (
    Circulant,
    ScaledCirculant,
    ScaledPrior,
    ScaledProduct,
    SiteDiagonal,
    WhitenedSites,
)
from numpyro_dgp.guides.rules import (
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
from numpyro_dgp.guides.structured import GivenBelow, GivenInducing, JointOutputs

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
