"""One run of a guide, and of the model at its values, in marginal mode: the input of a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.handlers import replay, seed, substitute, trace
from numpyro.primitives import Messenger

from numpyro_dgp._checks import expected
from numpyro_dgp._compiled import one_thread
from numpyro_dgp._data import indexable
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.observations_apart import require_observations_apart
from numpyro_dgp.analysis.program import ProgramFacts, inspect_program, require_sound
from numpyro_dgp.analysis.sites import Message, Trace, unwrap
from numpyro_dgp.functions.weights import Belief
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.guides.importance import ImportanceWeights, ReplicateLatents, importance_weights
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.guides.rules.strata import BeliefMixture, Stratified

__all__ = ["Run", "marginal", "mutable", "resample", "run", "traces"]


class marginal(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler of *marginal mode*: where a guide has a Gaussian q(v) of inducing values, the layer gets q(v) itself (a
    ``Belief``) instead of a draw from it, and integrates v out.

    Two kinds of inducing values are still drawn: those that the posterior of another site depends on, and those of a
    function of which one density depends on several rows (:mod:`numpyro_dgp.analysis.coupling`).

    Args:
        fn: the guide.
        strata: which part of a ``Stratified`` posterior a site takes, by name; otherwise it is drawn as a whole.
    """

    def __init__(self, fn: Callable[..., Any] | None = None, strata: Mapping[str, Array] | None = None) -> None:
        self.strata = strata or {}
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        fn: Any = unwrap(msg["fn"])
        if msg["name"] in self.strata:
            fn = fn.stratum(self.strata[msg["name"]])
        if isinstance(fn, Belief) and not record_of(msg).sample_inducing:
            msg["value"] = fn
        elif msg["name"] in self.strata:
            msg["value"], msg["intermediates"] = fn(rng_key=msg["kwargs"]["rng_key"], sample_intermediates=True)


def mutable(sites: Trace) -> dict[str, Any]:
    """Values of the ``mutable`` sites of a trace (NumPyro's sites of state that is not differentiated)."""
    return {name: site["value"] for name, site in sites.items() if site["type"] == "mutable"}


@one_thread
def traces(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    around: Callable[[Callable[..., Any], Trace], Callable[..., Any]] = lambda program, guide_trace: program,
) -> tuple[Trace, Trace]:
    """Run ``guide``, and then ``model`` at its values: the traces of both.

    Args:
        model: the program, with its random numbers and parameters.
        guide: likewise.
        args: arguments of both.
        kwargs: keyword arguments of both.
        around: wraps the model before it runs: a function of the model with the guide's values, and the guide's trace.
    """
    args, kwargs = indexable((args, kwargs))
    guide_trace = trace(guide).get_trace(*args, **kwargs)
    replayed = substitute(replay(model, guide_trace), data=mutable(guide_trace))
    return guide_trace, trace(around(replayed, guide_trace)).get_trace(*args, **kwargs)


class Run(NamedTuple):
    """Traces of a guide and its model, the weights of the latents that have several values, and the parts that
    ``Stratified`` posteriors took, by site."""

    guide: Trace
    model: Trace
    groups: list[ImportanceWeights]
    strata: Mapping[str, Array]

    def stratified(self) -> dict[str, int]:
        """The sites with a ``Stratified`` posterior, and how many parts it has."""
        found = {name: unwrap(site["fn"]) for name, site in self.guide.items() if site["type"] == "sample"}
        return {name: fn.num_strata for name, fn in found.items() if isinstance(fn, Stratified)}

    def weight(self) -> Any:
        """The product of the weights of the parts taken."""
        fns: dict[str, Any] = {name: unwrap(self.guide[name]["fn"]) for name in self.strata}
        return math.prod(fns[name].weight(index) for name, index in self.strata.items())


