"""What kind of site a message of NumPyro is about."""

from __future__ import annotations

from typing import Any

import numpyro.distributions as dist

from numpyro_dgp.model.beliefs import InducingPrior
from numpyro_dgp.model.function_values import FunctionValues, JointValues
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.representations.exact import ExactFunction

__all__ = ["Message", "site_kind", "unwrap"]

Message = dict[str, Any]


def unwrap(fn: dist.Distribution) -> dist.Distribution:
    """``fn`` without the wrappers that plates and masks put around it."""
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution):
        fn = fn.base_dist
    return fn


def site_kind(msg: Message) -> str:
    """Which rule of a guide speaks for a sample site.

    ``observed`` (nothing to infer), ``inducing`` (whitened inducing values), ``hidden`` (values of a layer),
    ``exact`` (values of an exact process), ``latent`` (another site inside a plate), ``other``.
    """
    fn = unwrap(msg["fn"])
    if msg["is_observed"] or isinstance(fn, Likelihood):
        return "observed"
    if isinstance(fn, InducingPrior):
        return "inducing"
    if isinstance(fn, JointValues) and isinstance(fn.function, ExactFunction):
        return "exact"
    if isinstance(fn, FunctionValues | JointValues):
        return "hidden"
    return "latent" if msg["cond_indep_stack"] else "other"
