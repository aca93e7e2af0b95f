"""Surrogates of simulators: where to look next, designs, and what the function depends on (``dgp.design``)."""

from numpyro_dgp.design.designs import additions, latin_hypercube, maximin, sobol
from numpyro_dgp.design.input_space import Box
from numpyro_dgp.design.loop import loop
from numpyro_dgp.design.maximise import Maximum, maximise
from numpyro_dgp.design.search import Fitted, Search, Seen
from numpyro_dgp.design.search_record import Record

__all__ = [
    "Box",
    "Fitted",
    "Maximum",
    "Record",
    "Search",
    "Seen",
    "additions",
    "latin_hypercube",
    "loop",
    "maximin",
    "maximise",
    "sobol",
]
