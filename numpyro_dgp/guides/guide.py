"""A guide runs the model under a handler that replaces the distributions of its latent sites.

The handler replaces the distribution of a site when the program draws it, so that a rule has access to everything
computed before: the function, its inputs, the layer below. A structured posterior is therefore a rule and needs no
model class.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jax.scipy.special import ndtri
from numpyro import handlers
from numpyro.infer import init_to_median
from numpyro.infer.autoguide import AutoGuide

from numpyro_dgp._checks import caller, expect, expect_kind, expected, require_key, require_levels
from numpyro_dgp._compiled import one_thread
from numpyro_dgp._data import indexable
from numpyro_dgp._numpyro import apart
from numpyro_dgp._repr import described
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import INITIAL_VALUES, require
from numpyro_dgp.analysis.program import full_plates, inspect_program
from numpyro_dgp.analysis.sites import Message, Trace, unwrap
from numpyro_dgp.guides.any_guide import AnyGuide, require_drawing
from numpyro_dgp.guides.handler import GuideConfig, GuideHandler
from numpyro_dgp.guides.importance import Importance
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.guides.rules.by_kind import Other, Rules
from numpyro_dgp.guides.rules.rule import Rule
from numpyro_dgp.guides.rules.strata import Stratified
from numpyro_dgp.guides.run import marginal, resample, run, shared_by_weights

__all__ = ["INIT", "Guide"]

INIT: Callable[..., Any] = partial(init_to_median, num_samples=1000)
"""Where sites that are not function values start."""


class Guide(AnyGuide):
    """A variational posterior over the latent sites of ``model``: one rule per kind of site.

    It takes the model's arguments, draws every latent site and returns them in a dict, so that it works
    wherever a NumPyro guide does. At test inputs (called without observations) sites that have one value per
    datum are left to the model, which draws them from their prior; hidden layers are drawn from their posterior.

    Args:
        model: the program.
        inducing: rule for whitened inducing values.
        hidden: rule for values of hidden layers.
        latent: rule for other sites inside plates.
        exact: rule for values of exact processes.
        other: rule for every other site, or a NumPyro autoguide class such as ``AutoMultivariateNormal``
            (any callable from a model to a guide), applied to all of them together.
        sites: rules for single sites by name.
        importance: importance weighting of the latents of every datum in ``dgp.ELBO``; ``None`` for the plain bound.
        prefix: part of the names of parameters, ``"<site>_<prefix>_<parameter>"``.
        init_loc_fn: NumPyro init strategy for sites that are not function values.

    Attributes:
        defaults: the rules of the class, for the kinds of sites that the constructor is given no rule for.

    Raises:
        ValueError: no program, or something else in the place of a rule; on the first call, a name in ``sites`` that
            the model does not have, or ``importance`` for a model without latents per datum.

    Example:
        >>> import numpyro, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.Guide(model, inducing=dgp.guides.Diagonal())
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     print({name: value.shape for name, value in guide(X, y).items()})
        {'f': (5,)}
    """

    defaults: ClassVar[Rules] = Rules()
    predicted: tuple[frozenset[str], ...] = ()

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        inducing: Rule | None = None,
        hidden: Rule | None = None,
        latent: Rule | None = None,
        exact: Rule | None = None,
        other: Other | None = None,
        sites: Mapping[str, Rule] | None = None,
        importance: Importance | None = None,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = INIT,
    ) -> None:
        expect(callable(model), "the program, a function", type(model).__name__, f"{type(self).__name__}(model)")
        expect(isinstance(prefix, str), "prefix to be a string", repr(prefix), "'auto' is the default")
        expect(callable(init_loc_fn), "init_loc_fn to be a function", type(init_loc_fn).__name__)
        expect_kind(sites, Mapping | None, "sites as a dict", "sites={'h': rule}")
        expect_kind(
            importance, Importance | None, "a dgp.guides.Importance", "importance=dgp.guides.Importance(num_samples=5)"
        )
        given = zip((inducing, hidden, latent, exact, other), self.defaults, strict=True)
        rules = Rules(*(default if rule is None else rule for rule, default in given))  # type: ignore[arg-type]
        _require_rules(rules, sites or {})
        self.model, self.prefix, self.importance = model, prefix, importance
        own = rules._replace(other=None) if _makes_guide(rules.other) else rules
        self.config = GuideConfig(model, own, dict(sites or {}), prefix, init_loc_fn, importance)
        if own.other is None:
            exposed = handlers.block(model, hide_fn=self._is_not_other)
            self.companion = rules.other if isinstance(rules.other, AutoGuide) else rules.other(exposed)
            require_drawing(self.companion, "AutoMultivariateNormal, or Delta() for a mode")

    def __repr__(self) -> str:
        """The rules by kind of site, and the settings that are not defaults."""
        held = self._settings()
        names = [name for name in inspect.signature(type(self)).parameters if name in held]
        return described(self, {name: held[name] for name in names}, always=Rules._fields)

    def _settings(self) -> dict[str, Any]:
        """The arguments of the constructors of the class and its bases."""
        companion = {} if self.companion is None else {"other": type(self.companion)}
        rules = self.config.rules._asdict() | companion | {"sites": self.config.sites or None}
        return vars(self.config) | vars(self) | rules

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Draw every latent site of ``model(*args, **kwargs)``; returns ``{name: value}``."""
        args, kwargs = indexable((args, kwargs))
        drawn = {} if self.companion is None else self.companion(*args, **kwargs)
        checked = require(INITIAL_VALUES)
        with GuideHandler(self.config, args, kwargs, drawn, self.predicted) as values, checked:
            self.model(*args, **kwargs)
        return values

    def on(self, *args: Any, **kwargs: Any) -> Guide:
        """The guide with the data of the fit, ``guide.on(X, y)``, for guides that need them to predict.

        Only :class:`Collapsed` needs them. The other guides predict from their parameters, and are returned unchanged.
        """
        return self

    def predicting(self, *plates: frozenset[str]) -> Guide:
        """The guide for calls at new rows: sites in all of these plates are left to the model.

        Args:
            *plates: the names of the plates of each site that is predicted.
        """
        guide = copy.copy(self)
        guide.predicted = plates
        return guide

    @apart()
    def sample_posterior(
        self, rng_key: Array, params: dict[str, Array], *args: Any, sample_shape: tuple[int, ...] = (), **kwargs: Any
    ) -> dict[str, Array]:
        """Draws of the latent sites, each with leading shape ``sample_shape``.

        Latents that have importance weights or quadrature nodes, and the layers above them, are drawn from the
        posterior that those imply, datum by datum.

        Args:
            rng_key: PRNG key.
            params: parameters, from ``svi_result.params``.
            *args: arguments of the model.
            sample_shape: shape of independent draws.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: a key that is no PRNG key.
        """
        require_key(rng_key)

        def draw(key: Array) -> dict[str, Array]:
            with handlers.trace() as sites:
                values = handlers.substitute(handlers.seed(self, key), data=params)(*args, **kwargs)
            if not self.config.has_weights:
                return values
            inner = inspect_program(self.model, args, kwargs).hidden
            given = handlers.substitute(self, data=shared_by_weights(sites, values, inner))
            return values | resample(jax.random.fold_in(key, 1), run(key, key, params, self.model, given, args, kwargs))

        for _ in sample_shape:
            draw = jax.vmap(draw)
        return draw(jax.random.split(rng_key, sample_shape) if sample_shape else rng_key)

    def median(self, params: dict[str, Array], *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Medians of the sites with a variational distribution: ``{site: median}``.

        Args:
            params: parameters, from ``svi_result.params``.
            *args: arguments of the model, those of the fit: ``guide.median(params, X, y)``.
            **kwargs: its keyword arguments.

        Raises:
            ValueError: arguments with which the model cannot be called.
        """
        self._require_arguments("median", args, kwargs)
        others = {} if self.companion is None else self.companion.median(params)
        found = self._quantiles(params, [0.5], args, kwargs)
        return others | {name: value[0] for name, value in found.items()}

    def quantiles(self, params: dict[str, Array], quantiles: Any, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Quantiles of the sites with a variational distribution.

        Hidden layers with the model's own conditional have none, nor have values whose posterior depends on those of
        other sites, such as inducing values drawn below them, or is a mixture: draw them with :meth:`sample_posterior`.

        Args:
            params: parameters, from ``svi_result.params``.
            quantiles: probabilities, a number or a vector.
            *args: arguments of the model, those of the fit.
            **kwargs: its keyword arguments.

        Returns:
            ``{site: values}``, with the probabilities along the first axis.

        Raises:
            ValueError: arguments with which the model cannot be called, or probabilities that are not between 0 and 1.
        """
        self._require_arguments("quantiles", args, kwargs)
        require_levels(quantiles)
        quantiles = jnp.ravel(jnp.asarray(quantiles))
        others = {} if self.companion is None else self.companion.quantiles(params, quantiles)
        return others | self._quantiles(params, quantiles, args, kwargs)

    def with_rules(self, change: Callable[[Rule], Rule]) -> Guide:
        """The same guide with every rule changed.

        Args:
            change: from a rule to the one in its place.
        """
        guide = copy.copy(self)
        guide.config = self.config.with_rules(change)
        return guide

    def _require_arguments(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            inspect.signature(self.model).bind(*args, **kwargs)
        except TypeError as error:
            raise expected(
                "the arguments of the model after the parameters, as in the fit",
                f"{len(args)} positional and {sorted(kwargs)} ({error})",
                f"write guide.{method}(params, {('' if method == 'median' else 'quantiles, ')}X, y)",
            ) from error

    @one_thread
    def _quantiles(
        self, params: dict[str, Array], quantiles: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Array]:
        def of_draw(key: Array) -> dict[str, Array]:
            program = full_plates(marginal(handlers.substitute(handlers.seed(self, key), data=params)))
            with handlers.block():
                sites = handlers.trace(program).get_trace(*args, **kwargs)
            return {name: _quantiles(unwrap(sites[name]["fn"]), quantiles) for name in self._own(sites)}

        traced, found = jax.make_jaxpr(of_draw, return_shape=True)(jax.random.key(0))
        # A quantile that depends on the key is conditional on a draw of another site.
        values = dict(zip(sorted(found), jaxpr_as_fun(traced)(jax.random.key(0)), strict=True))
        depends = {n: any(dce_jaxpr(traced.jaxpr, [n == other for other in values])[1]) for n in values}
        return {name: value for name, value in values.items() if not depends[name]}

    def _own(self, sites: Trace) -> list[str]:
        """The sites with a variational distribution that has quantiles."""
        records = {name: record_of(site) for name, site in sites.items()}
        own = [name for name, record in records.items() if record.is_variational and not record.follows]
        own = [name for name in own if not isinstance(unwrap(sites[name]["fn"]), Stratified)]
        for name in own:
            base: Any = unwrap(sites[name]["fn"])
            base = base.base_dist if isinstance(base, dist.TransformedDistribution) else base
            expect(
                isinstance(base, dist.Delta) or hasattr(base, "loc"),
                "distributions with quantiles in closed form",
                f"{type(base).__name__} at {name!r}",
                "take those of draws, guide.sample_posterior(key, params, X, y, sample_shape=(1000,))",
            )
        return own

    def _is_not_other(self, msg: Message) -> bool:
        """Whether this site is hidden from the autoguide for the ``other`` sites, because it has a rule."""
        return msg["type"] == "sample" and not self.config.are_shared(msg)


def _makes_guide(other: Any) -> bool:
    """Whether it is a NumPyro autoguide, or a function that makes a guide, instead of a rule."""
    is_class_of_rules = isinstance(other, type) and issubclass(other, Rule)
    return callable(other) and not isinstance(other, Rule) and not is_class_of_rules


def _require_rules(rules: Rules, sites: Mapping[str, Any]) -> None:
    """Raise for arguments that are not rules, and for rules given for the wrong kind of site."""
    by_kind: dict[str, Any] = rules._asdict()
    if _makes_guide(rules.other):
        del by_kind["other"]
    for name, rule in [*by_kind.items(), *sites.items()]:
        expect_kind(rule, Rule, f"a rule for {name!r}", "for example dgp.guides.Normal(), an instance")
    for name, rule in by_kind.items():
        if rule.only_for not in (None, name):
            raise expected(
                f"{name} to be a rule for {name} values",
                f"{type(rule).__name__}, a rule for {rule.only_for} ones",
                f"{caller()}(model, sites={{'h': {rule}}}), with the name of the site",
            )


def _quantiles(fn: Any, quantiles: Any) -> Array:
    if isinstance(fn, dist.Delta):
        return jnp.stack([fn.v] * len(quantiles))
    moved = isinstance(fn, dist.TransformedDistribution)
    base, transforms = (fn.base_dist, fn.transforms) if moved else (fn, [])
    q = jnp.asarray(quantiles, base.loc.dtype).reshape(-1, *(1,) * base.loc.ndim)
    values = base.loc + jnp.sqrt(base.variance) * ndtri(q)
    for transform in transforms:
        values = jax.vmap(transform)(values)
    return values
