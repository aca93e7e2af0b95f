"""Surrogates of simulators: acquisitions, designs and sensitivity analysis (``dgp.design``)."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.design.active_learning import ALC, ALM, MICE, VIGF, ContourEntropy
from numpyro_dgp.design.designs import additions, latin_hypercube, maximin, sobol
from numpyro_dgp.design.emulator_family import emulator_family
from numpyro_dgp.design.improvement import (
    ExpectedImprovement,
    KnowledgeGradient,
    LogExpectedImprovement,
    UpperConfidence,
)
from numpyro_dgp.design.input_space import Box
from numpyro_dgp.design.maximise import Maximum, maximise
from numpyro_dgp.design.replicates import Pooled, pooled, within_replicates
from numpyro_dgp.design.search import Fitted, Search, Seen, loop
from numpyro_dgp.design.search_record import Record
from numpyro_dgp.design.sensitivity import Integrals, MainEffects, SobolIndices, main_effects, sobol_indices
from numpyro_dgp.design.thompson import ThompsonSampling

__all__ = [
    "ALC",
    "ALM",
    "Box",
    "ContourEntropy",
    "ExpectedImprovement",
    "Fitted",
    "Integrals",
    "KnowledgeGradient",
    "LogExpectedImprovement",
    "MICE",
    "MainEffects",
    "Maximum",
    "Pooled",
    "Record",
    "Search",
    "Seen",
    "SobolIndices",
    "ThompsonSampling",
    "UpperConfidence",
    "VIGF",
    "additions",
    "emulator_family",
    "latin_hypercube",
    "loop",
    "main_effects",
    "maximin",
    "maximise",
    "pooled",
    "sobol",
    "sobol_indices",
    "within_replicates",
]
__dir__ = public_dir(globals())
