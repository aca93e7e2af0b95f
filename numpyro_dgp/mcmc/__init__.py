"""Samplers: Gibbs sampling, whose blocks move by updates, and stochastic gradients; coordinates of ``dgp.for_mcmc``.

``Gibbs(model, blocks={"h": dgp.mcmc.EllipticalSlice(repeat=3)})`` is Gibbs sampling with an update of one's own choice.
"""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.mcmc.for_mcmc import NonCentered
from numpyro_dgp.mcmc.gibbs import Gibbs
from numpyro_dgp.mcmc.sghmc import SGHMC
from numpyro_dgp.mcmc.slices import EllipticalSlice, Slice
from numpyro_dgp.mcmc.trajectories import BlockNUTS

__all__ = ["SGHMC", "BlockNUTS", "EllipticalSlice", "Gibbs", "NonCentered", "Slice"]
__dir__ = public_dir(globals())
