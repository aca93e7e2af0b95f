"""Bounds in closed form, as functions of arrays: for your own models, and as references in tests."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.bounds.collapsed import Observations, Quadratic, from_features, from_moments, predict, upper_bound
from numpyro_dgp.bounds.given_inducing import Following, follow

__all__ = [
    "Following",
    "Observations",
    "Quadratic",
    "follow",
    "from_features",
    "from_moments",
    "predict",
    "upper_bound",
]
__dir__ = public_dir(globals())
