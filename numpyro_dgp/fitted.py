"""What a fit left behind, parameters or draws, checked against the program that asks for it.

A ``numpyro.param`` without a value would take its initial value, and a site without a draw would be drawn from its
prior: each would be a prediction of something that was never fitted.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_dgp._checks import require_call, require_finite, require_finite_leaves, require_key, with_nearest
from numpyro_dgp._data import as_array, own
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.compiled import one_thread
from numpyro_dgp.draws import BatchKeys, Whole, sample_values
from numpyro_dgp.guides.guide import Guide, require_drawing
from numpyro_dgp.guides.run import marginal, traces
from numpyro_dgp.model.call_checks import (
    require_new_rows,
    require_own_functions,
    require_unobserved,
    warn_rows_together,
)
from numpyro_dgp.model.calls import Call, inspect_call
from numpyro_dgp.model.other_rows import apart
from numpyro_dgp.model.program import Program, inspect_program, structure
from numpyro_dgp.model.sites import Message, Trace

__all__ = [
    "Fit",
    "RequireParameters",
    "Target",
    "as_data",
    "given_draw",
    "is_array",
    "require_arguments",
    "require_draws",
    "require_fit",
    "require_rules",
]


class Target(NamedTuple):
    """What a prediction is of.

    Args:
        site: the observed site; ``None`` where no single one is asked for.
        plates: the plates of each predicted site.
        batch: the number of the batch of rows; ``None`` for all rows at once.
        of_fit: whether the rows are those of the fit, in their order, so that its values of single rows are theirs.
    """

    site: str | None
    plates: tuple[frozenset[str], ...]
    batch: Array | None = None
    of_fit: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """A fitted program and its runs at new inputs.

    Args:
        model: the program.
        guide: its guide.
        params: parameters, from ``svi_result.params``.
        samples: draws of the latent sites, instead of a guide.
        site: the observed site.

    Raises:
        ValueError: neither a guide nor samples, or both; or something else than a dict as params or samples.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any] | None = None
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    samples: Mapping[str, Array] | None = None
    site: str | None = None

    def __post_init__(self) -> None:
        require_fit(self.model, self.guide, self.params, self.samples, self.site)
        object.__setattr__(self, "params", own(self.params))
        object.__setattr__(self, "samples", own(self.samples))

    @one_thread
    def call(self, args: Any, kwargs: Any, or_of_fit: bool = False) -> Call:
        """What a call at new inputs predicts; raises for a call that is not one.

        Args:
            args: arguments of the program.
            kwargs: its keyword arguments.
            or_of_fit: take a call with all observations too, which is one at the rows of the fit.
        """
        hint = (
            "give those of the fit without observations, posterior.predict(key, X), posterior.layers(key, X), of a "
            "program def model(X, y=None)"
        )
        require_call("Posterior", self.model, args, kwargs, hint)
        call = inspect_call(handlers.substitute(self.model, data=dict(self.params)), self.site, args, kwargs)
        require_own_functions(call)
        if or_of_fit and call.candidates and not call.predicted:
            require_single_values(self.guide)
        else:
            require_unobserved(call)
            require_new_rows(call)
            warn_rows_together(call)
        require_rules(self.guide, self.params, call.sites)
        require_draws(self.samples or {}, call.sites)
        return call

    @one_thread
    def trace(self, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Trace:
        """One run of the model: in marginal mode under the guide, or given one draw of MCMC.

        Raises:
            ValueError: a site that all data share has no value in the guide or the draw.
        """
        with apart():
            return self._trace(target, key, sample, args, kwargs)

    def _trace(self, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Trace:
        guide_key, model_key = jax.random.split(key)
        guide, model = self.guide_at(target), self.seeded(self.model, model_key, target)
        if guide is None:
            return _whole(self.given(sample, model, args, kwargs, target), args, kwargs)
        integrated = marginal(self.seeded(guide, guide_key, target))
        if isinstance(guide, Guide):
            drawn, sites = traces(model, integrated, args, kwargs, lambda program, _: Whole(program))
            self._require_shared(drawn, sites, target, args, kwargs)
            return sites
        # A guide of another package may have hidden values for the rows of the fit only.
        values = sample_values(handlers.trace(integrated).get_trace(*args, **kwargs))
        return _whole(self.given(values, model, args, kwargs, target), args, kwargs)

    def _require_shared(self, drawn: Trace, sites: Trace, target: Target, args: Any, kwargs: Any) -> None:
        """Raise if the model has drawn a site that all data share from its prior, since the guide has none."""
        here = structure(sites)
        left = {
            name
            for name in sites.keys() - drawn.keys() - self.params.keys()
            if sites[name]["type"] == "sample"
            and sites[name]["kwargs"]["rng_key"] is not None
            and here.is_given(sites[name], target.plates)
        }
        if left and (missing := left - inspect_program(self.model, args, kwargs).ends):
            raise _without_value("a guide", missing, drawn)

    def guide_at(self, target: Target) -> Callable[..., Any] | None:
        """The guide at the rows that are predicted."""
        return self.guide.predicting(*target.plates) if isinstance(self.guide, Guide) else self.guide

    def seeded(self, program: Callable[..., Any], key: Array, target: Target | None = None) -> Callable[..., Any]:
        """``program`` with random numbers, and the parameters of the fit."""
        data = dict(self.params)
        seeded: Callable[..., Any] = handlers.seed(program, key)
        if target is not None and target.batch is not None:
            seeded = BatchKeys(seeded, target.plates, target.batch)
        return RequireParameters(handlers.substitute(seeded, data=data), data)

    def given(
        self,
        sample: Any,
        program: Callable[..., Any],
        args: Any,
        kwargs: Any,
        target: Target = Target(None, ()),
    ) -> Callable[..., Any]:
        """``program`` with those values of ``sample`` that are shared by all data, and all of them at rows of the fit.

        Args:
            sample: values by site.
            program: the model, with its random numbers.
            args: its arguments.
            kwargs: its keyword arguments.
            target: what is predicted: latents of other rows, observed in this call, are given too.
        """
        structure = inspect_program(self.model, args, kwargs)
        source = "samples" if self.guide is None else "a guide"
        return handlers.substitute(program, substitute_fn=given_draw(sample, source, structure, target))


def _whole(program: Callable[..., Any], args: Any, kwargs: Any) -> Trace:
    return handlers.trace(Whole(program)).get_trace(*args, **kwargs)


class RequireParameters(Messenger):
    """Raises an error for ``numpyro.param`` sites that have no value, all of them together, when the program has run.

    Args:
        fn: the program, in which handlers have given parameters their values.
        params: these values, by name.

    Raises:
        ValueError: sites without a value, or with NaN in it.
    """

    def __init__(self, fn: Callable[..., Any], params: Mapping[str, Any]) -> None:
        self.params = params
        self.met: set[str] = set()
        self.missing: set[str] = set()
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "param":
            return
        name = msg["name"]
        (self.missing if msg["value"] is None else self.met).add(name)
        for leaf in jax.tree.leaves(self.params.get(name)):  # of a network, several arrays
            require_finite(f"parameter {name!r}", leaf, "the fit diverged: take smaller steps")

    def __exit__(self, exc_type: Any, *exc: Any) -> None:
        super().__exit__(exc_type, *exc)
        if exc_type is None and self.missing:
            raise ValueError(
                "Posterior: expected params with a value for every numpyro.param, got none for "
                f"{with_nearest(self.missing, self.params.keys() - self.met)}: pass svi_result.params of the fit of "
                "this guide and model"
            )


def is_array(leaf: Any) -> bool:
    """Whether an argument of the model is data: a table, or an array, of a single number too, as traced numbers are."""
    return bool(np.ndim(leaf)) or isinstance(leaf, jax.Array | np.ndarray)


def as_data(leaf: Any) -> Any:
    """An argument of the model: a table as an array, a number or an object as it is."""
    return as_array("arguments of Posterior", leaf) if is_array(leaf) else leaf


def require_arguments(key: Any, leaves: list[Any]) -> None:
    """Raise unless a key and the arguments of the model, as a list, can make a prediction."""
    require_key("Posterior", key)
    for leaf in leaves:
        if not isinstance(leaf, Hashable) and not is_array(leaf):
            raise ValueError(
                f"Posterior: expected arrays and settings as arguments of the model, got a {type(leaf).__name__}: pass "
                "numbers in an array, jnp.asarray(list(values))"
            )
    require_finite_leaves("inputs", leaves)
    if any(map(np.ndim, leaves)) and not any(np.size(leaf) for leaf in leaves if np.ndim(leaf)):
        raise ValueError("Posterior: expected at least one row to predict, got arrays without rows: pass X[:1]")


def given_draw(sample: Mapping[str, Any], source: str, structure: Program, target: Target) -> Callable[[Message], Any]:
    """From a site of a program to its value in a draw, ``None`` for sites that the program draws at these rows.

    Args:
        sample: values by site.
        source: where they come from, for messages.
        structure: of the program in this call.
        target: what is predicted. Without plates, and at other rows than those of the fit, all sites of single data are
            left to the program.

    Raises:
        ValueError: when the program meets a shared site that has no value, or one of another shape.
    """

    def value(msg: Message) -> Any:
        name = msg["name"]
        if msg["type"] != "sample" or msg["is_observed"]:
            return None
        if not structure.is_given(msg, target.plates) and not (target.of_fit and name in sample):
            return None
        if name not in sample:
            if name in structure.ends:
                return None
            raise _without_value(source, {name}, sample)
        if jnp.shape(sample[name]) != msg["fn"].shape():
            raise ValueError(
                f"Posterior: expected each draw of {name!r} to have shape {msg['fn'].shape()}, got "
                f"{jnp.shape(sample[name])}: draws of several chains go along one axis, as in mcmc.get_samples(); "
                "values of single data need the data of the fit"
            )
        return sample[name]

    return value


def _without_value(source: str, missing: set[str], given: Iterable[str]) -> ValueError:
    return ValueError(
        f"Posterior: expected {source} with a value for every site that all data share, got none for "
        f"{with_nearest(missing, given)}: without one it would be drawn from its prior; is it the model of the fit?"
    )


def require_fit(model: Any, guide: Any, params: Any, samples: Any, site: Any) -> None:
    """Raise unless the arguments of ``Posterior`` are of the kinds that it takes."""
    if not callable(model):
        raise ValueError(
            f"Posterior: expected the model, a function, got {type(model).__name__}: Posterior(model, guide, params)"
        )
    if (guide is None) == (samples is None):
        raise ValueError(
            "Posterior: expected a guide with params, or samples, and not both: "
            "Posterior(model, guide, result.params) or Posterior(model, samples=mcmc.get_samples())"
        )
    if guide is not None and not callable(guide):
        raise ValueError(
            f"Posterior: expected the guide, a function, as second argument, got {type(guide).__name__}: "
            "Posterior(model, guide, result.params), or samples= for draws"
        )
    require_drawing(
        "Posterior", guide, "Posterior(model, samples=guide.sample_posterior(key, params, sample_shape=(100,)))"
    )
    if not isinstance(params, Mapping):
        has = "result.params" if hasattr(params, "params") else "svi.get_params(state)"
        raise ValueError(
            f"Posterior: expected params, a dict of parameters by name, got {type(params).__name__}: pass {has}"
        )
    if samples is not None and not isinstance(samples, Mapping):
        raise ValueError(
            f"Posterior: expected samples, a dict of draws by site, got {type(samples).__name__}: pass "
            "mcmc.get_samples()"
        )
    if site is not None and not isinstance(site, str):
        raise ValueError(f"Posterior: expected site to be the name of a site, got {type(site).__name__}: site='y'")
    if samples is not None:
        sizes = {name: np.shape(value)[:1] for name, value in samples.items()}
        if not sizes or len(set(sizes.values())) > 1 or () in sizes.values() or (0,) in sizes.values():
            raise ValueError(
                f"Posterior: expected samples with the same number of draws of every site along the first axis, got "
                f"{ {name: np.shape(value) for name, value in samples.items()} }: pass mcmc.get_samples() as it is"
            )


def require_draws(samples: Mapping[str, Any], sites: Trace) -> None:
    """Raise if draws of a site of the program hold NaN."""
    for name in sorted(samples.keys() & sites.keys()):
        if sites[name]["type"] == "sample":
            require_finite(f"draws of {name!r}", samples[name], "the chain diverged: look at its diagnostics")


def require_single_values(guide: Any) -> None:
    """Raise if a guide has several weighted values of latents at the rows of the fit, of which none is the one."""
    if isinstance(guide, Guide) and guide.choices.has_weights:
        raise ValueError(
            "Posterior.layers: expected a call without observations, got those of the fit with a guide that has "
            "several weighted values of every latent: leave the observations out, posterior.layers(key, X), for "
            "latents from their prior, or draw those of the fit's rows, guide.sample_posterior(key, params, X, y)"
        )


def require_rules(guide: Any, params: Mapping[str, Any], sites: Trace) -> None:
    """Raise if there are parameters for a site whose rule in ``guide`` has none; warn if for no site of the program."""
    if not isinstance(guide, Guide):
        return
    found = {name: site for name, site in sites.items() if site["type"] == "sample"}
    middle = f"_{guide.prefix}_"
    theirs = {name: name.split(middle)[0] for name in params if middle in name}
    of_others, of_none = [], []
    for name, owner in theirs.items():
        rule = guide.choices.rule(found[owner]) if owner in found else None
        if owner not in found:
            of_none.append(name)
        elif rule is not None and rule.follows_model:
            of_others.append(name)
    if of_others:
        raise ValueError(
            f"Posterior: expected the params of this guide, got {', '.join(map(repr, sorted(of_others)[:6]))} too, of "
            "sites that follow the model in it: pass the guide of the fit"
        )
    if of_none:
        warnings.warn(
            f"Posterior: the params have values for sites that the model does not have, "
            f"{', '.join(map(repr, sorted(of_none)[:6]))}: they are ignored; is it the model of the fit?",
            stacklevel=2,
        )
