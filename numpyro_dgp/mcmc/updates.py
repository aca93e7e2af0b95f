"""How ``dgp.Gibbs`` moves a block of sites: ``Gibbs(model, blocks={"h": dgp.updates.EllipticalSlice(repeat=3)})``."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.mcmc.slices import EllipticalSlice, Slice
from numpyro_dgp.mcmc.trajectories import NUTS

__all__ = ["EllipticalSlice", "NUTS", "Slice"]

__dir__ = public_dir(globals())
