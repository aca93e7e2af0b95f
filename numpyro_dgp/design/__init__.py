"""Surrogates of simulators: where to look next, designs, and what the function depends on (``dgp.design``)."""

from numpyro_dgp.design.designs import additions, latin_hypercube, maximin, sobol
from numpyro_dgp.design.input_space import Box
from numpyro_dgp.design.maximise import Maximum, maximise

__all__ = ["Box", "Maximum", "additions", "latin_hypercube", "maximin", "maximise", "sobol"]
