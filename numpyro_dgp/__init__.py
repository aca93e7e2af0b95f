"""Deep Gaussian processes as NumPyro primitives: one program, swappable guides."""

import warnings

import jax

from numpyro_dgp import (
    bounds,
    densities,
    design,
    diagnostics,
    extend,
    guides,
    initial,
    kernels,
    means,
    optim,
    rings,
    testing,
)
from numpyro_dgp._shown import public_dir
from numpyro_dgp.algebra.patches import Patches
from numpyro_dgp.algebra.quadrature import GaussHermite, MonteCarlo
from numpyro_dgp.deepening.fit_best import fit_best
from numpyro_dgp.densities import Mixture
from numpyro_dgp.diagnostics import compare, to_arviz
from numpyro_dgp.inference import updates
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import fit
from numpyro_dgp.inference.fit_stream import fit_stream
from numpyro_dgp.inference.gibbs import Gibbs
from numpyro_dgp.inference.mcmc import NonCentered, for_mcmc
from numpyro_dgp.inference.minibatch import minibatch
from numpyro_dgp.inference.parameter_files import load, save
from numpyro_dgp.inference.predictive_objective import PredictiveObjective
from numpyro_dgp.inference.sghmc import SGHMC
from numpyro_dgp.inference.streams import BatchSource, Stream
from numpyro_dgp.model.cumulative import cumulative
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.model.missing import missing
from numpyro_dgp.model.one_vs_each import OneVsEach
from numpyro_dgp.model.projections import projection
from numpyro_dgp.model.random_function import RandomFunction, Representation
from numpyro_dgp.model.robustmax import RobustMax
from numpyro_dgp.new_data.condition import condition
from numpyro_dgp.new_data.project import project
from numpyro_dgp.new_data.update import update
from numpyro_dgp.predict import Posterior
from numpyro_dgp.prediction.joint_mixture import JointMixture
from numpyro_dgp.primitives import gp, latent
from numpyro_dgp.representations.basis import Basis
from numpyro_dgp.representations.grid import Grid
from numpyro_dgp.representations.harmonics import Harmonics
from numpyro_dgp.representations.inducing_patches import InducingPatches
from numpyro_dgp.representations.neighbours import Neighbours
from numpyro_dgp.representations.points import Points
from numpyro_dgp.representations.points_and_slopes import PointsAndSlopes
from numpyro_dgp.representations.state_space import StateSpace
from numpyro_dgp.state_space import StateSpaceNormal

__version__ = "1.0.0rc1"

if jax.__version_info__[:2] == (0, 10):
    warnings.warn(
        f"numpyro_dgp: expected a JAX other than 0.10, got {jax.__version__}, whose programs can stop for ever on CPUs "
        "where two layers are factorised at the same time: pip install 'jax>=0.12'",
        RuntimeWarning,
        stacklevel=2,
    )
del warnings, jax

# In reading order: the program, its parts, its guides, inference, prediction, practicalities.
__all__ = [
    "gp",
    "latent",
    "projection",
    "cumulative",
    "Likelihood",
    "RobustMax",
    "OneVsEach",
    "missing",
    "Points",
    "PointsAndSlopes",
    "Grid",
    "Basis",
    "Harmonics",
    "Neighbours",
    "Patches",
    "InducingPatches",
    "StateSpace",
    "Representation",
    "RandomFunction",
    "rings",
    "StateSpaceNormal",
    "kernels",
    "means",
    "GaussHermite",
    "MonteCarlo",
    "bounds",
    "guides",
    "ELBO",
    "PredictiveObjective",
    "optim",
    "for_mcmc",
    "NonCentered",
    "Gibbs",
    "updates",
    "SGHMC",
    "Posterior",
    "update",
    "condition",
    "project",
    "fit_best",
    "design",
    "Mixture",
    "JointMixture",
    "densities",
    "to_arviz",
    "diagnostics",
    "compare",
    "initial",
    "fit",
    "BatchSource",
    "Stream",
    "minibatch",
    "fit_stream",
    "save",
    "load",
    "extend",
    "testing",
]
__dir__ = public_dir(globals())
