"""Deep Gaussian processes as NumPyro primitives: one program, swappable guides."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax

from numpyro_dgp import bounds, densities, functions, guides, kernels, likelihoods, means, optim, rings
from numpyro_dgp._repr import public_dir
from numpyro_dgp.functions.basis import Basis
from numpyro_dgp.functions.harmonics import Harmonics
from numpyro_dgp.functions.neighbours import Neighbours
from numpyro_dgp.functions.points import Points
from numpyro_dgp.functions.projections import projection
from numpyro_dgp.functions.state_space import StateSpace
from numpyro_dgp.inference.checkpoints import Checkpoint
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import fit
from numpyro_dgp.inference.fit_stream import fit_stream
from numpyro_dgp.inference.minibatch import minibatch
from numpyro_dgp.inference.parameter_files import load, save
from numpyro_dgp.inference.streams import Stream
from numpyro_dgp.likelihoods.likelihood import Likelihood
from numpyro_dgp.predict.posterior import Posterior
from numpyro_dgp.primitives import gp, latent
from numpyro_dgp.rings.grid import Grid

if TYPE_CHECKING:
    from numpyro_dgp import design, diagnostics, extend, initial, mcmc, testing
    from numpyro_dgp import plots as plots
    from numpyro_dgp import sklearn as sklearn
    from numpyro_dgp.depth.fit_best import fit_best
    from numpyro_dgp.mcmc.for_mcmc import for_mcmc
    from numpyro_dgp.new_data.condition import condition
    from numpyro_dgp.new_data.project import project
    from numpyro_dgp.new_data.update import update

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
# ``plots`` and ``sklearn`` are public too. They are not in the list, because they need packages that may be missing.
__all__ = [
    "gp",
    "latent",
    "projection",
    "Likelihood",
    "likelihoods",
    "Points",
    "Grid",
    "Basis",
    "Harmonics",
    "Neighbours",
    "StateSpace",
    "functions",
    "rings",
    "kernels",
    "means",
    "bounds",
    "guides",
    "ELBO",
    "optim",
    "fit",
    "Checkpoint",
    "Stream",
    "minibatch",
    "fit_stream",
    "initial",
    "for_mcmc",
    "mcmc",
    "Posterior",
    "update",
    "condition",
    "project",
    "densities",
    "diagnostics",
    "fit_best",
    "design",
    "save",
    "load",
    "extend",
    "testing",
]
__dir__ = public_dir(globals())

# Public names that are loaded when they are asked for, and the modules in which they are.
_ON_DEMAND = {
    "condition": "new_data.condition",
    "design": "design",
    "diagnostics": "diagnostics",
    "extend": "extend",
    "fit_best": "depth.fit_best",
    "for_mcmc": "mcmc.for_mcmc",
    "initial": "initial",
    "mcmc": "mcmc",
    "plots": "plots",
    "project": "new_data.project",
    "sklearn": "sklearn",
    "testing": "testing",
    "update": "new_data.update",
}

if not TYPE_CHECKING:  # it would give a misspelled name a type

    def __getattr__(name: str) -> Any:
        """A name of ``_ON_DEMAND``."""
        if name not in _ON_DEMAND:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_ON_DEMAND[name]}")
        globals()[name] = module if _ON_DEMAND[name] == name else getattr(module, name)
        return globals()[name]
