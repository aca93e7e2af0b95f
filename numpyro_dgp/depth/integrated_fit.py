r"""Posterior samples and evidence of a program, with the last layer integrated out, by sequential Monte Carlo.

Let u be the unconstrained values of all sites except the inducing values of integrated layers. In coordinates
:math:`z = (u - m) / s`, with m and s of draws of the prior, and z = u for whitened values, the joint density is

.. math:: p(y, u)\, \lvert du / dz \rvert = N(z; 0, I)\, e^{r(z) + \ell(z)},
          \qquad \ell = \log p(y \mid u),

where r is zero, up to rounding, if all hyperparameters are normal or log-normal. Points go from the prior to the
posterior along :math:`e^{\beta \ell}` (:mod:`numpyro_dgp.mcmc.population`), or, from the draws of an earlier fit
to data :math:`y'`, along :math:`p(y' \mid u)^{1 - \beta}\, p(y \mid u)^{\beta}`: for old data and more, this is the
sampler of Chopin (2002).

For one layer, hyperparameters are at their posterior mode and the function is integrated out.

Prior and likelihood of a program with the last layer integrated, as functions of one vector of numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to
from scipy import optimize

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._compiled import Compiled
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import LOG_DENSITIES, require
from numpyro_dgp.analysis.program import ProgramFacts, inspect_program
from numpyro_dgp.analysis.sites import Message, Trace, total_log_prob, unwrap
from numpyro_dgp.functions.weights import InducingPrior, StandardNormal
from numpyro_dgp.guides.collapsed.collapsed_guide import Collapsed
from numpyro_dgp.guides.rules.pointwise import Delta
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.mcmc.for_mcmc import for_mcmc
from numpyro_dgp.mcmc.integrated_layers import integrated_in
from numpyro_dgp.mcmc.population import each, evenly, evidence_of_runs, independent_runs
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["Density", "Ended", "IntegratedFit", "Numbers", "fit_integrated", "highest_end", "posterior_at"]

_MOST_STEPS = 300


def highest_end(slope: Callable[[np.ndarray], tuple[Array, Array]], starts: np.ndarray) -> np.ndarray:
    """The best end of ascents by L-BFGS from some points (S, n), which is not below any of them.

    Args:
        slope: value and gradient at a point (n,), of what is to be large.
        starts: the points, where it is finite.
    """

    def energy(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = (np.asarray(a, float) for a in slope(point.astype(starts.dtype)))
        finite = np.isfinite(value) and np.isfinite(gradient).all()
        return (-float(value), -gradient) if finite else (np.inf, np.zeros(len(point)))

    options = {"maxiter": _MOST_STEPS}
    ends = [optimize.minimize(energy, start, jac=True, method="L-BFGS-B", options=options) for start in starts]
    return min(ends, key=lambda end: end.fun).x.astype(starts.dtype)


def posterior_at(model: Callable[..., Any], values: dict[str, Array], args: tuple[Any, ...]) -> Posterior:
    """The posterior of a program of one layer with these hyperparameters, the values of the layer in closed form."""
    guide = Collapsed(model, sites=dict.fromkeys(values, Delta()))
    return Posterior(model, guide.on(*args), {f"{name}_auto_loc": value for name, value in values.items()})


Numbers = dict[str, Array]
"""Unconstrained numbers, or values, of sites by name."""

_PARTS = 10
"""Of the whitened values, which move one after the other: where noise is small, all of them together hardly move."""


class Density:
    """Prior and likelihood of a program in the unconstrained numbers of its latent sites, as one vector.

    It has ``one_layer`` if these are hyperparameters only, and inducing values are integrated.
    """

    def __init__(self, program: Callable[..., Any], args: tuple[Any, ...], key: Array, structure: ProgramFacts) -> None:
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
            totals[False] += jnp.sum(bijection.log_abs_det_jacobian(numbers[name], values[name]))  # log|d value / du|
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
        # log N(others; 0, I)
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
            raise expected(
                f"the sites of previous, {sorted(others)}", sorted(shapes), "use the same family, or leave previous out"
            )
        for name, shape in shapes.items():
            other = others[name]
            grows = self.white[name] and len(shape) == len(other) and all(np.greater_equal(shape, other))
            expect(
                shape == other or grows,
                f"the site {name!r} to have its shape in previous, {other}, or more whitened values",
                shape,
                "append rows to those of previous, or leave it out",
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


_STARTS = 50
"""Draws of the prior over those that are kept: for the first weights, and the moments of hyperparameters."""
_ASCENTS = 9
"""To the largest density, from draws as far apart in the chains as can be: it may have several maxima."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ended:
    """The state at the end of a fit, from which another can continue.

    Args:
        program: with the last layer integrated.
        structure: of the program.
        args: of the program, observations included.
        numbers: unconstrained, of all draws of all runs, one run after the other, by site.
        loc: means of the prior on that scale, but of whitened values.
        scale: its standard deviations.
        log_evidence: of each run (R,), minus infinity where no draw at its start had a finite likelihood.
        variance: of these, as the runs see it (R,).
    """

    program: Callable[..., Any]
    structure: ProgramFacts
    args: tuple[Any, ...]
    numbers: Numbers
    loc: Numbers
    scale: Numbers
    log_evidence: np.ndarray
    variance: np.ndarray

    __repr__ = brief


