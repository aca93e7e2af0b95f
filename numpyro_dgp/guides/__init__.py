"""Guides: variational posteriors over the sites of a program, built from rules."""

from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.presets import InducingPoint, MeanField
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

__all__ = [
    "Circulant",
    "Delta",
    "Diagonal",
    "Full",
    "Guide",
    "InducingPoint",
    "MeanField",
    "Normal",
    "OpperArchambeau",
    "Prior",
    "Propagate",
    "Rule",
    "ScaledCirculant",
    "ScaledPrior",
    "ScaledProduct",
    "Site",
    "SiteDiagonal",
    "WhitenedSites",
]
