"""``ELBO``, the evidence lower bound, with closed forms for all integrals that have one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import kl_divergence
from numpyro.distributions.util import scale_and_mask
from numpyro.infer import elbo
from numpyro.util import check_model_guide_match

from numpyro_dgp._checks import (
    MISSING,
    expect,
    expect_kind,
    expected,
    is_concrete,
    require_count,
    require_finite,
    require_key,
)
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import explained
from numpyro_dgp.analysis.sites import Message, Trace, masks_around, site_kind, total_log_prob, unwrap
from numpyro_dgp.functions.function_values import FunctionValues, follows
from numpyro_dgp.functions.weights import Belief
from numpyro_dgp.guides.record import follows_model, record_of
from numpyro_dgp.guides.rules.structured import ConditionalValues, CorrelatedOutputs
from numpyro_dgp.guides.run import Run, mutable, run
from numpyro_dgp.likelihoods.families import known_divergence
from numpyro_dgp.likelihoods.observed_only import warn_unobserved
from numpyro_dgp.likelihoods.outcomes import require_in_range

__all__ = ["ELBO"]


class ELBO(elbo.ELBO):
    r"""The evidence lower bound, with lower variance than NumPyro's estimators.

    .. math:: \mathcal L = \frac{N}{B} \sum_n E_{q(h_n)}\bigl[E_{q(f(h_n))} \log p(y_n \mid f(h_n))\bigr]
              - \sum_\ell \mathrm{KL}[q(v^\ell) \,\|\, p(v^\ell)] - \dots

    where n goes over the B rows of a minibatch.

    The guide and then the model run in marginal mode: Gaussian q(v) are integrated out of every layer, hidden layers
    with the model's own conditional contribute nothing, and a KL divergence is in closed form where NumPyro or this
    package has one. In expectation it equals ``Trace_ELBO``.

    All particles share one minibatch; the scale of a minibatch comes from the program's plates.

    Args:
        num_particles: number of draws of the hidden layers that the bound is averaged over.
        vectorize_particles: ``True`` for ``jax.vmap`` over particles, ``False`` for ``jax.lax.map``.

    Raises:
        ValueError: NaN or infinite numbers in the arguments of the model; observations that are missing; a guide
            without one of the latent sites; observations that broadcasting, or an index beyond the end of an array,
            makes count several times.

    Warns:
        UserWarning: the program observes nothing.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro.distributions as dist, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> prior = {"f_auto_loc": jnp.zeros(5), "f_auto_scale_tril": jnp.eye(5)}
        >>> loss = dgp.ELBO().loss(jax.random.key(0), prior, model, dgp.guides.InducingPoint(model), X, y)
        >>> print(f"{loss:.2f}")  # one layer: no draws
        1188.20
        >>> print(f"{-(dist.Normal(0.0, 0.1).log_prob(y) - 0.5 / 0.1**2).sum():.2f}")  # q is the prior, of variance 1
        1188.20

    Source: Salimbeni (2020), equations 2.9 and 2.19.
    """

    __repr__ = brief

    def __init__(self, num_particles: int = 1, vectorize_particles: bool | Callable[..., Any] = True) -> None:
        require_count("num_particles", num_particles, "1")
        super().__init__(num_particles, vectorize_particles)

    def loss_with_mutable_state(  # type: ignore[override]
        self,
        rng_key: Array,
        param_map: dict[str, Array],
        model: Callable[..., Any],
        guide: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Negative bound of one minibatch, ``{"loss": ..., "mutable_state": ...}``."""
        require_key(rng_key)
        for name, program in (("model", model), ("guide", guide)):
            expect(
                callable(program),
                f"a callable {name}",
                type(program).__name__,
                "call loss(key, params, model, guide, X, y)",
            )
        expect_kind(param_map, Mapping, "params as a dict", "svi.get_params(state)")
        for path, value in jax.tree.leaves_with_path({"args": args, "kwargs": kwargs}):
            if isinstance(value, np.ndarray | jax.Array) and jnp.issubdtype(value.dtype, jnp.floating):
                where = jax.tree_util.keystr(path)
                require_finite(f"data in the model's {where}", value, MISSING)
        plate_key, particle_key = jax.random.split(rng_key)

        def particle(key: Array) -> tuple[Array, dict[str, Any]]:
            def once(strata: Mapping[str, Array] | None = None) -> Run:
                with explained((args, kwargs)):
                    return run(key, plate_key, dict(param_map), model, guide, args, kwargs, strata)

            found = once()
            state = {**mutable(found.guide), **mutable(found.model)}
            parts = found.stratified()  # of posteriors in several parts: the bound is linear in q
            if not parts:
                return self._of_run(found), state

            def part(index: Array) -> Array:
                taken = once(dict(zip(parts, jnp.unravel_index(index, tuple(parts.values())), strict=True)))
                return taken.weight() * self._of_run(taken)

            return self.vectorize_particles_fn(part, jnp.arange(math.prod(parts.values()))).sum(), state

        if self.num_particles == 1:
            value, state = particle(particle_key)
        else:
            keys = jax.random.split(particle_key, self.num_particles)
            values, states = self.vectorize_particles_fn(particle, keys)
            value, state = values.mean(), jax.tree.map(lambda leaf: leaf[0], states)
            if is_concrete(value) and not np.isfinite(value):
                for key in keys:  # one by one their checks have values, and raise the reason
                    particle(key)
        return {"loss": -value, "mutable_state": state or None}

    def _of_run(self, found: Run) -> Array:
        """The bound of one run of guide and model."""
        guide_trace, model_trace, groups, strata = found
        _require_drawn(guide_trace, model_trace)
        warn_unobserved(model_trace)
        check_model_guide_match(model_trace, guide_trace)
        _require_same_counts(guide_trace, model_trace)
        in_order = _latent_names(model_trace, guide_trace) == _latent_names(guide_trace, model_trace)
        weighted = sum((group.bound() for group in groups), jnp.zeros(()))
        divergence = observed = jnp.zeros(())
        accounted = set[str]().union(*(group.sites for group in groups))
        for site in guide_trace.values():  # parts of the bound that the guide has computed itself
            if integrated := record_of(site).integrates:
                weighted, accounted = weighted + site["value"], accounted | set(integrated)
        for name, site in model_trace.items():
            if site["type"] != "sample" or name in accounted:
                continue
            if site["is_observed"]:
                require_in_range(name, site["value"], site["fn"])
                observed = observed + total_log_prob(site)
            else:
                divergence = divergence + _divergence(guide_trace[name], site, in_order, strata.get(name))
        for name, site in guide_trace.items():  # auxiliary sites of autoguides
            if site["type"] == "sample" and name not in model_trace:
                divergence = divergence + total_log_prob(site)
        return weighted - divergence + observed


