"""Prior and likelihood of a program with the last layer integrated, as functions of one vector of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_dgp._typing import Array
from numpyro_dgp.inference.integrated_layers import integrated_in
from numpyro_dgp.model.beliefs import InducingPrior, StandardNormal
from numpyro_dgp.model.program import Program
from numpyro_dgp.model.site_densities import total_log_prob
from numpyro_dgp.model.sites import Message, Trace, unwrap

__all__ = ["Density", "Numbers"]

Numbers = dict[str, Array]
"""Unconstrained numbers, or values, of sites by name."""

_PARTS = 10
"""Of the whitened values, which move one after the other: where noise is small, all of them together hardly move."""


class Density:
    """Prior and likelihood of a program in the unconstrained numbers of its latent sites, as one vector.

    It has ``one_layer`` if these are hyperparameters only, and inducing values are integrated.
    """

    def __init__(self, program: Callable[..., Any], args: tuple[Any, ...], key: Array, structure: Program) -> None:
        self.program, self.args, self.key, self.structure = program, args, key, structure
        sites = self.trace({}, key)
        self.sites = _latent(sites)
        self.bijections = {name: biject_to(site["fn"].support) for name, site in self.sites.items()}
        white = InducingPrior | StandardNormal
        self.white = {name: isinstance(unwrap(site["fn"]), white) for name, site in self.sites.items()}
        self.shapes = {name: self.bijections[name].inv(site["value"]) for name, site in self.sites.items()}
        self.unravel = ravel_pytree(self.shapes)[1]
        numbers = [structure.is_shared(site) and not self.white[name] for name, site in self.sites.items()]
        self.one_layer = all(numbers) and bool(integrated_in(sites))

    def trace(self, values: Numbers, key: Array) -> Trace:
        given = handlers.substitute(handlers.seed(self.program, key), data=values)
        with handlers.block():
            return handlers.trace(given).get_trace(*self.args)

    def constrained(self, flat: Array) -> Numbers:
        return {name: self.bijections[name](u) for name, u in self.unravel(flat).items()}

    def __call__(self, flat: Array) -> tuple[Array, Array]:
        """Log densities of the unconstrained numbers, and of the observations given these."""
        numbers, values = self.unravel(flat), self.constrained(flat)
        totals = {True: jnp.zeros((), flat.dtype), False: jnp.zeros((), flat.dtype)}
        for site in self.trace(values, self.key).values():
            if site["type"] == "sample":
                totals[site["is_observed"]] += total_log_prob(site)
        for name, bijection in self.bijections.items():
            totals[False] += jnp.sum(bijection.log_abs_det_jacobian(numbers[name], values[name]))
        return totals[False], totals[True]

    def of_prior(self, key: Array) -> Numbers:
        """The numbers of a draw of the prior, but whitened ones."""
        sites = _latent(self.trace({}, key))
        return {n: self.bijections[n].inv(site["value"]) for n, site in sites.items() if not self.white[n]}

    def completed(self, numbers: Numbers, key: Array) -> Array:
        """These numbers and a draw of the whitened ones that are not among them, behind those that are."""
        flat = ravel_pytree(self.shapes)[0]
        drawn = self.unravel(jax.random.normal(key, flat.shape, flat.dtype))
        return ravel_pytree(drawn | {n: drawn[n].at[_leading(u)].set(u) for n, u in numbers.items()})[0]

    def shortened(self, flat: Array, longer: Density) -> Array:
        """Of the numbers of a program with more rows, those that this one has."""
        numbers = longer.unravel(flat)
        return ravel_pytree({n: numbers[n][_leading(u)] for n, u in self.shapes.items()})[0]

    def log_density_of_others(self, flat: Array, longer: Density) -> Array:
        """Of the whitened numbers of a program with more rows, those that this one does not have."""
        numbers = longer.unravel(flat)
        others = [numbers[n].at[_leading(u)].set(0.0) for n, u in self.shapes.items()]
        count = flat.size - sum(u.size for u in self.shapes.values())
        return -0.5 * sum((jnp.square(u).sum() for u in others), count * jnp.log(2 * jnp.pi).astype(flat.dtype))

    def filled(self, numbers: Numbers, value: float) -> Array:
        """These numbers, and a value in the place of all others."""
        return ravel_pytree({n: jnp.full_like(u, value) for n, u in self.shapes.items()} | numbers)[0]

    def require_continues(self, before: Density) -> None:
        """Raise unless the numbers of another program are some of these.

        Raises:
            ValueError: other sites, other shapes, or fewer whitened values.
        """
        shapes, others = ({n: u.shape for n, u in d.shapes.items()} for d in (self, before))
        if shapes.keys() != others.keys():
            raise ValueError(
                f"fit_best: expected the sites of previous, {sorted(others)}, got {sorted(shapes)}: go on with the "
                "same family, or leave previous out"
            )
        for name, shape in shapes.items():
            other = others[name]
            grows = self.white[name] and len(shape) == len(other) and all(np.greater_equal(shape, other))
            if shape != other and not grows:
                raise ValueError(
                    f"fit_best: expected the site {name!r} in the shape that it has in previous, {other}, or a "
                    f"larger one of whitened values, got {shape}: append rows to those of previous, or leave it out"
                )

    def blocks(self) -> Array:
        """Which numbers move together: each site of hyperparameters, all of these, and every tenth whitened value."""
        sites = [self._mark(lambda name, at=site: name == at) for site in self.sites if not self.white[site]]
        hyper, white = self._mark(lambda name: not self.white[name]), self._mark(lambda name: self.white[name])
        count = min(_PARTS, sum(u.size for name, u in self.shapes.items() if self.white[name]))
        parts = [white * (jnp.cumsum(white) % count == part) for part in range(count)]
        return jnp.stack([*sites, *[hyper] * bool(sites), *parts])

    def _mark(self, chosen: Callable[..., bool]) -> Array:
        """One for each number of the sites that are chosen, zero for others."""
        return ravel_pytree({n: jnp.full_like(u, float(chosen(n))) for n, u in self.shapes.items()})[0]

    def draw(self, flat: Array) -> Numbers:
        """What all data share at these numbers: hyperparameters and inducing values."""
        sites = self.trace(self.constrained(flat), self.key)
        shared = self.structure.shared_values(sites)
        return {name: value for name, value in shared.items() if not name.endswith("_white")}


def _latent(sites: Trace) -> dict[str, Message]:
    return {n: s for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}


def _leading(like: Array) -> tuple[slice, ...]:
    """An index of the first entries of every axis, as many as an array has."""
    return tuple(slice(size) for size in like.shape)
