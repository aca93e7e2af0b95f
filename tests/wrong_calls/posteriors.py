"""Wrong calls of ``Posterior``."""

from programs import shallow
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp

WRONG = [
    Wrong("neither guide nor samples", lambda: dgp.Posterior(shallow), "a guide with params, or samples, and not both"),
]
