r"""What the data identify of the draws of a chain, computed without random numbers.

Hidden layers can be reflected, and their outputs permuted, without changing the density of the data: chains in
different reflections disagree about inducing values and hidden values, and agree about

- hyperparameters :math:`\theta`, on the unconstrained scale;
- the function under every observed site at the data, :math:`E[f(h_n) \mid v, h_n]` with the values of the draw;
- at other inputs :math:`E[f(\bar h_*) \mid v]`, where :math:`\bar h_*` are the means of the hidden layers given their
  inducing values, each at the mean of the layer below; an exact layer is conditioned on its values at the data;
- :math:`\log p(y \mid \theta, v, h)`, the log density of all observed sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.primitives import Messenger

from numpyro_dgp._typing import Array
from numpyro_dgp.diagnostics.ratios import map_draws
from numpyro_dgp.draws import Whole
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.model.beliefs import StandardNormal
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.model.outcomes import NoMomentsError, moments
from numpyro_dgp.model.process_values import ProcessValues
from numpyro_dgp.model.program import Program, structure
from numpyro_dgp.model.refusals import all_rows
from numpyro_dgp.model.site_densities import total_log_prob
from numpyro_dgp.model.sites import Message, Trace, site_kind, unwrap
from numpyro_dgp.predict import Posterior

__all__ = ["LOG_DENSITY", "Identified", "identified", "site_kinds", "sites_of_draws"]

LOG_DENSITY = "log density of the data"


class Identified(NamedTuple):
    """Quantities of every draw.

    Args:
        hyperparameters: by site, unconstrained (S, ...).
        functions: at observed sites (S, N...), by a description.
        log_density: of the data (S,).
    """

    hyperparameters: dict[str, Array]
    functions: dict[str, Array]
    log_density: Array


class _Conditioned(NamedTuple):
    """An exact process at a site of the data, and its values there."""

    values: ProcessValues
    given: Array

    def mean(self, x: Array) -> Array:
        function: Any = self.values.function
        return function.given(self.values.inputs, self.given, self.values.noise)(x).mean

    def mean_at_data(self) -> Array:
        """The mean at its own inputs, given its values with noise there."""
        if self.values.noise is None:
            return self.given
        residual = self.values.precision_times(self.given - self.values.loc)
        return self.given - jnp.square(self.values.noise) * residual


class _AtMeans(Messenger):
    """Gives sites their values in a draw, and their means to those that it has none of.

    Args:
        fn: the program.
        draw: values by site.
        exact: exact processes with values at the data, by site.
        program: its structure at other inputs, where only sites that all data share have values in the draw; ``None``
            at the data.
        predicted: the plates of the predicted sites.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        draw: Mapping[str, Array],
        exact: Mapping[str, _Conditioned],
        program: Program | None = None,
        predicted: tuple[frozenset[str], ...] = (),
    ) -> None:
        self.draw, self.exact, self.program, self.predicted = draw, exact, program, predicted
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or msg["is_observed"] or msg["value"] is not None:
            return
        name, fn = msg["name"], unwrap(msg["fn"])
        if name in self.exact:
            mean = self.exact[name].mean(fn.inputs)  # type: ignore[attr-defined]
            msg["value"] = jnp.broadcast_to(mean, msg["fn"].shape())
        elif name in self.draw and (self.program is None or self.program.is_given(msg, self.predicted)):
            if jnp.shape(self.draw[name]) != msg["fn"].shape():
                raise ValueError(
                    f"convergence: expected {name!r} to have the shape {jnp.shape(self.draw[name])} of its draws at "
                    f"the inputs test= too, got {msg['fn'].shape()}: leave test= out"
                )
            msg["value"] = self.draw[name]
        elif site_kind(msg) != "observed" and not msg["fn"].is_discrete:
            loc = _mean(msg["fn"])
            msg["value"] = None if loc is None else jnp.broadcast_to(loc, msg["fn"].shape())


