"""Figures of fitted programs and their diagnostics, which need matplotlib.

Every function returns the figure, or draws into ``ax`` where one is given.
"""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.plots.diagnoses import calibration, class_reliability, comparison, ranks
from numpyro_dgp.plots.predictions import density, fit, marginals, observed
from numpyro_dgp.plots.programs import bounds, latent_space, layers
from numpyro_dgp.plots.ring_spectra import ring_spectra
from numpyro_dgp.plots.sensitivities import main_effects, sobol_indices

__all__ = [
    "bounds",
    "calibration",
    "class_reliability",
    "comparison",
    "density",
    "fit",
    "latent_space",
    "layers",
    "main_effects",
    "marginals",
    "observed",
    "ranks",
    "ring_spectra",
    "sobol_indices",
]
__dir__ = public_dir(globals())
