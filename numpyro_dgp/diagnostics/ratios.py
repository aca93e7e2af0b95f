r"""Log p - log q of draws from a posterior, with the latents of each datum integrated out.

Given a draw s of the *global* sites :math:`\phi` (hyperparameters, inducing values), the data are independent. The
variables :math:`w_n` of one datum (latents, values of hidden layers) are drawn K times for every s. With these,

.. math:: \log \omega_{skn} = \log p(y_n, w_n^{(k)} \mid \phi_s) - \log q(w_n^{(k)} \mid \phi_s), \qquad
          \log p(y_n \mid \phi_s) \approx \log \tfrac1K \sum_k \omega_{skn} .

Hidden layers distributed as in the model cancel in :math:`\omega`, as they do in the bound. All sites are drawn,
inducing values too: the density is the one that NUTS samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro import handlers

from numpyro_dgp._compiled import Compiled
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, Trace, log_marginal, scaled_log_prob, total_log_prob, unwrap
from numpyro_dgp.densities import log_mean_exp
from numpyro_dgp.diagnostics.local_sites import LocalSites, is_value, local_sites, traces
from numpyro_dgp.functions.function_values import follows
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["Draws", "block_of", "draw", "drawing", "map_draws", "mapped", "prior", "summed_over_data"]

# Rows (draws times K times inputs) that are computed at once.
_BLOCK = 20_000


class Draws(NamedTuple):
    """Draws from a posterior and their densities.

    Observed sites in the same plates share the variables of single data; a density of one of them is given the others.

    Args:
        values: of latent and deterministic sites, (S, ...).
        log_p: log prior of the global sites (S,).
        log_q: their log density under the guide (S,); zero for draws from MCMC.
        target: by observed site, a summary of the log weights (K, N...) with its ``log_prob``, (S, ...).
        predictive: the same with the normalised density of y.
        joint: by observed site, that of the log weights with the ``log_prob`` of all sites in its plates.
        normalised: the same with the normalised densities of y.
        log_prior: log densities of the hyperparameters (S,), which add up to ``log_p`` with those of inducing values
            and factors.
        replicated: by observed site, data drawn given the global sites (S, N...).
    """

    values: dict[str, Array]
    log_p: Array
    log_q: Array
    target: dict[str, Array]
    predictive: dict[str, Array]
    joint: dict[str, Array]
    normalised: dict[str, Array]
    log_prior: dict[str, Array]
    replicated: dict[str, Array]


def draw(
    posterior: Posterior,
    key: Array,
    num_samples: int | None,
    local_samples: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    summary: Callable[[Array], Array] = log_mean_exp,
) -> Draws:
    """``num_samples`` draws from a guide, or all of those from MCMC, each with a ``summary`` of its K log weights."""
    samples = dict(posterior.samples or {})
    total = len(next(iter(samples.values()))) if samples else num_samples
    assert total is not None  # with a guide, the number of draws is given
    known = local_sites(posterior, args, kwargs)
    return drawing(posterior, known, total, local_samples, args, kwargs, summary)(jax.random.split(key, total), samples)


def drawing(
    posterior: Posterior,
    known: LocalSites,
    num_samples: int,
    local_samples: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    summary: Callable[[Array], Array] = log_mean_exp,
    kept: Callable[[Draws], Any] = lambda draws: draws,
) -> Callable[[Array, dict[str, Array]], Any]:
    """:func:`draw` as a compiled function of keys (S,) and of samples, (S, ...) by site, empty with a guide.

    ``kept`` says what is wanted of every draw; the rest is not computed.
    """
    copies = local_samples if known.local else 1
    weighing = _Weighing(posterior, known, copies, summary)
    return _mapping(lambda *each: kept(_draw(weighing, *each)), num_samples, args, kwargs, copies)


def prior(
    posterior: Posterior, key: Array, num_samples: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Draws of the latent sites and of the data from the prior."""

    def one(key: Array, sample: dict[str, Array], args: Any, kwargs: Any, block: int) -> Any:
        sites = handlers.trace(handlers.uncondition(posterior.seeded(posterior.model, key))).get_trace(*args, **kwargs)
        values = {n: s["value"] for n, s in sites.items() if is_value(s)}
        data = {n: values.pop(n) for n in list(values) if sites[n].get("infer", {}).get("was_observed")}
        return values, data

    return map_draws(one, key, num_samples, {}, args, kwargs, 1)