def _require_drawn(guide_trace: Trace, model_trace: Trace) -> None:
    """Raise for latent sites of the model that the guide does not draw."""
    for name, site in model_trace.items():
        if site["type"] != "sample" or site["is_observed"] or name in guide_trace:
            continue
        expect(
            site_kind(site) != "observed",
            f"observations at {name!r}",
            "none",
            "pass them to the call, as in svi.run(key, num_steps, X, y), and to the site, obs=y",
        )
        raise expected(
            "a guide that draws every latent site of the model",
            f"one without {name!r}; it draws {_sample_names(guide_trace)}",
            f"make the guide from this model, or pass the observations of {name!r} if it has any",
        )


def _require_same_counts(guide_trace: Trace, model_trace: Trace) -> None:
    """Raise for guides of another program whose scale of a latent site differs from the model's."""
    for name, site in model_trace.items():
        q = guide_trace.get(name)
        if site["type"] != "sample" or q is None or not record_of(q).name or follows_model(q):
            continue
        count, of_guide = (1.0 if scale is None else scale for scale in (site["scale"], q["scale"]))
        expect(
            not is_concrete(count, of_guide) or np.shape(count) != np.shape(of_guide) or np.allclose(count, of_guide),
            f"a guide that counts the latent {name!r} as the model does, {count} times",
            f"{of_guide} times",
            "make the guide of the program that is fitted, with its dgp.minibatch or handlers.scale",
        )


def _sample_names(sites: Trace) -> list[str]:
    return [name for name, site in sites.items() if site["type"] == "sample"]


def _divergence(guide_site: Message, model_site: Message, in_order: bool, stratum: Array | None) -> Array:
    """Contribution of a latent site: log q - log p, in closed form where that is exact."""
    q, p = guide_site["fn"], model_site["fn"]
    # q(h | v) = p(h | v)
    if follows(unwrap(q)):
        return jnp.zeros(())
    if isinstance(model_site["value"], Belief):
        divergence = kl_divergence(model_site["value"], unwrap(p))
        if stratum is not None:
            # E_q_i log q / q_i
            divergence = divergence + unwrap(q).log_ratio(stratum, guide_site["kwargs"]["rng_key"])  # type: ignore[attr-defined]
        for masked in masks_around(p):
            divergence = jnp.where(masked._mask, divergence, 0.0)
        return jnp.sum(scale_and_mask(divergence, model_site["scale"]))
    # Under q(h | v) with v integrated out there is no draw of v, so that log densities cannot be subtracted.
    given_v = isinstance(unwrap(q), ConditionalValues | CorrelatedOutputs)
    if in_order or given_v:  # in order, no parent of the site in the model comes after it in the guide
        try:
            return jnp.sum(scale_and_mask(known_divergence(q, p), guide_site["scale"]))
        except NotImplementedError:
            pass
    return total_log_prob(guide_site) - total_log_prob(model_site)  # one draw of log q - log p


@kl_divergence.register(FunctionValues, dist.Normal)
def _kl_normal(q: FunctionValues, p: dist.Normal) -> Array:
    """KL of single Gaussian numbers from a prior that the program writes as a ``Normal``."""
    return kl_divergence(q, FunctionValues(jnp.broadcast_to(p.loc, q.loc.shape), jnp.square(p.scale), event_dim=0))


@kl_divergence.register(FunctionValues, dist.Independent)
def _kl_independent(q: FunctionValues, p: dist.Independent) -> Array:
    """KL of Gaussian rows from a prior that the program writes with ``to_event``."""
    if p.reinterpreted_batch_ndims != q.event_dim:
        raise NotImplementedError
    numbers = FunctionValues(q.loc, q.conditional_variance, q.belief_variance, event_dim=0)
    return kl_divergence(numbers, p.base_dist).sum(tuple(range(-q.event_dim, 0)))


def _latent_names(sites: Trace, others: Trace) -> list[str]:
    return [n for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"] and n in others]
