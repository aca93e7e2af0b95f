"""The kind of a site (inducing values, hidden layer, latent, ...), the wrappers around its distribution, and
its log density."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.util import scale_and_mask

from numpyro_dgp._typing import Array
from numpyro_dgp.functions.site_distribution import SiteDistribution, declared

__all__ = [
    "Message",
    "Trace",
    "declared_kind",
    "each_values_of",
    "hide",
    "is_function_values",
    "is_likelihood",
    "is_row_by_row",
    "log_marginal",
    "log_prob",
    "mask_rows",
    "masks_around",
    "rewrap",
    "row_shape",
    "sample_values",
    "scaled_log_prob",
    "site_kind",
    "total_log_prob",
    "unwrap",
    "values_of",
]

# A message of NumPyro, while handlers process it or recorded in a trace; and a trace, by name.
Message = dict[str, Any]
Trace = dict[str, Message]


def unwrap(fn: dist.Distribution) -> dist.Distribution:
    """``fn`` without the wrappers that plates and masks put around it, and function values without ``to_event``."""
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution):
        fn = fn.base_dist
    if isinstance(fn, dist.Independent):
        inside = unwrap(fn.base_dist)
        return fn if declared(inside).site_kind is None else inside
    return fn


def declared_kind(fn: dist.Distribution) -> str | None:
    """The kind of its site that a distribution of this package declares by ``site_kind``; ``None`` for others."""
    return declared(unwrap(fn)).site_kind


def is_likelihood(fn: dist.Distribution) -> bool:
    """Whether it is a :class:`~numpyro_dgp.Likelihood`, which integrates the values of functions."""
    return declared_kind(fn) == "observed"


def is_function_values(fn: dist.Distribution) -> bool:
    """Whether it is a distribution of values of a function."""
    return declared_kind(fn) in ("hidden", "exact")


def is_row_by_row(fn: dist.Distribution) -> bool:
    """The same of values at each input on its own."""
    values: Any = unwrap(fn)
    return is_function_values(values) and not values.all_rows_together


def masks_around(fn: dist.Distribution) -> list[Any]:
    """The masked distributions among the wrappers that plates and masks put around ``fn``, outermost first."""
    found = []
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution):
        found += [fn] if isinstance(fn, dist.MaskedDistribution) else []
        fn = fn.base_dist
    return found


def values_of(fn: dist.Distribution) -> SiteDistribution:
    """The function values at a site with this distribution, or those that its likelihood integrates; of a distribution
    of NumPyro, one that declares nothing."""
    return declared(unwrap(fn)).function_values


def each_values_of(fn: dist.Distribution) -> tuple[SiteDistribution, ...]:
    """The same by function: a likelihood may depend on several of them."""
    return values_of(fn).by_function


def row_shape(fn: dist.Distribution) -> tuple[int, ...]:
    """The shape of the rows of a site: its batch dimensions, and those of function values that ``to_event`` took."""
    shape = (*fn.batch_shape, *fn.event_shape)
    return shape[: len(shape) - unwrap(fn).event_dim]


def rewrap(q: dist.Distribution, fn: dist.Distribution) -> dist.Distribution:
    """``q``, a distribution in place of ``unwrap(fn)``, with the wrappers and the batch shape that ``fn`` has."""

    def wrapped(q: dist.Distribution, fn: dist.Distribution) -> dist.Distribution:
        if isinstance(fn, dist.ExpandedDistribution):
            return wrapped(q, fn.base_dist)
        if isinstance(fn, dist.MaskedDistribution):
            return wrapped(q, fn.base_dist).mask(fn._mask)
        if isinstance(fn, dist.Independent) and unwrap(fn) is not fn:
            return wrapped(q, fn.base_dist).to_event(fn.reinterpreted_batch_ndims)
        return q

    q = wrapped(q, fn)
    return q if q.batch_shape == fn.batch_shape else q.expand(fn.batch_shape)


def site_kind(msg: Message) -> str:
    """The kind of a sample site, which decides the rule that a guide applies to it.

    ``observed`` (nothing to infer), ``inducing`` (whitened inducing values), ``hidden`` (values of a layer),
    ``exact`` (values of an exact process), ``latent`` (another site inside a plate), ``other``.
    """
    if msg["is_observed"]:
        return "observed"
    return declared_kind(msg["fn"]) or ("latent" if msg["cond_indep_stack"] else "other")


def sample_values(sites: Trace) -> dict[str, Any]:
    """Values of the sample sites of a run."""
    return {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}


def mask_rows(msg: Message, counted: Any, axis: int) -> None:
    """Mask those entries of a site that do not count along a batch axis, which is given from the end."""
    msg["fn"] = msg["fn"].mask(counted.reshape(-1, *(1,) * (-axis - 1)))


def hide(msg: Message) -> None:
    """Hide a site from the handlers outside the guide; the program still gets a value."""
    msg["stop"] = True
    if msg["type"] == "sample" and msg["value"] is None and msg["kwargs"]["rng_key"] is None:
        msg["kwargs"]["rng_key"] = numpyro.prng_key()


def log_prob(site: Message) -> Array:
    """Log densities of a site, of its batch shape, without the scale of its plates."""
    arguments = (site["value"], site["intermediates"]) if site["intermediates"] else (site["value"],)
    return site["fn"].log_prob(*arguments)


def scaled_log_prob(site: Message) -> Array:
    """The same with the scale of its plates."""
    return scale_and_mask(log_prob(site), site["scale"])


def total_log_prob(site: Message) -> Array:
    """What a site adds to the log of a joint density."""
    return jnp.sum(scaled_log_prob(site))


def log_marginal(site: Message) -> Array:
    """Normalised log densities of an observed site, of its batch shape, without the scale of its plates: a
    :class:`~numpyro_dgp.Likelihood` integrates inside the logarithm."""
    fn: Any = unwrap(site["fn"])
    if not is_likelihood(fn):
        return log_prob(site)
    value, outer = fn.log_marginal(site["value"]), site["fn"]
    while outer is not fn:
        if isinstance(outer, dist.MaskedDistribution):
            value = jnp.where(outer._mask, value, 0.0)
        outer = outer.base_dist
    return value
