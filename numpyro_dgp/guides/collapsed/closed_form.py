"""Guides with parameters of their own whose bound on the evidence has a closed form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro
from numpyro import handlers

from numpyro_dgp._checks import expect
from numpyro_dgp._data import indexable
from numpyro_dgp._numpyro import each_message
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import INITIAL_VALUES, require
from numpyro_dgp.analysis.program import inspect_program
from numpyro_dgp.analysis.sites import Message, is_row_by_row, unwrap
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.guides.collapsed.at_means import AtMeans, matrix_belief, run_at_means, values_of_projections
from numpyro_dgp.guides.collapsed.gaussian_uses import Gaussian, is_projected
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.handler import GuideConfig, GuideHandler
from numpyro_dgp.guides.record import SiteRecord, attach, record_of
from numpyro_dgp.guides.rules.rule import Rule

__all__ = ["ClosedForm", "Part"]


class Part(NamedTuple):
    """What a guide integrates of a bound.

    Args:
        bound: its value, in nats.
        sites: the sites of which all terms are in it.
        hidden: posteriors of hidden values that were computed with it, by site.
    """

    bound: Array
    sites: tuple[str, ...]
    hidden: Mapping[str, Rule]


class ClosedForm(Guide):
    """A guide that computes a part of the bound where it is called with data, and hands it to ``dgp.ELBO``.

    A first run of its rules gives all posteriors, :meth:`_part` the integrals, and a second run the draws. Both have
    the same rows of a minibatch. Without data it is the guide of its rules.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Draw every latent site of ``model(*args, **kwargs)``; returns ``{name: value}``."""
        args, kwargs = indexable((args, kwargs))
        if self.predicted or not inspect_program(self.model, args, kwargs).observed_plates:
            return super().__call__(*args, **kwargs)
        expect(
            not self.config.has_weights,
            "a Gaussian rule for latents, Normal() or Amortised()",
            "a quadrature rule",
            "guides.InducingPoint() takes it",
        )
        drawn = {} if self.companion is None else self.companion(*args, **kwargs)
        key = numpyro.prng_key()
        shown = handlers.block(hide_fn=lambda msg: msg["type"] not in ("param", "plate"))
        # Rows of a minibatch are those that handlers outside choose.
        seeded = handlers.seed(rng_seed=key, hide_types=["plate"])
        rules = _AtZero(self.config, args, kwargs, drawn)
        with shown, handlers.trace() as guide_sites, seeded, rules, require(INITIAL_VALUES):
            self.model(*args, **kwargs)
        known, values = _posteriors(guide_sites)
        self._require(guide_sites)
        run = run_at_means(partial(self.model, *args, **kwargs), key, guide_sites, known, values | drawn)
        part = self._part(guide_sites, run)
        # Objectives leave out the sites that the integrated part of the bound accounts for.
        with each_message(lambda msg: attach(msg, SiteRecord("", "other", integrates=part.sites))):
            numpyro.deterministic(f"_{self.config.prefix}_integrated", part.bound)
        fixed = {n: v for n, v in values.items() if record_of(guide_sites[n]).kind in ("latent", "other")}
        fixed |= {n: guide_sites[n]["value"] for n in fixed}
        plates = {name: site for name, site in guide_sites.items() if site["type"] == "plate"}
        with handlers.replay(trace=plates), _Drawn(self.config, args, kwargs, drawn, part.hidden, fixed) as found:
            self.model(*args, **kwargs)
        return found

    def _require(self, guide_sites: dict[str, Message]) -> None:
        """Raise for rules without a closed form."""
        raise NotImplementedError

    def _part(self, guide_sites: dict[str, Message], run: AtMeans) -> Part:
        """The integrated part of the bound.

        Args:
            guide_sites: trace of the rules, with all inducing values at zero.
            run: the program at the means of latents, whose posteriors it has with a placeholder for each hidden layer.
        """
        raise NotImplementedError


class _AtZero(GuideHandler):
    """The rules of a guide where all inducing values are zero, so that a mean that is linear in them is its shift."""

    def replace(self, msg: Message, rule: Rule | None) -> None:
        prior: Any = unwrap(msg["fn"])
        super().replace(msg, rule)
        if record_of(msg).kind == "inducing":
            msg["value"] = jnp.zeros(prior.event_shape, prior.dtype)


class _Drawn(GuideHandler):
    """The rules of a guide, with other ones for hidden values and the values of some sites."""

    def __init__(
        self, config: GuideConfig, args: Any, kwargs: Any, drawn: Any, hidden: Mapping[str, Rule], fixed: Any
    ) -> None:
        self.hidden, self.fixed = hidden, fixed
        super().__init__(config, args, kwargs, drawn)

    def replace(self, msg: Message, rule: Rule | None) -> None:
        super().replace(msg, self.hidden.get(msg["name"], rule))
        if msg["name"] in self.fixed:
            msg["value"] = self.fixed[msg["name"]]


def _posteriors(guide_sites: dict[str, Message]) -> tuple[dict[str, Gaussian], dict[str, Any]]:
    """Gaussian posteriors of latents with placeholders for hidden layers, and a value for every latent site: zero for
    inducing values, the Gaussian itself for matrices of projections, means where Gaussian."""
    known, values, matrices = {}, {}, values_of_projections(guide_sites)
    for name, site in guide_sites.items():
        if site["type"] != "sample" or is_projected(site["fn"]):
            continue
        fn, kind, value = unwrap(site["fn"]), record_of(site).kind, site["value"]
        if name in matrices:
            values[name] = matrix_belief(name, site)
            continue
        expect(
            kind != "exact",
            f"layers with inducing values, dgp.Points(Z), at {name!r}",
            "the values of an exact process",
            "guides.InducingPoint() takes them",
        )
        if kind in ("hidden", "latent") and is_row_by_row(fn):
            assert isinstance(fn, FunctionValues)
            value = jnp.broadcast_to(fn.loc, value.shape)
            known[name] = Gaussian(value, jnp.broadcast_to(fn.variance, value.shape))
        values[name] = value
    return known, values
