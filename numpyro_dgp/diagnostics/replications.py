"""Data simulated from a program, fits to them, and the ranks of the true values: replications for
:func:`~numpyro_dgp.diagnostics.sbc`, many in one compiled program."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC, SVI

from numpyro_dgp._checks import expect, expected, require_call, require_count, require_key
from numpyro_dgp._compiled import Compiled, one_thread
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import ALL_ROWS, WHOLE_DATA, require
from numpyro_dgp.analysis.program import run_on_shapes, structure
from numpyro_dgp.analysis.sites import (
    Trace,
    each_values_of,
    is_likelihood,
    is_row_by_row,
    sample_values,
    site_kind,
    total_log_prob,
    values_of,
)
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.inference.fit_start import require_svi
from numpyro_dgp.mcmc.for_mcmc import Prepared

__all__ = ["Inference", "Quantities", "Replications", "joined", "replicate"]

_TOGETHER = 25
"""Replications that run at once."""

_DRAWS = 99
"""Of a guide."""

_ENTRIES = 8
"""Of function values that are ranked, evenly spaced among all."""

Values: TypeAlias = dict[str, Array]
Quantities: TypeAlias = Callable[[Values], Values]
Inference: TypeAlias = SVI | MCMC
_Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class Replications(NamedTuple):
    """Some replications, by the first axis.

    Args:
        ranks: of the true values, by quantity (R, ...).
        autocorrelation: of neighbouring posterior samples, by quantity (R, ...).
        unfinished: whether the loss of a fit still fell at the end (R,).
    """

    ranks: dict[str, np.ndarray]
    autocorrelation: dict[str, np.ndarray]
    unfinished: np.ndarray


def joined(ranks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Ranks of several batches of replications, by quantity."""
    return {name: np.concatenate([batch[name] for batch in ranks]) for name in ranks[0]}


class _Fitted(NamedTuple):
    """How to draw from a posterior.

    Args:
        model: the program, as the user wrote it.
        draw: from a key and a call with observations to posterior samples, and whether the fit was unfinished.
        num_samples: the number of samples.
    """

    model: Callable[..., Any]
    draw: Callable[[Array, _Call], tuple[Values, Array]]
    num_samples: int


def _by_svi(svi: SVI, num_steps: int) -> _Fitted:
    guide = adapted(svi.guide)

    def draw(key: Array, call: _Call) -> tuple[Values, Array]:
        fit_key, draw_key = jax.random.split(key)
        args, kwargs = call
        result = svi.run(fit_key, num_steps, *args, progress_bar=False, **kwargs)
        kwargs = kwargs | svi.static_kwargs
        if guide.has_rules:
            draws = svi.guide.sample_posterior(draw_key, result.params, *args, sample_shape=(_DRAWS,), **kwargs)
        else:
            given = handlers.substitute(guide, data=result.params)
            draws = jax.vmap(lambda k: handlers.seed(given, k)(*args, **kwargs))(jax.random.split(draw_key, _DRAWS))
        return draws, _falls(result.losses)

    return _Fitted(partial(svi.model, **svi.static_kwargs) if svi.static_kwargs else svi.model, draw, _DRAWS)


def _falls(losses: Array) -> Array:
    """Whether the last quarter of the losses lies below the quarter before it, by more than two standard errors."""
    quarter = len(losses) // 4
    if quarter < 2:
        return jnp.array(False)
    before, last = losses[-2 * quarter : -quarter], losses[-quarter:]
    return before.mean() - last.mean() > 2 * jnp.sqrt((before.var() + last.var()) / quarter)


