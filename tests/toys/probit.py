"""A strategy: labels y in {0, 1} with the probabilities ndtr(v), integrated over v."""

import jax.numpy as jnp
from jax.scipy.special import log_ndtr

from numpyro_dgp.extend import Integral


def probit(case):
    """log E[p(y | v)] = log Phi((2 y - 1) m / sqrt(1 + var)); the rest is left to the package."""

    def log_marginal(of, y, mean, variance):
        return of.total(log_ndtr((2 * y - 1) * mean / jnp.sqrt(1 + variance)))

    return Integral(lambda of: "probit", log_marginal=log_marginal)
