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
from numpyro_dgp.guides.structured import GivenBelow, GivenInducing, JointOutputs

__all__ = [
    "Collapsed",
    "Delta",
    "Diagonal",
    "Full",
    "GivenBelow",
    "GivenInducing",
    "Guide",
    "InducingPoint",
    "JointOutputs",
    "MeanField",
    "Normal",
    "OpperArchambeau",
    "Prior",
    "Propagate",
    "Rule",
    "Site",
]
