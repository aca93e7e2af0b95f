"""How ``dgp.Gibbs`` moves a block of sites: ``Gibbs(model, blocks={"h": dgp.updates.EllipticalSlice(repeat=3)})``."""

from numpyro_dgp._shown import public_dir
from numpyro_dgp.inference.coordinate_slice import Slice
from numpyro_dgp.inference.elliptical_slice import EllipticalSlice
from numpyro_dgp.inference.trajectories import NUTS

__all__ = ["EllipticalSlice", "NUTS", "Slice"]
__dir__ = public_dir(globals())
