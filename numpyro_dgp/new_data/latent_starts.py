"""Where the latents of new rows start: at the best of draws from the prior."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.fitted import Target
from numpyro_dgp.inference.program_sites import Rebuild
from numpyro_dgp.model.calls import inspect_call
from numpyro_dgp.model.site_densities import scaled_log_prob
from numpyro_dgp.model.sites import site_kind
from numpyro_dgp.predict import Posterior

__all__ = ["best_of_prior"]

_DRAWS = 200


def best_of_prior(fit: Posterior, rng_key: Array, rebuild: Rebuild, arrays: list[Array]) -> dict[str, Array]:
    """Of every row the draw of its latents from the prior that makes its observations most probable, by site.

    Args:
        fit: the functions and all else that is shared by rows.
        rng_key: PRNG key.
        rebuild: the arguments of the program, observations included, from ``arrays``.
        arrays: those of them that are arrays.
    """
    args, kwargs = rebuild(arrays)
    call = inspect_call(fit.model, None, args, kwargs)
    target = Target(None, tuple(frozenset(f.name for f in call.sites[y]["cond_indep_stack"]) for y in call.candidates))

    def one(key: Array, arrays: list[Array]) -> tuple[dict[str, Array], Array]:
        args, kwargs = rebuild(arrays)
        sites = fit.trace(target, key, {}, args, kwargs)
        drawn = {name: site for name, site in sites.items() if site["type"] == "sample" and site_kind(site) == "latent"}
        latents = {name: site for name, site in drawn.items() if call.program.is_predicted(site, target.plates)}
        observed = [site for site in sites.values() if site["type"] == "sample" and site["is_observed"]]
        score = sum((_by_row(scaled_log_prob(site)) for site in observed), jnp.zeros(()))
        return {name: site["value"] for name, site in latents.items()}, score

    values, scores = jax.jit(lambda keys, arrays: jax.lax.map(lambda key: one(key, arrays), keys))(
        jax.random.split(rng_key, _DRAWS), arrays
    )
    best = scores.argmax(0)
    return {name: jnp.take_along_axis(v, best[None, :, None], 0)[0] for name, v in values.items() if v.ndim == 3}


def _by_row(terms: Array) -> Array:
    """Sums over all axes but the last, that of the rows."""
    return terms.reshape(-1, terms.shape[-1]).sum(0)
