"""Processes without inducing values at new rows: given their values at the rows of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpyro.distributions as dist
from numpyro.primitives import Messenger

from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.model.process_values import ProcessValues
from numpyro_dgp.model.sites import Message, Trace, unwrap

__all__ = ["Conditioned", "ValuesOfFit", "known_values"]


class ValuesOfFit(NamedTuple):
    """Values of an exact process at the rows of a fit.

    Args:
        inputs: where (N, D).
        values: the values there, (N,) or (N, P), observations or a draw.
        noise: standard deviation of the noise in them, or ``None``.
        observed: whether they are observations.
    """

    inputs: Array
    values: Array
    noise: ArrayLike | None
    observed: bool


def known_values(sites: Trace) -> dict[str, ValuesOfFit]:
    """The values of exact processes in a run of a program, observed or drawn, by site."""
    found = {}
    for name, site in sites.items():
        values = unwrap(site["fn"]) if site["type"] == "sample" else None
        if isinstance(values, ProcessValues) and values.function is not None and values.function.site is None:
            found[name] = ValuesOfFit(values.inputs, site["value"], values.noise, site["is_observed"])
    return found


class Conditioned(Messenger):
    """Gives exact processes at new rows their distribution given values at other rows, row by row.

    What was observed with noise is a ``Likelihood`` of the function, with this noise.

    Args:
        fn: the program.
        known: the values, by site.
    """

    def __init__(self, fn: Callable[..., Any], known: Mapping[str, ValuesOfFit]) -> None:
        self.known = known
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or msg["name"] not in self.known:
            return
        here: Any = unwrap(msg["fn"])
        fit = self.known[msg["name"]]
        given, noise = here.function.condition(fit.inputs, fit.values, noise=fit.noise), here.noise
        if fit.observed and noise is not None:
            msg["fn"] = Likelihood(given(here.inputs), _noisy(noise, here.function.outputs))
        else:
            msg["fn"] = given(here.inputs, noise=noise)


def _noisy(noise: ArrayLike, outputs: int | None) -> Callable[[Array], dist.Distribution]:
    if outputs is None:
        return lambda v: dist.Normal(v, noise)
    return lambda v: dist.Normal(v, noise).to_event(1)
