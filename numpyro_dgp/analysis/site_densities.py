"""Log densities of a site in a trace, number by number."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.util import scale_and_mask

from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, is_likelihood, unwrap

__all__ = ["log_marginal", "log_prob", "scaled_log_prob", "total_log_prob"]


def log_prob(site: Message) -> Array:
    """Log densities of a site, number by number, without the scale of its plates."""
    arguments = (site["value"], site["intermediates"]) if site["intermediates"] else (site["value"],)
    return site["fn"].log_prob(*arguments)


def scaled_log_prob(site: Message) -> Array:
    """The same with the scale of its plates."""
    return scale_and_mask(log_prob(site), site["scale"])


def total_log_prob(site: Message) -> Array:
    """What a site adds to the log of a joint density."""
    return jnp.sum(scaled_log_prob(site))


def log_marginal(site: Message) -> Array:
    """Normalised log densities of an observed site, number by number, without the scale of its plates: what a
    :class:`~numpyro_dgp.Likelihood` integrates is inside the logarithm."""
    fn: Any = unwrap(site["fn"])
    if not is_likelihood(fn):
        return log_prob(site)
    value, outer = fn.log_marginal(site["value"]), site["fn"]
    while outer is not fn:
        if isinstance(outer, dist.MaskedDistribution):
            value = jnp.where(outer._mask, value, 0.0)
        outer = outer.base_dist
    return value