def run(
    key: Array,
    plate_key: Array,
    params: dict[str, Array],
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    strata: Mapping[str, Array] | None = None,
) -> Run:
    """Run ``guide`` and then ``model`` at its values; plates subsample by ``plate_key``.

    ``strata`` are the parts that ``Stratified`` posteriors take, by site; without it they are drawn as a whole.
    For doubly reparameterised gradients there are two runs: one without gradients gives the weights of the second.
    """
    importance = adapted(guide).importance
    model_key, guide_key = jax.random.split(key)

    def seeded(program: Callable[..., Any], key: Array) -> Callable[..., Any]:
        return seed(seed(program, plate_key, hide_types=["sample", "prng_key", "control_flow"]), key)

    @cache
    def program() -> ProgramFacts:
        return inspect_program(model, args, kwargs)

    def nesting() -> int:
        return program().nesting

    def once(params: dict[str, Array], weights: dict[str, Array] | None = None) -> Run:
        given = [substitute(seeded(*pair), data=params) for pair in ((model, model_key), (guide, guide_key))]
        integrated = marginal(ReplicateLatents(given[1], nesting, weights=weights), strata)
        guide_trace, model_trace = traces(
            given[0], integrated, args, kwargs, lambda fn, guide_trace: ReplicateLatents(fn, nesting, guide_trace)
        )
        if not any(record_of(site).name for site in guide_trace.values()):  # guides of this package do that themselves
            require_sound(model, args, kwargs)
            require_observations_apart(model, args, kwargs)
        groups = importance_weights(guide_trace, model_trace, nesting)
        if groups and program().aggregates:
            raise expected(
                "densities that depend on one row of a hidden layer each",
                f"{sorted(program().aggregates)}, which depend on several",
                "the weights of one datum would depend on the others; use guides.InducingPoint",
                at="importance weighting",
            )
        return Run(guide_trace, model_trace, groups, strata or {})

    if importance is None or not importance.doubly_reparameterised:
        return once(params)
    before = once(jax.lax.stop_gradient(params))
    known = {name: jax.lax.stop_gradient(group.normalised()) for group in before.groups for name in group.latents}
    return once(params, known)


def shared_by_weights(sites: Trace, values: Mapping[str, Any], inner: frozenset[str]) -> dict[str, Any]:
    """The values on which the weights of latents are conditioned: all except those in the plates of these latents, and
    those of functions that the weights integrate out.

    Args:
        sites: trace of the run.
        values: its values by site.
        inner: inducing sites of functions with values at hidden sites.
    """
    weighted = [site for site in sites.values() if record_of(site).num_replicates is not None]
    frames = {frame for site in weighted for frame in site["cond_indep_stack"]}

    def shared(name: str) -> bool:
        site = sites.get(name)
        if site is None or name in inner:
            return True
        integrated = isinstance(unwrap(site["fn"]), Belief | BeliefMixture) and not record_of(site).sample_inducing
        return not integrated and not frames & set(site["cond_indep_stack"])

    return {name: value for name, value in values.items() if shared(name)}


def resample(key: Array, found: Run) -> dict[str, Array]:
    """Resample the K values of every site in the plates of latents by their weights: ``{site: value}``.

    Source: Salimbeni (2020), section 5.2.4.
    """
    values = {}
    for i, group in enumerate(found.groups):
        replicates = group.log_weights.ndim
        index = jax.random.categorical(jax.random.fold_in(key, i), group.log_weights, axis=0)[None]
        frames = set(found.guide[group.latents[0]]["cond_indep_stack"])
        for name, site in found.guide.items():
            if site["type"] != "sample" or not frames <= set(site["cond_indep_stack"]):
                continue
            batch = jnp.ndim(site["value"]) - site["fn"].event_dim
            if batch == replicates:
                which = index.reshape(index.shape + (1,) * site["fn"].event_dim)
                chosen = jnp.take_along_axis(site["value"], which, axis=0)[0]
                plates = max(-frame.dim for frame in site["cond_indep_stack"])
                values[name] = chosen.reshape(chosen.shape[batch - 1 - plates :])
            else:
                values[name] = site["value"]
    return values
