"""The settings of a guide: the rule of every site."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from numpyro_dgp.guides.rules.rule import Rule
from numpyro_dgp.model.sites import Message, site_kind

__all__ = ["Choices"]


@dataclasses.dataclass(frozen=True)
class Choices:
    """The arguments of the constructor of a guide.

    Args:
        owner: name of the guide's class, for messages.
        model: the program.
        rules: by kind of site.
        sites: rules of single sites, by name.
        prefix: part of the names of parameters, ``"<site>_<prefix>_<parameter>"``.
        init_loc_fn: NumPyro init strategy for sites that are not function values.
        num_samples: K, importance samples of latents; ``None`` for the plain bound.
    """

    owner: str
    model: Callable[..., Any]
    rules: dict[str, Rule]
    sites: dict[str, Rule]
    prefix: str
    init_loc_fn: Callable[..., Any]
    num_samples: int | None

    def rule(self, msg: Message) -> Rule | None:
        """The rule for a latent site; ``None`` where a NumPyro autoguide draws it."""
        return self.sites.get(msg["name"], self.rules.get(site_kind(msg)))

    def are_shared(self, msg: Message) -> bool:
        """Whether a site is one of the ``other`` kind and has no rule of its own."""
        return msg["name"] not in self.sites and site_kind(msg) == "other"
