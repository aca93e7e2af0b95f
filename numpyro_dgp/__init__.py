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
from numpyro_dgp._repr import public_dir
from numpyro_dgp.densities import Mixture
from numpyro_dgp.depth.fit_best import fit_best
from numpyro_dgp.diagnostics import compare, to_arviz
from numpyro_dgp.functions.basis import Basis
from numpyro_dgp.functions.harmonics import Harmonics
from numpyro_dgp.functions.inducing_patches import InducingPatches
from numpyro_dgp.functions.neighbours import Neighbours
from numpyro_dgp.functions.points import Points
from numpyro_dgp.functions.points_and_slopes import PointsAndSlopes
from numpyro_dgp.functions.projections import projection
from numpyro_dgp.functions.random_function import RandomFunction, Representation
from numpyro_dgp.functions.state_space import StateSpace, StateSpaceNormal
from numpyro_dgp.inference.checkpoints import Checkpoint
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import fit
from numpyro_dgp.inference.fit_stream import fit_stream
from numpyro_dgp.inference.minibatch import minibatch
from numpyro_dgp.inference.parameter_files import load, save
from numpyro_dgp.inference.predictive_objective import PredictiveObjective
from numpyro_dgp.inference.streams import BatchSource, Stream
from numpyro_dgp.kernels.convolutional import Patches
from numpyro_dgp.likelihoods.cumulative import cumulative
from numpyro_dgp.likelihoods.likelihood import Likelihood
from numpyro_dgp.likelihoods.missing import missing
from numpyro_dgp.likelihoods.multiclass import OneVsEach, RobustMax
from numpyro_dgp.math.quadrature import GaussHermite, MonteCarlo
from numpyro_dgp.mcmc import updates
from numpyro_dgp.mcmc.for_mcmc import NonCentered, for_mcmc
from numpyro_dgp.mcmc.gibbs import Gibbs
from numpyro_dgp.mcmc.sghmc import SGHMC
from numpyro_dgp.new_data.condition import condition
from numpyro_dgp.new_data.project import project
from numpyro_dgp.new_data.update import update
from numpyro_dgp.predict.joint_mixture import JointMixture
from numpyro_dgp.predict.posterior import Posterior
from numpyro_dgp.primitives import gp, latent
from numpyro_dgp.rings.grid import Grid

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
    "Checkpoint",
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
