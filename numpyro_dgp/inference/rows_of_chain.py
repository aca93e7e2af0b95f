"""A warning where draws of a chain are taken as the values of a layer at other rows."""

from __future__ import annotations

import warnings
from typing import Any

from numpyro import handlers
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_dgp.model.sites import Message, site_kind

__all__ = ["rows_of_chain"]


class rows_of_chain(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler that warns of values of layers that NumPyro's ``Predictive`` gives, for a run that observes nothing.

    They are those of the rows of a chain. It takes them whatever the inputs are, if there are as many.
    """

    def __init__(self) -> None:
        self._given: list[str] = []
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or site_kind(msg) not in ("hidden", "exact"):
            return
        if any(_gives(h, msg) for h in _PYRO_STACK if isinstance(h, handlers.substitute)):
            self._given.append(msg["name"])

    def __exit__(self, exc_type: Any, *exc: Any) -> None:
        super().__exit__(exc_type, *exc)
        if exc_type is None and self._given:
            warnings.warn(
                "for_mcmc: expected the rows of the chain, in their order, in a call without observations, since draws "
                f"of {', '.join(map(repr, self._given))} are values there only: at other inputs of equal number they "
                "are wrong; predict by dgp.Posterior(model, samples=mcmc.get_samples()), or for an exact process keep "
                "the inputs X of the chain outside the model and call f.condition(X, v)",
                stacklevel=4,
            )


def _gives(handler: handlers.substitute, msg: Message) -> bool:
    """Whether a handler is the one by which NumPyro's ``Predictive`` gives draws, and has one for a site.

    Others, such as those of samplers and their initial values, are not asked: they may draw, or add to a density.
    """
    of_predictive = getattr(handler.substitute_fn, "__qualname__", "").startswith("_predictive.")
    return of_predictive and handler.substitute_fn(msg) is not None