class IntegratedFit(NamedTuple):
    """A fitted program.

    Args:
        posterior: draws of it, or one layer at the largest density of its hyperparameters.
        log_evidence: an estimate of log p(y), with everything integrated.
        error: its standard error, by what runs differ, and points within a run as far as the moves make those of one
            temperature independent of those of the next; too low where all runs miss the same.
        temperatures: between the prior and the posterior, in the run that has most of them.
        ended: where other fits can go on.
        at: what it predicts by, unconstrained numbers by site: those of all draws, or of the largest density. Where
            there are further runs, those of the first.
    """

    posterior: Posterior
    log_evidence: float
    error: float
    temperatures: int
    ended: Ended | None = None
    at: Mapping[str, Array] = MappingProxyType({})


class _Path(NamedTuple):
    """From draws of one density to another.

    Args:
        density: of the program.
        moments: means and standard deviations of the prior, by site, but of whitened values.
        loc: m, of all numbers.
        scale: s.
        seeds: of draws at the start: numbers, but those that are standard normal there, and a key for these.
        earlier: the log density of the start, of all numbers; nothing of the prior.
    """

    density: Density
    moments: tuple[Numbers, Numbers]
    loc: Array
    scale: Array
    seeds: tuple[Numbers, Array]
    earlier: Callable[[Array], Array] | None = None

    def numbers(self, z: Array) -> Array:
        return self.loc + self.scale * z  # u = m + s z

    def draw(self, seed: tuple[Numbers, Array]) -> Array:
        return (self.density.completed(*seed) - self.loc) / self.scale  # z = (u - m) / s

    def log_ratios(self, z: Array) -> tuple[Array, Array]:
        u = self.numbers(z)
        prior, likelihood = self.density(u)
        # -log N(z; 0, I) + log|du / dz|
        r = 0.5 * jnp.square(z).sum() + 0.5 * z.size * math.log(2 * math.pi) + jnp.log(self.scale).sum()
        if self.earlier is None:
            return r + prior, likelihood
        before = self.earlier(u)
        return r + before, prior + likelihood - before  # from p'(u) p(y' | u) to p(u) p(y | u)


def _path(
    density: Density,
    moments: tuple[Numbers, Numbers],
    seeds: tuple[Numbers, Array],
    earlier: Callable[[Array], Array] | None = None,
) -> _Path:
    loc, scale = moments
    return _Path(density, moments, density.filled(loc, 0.0), density.filled(scale, 1.0), seeds, earlier)


def _from_prior(density: Density, key: Array, count: int) -> _Path:
    prior_key, white_key = jax.random.split(key)
    # once for all uses: random numbers of every site take longest to compile
    drawn = each(density.of_prior, jax.random.split(prior_key, count), count)
    loc, scale = ({n: f(u, 0) for n, u in drawn.items()} for f in (jnp.mean, jnp.std))
    return _path(density, (loc, scale), (drawn, jax.random.split(white_key, count)))


def _from_earlier(density: Density, ended: Ended, site_key: Array, key: Array) -> _Path:
    before = Density(ended.program, ended.args, site_key, ended.structure)
    density.require_continues(before)
    count = len(next(iter(ended.numbers.values())))

    def earlier(u: Array) -> Array:
        prior, likelihood = before(before.shortened(u, density))  # its own prior, which may be another one
        return prior + likelihood + before.log_density_of_others(u, density)

    return _path(density, (ended.loc, ended.scale), (ended.numbers, jax.random.split(key, count)), earlier)


