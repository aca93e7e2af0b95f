"""Random functions and their representations, in addition to ``dgp.Points``, ``dgp.Basis`` and the like."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.functions.cumulative import cumulative
from numpyro_dgp.functions.inducing_patches import InducingPatches
from numpyro_dgp.functions.points_and_slopes import PointsAndSlopes
from numpyro_dgp.functions.state_space import StateSpaceNormal

__all__ = ["InducingPatches", "PointsAndSlopes", "StateSpaceNormal", "cumulative"]
__dir__ = public_dir(globals())
