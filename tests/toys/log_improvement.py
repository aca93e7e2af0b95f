"""An acquisition: the log probability that a point improves on the best value so far."""

import jax.numpy as jnp
from jax.scipy.special import log_ndtr, logsumexp


def log_improvement(posterior, key, best):
    """log P(f(x) < best) of one point x (1, D), where small values are good."""

    def acquisition(x):
        f = posterior.predict_jointly(key, x)  # S Gaussians: means (S, q), covariances (S, q, q)
        z = (best - f.means[:, 0]) / jnp.sqrt(f.covariances[:, 0, 0])
        return logsumexp(log_ndtr(z)) - jnp.log(len(z))  # the mean of S closed forms

    return acquisition