def _by_mcmc(mcmc: MCMC) -> _Fitted:
    settings = dict(num_warmup=mcmc.num_warmup, num_samples=mcmc.num_samples, thinning=mcmc.thinning)
    several = mcmc.num_chains > 1

    def draw(key: Array, call: _Call) -> tuple[Values, Array]:
        args, kwargs = call
        run = MCMC(  # a sampler of its own: the user's would keep traced values
            copy.copy(mcmc.sampler),
            num_chains=mcmc.num_chains,
            chain_method="vectorized" if several else "sequential",
            progress_bar=False,
            **settings,
        )
        run.run(key, *args, **kwargs)
        return run.get_samples(), jnp.array(False)

    model: Any = getattr(mcmc.sampler, "model", None)
    expect(callable(model), "a kernel of a program", type(mcmc.sampler).__name__, "MCMC(NUTS(dgp.for_mcmc(model)))")
    if isinstance(model, Prepared):
        model = handlers.substitute(model.model, data=model.params) if model.params else model.model
    return _Fitted(model, draw, mcmc.num_samples // mcmc.thinning * mcmc.num_chains)


def _fitted(inference: Any, num_steps: int | None) -> _Fitted:
    if isinstance(inference, MCMC):
        expect(num_steps is None, "num_steps for an SVI only", num_steps, "an MCMC object has its own settings")
        return _by_mcmc(inference)
    expect(
        isinstance(inference, SVI),
        "a numpyro.infer.SVI or MCMC",
        f"the class {inference.__name__}" if isinstance(inference, type) else type(inference).__name__,
        "SVI(model, guide, optax.adam(0.01), dgp.ELBO()), or MCMC(NUTS(dgp.for_mcmc(model)), ...)",
    )
    require_svi(inference)
    if num_steps is not None:
        require_count("num_steps", num_steps, "1000")
    return _by_svi(inference, 1000 if num_steps is None else num_steps)


def _run(program: Callable[..., Any], key: Array, given: Values, call: _Call) -> Trace:
    """A trace of a program on all rows, given values of some of its sites."""
    seeded = handlers.substitute(handlers.seed(program, key), data=given)
    with handlers.block(), require(WHOLE_DATA, ALL_ROWS) as met:
        sites = handlers.trace(seeded).get_trace(*call[0], **call[1])
    expect(
        not met.unset,
        "a prior for every unknown of the program",
        f"numpyro.param {sorted(met.unset)}",
        "write numpyro.sample, or fix values by numpyro.handlers.substitute(model, data=values)",
    )
    return sites


def _on_shapes(program: Callable[..., Any], call: _Call) -> Trace:
    """A trace of a program that has shapes only, and no arithmetic."""
    found: list[Trace] = []

    def run(key: Array) -> tuple[()]:
        found.append(_run(program, key, {}, call))
        return ()

    jax.eval_shape(run, jax.random.key(0))
    return found[0]


def _with_data(model: Callable[..., Any], call: _Call, data: Values) -> _Call:
    """A call with observations in the place of the arguments that have their names."""
    bound = inspect.signature(model).bind_partial(*call[0], **call[1])
    bound.arguments.update(data)
    return bound.args, bound.kwargs


def _latents(sites: Trace) -> dict[str, Any]:
    return {n: site for n, site in sites.items() if site["type"] == "sample" and not site["is_observed"]}


class _Simulation(NamedTuple):
    """Programs and arguments of the replications.

    Args:
        fitted: how to draw from a posterior.
        simulator: the program that the data come from.
        call: arguments of both, without observations.
        data: observations, for a simulation at these; or none.
        doubled: the call with all rows twice, for the latter.
        quantities: what is ranked, from the sites of a run.
    """

    fitted: _Fitted
    simulator: Callable[..., Any]
    call: _Call
    data: Values
    doubled: _Call
    quantities: Callable[[Trace], Values]

    def once(self, key: Array) -> Any:
        """Ranks and more of one replication."""
        truth_key, fit_key, tie_key = jax.random.split(key, 3)
        truth, call = self._from_prior(truth_key) if not self.data else self._from_posterior(truth_key)
        draws, unfinished = self.fitted.draw(fit_key, call)

        def quantities(values: Values) -> Values:
            return self.quantities(_run(self.fitted.model, jax.random.key(0), values, call))

        true, drawn = quantities(truth), jax.vmap(quantities)(draws)
        ranks = {n: _rank(jax.random.fold_in(tie_key, i), t, drawn[n]) for i, (n, t) in enumerate(true.items())}
        sound = jnp.array([jnp.isfinite(v).all() for v in drawn.values()]).all()
        return ranks, {name: _neighbours(v) for name, v in drawn.items()}, unfinished, sound

    def _names(self, sites: Trace) -> list[str]:
        parameters = inspect.signature(self.fitted.model).parameters
        return [name for name in parameters if name in sites and sites[name]["type"] == "sample"]

    def _from_prior(self, key: Array) -> tuple[Values, _Call]:
        """phi ~ p(phi), y ~ p(y | phi)."""
        sites = _run(self.simulator, key, {}, self.call)
        data = {name: sites[name]["value"] for name in self._names(sites)}
        return sample_values(sites), _with_data(self.fitted.model, self.call, data)

    def _from_posterior(self, key: Array) -> tuple[Values, _Call]:
        """phi ~ p(phi | y_obs), y ~ p(y | phi), and the call with both."""
        draw_key, data_key = jax.random.split(key)
        observed = _with_data(self.fitted.model, self.call, self.data)
        draws, _ = self.fitted.draw(draw_key, observed)
        first = sample_values(_run(self.fitted.model, draw_key, {n: v[-1] for n, v in draws.items()}, observed))
        shapes = {
            name: site["fn"].shape() for name, site in _run(self.simulator, data_key, {}, self.doubled).items()
            if site["type"] == "sample"
        }  # fmt: skip
        shared = {name: v for name, v in first.items() if name not in self.data and v.shape == shapes[name]}
        second = sample_values(_run(self.simulator, data_key, shared, self.call))
        both = {
            name: v if name in shared else _side_by_side(v, second[name], shapes[name]) for name, v in first.items()
        }
        data = {name: both[name] for name in self.data}
        return both, _with_data(self.fitted.model, self.doubled, data)


def _side_by_side(first: Array, second: Array, shape: tuple[int, ...]) -> Array:
    """Values at some rows and at further ones, along the axis in which the shape of both is larger."""
    (axis,) = (a for a in range(first.ndim) if first.shape[a] != shape[a])
    return jnp.concatenate([first, second], axis)


def _rank(key: Array, true: Array, drawn: Array) -> Array:
    """The number of draws (S, ...) below the truth, equal ones in random order."""
    below, equal = (drawn < true).sum(0), (drawn == true).sum(0)
    return below + jax.random.randint(key, below.shape, 0, equal + 1)


def _neighbours(draws: Array) -> Array:
    """The correlation of neighbouring draws (S, ...)."""
    centred = draws - draws.mean(0)
    return (centred[1:] * centred[:-1]).sum(0) / (jnp.square(centred).sum(0) + jnp.finfo(centred.dtype).tiny)


def _identified(model: Callable[..., Any], call: _Call) -> Callable[[Trace], Values]:
    """What is ranked by default: values that all data share except inducing values, the last function at some rows,
    and the log density of the data. Signs and orders of hidden columns cancel in these."""
    sites, _, _ = run_on_shapes(model, *call)
    program = structure(sites)
    shared = [n for n, s in _latents(sites).items() if site_kind(s) in ("other", "latent") and program.is_shared(s)]

    def is_last(site: Any) -> bool:
        if site["type"] != "sample" or (site["is_observed"] and not is_likelihood(site["fn"])):
            return False
        functions = [values.function for values in each_values_of(site["fn"]) if values.function is not None]
        return bool(functions) and not {f.site for f in functions} & program.inner

    last = [name for name, site in sites.items() if is_last(site)]

    def quantities(sites: Trace) -> Values:
        found = {name: sites[name]["value"] for name in shared}
        for name in last:
            site = sites[name]
            values = values_of(site["fn"]).loc if site["is_observed"] else site["value"]
            found[f"f(x) of {name}"] = _spaced(jnp.asarray(values).reshape(-1))
        observed = [site for site in sites.values() if site["type"] == "sample" and site["is_observed"]]
        return found | {"log density": sum((total_log_prob(site) for site in observed), jnp.zeros(()))}

    return quantities


def _spaced(values: Array) -> Array:
    return values[np.unique(np.linspace(0, len(values) - 1, _ENTRIES).round().astype(int))]


def _of_user(function: Quantities) -> Callable[[Trace], Values]:
    def quantities(sites: Trace) -> Values:
        found = function({n: s["value"] for n, s in sites.items() if s["type"] in ("sample", "deterministic")})
        expect(isinstance(found, dict) and found, "a dict of arrays from quantities", type(found).__name__)
        return {name: jnp.asarray(value) for name, value in found.items()}

    return quantities


def _doubled(call: _Call, data: Values) -> _Call:
    """All rows of the arguments twice."""
    rows = {len(v) if np.ndim(v) else 0 for v in data.values()}

    def twice(leaf: Any) -> Any:
        if not np.ndim(leaf):
            return leaf
        expect(
            {len(leaf)} == rows,
            f"arguments that have a row for each of the {max(rows)} observations",
            f"one of shape {np.shape(leaf)}",
            "keep other arrays outside of the program, or simulate from the prior, without observations",
        )
        return jnp.concatenate([leaf, leaf])

    return jax.tree.map(twice, call)


def _require_rows(latents: dict[str, Any], twice: Trace) -> None:
    """Raise unless a program at twice as many rows has the same functions, and values at its rows are independent given
    what all rows share."""
    for name, site in latents.items():
        shapes = [jnp.shape(some["value"]) for some in (site, twice[name])]
        kind, differ = site_kind(site), [a != b for a, b in zip(*shapes, strict=True)]
        alone = kind == "latent" or (kind == "hidden" and is_row_by_row(site["fn"]))
        expect(
            shapes[0] == shapes[1] or (alone and sum(differ) == 1),
            f"{name!r} to be shared by all rows, or to have a value for each row on its own, where observations are "
            "given",
            f"shapes {shapes[0]} for the rows, {shapes[1]} for twice as many",
            "give the layer known inducing inputs, dgp.Points(Z), or simulate from the prior, without observations",
        )


@one_thread
def _prepared(
    fitted: _Fitted,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    simulator: Callable[..., Any] | None,
    quantities: Quantities | None,
) -> _Simulation:
    """The parts of a simulation, after checks of the programs."""
    arrays, rebuild = split_arguments(args, kwargs)
    model = fitted.model
    call = _with_data(model, rebuild(arrays), {})
    parameters = inspect.signature(model).parameters
    bound = inspect.signature(model).bind_partial(*call[0], **call[1]).arguments
    given = {n: v for n, v in bound.items() if v is not None}
    sites = _on_shapes(model, call)
    data = {name: given[name] for name in given if name in sites and sites[name]["type"] == "sample"}
    call = _with_data(model, ((), {}), {name: value for name, value in bound.items() if name not in data})
    sites = _on_shapes(simulator or model, call)
    observed = [name for name in parameters if name in sites and sites[name]["type"] == "sample"]
    expect(
        observed and (not data or list(data) == observed),
        "a program whose observed sites have the names of the arguments for them, all or none of them given",
        f"arguments {list(parameters)}, of which {list(data)} are given, and sites {list(sites)}",
        'def model(X, y=None): ... numpyro.sample("y", ..., obs=y)',
    )
    fixed = [n for n, s in sites.items() if s["type"] == "sample" and s["is_observed"]]
    expect(not fixed, "a program that draws all data", f"{fixed} observed", "pass observations as arguments")
    zeros = {name: jnp.zeros(sites[name]["value"].shape, sites[name]["value"].dtype) for name in observed}
    at_data = _with_data(model, call, zeros)
    missing = _latents(_on_shapes(model, at_data)).keys() - sites.keys()
    expect(not missing, "a simulator that draws all latent sites of the program", f"none of {sorted(missing)}")
    doubled = _doubled(call, data) if data else call
    if data:
        latents = {name: site for name, site in _latents(sites).items() if name not in data}
        _require_rows(latents, _on_shapes(simulator or model, doubled))
    of_trace = _identified(model, at_data) if quantities is None else _of_user(quantities)
    return _Simulation(fitted, simulator or model, call, data, doubled, of_trace)


def replicate(
    inference: Inference,
    key: Array,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    num_replications: int,
    num_steps: int | None,
    simulator: Callable[..., Any] | None,
    quantities: Quantities | None,
) -> tuple[int, Iterator[Replications]]:
    """The number of draws, S, and replications, which are made as they are asked for.

    Args:
        inference: the program with its guide and optimiser, or its chain.
        key: PRNG key.
        args: arguments of the program; with observations for a simulation at these.
        kwargs: its keyword arguments.
        num_replications: how many in all.
        num_steps: of each fit of an ``SVI``.
        simulator: the program that the data come from, if it is another one.
        quantities: what is ranked, from values by site.

    Raises:
        ValueError: as :func:`~numpyro_dgp.diagnostics.sbc`.
    """
    fitted = _fitted(inference, num_steps)
    require_key(key)
    require_count("the number of replications", num_replications, "400")
    for name, function in (("simulator", simulator), ("quantities", quantities)):
        expect(function is None or callable(function), f"{name} to be a function", type(function).__name__)
    require_call(fitted.model, args, kwargs, "the arguments of the program, with or without observations")
    simulation = _prepared(fitted, args, kwargs, simulator, quantities)
    if isinstance(inference, SVI) and adapted(inference.guide).keeps_state:  # it is set up in its first call
        call = simulation._from_prior(key)[1]
        inference.init(key, *call[0], **call[1])
    return fitted.num_samples, _batches(simulation, key, num_replications)


def _batches(simulation: _Simulation, key: Array, num_replications: int) -> Iterator[Replications]:
    size = min(_TOGETHER, num_replications)
    keys = jax.random.split(key, -(-num_replications // size) * size)
    program = Compiled(jax.vmap(simulation.once)).at(keys[:size])
    for start in range(0, num_replications, size):
        found = program(keys[start : start + size])
        wanted = slice(num_replications - start)  # the last ones may be too many
        ranks, autocorrelation, unfinished, sound = jax.tree.map(lambda v, w=wanted: np.asarray(v)[w], found)
        if not sound.all():
            raise expected(
                "finite posterior samples in every replication",
                f"NaN or infinite ones in {int((~sound).sum())} of {len(sound)}",
                "lower the learning rate, or look at data that the simulator draws",
            )
        yield Replications(ranks, autocorrelation, unfinished)
