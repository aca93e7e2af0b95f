"""What fits, samplers and predictions ask of a guide, whoever wrote it.

A guide of this package is made of rules and answers for itself (:class:`~numpyro_dgp.guides.guide.Guide`).
:func:`adapted` gives every other guide, such as NumPyro's autoguides, the same methods.
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
    """A guide, with what is asked of one.

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
        """Whether it is made of rules. Such a guide leaves sites with one value per datum to the model at new rows."""
        return self.config is not None

    @property
    def keeps_state(self) -> bool:
        """Whether it keeps something between its calls. NumPyro's autoguides set themselves up in their first one."""
        return self.companion is not None

    def on(self, *args: Any, **kwargs: Any) -> Any:
        """The guide together with the data of the fit, for guides that need these to predict."""
        return self

    def predicting(self, *plates: frozenset[str]) -> AnyGuide:
        """The guide for calls at new rows, where sites in all these plates are predicted."""
        return self

    def with_rules(self, change: Callable[[Rule], Rule]) -> AnyGuide:
        """The same guide with every rule changed by a function."""
        return self


class _OtherGuide(AnyGuide):
    """A guide of another package: the values of a run are those of its sites, whatever it returns."""

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
    """Raise for a guide whose runs draw nothing but the mode of what its ``sample_posterior`` draws from."""
    for part in guide if isinstance(guide, AutoGuideList) else [guide]:
        expect(
            not isinstance(part, AutoLaplaceApproximation),
            "a guide that draws from its posterior",
            "AutoLaplaceApproximation, whose runs give the mode without any uncertainty",
            hint,
        )
