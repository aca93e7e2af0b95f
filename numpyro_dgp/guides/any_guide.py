"""The interface of a guide for fits, samplers and predictions.

Guides of this package (:class:`~numpyro_dgp.guides.Guide`) have these methods. :func:`adapted` adds them to other
guides, such as NumPyro's autoguides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from numpyro import handlers
from numpyro.infer.autoguide import AutoGuideList, AutoLaplaceApproximation

from numpyro_dgp._checks import expect
from numpyro_dgp.analysis.sites import sample_values
from numpyro_dgp.guides.importance import Importance
from numpyro_dgp.guides.rules.rule import Rule

__all__ = ["AnyGuide", "adapted", "require_drawing"]


class AnyGuide:
    """A guide with the methods that this package needs.

    Attributes:
        model: the program that it is of; ``None`` where it is not known.
        config: the rules by site, a ``GuideConfig``; ``None`` for a guide that is not made of rules.
        companion: the guide of another package that draws all sites, or those of the kind ``other``; or ``None``.
        importance: importance weighting of latents; ``None`` for the plain bound.
        is_collapsed: whether it computes q(v) of inducing values from the data, without parameters.
    """

    model: Any = None
    config: Any = None
    companion: Any = None
    importance: Importance | None = None
    is_collapsed = False

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Draw every latent site; returns ``{name: value}``."""
        raise NotImplementedError

    @property
    def has_rules(self) -> bool:
        """Whether it consists of rules. At new rows such a guide leaves sites with one value per datum to the model."""
        return self.config is not None

    @property
    def keeps_state(self) -> bool:
        """Whether it has state between calls. NumPyro's autoguides initialise themselves in the first one."""
        return self.companion is not None

    def on(self, *args: Any, **kwargs: Any) -> Any:
        """The guide with the data of the fit, for guides that need them to predict."""
        return self

    def predicting(self, *plates: frozenset[str]) -> AnyGuide:
        """The guide for calls at new rows, where sites in all these plates are predicted."""
        return self

    def with_rules(self, change: Callable[[Rule], Rule]) -> AnyGuide:
        """The same guide with every rule changed by a function."""
        return self


class _OtherGuide(AnyGuide):
    """A guide of another package; its values are those of its sites, whatever it returns."""

    def __init__(self, guide: Callable[..., Any]) -> None:
        self.companion = guide

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return sample_values(handlers.trace(self.companion).get_trace(*args, **kwargs))

    @property
    def keeps_state(self) -> bool:
        return not inspect.isfunction(self.companion)

    def on(self, *args: Any, **kwargs: Any) -> Any:
        return self.companion


def adapted(guide: Any) -> AnyGuide:
    """A guide with the methods of :class:`AnyGuide`: itself if it has them.

    Args:
        guide: the guide, of this package or another one.
    """
    return guide if isinstance(guide, AnyGuide) else _OtherGuide(guide)


def require_drawing(guide: Any, hint: str) -> None:
    """Raise for a guide whose call returns the mode of its posterior instead of a draw, as
    ``AutoLaplaceApproximation``."""
    for part in guide if isinstance(guide, AutoGuideList) else [guide]:
        expect(
            not isinstance(part, AutoLaplaceApproximation),
            "a guide that draws from its posterior",
            "AutoLaplaceApproximation, whose runs give the mode without any uncertainty",
            hint,
        )
