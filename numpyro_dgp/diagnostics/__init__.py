"""Diagnostics of posteriors: ArviZ trees, importance weights, calibration, the evidence, and comparison."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.diagnostics.arviz import to_arviz
from numpyro_dgp.diagnostics.calibration import (
    ClassCalibration,
    Coverage,
    class_calibration,
    coverage,
    pit,
    uniformity,
)
from numpyro_dgp.diagnostics.certificate import Certificate, certify
from numpyro_dgp.diagnostics.comparison import Comparison, compare
from numpyro_dgp.diagnostics.convergence import Convergence, convergence
from numpyro_dgp.diagnostics.evidence import Evidence, evidence
from numpyro_dgp.diagnostics.left_out import loo_moment_match, refits
from numpyro_dgp.diagnostics.pareto import pareto_shape
from numpyro_dgp.diagnostics.reliability import khat, local_khat, loo
from numpyro_dgp.diagnostics.simulation import Simulated, sbc

__all__ = [
    "Certificate",
    "certify",
    "Comparison",
    "Convergence",
    "Coverage",
    "Evidence",
    "Simulated",
    "compare",
    "ClassCalibration",
    "class_calibration",
    "convergence",
    "coverage",
    "evidence",
    "khat",
    "local_khat",
    "loo",
    "loo_moment_match",
    "pareto_shape",
    "pit",
    "refits",
    "sbc",
    "to_arviz",
    "uniformity",
]
__dir__ = public_dir(globals())
