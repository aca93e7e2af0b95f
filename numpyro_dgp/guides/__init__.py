"""Guides: variational posteriors over the sites of a program, built from rules."""

from numpyro_dgp.guides.collapsed import Collapsed
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.presets import InducingPoint, MeanField
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
    "Collapsed",
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
    "Site",
]
