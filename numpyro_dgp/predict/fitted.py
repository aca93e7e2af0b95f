"""A fitted program: parameters or posterior samples, validated against the model.

A ``numpyro.param`` without a value would take its initial value, and a site without a sample would be drawn from its
prior: predictions would then be those of a program that was never fitted.

Processes without inducing values are predicted at new rows given their values at the rows of the fit.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_dgp._checks import (
    expect,
    expected,
    nearest,
    require_call,
    require_finite,
    require_finite_leaves,
    require_key,
)
from numpyro_dgp._data import as_array, own
from numpyro_dgp._fields import Checked, count, flag
from numpyro_dgp._numpyro import apart
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.analysis.calls import (
    Call,
    inspect_call,
    require_new_rows,
    require_own_functions,
    require_unobserved,
    warn_rows_together,
)
from numpyro_dgp.analysis.checks import parameters_from, require
from numpyro_dgp.analysis.program import inspect_program, structure
from numpyro_dgp.analysis.sites import Message, Trace, unwrap
from numpyro_dgp.functions.function_values import ProcessValues
from numpyro_dgp.guides.any_guide import AnyGuide, adapted, require_drawing
from numpyro_dgp.guides.run import marginal, traces
from numpyro_dgp.likelihoods.likelihood import Likelihood
from numpyro_dgp.predict.draws import (
    BatchKeys,
    Target,
    given_draw,
    over_all_rows,
    trace_over_all_rows,
    without_value,
)

__all__ = [
    "Conditioned",
    "Fit",
    "Options",
    "Target",
    "ValuesOfFit",
    "as_data",
    "is_array",
    "known_values",
    "require_arguments",
    "require_draws",
    "require_fit",
    "require_rules",
]


class ValuesOfFit(NamedTuple):
    """Values of an exact process at the rows of a fit.

    Args:
        inputs: where (N, D).
        values: the values there, (N,) or (N, P), observations or a draw.
        noise: standard deviation of the noise in them, or ``None``.
        observed: whether they are observations.
    """

    inputs: Array
    values: Array
    noise: ArrayLike | None
    observed: bool


def known_values(sites: Trace) -> dict[str, ValuesOfFit]:
    """The values of exact processes in a run of a program, observed or drawn, by site."""
    found = {}
    for name, site in sites.items():
        values = unwrap(site["fn"]) if site["type"] == "sample" else None
        if isinstance(values, ProcessValues) and values.function is not None and values.function.site is None:
            found[name] = ValuesOfFit(values.inputs, site["value"], values.noise, site["is_observed"])
    return found


class Conditioned(Messenger):
    """Condition exact processes at new rows on their values at other rows, row by row.

    What was observed with noise is a ``Likelihood`` of the function, with this noise.

    Args:
        fn: the program.
        known: the values, by site.
    """

    def __init__(self, fn: Callable[..., Any], known: Mapping[str, ValuesOfFit]) -> None:
        self.known = known
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or msg["name"] not in self.known:
            return
        here: Any = unwrap(msg["fn"])
        fit = self.known[msg["name"]]
        # p(f(x) | f(X) + s e = values), s the noise in the values of the fit
        given, noise = here.function.condition(fit.inputs, fit.values, noise=fit.noise), here.noise
        if fit.observed and noise is not None:
            # The noise of a new y is in the likelihood: predict_function is without it.
            msg["fn"] = Likelihood(given(here.inputs), _noisy(noise, here.function.outputs))
        else:
            msg["fn"] = given(here.inputs, noise=noise)


def _noisy(noise: ArrayLike, outputs: int | None) -> Callable[[Array], dist.Distribution]:
    if outputs is None:
        return lambda v: dist.Normal(v, noise)
    return lambda v: dist.Normal(v, noise).to_event(1)


@dataclasses.dataclass(frozen=True)
class Options(Checked):
    """Options of predictions, shared by all methods of a posterior.

    Args:
        num_samples: S, draws of the latent variables; ``None`` for the default of each method.
        batch_size: rows at a time; ``None`` for all.
        progress_bar: show progress over batches.

    Raises:
        ValueError: numbers that are not positive integers.
    """

    num_samples: int | None = count(None, "100")
    batch_size: int | None = count(None, "10_000")
    progress_bar: bool = flag(True, "False for none")

    def using(self, num_samples: int | None, batch_size: int | None, progress_bar: bool | None) -> Options:
        """These options, updated by those that are not ``None``."""
        given: dict[str, Any] = {"num_samples": num_samples, "batch_size": batch_size, "progress_bar": progress_bar}
        return dataclasses.replace(self, **{name: value for name, value in given.items() if value is not None})


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """A fitted program and its runs at new inputs.

    Args:
        model: the program.
        guide: its guide.
        params: parameters, from ``svi_result.params``.
        samples: draws of the latent sites, instead of a guide.
        site: the observed site.
        data: arguments of the fit, positional ones and a dict, of programs with exact processes; :meth:`on` gives them.
        options: of predictions; :meth:`Posterior.using` gives them.

    Raises:
        ValueError: neither a guide nor samples, or both; or something else than a dict as params or samples.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any] | None = None
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    samples: Mapping[str, Array] | None = None
    site: str | None = None
    data: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    options: Options = Options()

    def __post_init__(self) -> None:
        require_fit(self.model, self.guide, self.params, self.samples, self.site)
        object.__setattr__(self, "params", own(self.params))
        object.__setattr__(self, "samples", own(self.samples))

    @property
    def programs(self) -> list[Self]:
        """The fitted programs: this one; a mixture, as of ``dgp.fit_best``, has several."""
        return [self]

    def on(self, *args: Any, **kwargs: Any) -> Self:
        """The same fit with its data, ``posterior.on(X, y)``, on which exact processes are conditioned.

        Values of a layer with ``inducing=None`` at new rows depend on those at the rows of the fit. Given each draw of
        hyperparameters and, where they are not observed, of these values, they have the closed form of
        ``f.condition(X, v)``. Predictions of an observed ``f(X, noise=s)`` have the noise, as those of every observed
        site; ``predict_function`` is without it. Other programs do not need the data.

        Args:
            *args: arguments of the model as in the fit, observations included.
            **kwargs: its keyword arguments.

        Returns:
            A copy that predicts from these data.

        Raises:
            ValueError: data without the observations, NaN or infinite data.

        Example:
            >>> import jax, numpyro
            >>> import jax.numpy as jnp
            >>> import numpyro.distributions as dist
            >>> import numpyro_dgp as dgp
            >>> def model(X, y=None):
            ...     scale = numpyro.sample("scale", dist.LogNormal())
            ...     numpyro.sample("y", dgp.gp("f", dgp.kernels.RBF(1.0, scale), None)(X, noise=0.1), obs=y)
            >>> X = jnp.linspace(0, 1, 9)[:, None]
            >>> posterior = dgp.Posterior(model, samples={"scale": jnp.array([0.4, 0.5])}).on(X, jnp.sin(6 * X[:, 0]))
            >>> print(posterior.predict(jax.random.key(0), jnp.array([[0.25]])).mean.round())
            [1.]
        """
        data = jax.tree.map(as_data, (args, kwargs))
        found = dataclasses.replace(self, data=data)
        call = inspect_call(found._with_parameters(), None, *data)
        if call.predicted or not call.candidates:
            raise expected(
                "the data of the fit with observations",
                f"none of {', '.join(map(repr, call.predicted))}",
                "posterior.on(X, y)",
            )
        guide = None if self.guide is None else adapted(self.guide).on(*args, **kwargs)
        exact = jax.eval_shape(lambda: found._known(jax.random.key(0), {})[0])
        if exact:
            require_finite_leaves("data", jax.tree.leaves(data))
        return dataclasses.replace(found, guide=guide, data=data if exact else None)

    def _with_parameters(self) -> Callable[..., Any]:
        substituted: Callable[..., Any] = handlers.substitute(self.model, data=dict(self.params))
        return substituted

    def _known(self, key: Array, values: Mapping[str, Any]) -> tuple[dict[str, ValuesOfFit], Trace]:
        """Values of exact processes at the rows of the fit given a draw of the other sites, and the run that gave
        them."""
        assert self.data is not None
        args, kwargs = self.data
        sites = handlers.trace(handlers.substitute(self.seeded(self.model, key), data=dict(values))).get_trace(
            *args, **kwargs
        )
        return known_values(sites), sites

    @apart()
    def call(self, args: Any, kwargs: Any, or_of_fit: bool = False) -> Call:
        """Analyse a call at new inputs; raises for invalid calls.

        Args:
            args: arguments of the program.
            kwargs: its keyword arguments.
            or_of_fit: take a call with all observations too, which is one at the rows of the fit.
        """
        hint = (
            "give those of the fit without observations, posterior.predict(key, X), posterior.layers(key, X), of a "
            "program def model(X, y=None)"
        )
        _require_no_options(self.model, kwargs)
        require_call(self.model, args, kwargs, hint)
        call = own = inspect_call(self._with_parameters(), self.site, args, kwargs)
        if self.data is not None and call.exact and not (or_of_fit and call.candidates and not call.predicted):

            def conditioned(*args: Any, **kwargs: Any) -> Any:
                with handlers.block():
                    known, _ = self._known(jax.random.key(0), {})
                return Conditioned(self._with_parameters(), {name: known[name] for name in own.exact})(*args, **kwargs)

            call = inspect_call(conditioned, self.site, args, kwargs)
        require_own_functions(call)
        if or_of_fit and call.candidates and not call.predicted:
            require_single_values(self.guide)
        else:
            require_unobserved(call)
            require_new_rows(call)
            warn_rows_together(call)
        require_rules(self.guide, self.params, own.sites)
        require_draws(self.samples or {}, own.sites)
        return call

    @apart()
    def trace(self, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Trace:
        """One run of the model: in marginal mode under the guide, or given one draw of MCMC.

        Raises:
            ValueError: a site that all data share has no value in the guide or the draw.
        """
        if self.data is not None and not target.of_fit:
            return self._trace_given_data(target, key, sample, args, kwargs)
        return self._trace(target, key, sample, args, kwargs)

    def _trace(self, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Trace:
        guide_key, model_key = jax.random.split(key)
        guide, model = self.guide_at(target), self.seeded(self.model, model_key, target)
        if guide is None:
            return trace_over_all_rows(self.given(sample, model, args, kwargs, target), args, kwargs)
        integrated = marginal(self.seeded(guide, guide_key, target))
        if guide.has_rules:
            drawn, sites = traces(model, integrated, args, kwargs, over_all_rows)
            self._require_shared(drawn, sites, target, args, kwargs)
            return sites
        # A guide of another package may have hidden values for the rows of the fit only.
        values = integrated(*args, **kwargs)
        return trace_over_all_rows(self.given(values, model, args, kwargs, target), args, kwargs)

    def _trace_given_data(self, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Trace:
        """One run of a model with exact processes, which are given the values that they have in a run at the data."""
        assert self.data is not None
        guide_key, fit_key, model_key = jax.random.split(key, 3)
        values: Any = sample
        if self.guide is not None:
            values = self.seeded(adapted(self.guide), guide_key)(*self.data[0], **self.data[1])
        known, sites = self._known(fit_key, values)
        unknown = {name for name, site in sites.items() if site["type"] == "sample" and not site["is_observed"]}
        if missing := unknown - values.keys():
            raise without_value("samples" if self.guide is None else "a guide", missing, values)
        call = inspect_call(self._with_parameters(), self.site, args, kwargs)
        rows = [plates for plates in (*call.program.data_plates, *target.plates) if plates]
        shared = dataclasses.replace(call.program, data_plates=tuple(rows), ends=call.program.ends)
        program = Conditioned(self.model, {name: known[name] for name in call.exact})
        seeded = self.seeded(program, model_key, target)
        source = given_draw(values, "samples" if self.guide is None else "a guide", shared, Target(None, ()))
        return trace_over_all_rows(handlers.substitute(seeded, substitute_fn=source), args, kwargs)

    def _require_shared(self, drawn: Trace, sites: Trace, target: Target, args: Any, kwargs: Any) -> None:
        """Raise if the model has drawn a shared site from its prior because the guide lacks it."""
        here = structure(sites)
        left = {
            name
            for name in sites.keys() - drawn.keys() - self.params.keys()
            if sites[name]["type"] == "sample"
            and sites[name]["kwargs"]["rng_key"] is not None
            and here.is_given(sites[name], target.plates)
        }
        if left and (missing := left - inspect_program(self.model, args, kwargs).ends):
            raise without_value("a guide", missing, drawn)

    def guide_at(self, target: Target) -> AnyGuide | None:
        """The guide at the rows that are predicted."""
        return None if self.guide is None else adapted(self.guide).predicting(*target.plates)

    def seeded(self, program: Callable[..., Any], key: Array, target: Target | None = None) -> Callable[..., Any]:
        """``program`` with random numbers, and the parameters of the fit."""
        data = dict(self.params)
        seeded: Callable[..., Any] = handlers.seed(program, key)
        if target is not None and target.batch is not None:
            seeded = BatchKeys(seeded, target.plates, target.batch)
        return require(parameters_from(data), fn=handlers.substitute(seeded, data=data))

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


def is_array(leaf: Any) -> bool:
    """Whether an argument of the model is data: a table or an array, also of a single number."""
    return bool(np.ndim(leaf)) or isinstance(leaf, jax.Array | np.ndarray)


def as_data(leaf: Any) -> Any:
    """An argument of the model with tables converted to arrays; other objects are unchanged."""
    expect(
        all(isinstance(n, int) for n in np.shape(leaf)),
        "a number of rows",
        f"a symbolic one, shape {np.shape(leaf)}",
        ("export the prediction of a row over rows, jax.vmap(lambda x: posterior.predict(key, x[None]).mean[0])"),
    )
    return as_array("arguments of the model", leaf) if is_array(leaf) else leaf


def require_arguments(key: Any, leaves: list[Any]) -> None:
    """Raise unless a key and the arguments of the model, as a list, can make a prediction."""
    require_key(key)
    for leaf in leaves:
        expect(
            isinstance(leaf, Hashable) or is_array(leaf),
            "arrays and settings as arguments of the model",
            f"a {type(leaf).__name__}",
            "pass numbers in an array, jnp.asarray(list(values))",
        )
    require_finite_leaves("inputs", leaves)
    expect(
        not any(map(np.ndim, leaves)) or any(np.size(leaf) for leaf in leaves if np.ndim(leaf)),
        "at least one row to predict",
        "arrays without rows",
        "pass X[:1]",
    )


def _require_no_options(model: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a keyword argument is an option of predictions and no parameter of the program."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):  # a callable that has no signature
        return
    own = [field.name for field in dataclasses.fields(Options)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    for name in kwargs.keys() - {p.name for p in parameters if p.kind != p.VAR_KEYWORD}:
        option = name if name in own else None if takes_any else nearest(name, (*own, "X_variance"))
        expect(
            option not in own,
            "arguments of the program",
            f"{name!r}, which is none of its parameters",
            f"options are given before, posterior.using({option}=...).predict(key, X)",
        )
        expect(
            option is None,
            "arguments of the program",
            f"{name!r}, which is none of its parameters",
            "predict, predict_function, log_density, probs and quantile take X_variance=...",
        )


def require_fit(model: Any, guide: Any, params: Any, samples: Any, site: Any) -> None:
    """Raise unless the arguments of ``Posterior`` have the right types."""
    expect(callable(model), "the model, a function", type(model).__name__, "Posterior(model, guide, params)")
    if (guide is None) == (samples is None):
        raise expected(
            "a guide with params, or samples",
            "neither" if guide is None else "both",
            "Posterior(model, guide, result.params) or Posterior(model, samples=mcmc.get_samples())",
        )
    expect(
        guide is None or callable(guide),
        "the guide, a function, as second argument",
        type(guide).__name__,
        "Posterior(model, guide, result.params), or samples= for draws",
    )
    require_drawing(guide, "Posterior(model, samples=guide.sample_posterior(key, params, sample_shape=(100,)))")
    if not isinstance(params, Mapping):
        has = "result.params" if hasattr(params, "params") else "svi.get_params(state)"
        raise expected("params, a dict of parameters by name", type(params).__name__, f"pass {has}")
    expect(
        samples is None or isinstance(samples, Mapping),
        "samples, a dict of draws",
        type(samples).__name__,
        "mcmc.get_samples()",
    )
    expect(site is None or isinstance(site, str), "site to be the name of a site", type(site).__name__, "site='y'")
    if samples is not None:
        sizes = {name: np.shape(value)[:1] for name, value in samples.items()}
        if not sizes or len(set(sizes.values())) > 1 or () in sizes.values() or (0,) in sizes.values():
            raise expected(
                "samples with the same number of draws of every site along the first axis",
                {name: np.shape(value) for name, value in samples.items()},
                "pass mcmc.get_samples() as it is",
            )


def require_draws(samples: Mapping[str, Any], sites: Trace) -> None:
    """Raise if draws of a site of the program are NaN."""
    for name in sorted(samples.keys() & sites.keys()):
        if sites[name]["type"] == "sample":
            require_finite(f"draws of {name!r}", samples[name], "the chain diverged: look at its diagnostics")


def require_single_values(guide: Any) -> None:
    """Raise if a guide has several weighted values of latents at the rows of the fit, so that no single value
    exists."""
    if (config := adapted(guide).config) is not None and config.has_weights:
        raise expected(
            "a call without observations",
            "the data of the fit with a guide that has several weighted values of every latent",
            "posterior.layers(key, X) for new rows, guide.sample_posterior(key, params, X, y) for those of the fit",
        )


def require_rules(guide: Any, params: Mapping[str, Any], sites: Trace) -> None:
    """Raise if there are parameters for a site whose rule in ``guide`` has none; warn of parameters of no site."""
    if (config := adapted(guide).config) is None:
        return
    found = {name: site for name, site in sites.items() if site["type"] == "sample"}
    middle = f"_{config.prefix}_"
    theirs = {name: name.split(middle)[0] for name in params if middle in name}
    of_others, of_none = [], []
    for name, owner in theirs.items():
        rule = config.rule(found[owner]) if owner in found else None
        if owner not in found:
            of_none.append(name)
        elif rule is not None and rule.follows_model:
            of_others.append(name)
    if of_others:
        raise expected(
            "the params of this guide",
            f"{', '.join(map(repr, sorted(of_others)[:6]))} too, of sites that follow the model in it",
            "pass the guide of the fit",
        )
    if of_none:
        warnings.warn(
            f"Posterior: the params have values for sites that the model does not have, "
            f"{', '.join(map(repr, sorted(of_none)[:6]))}: they are ignored; is it the model of the fit?",
            stacklevel=2,
        )