def fit_integrated(
    model: Callable[..., Any],
    rng_key: Array,
    args: tuple[Any, ...],
    num_draws: int,
    num_sweeps: int,
    num_runs: int,
    mode: bool,
    previous: IntegratedFit | None = None,
) -> IntegratedFit:
    """Draw from the posterior of one program, and estimate its evidence.

    Args:
        model: the program.
        rng_key: PRNG key.
        args: of the program, observations included.
        num_draws: points of each run at each temperature, of which those at the end are the draws.
        num_sweeps: of moves of each chain at each temperature.
        num_runs: of the sampler; 1 from a previous fit, which has one.
        mode: whether a program in which all but an integrated layer are hyperparameters predicts with these at their
            largest density, and not with draws of them.
        previous: a fit to go on from, in place of the prior.

    Raises:
        ValueError: a likelihood that is not finite at any draw of the prior; a previous fit with other sites.
    """
    program = for_mcmc(model)
    arrays, rebuild = split_arguments(args, {})
    structure = inspect_program(require(LOG_DENSITIES, fn=model), args, {})
    before = previous.ended if previous else None
    num_points = num_runs * num_draws

    def run(key: Array, arrays: list[Array]) -> Any:
        site_key, start_key, move_key = jax.random.split(key, 3)
        density = Density(program, rebuild(arrays)[0], site_key, structure)
        if before:
            path = _from_earlier(density, before, site_key, start_key)
        else:
            path = _from_prior(density, start_key, _STARTS * num_points)
        sampler = jax.jit(path.log_ratios), path.draw, density.blocks()  # traced once, and used in three places
        found = independent_runs(*sampler, move_key, path.seeds, num_points, num_sweeps, num_runs)
        ends = found.points.reshape(-1, found.points.shape[-1])
        points = each(path.numbers, ends, len(ends))
        there = each(density.unravel, points, len(ends)), *path.moments
        draws = each(density.draw, points, len(ends))
        if not (mode and density.one_layer):
            return found, draws, points[:0], there
        return found, draws, points[evenly(len(ends), _ASCENTS)], there

    found, draws, starts, there = Compiled(run).at(rng_key, arrays)(rng_key, arrays)
    log_evidence, variance = np.asarray(found.log_evidence, float), np.asarray(found.variance, float)
    finite = np.isfinite(log_evidence)
    if not finite.any():
        where = "draws of previous" if previous else "draws of the prior"
        raise expected(
            f"a likelihood that is finite at some {where}",
            "none",
            "standardise X and y, give the noise a prior away from zero, or run in float64",
        )
    log_evidence, variance = np.where(finite, log_evidence, -np.inf), np.where(finite, variance, 0.0)
    if before:
        # log p(y') + log p(y) / p(y')
        log_evidence, variance = before.log_evidence + log_evidence, before.variance + variance
    numbers, loc, scale = there
    ended = Ended(program, structure, rebuild(arrays)[0], numbers, loc, scale, log_evidence, variance)
    evidence = *evidence_of_runs(log_evidence, variance), int(np.max(found.temperatures))
    if len(starts):
        values, at = _at_the_mode(
            lambda arrays: Density(program, rebuild(arrays)[0], rng_key, structure), arrays, starts
        )
        return IntegratedFit(posterior_at(model, values, args), *evidence, ended, at)
    return IntegratedFit(Posterior(model, samples=draws), *evidence, ended, numbers)


def _at_the_mode(
    density: Callable[[list[Array]], Density], arrays: list[Array], starts: Array
) -> tuple[Numbers, Numbers]:
    """Hyperparameters where the density of their unconstrained numbers is largest, found from some draws of these, and
    these numbers with a first axis of one.

    Args:
        density: from the arrays among the arguments of the program.
        arrays: these.
        starts: draws of the unconstrained numbers (S, n).
    """
    # of log p(u) + log p(y | u)
    slope = Compiled(jax.value_and_grad(lambda flat, arrays: jnp.stack(density(arrays)(flat)).sum()))
    at_start = slope.at(starts[0], arrays)
    flat = highest_end(lambda flat: at_start(flat, arrays), np.asarray(starts))

    def there(flat: Array, arrays: list[Array]) -> tuple[Numbers, Numbers]:
        found = density(arrays)
        return found.constrained(flat), {name: u[None] for name, u in found.unravel(flat).items()}

    return Compiled(there)(flat, arrays)
