"""Fits in which the last layer is integrated, and a guide of NumPyro has all other numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
from numpyro import handlers

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.compiled import Compiled
from numpyro_dgp.design.padded_rows import with_known_rows
from numpyro_dgp.design.surrogate import Data, Params, Surrogate
from numpyro_dgp.inference.mcmc import for_mcmc
from numpyro_dgp.model.program import inspect_program
from numpyro_dgp.predict import Posterior

__all__ = ["IntegratedSurrogate"]

_DRAWS = 100
"""Of the posterior, that predictions are made of."""


@dataclasses.dataclass(frozen=True, eq=False)
class IntegratedSurrogate(Surrogate):
    r"""A program of :func:`dgp.for_mcmc` under a guide of NumPyro, such as ``AutoNormal``.

    .. math:: q = q(u)\, p(v \mid u, y), \qquad
              \mathcal L = E_{q(u)}\Bigl[\log \int p(y, v, u)\, dv - \log q(u)\Bigr]

    with the inducing values v of the last layer, integrated where the likelihood is Gaussian, and all other numbers u.
    A posterior is made of draws of u and v, which new rows change through v alone until the next fit.
    """

    def conditioned(self, params: Params, key: Array, data: Data, *, is_fitted: bool) -> Params:
        """Draws of all sites that rows share."""
        found: Params = self._drawing(self._start(params, key, data), key, data)
        return found

    def posterior(self, found: Params, data: Data) -> Posterior:
        """The posterior of these draws."""
        return Posterior(self.program(data.X), samples=found)

    def found(self, posterior: Posterior) -> Params:
        """The draws."""
        assert posterior.samples is not None
        return posterior.samples

    def at(self, data: Data) -> tuple[Callable[..., Any], Any]:
        """The program with its last layer integrated, and a guide in which rows that are not known do not count."""
        program = for_mcmc(self.program(data.X))
        return program, with_known_rows(self.guide(program), self.plates)

    def require_guide(self) -> None:
        """Any guide of NumPyro will do: a new one is made for every fit, and rows keep their order."""

    @property
    def binds_data(self) -> bool:
        """Draws of v are computed from the data."""
        return True

    @property
    def takes_natural_steps(self) -> bool:
        """There are no parameters of v."""
        return False

    @cached_property
    def _drawing(self) -> Compiled:
        def draw(params: Params, key: Array, data: Data) -> Params:
            program, guide = self.at(data)
            guide_key, model_key = jax.random.split(key)
            given = handlers.substitute(handlers.seed(guide, guide_key), data=dict(params))
            with handlers.block():
                values = given(*data)
                run = handlers.substitute(handlers.seed(program, model_key), data=values)
                sites = handlers.trace(run).get_trace(*data)
            return inspect_program(self.program(data.X), tuple(data), {}).shared_values(sites)

        return Compiled(
            lambda params, key, data: jax.lax.map(lambda key: draw(params, key, data), jax.random.split(key, _DRAWS))
        )