def map_draws(
    function: Any, key: Array, num_samples: int, samples: dict[str, Array], args: Any, kwargs: Any, copies: int
) -> Any:
    """``function`` of every draw in a compiled loop."""
    return _mapping(function, num_samples, args, kwargs, copies)(jax.random.split(key, num_samples), samples)


def _mapping(function: Any, num_samples: int, args: Any, kwargs: Any, copies: int) -> Callable[[Array, Any], Any]:
    """The same of keys and samples; the data are arguments of the compiled loop, in blocks that fit the cache."""
    arrays, rebuild = split_arguments(args, kwargs)
    block = block_of(arrays)

    @Compiled
    def run(keys: Array, samples: dict[str, Array], arrays: list[Array]) -> Any:
        again, options = rebuild(arrays)
        return mapped(
            lambda each: function(*each, again, options, block), (keys, samples), num_samples, block // copies
        )

    return lambda keys, samples: run(keys, {name: jnp.asarray(values) for name, values in samples.items()}, arrays)


def block_of(arrays: list[Array]) -> int:
    """How many draws are computed at once, of functions of these data."""
    return max(1, _BLOCK // max([len(a) for a in arrays], default=1))


def mapped(function: Callable[[Any], Any], each: Any, total: int, block: int) -> Any:
    """``function`` of every row, at most ``block`` at once; of blocks of one size, which compile one program."""
    if total <= block:
        return jax.vmap(function)(each)
    sizes = [size for size in range(max(1, block // 4), max(1, block) + 1) if total % size == 0]
    return jax.lax.map(function, each, batch_size=max(sizes, default=max(1, block)))


class _Weighing(NamedTuple):
    """How draws are weighed.

    Args:
        posterior: what they are drawn from.
        known: its variables of single data.
        copies: how often these are drawn for each draw of the others, K.
        summary: from log weights (K, N...) to (N...).
    """

    posterior: Posterior
    known: LocalSites
    copies: int
    summary: Callable[[Array], Array]


def _draw(weighing: _Weighing, key: Array, sample: dict[str, Array], args: Any, kwargs: Any, block: int) -> Draws:
    posterior, known, copies, summary = weighing
    key, local_key, data_key, choice_key = jax.random.split(key, 4)
    guide_trace, sites = traces(posterior, key, sample, {}, args, kwargs)
    shared = {n: s["value"] for n, s in guide_trace.items() if s["type"] == "sample" and n not in known.local}
    log_p = log_q = jnp.zeros(())
    for name, site in sites.items():
        if site["type"] == "sample" and name not in known.local and name not in known.frames:
            log_p = log_p + total_log_prob(site)  # log p(phi)
    for name, site in guide_trace.items():
        if site["type"] == "sample" and name not in known.local:
            log_q = log_q + total_log_prob(site)  # log q(phi)
    values = {n: s["value"] for n, s in sites.items() if is_value(s)} if posterior.guide is not None else sample

    def local(key: Array) -> Any:
        guide_trace, sites = traces(posterior, key, sample, shared, args, kwargs)
        mine = {n: sites[n]["value"] for n in known.local if known.weighted and is_value(sites[n])}
        return *_data_terms(known, guide_trace, sites), mine

    keys = jax.random.split(local_key, copies)
    target, predictive, ratios, mine = mapped(local, keys, copies, block)  # (K, ...)
    for name, several in mine.items():
        weights = _joint(known, target, ratios)[known.local[name]]  # log omega_k
        values[name] = _choose(jax.random.categorical(choice_key, weights, axis=0), several, sites[name])

    program = handlers.uncondition(posterior.seeded(posterior.model, data_key))
    program = posterior.given(sample, program, args, kwargs) if posterior.guide is None else program
    again = handlers.trace(handlers.substitute(program, data=shared)).get_trace(*args, **kwargs)

    def each(terms: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """The density of every site given the others in its plates, and that of all of these."""

        def summed(name: str, terms: Array) -> Array:
            return summary(_squeeze(terms, known.frames[name]))

        joint = _joint(known, terms, ratios)
        alone = {name: list(known.first.values()).count(first) == 1 for name, first in known.first.items()}
        together = {name: summed(name, joint[first]) for name, first in known.first.items()}
        return {
            # log p(y_a, y_b) - log p(y_b)
            name: together[name] if alone[name] else together[name] - summed(name, joint[first] - terms[name])
            for name, first in known.first.items()
        }, together

    replicated = {name: again[name]["value"] for name in known.frames}
    log_prior = {name: total_log_prob(sites[name]) for name, kind in known.kinds.items() if kind == "hyperparameter"}
    (of_target, joint), (of_predictive, normalised) = each(target), each(predictive)
    return Draws(values, log_p, log_q, of_target, of_predictive, joint, normalised, log_prior, replicated)


def summed_over_data(known: LocalSites, densities: dict[str, Array]) -> Array:
    """The log density of all data given a draw (S,), of ``joint`` or ``normalised`` densities."""
    rows = [densities[name] for name in dict.fromkeys(known.first.values())]
    return sum(v.reshape(len(v), -1).sum(1) for v in rows)  # type: ignore[return-value]


def _joint(known: LocalSites, terms: dict[str, Array], ratios: dict[str, Array]) -> dict[str, Array]:
    """The log weights of all observed sites in the same plates, by the first of them."""
    joint = dict(ratios)
    for name, first in known.first.items():
        joint[first] = joint[first] + terms[name]
    return joint


def _data_terms(
    known: LocalSites, guide_trace: Trace, sites: Trace
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """The log densities of observed sites in one draw of the variables of single data, and p over q of these, by the
    first site of the data: (N...) aligned with the plates."""
    target = {name: _over(scaled_log_prob(sites[name]), known.frames[name]) for name in known.frames}
    predictive = {name: _over(log_marginal(sites[name]), known.frames[name]) for name in known.frames}
    ratios = {first: jnp.zeros_like(target[first]) for first in known.first.values()}
    for name, beside in known.local.items():
        ratio = scaled_log_prob(sites[name])
        if not sites[name]["is_observed"]:  # all observed sites but factors
            if name not in guide_trace or follows(unwrap(guide_trace[name]["fn"])):
                continue  # drawn from the model
            ratio = ratio - scaled_log_prob(guide_trace[name])  # log p(w) - log q(w)
        ratios[beside] = ratios[beside] + _over(ratio, known.frames[beside])
    return target, predictive, ratios


def _over(values: Array, frames: tuple[Any, ...]) -> Array:
    """Sums over all dimensions but those of the plates, which keep their places."""
    kept = {frame.dim + values.ndim for frame in frames}
    return values.sum(tuple(axis for axis in range(values.ndim) if axis not in kept), keepdims=True)


def _squeeze(values: Array, frames: tuple[Any, ...]) -> Array:
    """Terms (K, ...) without the dimensions that are not plates: (K, N...)."""
    return values.reshape(len(values), *(values.shape[frame.dim] for frame in frames))


def _choose(index: Array, several: Array, site: Message) -> Array:
    """One of K values (K, ...) for every datum."""
    event_dim = 0 if site["type"] == "deterministic" else site["fn"].event_dim
    batch = several.ndim - 1 - event_dim
    shape = ((1,) * batch + index.shape)[-batch:]
    return jnp.take_along_axis(several, index.reshape(1, *shape, *(1,) * event_dim), axis=0)[0]
