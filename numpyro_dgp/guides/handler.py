"""The handler that turns a run of the model into a run of a guide, and its settings.

Raises where a site of the program has the name of a parameter of its guide.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_dgp._checks import caller, expect, expected
from numpyro_dgp._numpyro import active, outside
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.calls import inspect_call
from numpyro_dgp.analysis.observations_apart import require_observations_apart
from numpyro_dgp.analysis.program import ProgramFacts, initial_values, inspect_program, observations
from numpyro_dgp.analysis.run_at_rows import OtherRows, with_rows
from numpyro_dgp.analysis.sites import Message, hide, is_likelihood, masks_around, rewrap, site_kind, unwrap
from numpyro_dgp.functions.joint_values import require_following
from numpyro_dgp.functions.site_distribution import declared
from numpyro_dgp.guides.importance import Importance
from numpyro_dgp.guides.record import SiteRecord, attach, record_of
from numpyro_dgp.guides.rules.by_kind import Rules
from numpyro_dgp.guides.rules.rule import Rule, SiteContext, require_rows, warn_of_rows
from numpyro_dgp.likelihoods.outcomes import require_in_range

__all__ = ["GuideConfig", "NamesApart", "GuideHandler"]


class NamesApart:
    """The names of sites of a program and its guide in one run, each of which must be unique.

    NumPyro gives all ``numpyro.param`` of one name the same value, whoever opens them.
    """

    def __init__(self) -> None:
        self._guide: set[str] = set()
        self._program: set[str] = set()
        self._in_guide = False

    @contextmanager
    def of_guide(self) -> Iterator[None]:
        """Where parameters are those of the guide."""
        self._in_guide = True
        try:
            yield
        finally:
            self._in_guide = False

    def meet(self, msg: Message) -> None:
        """Note a site.

        Raises:
            ValueError: a site of the program with the name of a parameter of the guide.
        """
        if msg["type"] not in ("param", "sample"):
            return
        name = msg["name"]
        (self._guide if self._in_guide else self._program).add(name)
        if name in self._guide and name in self._program:
            raise expected(
                "names of the model's sites other than those of the guide's parameters",
                f"{name!r} for both",
                f"rename the site of the model, or give the guide's another prefix, {caller()}(model, prefix='q')",
            )


@dataclasses.dataclass(frozen=True)
class GuideConfig:
    """The arguments of the constructor of a guide.

    Args:
        model: the program.
        rules: by kind of site.
        sites: rules of single sites, by name.
        prefix: part of the names of parameters, ``"<site>_<prefix>_<parameter>"``.
        init_loc_fn: NumPyro init strategy for sites that are not function values.
        importance: importance weighting of latents; ``None`` for the plain bound.
    """

    model: Callable[..., Any]
    rules: Rules
    sites: dict[str, Rule]
    prefix: str
    init_loc_fn: Callable[..., Any]
    importance: Importance | None

    @property
    def has_weights(self) -> bool:
        """Whether latents have several values in a fit, weighted by importance or quadrature."""
        rules = (*self.rules, *self.sites.values())
        return self.importance is not None or any(rule is not None and rule.num_nodes for rule in rules)

    def rule(self, msg: Message) -> Rule | None:
        """The rule for a latent site; ``None`` where a NumPyro autoguide draws it."""
        return self.sites.get(msg["name"], self.rules._asdict().get(site_kind(msg)))

    def with_rules(self, change: Callable[[Rule], Rule]) -> GuideConfig:
        """The same with every rule changed by a function."""
        rules = Rules(*(rule if rule is None else change(rule) for rule in self.rules))  # type: ignore[arg-type]
        return dataclasses.replace(self, rules=rules, sites={n: change(rule) for n, rule in self.sites.items()})

    def are_shared(self, msg: Message) -> bool:
        """Whether a site is one of the ``other`` kind without a rule in ``sites``."""
        return msg["name"] not in self.sites and site_kind(msg) == "other"


class GuideHandler(Messenger):
    """Replaces the model's distributions by the guide's; ``with GuideHandler(...) as values`` collects the draws.

    Every run of a guide makes a new instance.

    Args:
        config: the settings of the guide.
        args: positional arguments of the model.
        kwargs: its keyword arguments.
        drawn: values of sites that another guide has drawn.
        predicted: the plates of each site that is predicted; none in a fit. Sites in all of these plates are left to
            the model, whatever the call observes.
    """

    def __init__(
        self,
        config: GuideConfig,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        drawn: dict[str, Any],
        predicted: tuple[frozenset[str], ...] = (),
    ) -> None:
        self.config, self.args, self.kwargs, self.drawn, self.predicted = config, args, kwargs, drawn, predicted
        self.values: dict[str, Any] = {}
        self.found: dict[str, Array] = {}
        self.met: set[str] = set()
        self.indices: dict[str, Array] = {}
        self.replicated: set[str] = set()
        self._names = NamesApart()
        super().__init__()

    def __enter__(self) -> dict[str, Any]:
        super().__enter__()
        return self.values

    def __exit__(self, exc_type: Any, *exc: Any) -> None:
        super().__exit__(exc_type, *exc)
        if exc_type is not None:
            return
        in_fit = self.config.importance is not None and not self.predicted
        if in_fit and self.program.observed_plates and not self.replicated:
            raise expected(
                "a model with latent variables per datum",
                f"one with {sorted(self.met)}",
                "draw them by dgp.latent inside the data plate, or use guides.InducingPoint",
            )
        unknown = sorted(set(self.config.sites) - self.met)
        if unknown:
            raise expected("names of latent sites of the model", unknown, f"the model has {sorted(self.met)}")

    @cached_property
    def program(self) -> ProgramFacts:
        """The structure of the model for these arguments."""
        return inspect_program(self.config.model, self.args, self.kwargs)

    @cached_property
    def _sound(self) -> bool:
        require_observations_apart(self.config.model, self.args, self.kwargs)
        return True

    def require_sound(self) -> None:
        """Raise if the program cannot be fitted; checked once."""
        assert self._sound

    @cached_property
    def initial(self) -> dict[str, Array]:
        """A value for every latent site, where parameters are created."""
        return initial_values(self.config.model, self.args, self.kwargs, self.config.init_loc_fn)

    @cached_property
    def below(self) -> dict[str, tuple[str, ...]]:
        """The inducing sites on which the posteriors of other inducing sites depend."""
        order = self.program.inducing
        found: dict[str, tuple[str, ...]] = {}
        for name in order:
            rule = self.config.sites.get(name, self.config.rules.inducing)
            one, all_lower = rule.follows(name, order), self.program.lower.get(name, frozenset())
            below = all_lower if rule.follows_layers else () if one is None else (one,)
            found |= {name: tuple(n for n in order if n in below)} if below else {}
        return found

    def process_message(self, msg: Message) -> None:
        self._names.meet(msg)
        if msg["type"] == "deterministic":
            msg["stop"] = True
        expect(
            msg["type"] != "control_flow",
            "sites outside of control flow",
            "those of numpyro.contrib.control_flow",
            "write a Python loop with a name for every step, or use AutoNormal(model) or NUTS",
        )
        if msg["type"] != "sample":
            return
        name = msg["name"]
        if msg["is_observed"]:
            require_in_range(name, msg["value"], msg["fn"])
        if self._is_observation(msg):
            return hide(msg)
        self.met.add(name)
        if name in self.drawn:
            self.values[name] = msg["value"] = self.drawn[name]
            return hide(msg)
        self.replace(msg, self.config.rule(msg))

    def _is_observation(self, msg: Message) -> bool:
        """Whether a site is observed, or would be in a call with data."""
        if site_kind(msg) == "observed":
            return True
        in_fit = not self.predicted and self.program.observed_plates
        return msg["name"] in self.program.ends and not in_fit

    def _is_at_rows_of_call(self, name: str) -> bool:
        """Whether the inputs of an exact process come from the arguments of this call, as far as tracing shows."""
        try:
            return name in inspect_call(self.config.model, None, self.args, self.kwargs).exact
        except ValueError:  # a model that turns its arguments into NumPy arrays
            return True

    def replace(self, msg: Message, rule: Rule | None) -> None:
        """Replace the model's distribution by the one that a rule returns."""
        name, fn, kind = msg["name"], unwrap(msg["fn"]), site_kind(msg)
        if rule is None:
            return hide(msg)
        follows_model = rule.follows_model
        if kind in ("latent", "hidden") and not follows_model and self._lacks_data(msg):
            if kind == "latent":
                return hide(msg)
            follows_model = True
        site = SiteContext(
            name=self._local_name(name),
            fn=fn,
            prefix=self.config.prefix,
            in_plate=bool(msg["cond_indep_stack"]),
            rows_in_event=msg["fn"].event_dim - fn.event_dim,
            is_inner=lambda: name in self.program.inner,
            initial=lambda: self.initial[name],
            data=lambda: self._data(msg),
            below=lambda: self.found[self.below[name][0]] if name in self.below else None,
            at_rows=lambda *run: self._at_rows(name, fn, *run),
            require_sound=self.require_sound,
        )
        with self._names.of_guide():
            q: Any = fn.propagated() if follows_model and not rule.follows_model else rule(site)  # type: ignore[attr-defined]
        require_following(name, fn, q)
        if kind == "exact":
            require_rows(rule, site, q.shape(), fn.shape())
            unobserved = bool(self.program.ends) and not self.program.observed_plates
            if unobserved and not rule.follows_model and self._is_at_rows_of_call(name):
                warn_of_rows(name)
        replicates, importance = None, self.config.importance
        if kind == "latent" and self.program.is_per_datum(msg):
            replicates = rule.num_nodes or (None if importance is None else importance.num_samples)
            self.replicated |= set() if replicates is None else {name}
        record = SiteRecord(
            name=name,
            kind=kind,
            is_variational=not follows_model,
            is_inner_layer=name in self.program.inner,
            gaussian=None if follows_model else rule.gaussian,
            param_prefix=f"{name}_{self.config.prefix}",
            follows=self.below.get(name, ()),
            sample_inducing=any(name in below for below in self.below.values()) or name in self.program.coupled,
            num_replicates=replicates,
            rule=None if rule.num_nodes is None else rule,
        )
        attach(msg, record)
        msg["fn"] = rewrap(q, msg["fn"])

    def _lacks_data(self, msg: Message) -> bool:
        """Whether a site has one value per datum in a call that observes none of those data, or predicts them."""
        program = self.program
        if not program.is_per_datum(msg):
            return False
        return program.is_predicted(msg, self.predicted) or not program.is_conditioned(msg)

    def _data(self, msg: Message) -> Array:
        """The inputs of a latent and the observations in its plates, as columns, for the rows of this minibatch."""
        sites = observations(self.config.model, self.args, self.kwargs, self.indices)
        mine = [site for site in sites if site["cond_indep_stack"] == msg["cond_indep_stack"]]
        beside = declared(unwrap(msg["fn"])).inputs
        columns = [] if beside is None else [beside]
        for site in mine:
            likelihood: Any = unwrap(site["fn"])
            value = likelihood.complete(site["value"]) if is_likelihood(likelihood) else site["value"]
            for masked in masks_around(site["fn"]):
                counted = jnp.reshape(masked._mask, (*np.shape(masked._mask), *(1,) * site["fn"].event_dim))
                value = jnp.where(counted, value, jnp.zeros((), jnp.result_type(value)))
            batch = np.shape(value)[: np.ndim(value) - site["fn"].event_dim]
            columns.append(jnp.reshape(value, (*batch, -1)))
        rows = jnp.broadcast_shapes(*(column.shape[:-1] for column in columns))
        dtype = jnp.result_type(*columns, float)
        return jnp.concatenate([jnp.broadcast_to(c, (*rows, c.shape[-1])).astype(dtype) for c in columns], -1)

    def _at_rows(
        self,
        name: str,
        fn: Any,
        inputs: str | None,
        rows: Callable[[Array], Array],
        latent: Callable[[Message], Array],
    ) -> list[Any]:
        """The values of a layer's function in a run of the model at other rows, with its own inducing values zero and
        others as this run has drawn them so far."""
        config, program = self.config, self.program
        lower = self.below.get(name, ())
        expect(
            not (later := [below for below in lower if below not in self.found]),
            "layers opened in the order in which values go through them",
            f"{name!r} before {later}, on which its inputs depend",
            "move its dgp.gp below theirs",
        )
        given = self.drawn | {n: v for n, v in self.found.items() if n in lower or n not in program.inducing}
        given[name] = jnp.zeros(fn.shape(), fn.dtype)
        with outside(self):
            args, kwargs, *counts = with_rows(config.model, self.args, self.kwargs, inputs, rows)
            run = OtherRows(given, latent, program.ends, *counts)
            with run, handlers.seed(rng_seed=0), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # given at the rows of the call
                config.model(*args, **kwargs)
        return [values for values in run.values if values.function.site == name]

    def _local_name(self, name: str) -> str:
        """``name`` without the prefixes of scopes inside the model, which NumPyro adds to parameters again."""
        for handler in reversed(active(inside=self)):
            if isinstance(handler, handlers.scope) and "param" not in handler.hide_types:
                name = name.removeprefix(f"{handler.prefix}{handler.divider}")
        return name

    def postprocess_message(self, msg: Message) -> None:
        if msg["type"] == "plate":
            self.indices[msg["name"]] = msg["value"]
        record = record_of(msg)
        if msg["type"] != "sample" or record.name not in self.met:
            return
        self.found[record.name] = msg["value"]  # also where a handler outside hides the site
        if not msg.get("stop"):
            self.values[record.name] = msg["value"]
