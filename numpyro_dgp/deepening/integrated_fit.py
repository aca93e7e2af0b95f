r"""Draws of the posterior of a program and its evidence, with the last layer integrated, by sequential Monte Carlo.

Let u be the unconstrained numbers of all sites but the inducing values of integrated layers. In coordinates
:math:`z = (u - m) / s`, with m and s of draws of the prior, and z = u for whitened values, the joint density is

.. math:: p(y, u)\, \lvert du / dz \rvert = N(z; 0, I)\, e^{r(z) + \ell(z)},
          \qquad \ell = \log p(y \mid u),

where r is zero but for rounding where all hyperparameters are normal or log-normal. Points go from the prior to the
posterior along :math:`e^{\beta \ell}` (:mod:`numpyro_dgp.inference.population`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.compiled import Compiled
from numpyro_dgp.deepening.largest_density import highest_end, posterior_at
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.inference.integrated_layers import integrated_in
from numpyro_dgp.inference.mcmc import for_mcmc
from numpyro_dgp.inference.population import each, populate
from numpyro_dgp.model.beliefs import InducingPrior, StandardNormal
from numpyro_dgp.model.program import Program, inspect_program
from numpyro_dgp.model.site_densities import total_log_prob
from numpyro_dgp.model.sites import Message, Trace, unwrap
from numpyro_dgp.predict import Posterior

__all__ = ["IntegratedFit", "fit_integrated"]

_STARTS = 50
"""Draws of the prior over those that are kept: for the first weights, and the moments of hyperparameters."""
_ASCENTS = 3
"""To the largest density, from the points where it is largest."""

Numbers = dict[str, Array]


class IntegratedFit(NamedTuple):
    """A fitted program.

    Args:
        posterior: draws of it, or one layer at the largest density of its hyperparameters.
        log_evidence: an estimate of log p(y), with everything integrated.
        error: its standard error, as far as the moves make points independent of one temperature from those of the
            next; less than the true one where they do not.
        temperatures: between the prior and the posterior.
    """

    posterior: Posterior
    log_evidence: float
    error: float
    temperatures: int


def fit_integrated(
    model: Callable[..., Any],
    rng_key: Array,
    args: tuple[Any, ...],
    num_draws: int,
    num_sweeps: int,
    mode: bool,
) -> IntegratedFit:
    """Draw from the posterior of one program, and estimate its evidence.

    Args:
        model: the program.
        rng_key: PRNG key.
        args: of the program, observations included.
        num_draws: points at each temperature, of which those at the end are the draws.
        num_sweeps: of moves of each chain at each temperature.
        mode: whether a program in which all but an integrated layer are hyperparameters predicts with these at their
            largest density, and not with draws of them.

    Raises:
        ValueError: a likelihood that is not finite at any draw of the prior.
    """
    program = for_mcmc(model)
    arrays, rebuild = split_arguments(args, {})
    structure = inspect_program(model, args, {})

    def run(key: Array, arrays: list[Array]) -> Any:
        args, _ = rebuild(arrays)
        site_key, prior_key, white_key, move_key = jax.random.split(key, 4)
        density = _Density(program, args, site_key, structure)
        count = _STARTS * num_draws
        # once for all uses: random numbers of every site take longest to compile
        priors = each(density.of_prior, jax.random.split(prior_key, count), count)
        loc, scale = density.moments(priors)

        def draw(seed: tuple[Numbers, Array]) -> Array:
            return (density.with_white(*seed) - loc) / scale

        @jax.jit  # traced once, and used in three places
        def log_ratios(z: Array) -> tuple[Array, Array]:
            prior, likelihood = density(loc + scale * z)
            gaussian = -0.5 * jnp.square(z).sum() - jnp.log(scale).sum() - 0.5 * z.size * math.log(2 * math.pi)
            return prior - gaussian, likelihood

        seeds = priors, jax.random.split(white_key, count)
        found = populate(log_ratios, move_key, seeds, draw, density.blocks(), num_draws, num_sweeps)
        points = loc + scale * found.points
        draws = found._replace(points=each(density.draw, points, num_draws))
        if not (mode and density.one_layer):
            return draws, points[:0]
        order = jnp.argsort(-each(lambda point: jnp.stack(density(point)).sum(), points, num_draws))
        return draws, points[order[:_ASCENTS]]

    found, starts = Compiled(run).at(rng_key, arrays)(rng_key, arrays)
    log_evidence, error = float(found.log_evidence), math.sqrt(float(found.variance))
    if not math.isfinite(log_evidence):
        raise ValueError(
            "fit_best: expected a likelihood that is finite at some draws of the prior, got none: standardise X and "
            "y, give the noise a prior away from zero, or run in float64"
        )
    if len(starts):
        values = _at_the_mode(lambda arrays: _Density(program, rebuild(arrays)[0], rng_key, structure), arrays, starts)
        posterior = posterior_at(model, values, args)
    else:
        posterior = Posterior(model, samples=found.points)
    return IntegratedFit(posterior, log_evidence, error, int(found.temperatures))


class _Density:
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

    def with_white(self, numbers: Numbers, key: Array) -> Array:
        """These numbers of a draw of the prior and whitened ones."""
        flat = ravel_pytree(self.shapes)[0]
        return ravel_pytree(self.unravel(jax.random.normal(key, flat.shape, flat.dtype)) | numbers)[0]

    def moments(self, draws: Numbers) -> tuple[Array, Array]:
        """Means and standard deviations of all numbers: 0 and 1 of whitened ones."""
        zeros, ones = (self.unravel(fill(ravel_pytree(self.shapes)[0])) for fill in (jnp.zeros_like, jnp.ones_like))
        loc, scale = ({n: f(u, 0) for n, u in draws.items()} for f in (jnp.mean, jnp.std))
        return ravel_pytree(zeros | loc)[0], ravel_pytree(ones | scale)[0]

    def blocks(self) -> Array:
        """Which numbers move together: each site of hyperparameters, all of these, and whitened values, twice."""
        sites = [self._mark(lambda name, at=site: name == at) for site in self.sites if not self.white[site]]
        hyper, white = self._mark(lambda name: not self.white[name]), self._mark(lambda name: self.white[name])
        return jnp.stack([*sites, *[hyper] * bool(sites), *[white] * 2 * any(self.white.values())])

    def _mark(self, chosen: Callable[..., bool]) -> Array:
        """One for each number of the sites that are chosen, zero for others."""
        return ravel_pytree({n: jnp.full_like(u, float(chosen(n))) for n, u in self.shapes.items()})[0]

    def draw(self, flat: Array) -> Numbers:
        """What all data share at these numbers: hyperparameters and inducing values."""
        sites = self.trace(self.constrained(flat), self.key)
        shared = self.structure.shared_values(sites)
        return {name: value for name, value in shared.items() if not name.endswith("_white")}


def _at_the_mode(density: Callable[[list[Array]], _Density], arrays: list[Array], starts: Array) -> Numbers:
    """Hyperparameters where the density of their unconstrained numbers is largest, found from some of these.

    Args:
        density: from the arrays among the arguments of the program.
        arrays: these.
        starts: unconstrained numbers (S, n).
    """
    slope = Compiled(jax.value_and_grad(lambda flat, arrays: jnp.stack(density(arrays)(flat)).sum()))
    at_start = slope.at(starts[0], arrays)
    flat = highest_end(lambda flat: at_start(flat, arrays), np.asarray(starts))
    return Compiled(lambda flat, arrays: density(arrays).constrained(flat))(flat, arrays)


def _latent(sites: Trace) -> dict[str, Message]:
    return {n: s for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
