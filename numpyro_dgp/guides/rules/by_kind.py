"""The rules of a guide, one for each kind of latent site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numpyro_dgp._repr import brief
from numpyro_dgp.guides.rules.inducing_values import Full
from numpyro_dgp.guides.rules.model_conditional import Propagate
from numpyro_dgp.guides.rules.pointwise import Delta, Normal
from numpyro_dgp.guides.rules.rule import Rule

__all__ = ["Other", "Rules"]

Other = Rule | Callable[[Callable[..., Any]], Any]
"""A rule, or what makes a guide of a program, such as a NumPyro autoguide class."""


class Rules(NamedTuple):
    """The rules of a guide, one for each kind of latent site.

    A guide has those of its class, ``defaults``, where its constructor is given no others.

    Args:
        inducing: for whitened inducing values.
        hidden: for values of hidden layers.
        latent: for other sites inside plates.
        exact: for values of exact processes.
        other: for every other site, or a NumPyro autoguide class; ``None`` where another guide draws these.

    Example:
        >>> from numpyro_dgp import guides
        >>> guides.MeanField.defaults
        Rules(inducing=Diagonal(), hidden=Normal(), exact=Normal())
        >>> class Diagonals(guides.InducingPoint):
        ...     defaults = guides.Rules(inducing=guides.Diagonal())
        >>> Diagonals(lambda: None).config.rules.inducing
        Diagonal()
    """

    inducing: Rule = Full()
    hidden: Rule = Propagate()
    latent: Rule = Normal()
    exact: Rule = Full()
    other: Any = Delta()

    def __repr__(self) -> str:
        return brief(self)
