"""The handler that turns a run of the model into a run of a guide."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_dgp._typing import Array
from numpyro_dgp.guides.rules.latents import Quadrature
from numpyro_dgp.guides.rules.markov_inducing import MarkovInducing
from numpyro_dgp.guides.rules.rules import Prior, Propagate, Rule, Site
from numpyro_dgp.model.program import (
    Message,
    Program,
    hide,
    initial_values,
    inspect_program,
    observations,
    site_kind,
    unwrap,
)

if TYPE_CHECKING:
    from numpyro_dgp.guides.guide import Guide

__all__ = ["Replace"]

FOLLOWS_MODEL = (Propagate, Prior)


class Replace(Messenger):
    """Replaces the model's distributions by the guide's; entering it gives the dict of values drawn."""

    def __init__(self, guide: Guide, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: dict[str, Any]) -> None:
        self.guide, self.args, self.kwargs, self.drawn = guide, args, kwargs, drawn
        self.values: dict[str, Any] = {}
        self.followed: dict[str, Array] = {}
        self.met: set[str] = set()
        self.indices: dict[str, Array] = {}
        self.observes = self.weighted = False
        super().__init__()

    def __enter__(self) -> dict[str, Any]:
        super().__enter__()
        return self.values

    def __exit__(self, exc_type: Any, *exc: Any) -> None:
        super().__exit__(exc_type, *exc)
        if exc_type is None and self.guide.num_samples is not None and self.observes and not self.weighted:
            raise ValueError(
                f"{type(self.guide).__name__}: expected a model with latent variables per datum, got one with "
                f"{sorted(self.met)}: draw them by dgp.latent inside the data plate, or use guides.InducingPoint"
            )
        unknown = sorted(set(self.guide.sites) - self.met)
        if exc_type is None and unknown:
            raise ValueError(
                f"{type(self.guide).__name__}(sites=...): expected names of latent sites of the model, got "
                f"{unknown}: the model has {sorted(self.met)}"
            )

    @cached_property
    def program(self) -> Program:
        return inspect_program(self.guide.model, self.args, self.kwargs)

    @cached_property
    def initial(self) -> dict[str, Array]:
        return initial_values(self.guide.model, self.args, self.kwargs, self.guide.init_loc_fn)

    @cached_property
    def below(self) -> dict[str, str]:
        """The inducing sites that follow others: ``{site: site below}``. Those below are drawn, never integrated."""
        named, default = self.guide.sites, self.guide.rules["inducing"]
        if not any(isinstance(rule, MarkovInducing) for rule in [*named.values(), default]):
            return {}
        order = self.program.inducing
        rules = {name: named.get(name, default) for name in order}
        return {n: rule.layer_below(n, order) for n, rule in rules.items() if isinstance(rule, MarkovInducing)}

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "deterministic":
            msg["stop"] = True
        if msg["type"] != "sample":
            return
        name = msg["name"]
        if msg["is_observed"]:
            self.guide._observed.add(name)
            self.observes = True
        if self.guide._rule_name(msg) == "observed":
            return hide(msg)
        self.met.add(name)
        if name in self.drawn:
            self.values[name] = msg["value"] = self.drawn[name]
            return hide(msg)
        self._replace(msg, self.guide._rule(msg))

    def _replace(self, msg: Message, rule: Rule | None) -> None:
        fn, kind = unwrap(msg["fn"]), site_kind(msg)
        if rule is None:
            return hide(msg)
        if kind in ("latent", "hidden") and not isinstance(rule, FOLLOWS_MODEL) and self._lacks_data(msg):
            if kind == "latent":
                return hide(msg)
            rule = Propagate()
        site = Site(
            name=self._local_name(msg["name"]),
            fn=fn,
            prefix=self.guide.prefix,
            in_plate=bool(msg["cond_indep_stack"]),
            is_inner=lambda: msg["name"] in self.program.inner,
            initial=lambda: self.initial[msg["name"]],
            data=lambda: self._data(msg),
            below=lambda: self.followed[self.below[msg["name"]]],
        )
        q = rule(site)
        if isinstance(msg["fn"], dist.MaskedDistribution):
            q = q.mask(msg["fn"]._mask)
        msg["own"], msg["kind"] = not isinstance(rule, FOLLOWS_MODEL), kind
        msg["drawn"], msg["follows"] = msg["name"] in self.below.values(), msg["name"] in self.below
        if kind == "latent" and self.program.is_per_datum(msg):
            msg["copies"] = rule if isinstance(rule, Quadrature) else self.guide.num_samples
            self.weighted = self.weighted or msg["copies"] is not None
        msg["fn"] = q if q.batch_shape == msg["fn"].batch_shape else q.expand(msg["fn"].batch_shape)

    def _lacks_data(self, msg: Message) -> bool:
        """Whether a site has one value per datum in a call that observes none of those data."""
        return self.program.is_per_datum(msg) and not self.program.is_conditioned(msg)

    def _data(self, msg: Message) -> Array:
        """Columns of what stands beside a latent: its inputs, and the observations of its plates in this minibatch."""
        sites = observations(self.guide.model, self.args, self.kwargs, self.indices)
        mine = [site for site in sites if site["cond_indep_stack"] == msg["cond_indep_stack"]]
        beside = getattr(unwrap(msg["fn"]), "inputs", None)
        columns = [] if beside is None else [beside]
        for site in mine:
            batch = np.shape(site["value"])[: np.ndim(site["value"]) - site["fn"].event_dim]
            columns.append(jnp.reshape(site["value"], (*batch, -1)))
        rows = jnp.broadcast_shapes(*(column.shape[:-1] for column in columns))
        dtype = jnp.result_type(*columns, float)
        return jnp.concatenate([jnp.broadcast_to(c, (*rows, c.shape[-1])).astype(dtype) for c in columns], -1)

    def _local_name(self, name: str) -> str:
        """``name`` without the prefixes of scopes inside the model, which parameters will get again."""
        inside = _PYRO_STACK[_PYRO_STACK.index(self) + 1 :]
        for handler in inside:
            if isinstance(handler, handlers.scope) and "param" not in handler.hide_types:
                name = name.removeprefix(f"{handler.prefix}{handler.divider}")
        return name

    def postprocess_message(self, msg: Message) -> None:
        if msg["type"] == "plate":
            self.indices[msg["name"]] = msg["value"]
        if msg.get("drawn"):  # also where a handler outside hides the site
            self.followed[msg["name"]] = msg["value"]
        if msg["type"] == "sample" and msg["name"] in self.met and not msg.get("stop"):
            self.values[msg["name"]] = msg["value"]