def identified(
    posterior: Posterior, args: tuple[Any, ...], kwargs: dict[str, Any], test: tuple[Any, ...] | None
) -> Identified:
    """What the data identify of all draws.

    Args:
        posterior: a program whose hidden values are sites, and draws of it.
        args: arguments of the program, observations included.
        kwargs: its keyword arguments.
        test: arguments of the program at other inputs, without observations.

    Raises:
        ValueError: draws of other data or of another program, and what ``Posterior`` refuses of ``test``.
    """
    call = None if test is None else posterior.call(test, {})
    fixed = jax.random.key(0)  # for sites of other rows that have no mean: the same numbers for every draw
    samples = dict(posterior.samples or {})
    total = len(next(iter(samples.values())))

    def one(_: Array, draw: dict[str, Array], arguments: Any, keywords: Any, block: int) -> Identified:
        sites = _run(posterior, draw, fixed, arguments[0], keywords)
        kinds = site_kinds(sites)
        hyperparameters = {
            name: biject_to(site["fn"].support).inv(site["value"]) if not site["fn"].is_discrete else site["value"]
            for name, site in sites.items()
            if name in draw and kinds[name] == "hyperparameter"
        }
        observed = [site for site in sites.values() if site["type"] == "sample" and site["is_observed"]]
        exact = _exact(sites)
        functions = {f"function at {site['name']}": _function(site, exact) for site in observed}
        if call is not None:
            program = posterior.seeded(posterior.model, fixed)
            program = _AtMeans(program, draw, exact, call.program, call.plates)
            there = handlers.trace(Whole(program)).get_trace(*arguments[1])
            names = [n for site in observed if (n := site["name"]) in there and not there[n]["is_observed"]]
            functions |= {f"function at {name}, test": _function(there[name], {}) for name in names}
        density = sum((total_log_prob(site) for site in observed), jnp.zeros(()))
        return Identified(hyperparameters, {n: f for n, f in functions.items() if f is not None}, density)

    return map_draws(one, fixed, total, samples, (args, test), kwargs, 1)


def site_kinds(sites: Trace) -> dict[str, str]:
    """The kind of every site: ``hyperparameter``, ``inducing``, ``hidden``, ``exact``, ``latent``, ``deterministic``.

    Args:
        sites: a trace of a program on its data.
    """
    program = structure(sites)
    kinds = {}
    for name, site in sites.items():
        if site["type"] == "deterministic":
            kinds[name] = "deterministic"
        elif site["type"] == "sample" and not site["is_observed"] and not isinstance(unwrap(site["fn"]), dist.Unit):
            kind = site_kind(site)
            latent = isinstance(unwrap(site["fn"]), StandardNormal) or not program.is_shared(site)
            kinds[name] = ("latent" if latent else "hyperparameter") if kind in ("other", "latent") else kind
    return kinds


def sites_of_draws(posterior: Posterior, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """A trace of the program at a draw, on shapes only.

    Raises:
        ValueError: draws of other data or of another program.
    """
    found: list[Trace] = []
    arrays, rebuild = split_arguments(args, kwargs)
    draw = {name: jax.ShapeDtypeStruct(jnp.shape(v)[1:], jnp.result_type(v)) for name, v in posterior.samples.items()}  # type: ignore[union-attr]

    def run(key: Array, draw: dict[str, Array], arrays: list[Array]) -> Array:
        again, options = rebuild(arrays)
        with all_rows(owner="convergence"):
            found.append(_run(posterior, {}, key, again, options))
        return jnp.zeros(())

    jax.eval_shape(run, jax.random.key(0), draw, arrays)
    (sites,) = found
    if not any(site["type"] == "sample" and site["is_observed"] for site in sites.values()):
        raise ValueError(
            "convergence: expected a program that observes data, got none: pass the arguments of the run, "
            "observations included"
        )
    for name, kind in site_kinds(sites).items():
        shape = jnp.shape(sites[name]["value"])
        if name not in draw and kind in ("hyperparameter", "inducing", "exact"):
            raise ValueError(
                f"convergence: expected draws of every site that all data share, got none of {name!r}: pass all of "
                "mcmc.get_samples()"
            )
        if name in draw and draw[name].shape != shape:
            raise ValueError(
                f"convergence: expected draws of {name!r} of shape {shape}, got {draw[name].shape}: pass the arguments "
                "that the chains were run on"
            )
    return sites


def _run(posterior: Posterior, draw: Mapping[str, Array], key: Array, args: Any, kwargs: Any) -> Trace:
    """The program at its data with the values of a draw; what a chain does not have (hidden values, under SGHMC) is at
    its mean."""
    program = handlers.substitute(posterior.seeded(posterior.model, key), data=dict(draw))
    return handlers.trace(Whole(_AtMeans(program, {}, {}))).get_trace(*args, **kwargs)


def _exact(sites: Trace) -> dict[str, _Conditioned]:
    """The exact processes of a run by site, each with its values."""
    found = {}
    for name, site in sites.items():
        values: Any = unwrap(site["fn"]) if site["type"] == "sample" else None
        if isinstance(values, ProcessValues) and values.function is not None and values.function.site is None:
            found[name] = _Conditioned(values, site["value"])
    return found


def _function(site: Message, exact: Mapping[str, _Conditioned]) -> Array | None:
    """The mean under an observed site, of the function where there is one and otherwise of y."""
    fn = unwrap(site["fn"])
    if isinstance(fn, Likelihood):
        return fn.f_x.loc
    if isinstance(fn, ProcessValues):
        return exact[site["name"]].mean_at_data() if site["name"] in exact else site["value"]
    return None if isinstance(fn, dist.Unit) else _mean(site["fn"])


def _mean(fn: dist.Distribution) -> Array | None:
    try:
        return moments(fn)[0]
    except NoMomentsError:
        return None
