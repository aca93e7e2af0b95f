"""Deep Gaussian processes as NumPyro primitives: one program, swappable guides."""

from numpyro_dgp import guides, kernels, means
from numpyro_dgp.inducing import Points
from numpyro_dgp.likelihood import Likelihood
from numpyro_dgp.objectives import ELBO
from numpyro_dgp.primitives import gp, latent
from numpyro_dgp.quadrature import GaussHermite, MonteCarlo
from numpyro_dgp.robustmax import RobustMax

__version__ = "0.1.0"

__all__ = [
    "ELBO",
    "GaussHermite",
    "Likelihood",
    "MonteCarlo",
    "Points",
    "RobustMax",
    "gp",
    "guides",
    "kernels",
    "latent",
    "means",
]
