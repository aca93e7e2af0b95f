"""The record of a guide about a site that it draws, stored under one key of the site's message."""

from __future__ import annotations

import dataclasses
from typing import Any

from numpyro_dgp.analysis.sites import Message, unwrap
from numpyro_dgp.functions.function_values import follows
from numpyro_dgp.guides.rules.rule import GaussianParameters, Rule

__all__ = ["SiteRecord", "attach", "follows_model", "record_of"]

_KEY = "numpyro_dgp"


@dataclasses.dataclass(frozen=True)
class SiteRecord:
    """The record of a guide about a site, for objectives, optimisers and diagnostics.

    Args:
        name: the site's name where the guide met it; a scope around the guide adds its prefix after that.
        kind: ``inducing``, ``exact``, ``hidden``, ``latent`` or ``other``.
        is_variational: whether the guide has a variational distribution there, rather than the model's.
        is_inner_layer: whether it holds the inducing values of an inner layer.
        gaussian: which parameters are the mean and the scale of a Gaussian; ``None`` if the rule has no Gaussian.
        param_prefix: what the names of the site's parameters begin with, ``"<site>_<prefix>"``.
        follows: the inducing sites of lower layers that the posterior of this one depends on.
        sample_inducing: whether its values are drawn even in marginal mode, because other posteriors depend on them or
            because a density depends on several rows of their function.
        num_replicates: how many values a latent per datum gets: importance samples, or the nodes of a rule.
        rule: the rule with those nodes.
        integrates: sites whose part of the bound is in the value of this one (``guides.Collapsed``).
    """

    name: str
    kind: str
    is_variational: bool = False
    is_inner_layer: bool = False
    gaussian: GaussianParameters | None = None
    param_prefix: str = ""
    follows: tuple[str, ...] = ()
    sample_inducing: bool = False
    num_replicates: int | None = None
    rule: Rule | None = None
    integrates: tuple[str, ...] = ()


_NOTHING = SiteRecord(name="", kind="other")


def attach(msg: Message, record: SiteRecord) -> None:
    """Store a record in a message. Nothing else in this package adds keys to messages."""
    msg[_KEY] = record


def record_of(site: dict[str, Any]) -> SiteRecord:
    """The record of a site of a trace; one with the default values if no guide of this package has drawn it."""
    return site.get(_KEY, _NOTHING)


def follows_model(site: Message) -> bool:
    """Whether the guide's distribution at a site equals the model's, so that the two cancel in a bound."""
    known = record_of(site)
    return bool(known.name) and (not known.is_variational or follows(unwrap(site["fn"])))
