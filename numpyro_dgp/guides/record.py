"""What a guide knows of a site that it has drawn: one frozen record under one key of the site's message."""

from __future__ import annotations

import dataclasses
from typing import Any

from numpyro_dgp.guides.rules.rule import GaussianParameters, Rule
from numpyro_dgp.model.sites import Message

__all__ = ["SiteRecord", "attach", "record_of"]

_KEY = "numpyro_dgp"


@dataclasses.dataclass(frozen=True)
class SiteRecord:
    """What objectives, optimisers and diagnostics read of a site.

    Args:
        name: the site's name where the guide met it; a scope around the guide adds its prefix after that.
        kind: ``inducing``, ``exact``, ``hidden``, ``latent`` or ``other``.
        learned: whether the guide has a distribution of its own there, rather than the model's.
        inner: whether it holds the inducing values of an inner layer.
        gaussian: the parameters that are those of a Gaussian, where the rule says so.
        stem: what the names of the site's parameters begin with, ``"<site>_<prefix>"``.
        follows: the inducing site whose draw this one follows.
        drawn: whether its values are drawn even where Gaussians are integrated, because others follow them or because
            rows of their function are seen together.
        copies: how many values a latent per datum gets: importance samples, or the nodes of a rule.
        rule: the rule with those nodes.
        integrates: sites whose part of the bound is in the value of this one (``guides.Collapsed``).
    """

    name: str
    kind: str
    learned: bool = False
    inner: bool = False
    gaussian: GaussianParameters | None = None
    stem: str = ""
    follows: str | None = None
    drawn: bool = False
    copies: int | None = None
    rule: Rule | None = None
    integrates: tuple[str, ...] = ()


_NOTHING = SiteRecord(name="", kind="other")


def attach(msg: Message, record: SiteRecord) -> None:
    """Put a record into a message: the one place where this package writes a key of its own."""
    msg[_KEY] = record


def record_of(site: dict[str, Any]) -> SiteRecord:
    """The record of a site of a trace; that of a site which is nobody's where there is none."""
    return site.get(_KEY, _NOTHING)
