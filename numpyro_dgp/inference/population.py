r"""Sequential Monte Carlo from a standard normal to N(0, I) times a ratio, by elliptical slice moves.

With the log ratios :math:`r` (of priors to the Gaussian) and :math:`\ell` (the likelihood), the path of densities is

.. math:: p_\beta(z) \propto N(z; 0, I)\, e^{r(z) + \beta\, \ell(z)}, \qquad 0 = \beta_0 < \dots < \beta_T = 1 .

Points begin at draws of :math:`p_0`. From one :math:`\beta` to the next they have the weights
:math:`e^{(\beta_{t+1} - \beta_t)\, \ell(z)}`; they are drawn again by these weights, and then moved without leaving
:math:`p_{\beta_{t+1}}`. The product of the mean weights estimates the integral
:math:`\int N(z; 0, I)\, e^{r(z) + \ell(z)}\, dz` over that of :math:`e^r`. The next :math:`\beta` is the one at which
the effective number of weights is half the number of points.

Source: Chopin (2002) for weights, draws and moves in turn; Jasra et al. (2011) for the choice of temperatures;
Murray et al. (2010) for the moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.tuning import tuned
from numpyro_dgp.inference.elliptical_slice import elliptical_slice

__all__ = ["LogRatios", "Population", "populate"]

LogRatios = Callable[[Array], tuple[Array, Array]]
"""From a position (D,) to r and the log likelihood."""

_SHARE = 0.5
"""The effective number of weights at the next temperature, over the number of points."""
_HALVINGS = 40
_ROUNDS_AT_ONE = 2
"""Rounds of moves at the end, where all points count."""
_MOST_TRIES = 16


class Population(NamedTuple):
    """Points at the end of the path.

    Args:
        points: (P, D).
        log_evidence: log of the product of mean weights.
        variance: of it, as far as weights at different temperatures are independent.
        temperatures: the number of temperatures, T.
    """

    points: Array
    log_evidence: Array
    variance: Array
    temperatures: Array


class _Some(NamedTuple):
    """A Gaussian that is standard normal for the coordinates that move, and a point for the others."""

    mean: Array
    moving: Array

    def sample(self, key: Array) -> Array:
        return self.mean + self.moving * jax.random.normal(key, self.mean.shape, self.mean.dtype)

    def log_prob(self, value: Array) -> Array:
        return -0.5 * jnp.square(self.moving * (value - self.mean))


class _State(NamedTuple):
    points: Array
    beta: Array
    log_evidence: Array
    variance: Array
    round: Array
    rounds_at_one: Array


def populate(log_ratios: LogRatios, key: Array, starts: Array, blocks: Array, sweeps: int) -> Population:
    """Move points from the start of the path to its end.

    Args:
        log_ratios: r and the log likelihood of one position.
        key: PRNG key.
        starts: draws of the density at the start (P, D).
        blocks: which coordinates each move of a sweep changes, zeros and ones (B, D).
        sweeps: at each temperature.
    """
    count, dtype = len(starts), starts.dtype
    moves = jnp.tile(blocks.astype(dtype), (sweeps, 1))
    batch = max(size for size in range(1, min(count, tuned().together) + 1) if count % size == 0)

    def moved(point: Array, energy_there: Array, key: Array, beta: Array) -> Array:
        """One position after all moves of a round."""

        def energy(z: dict[str, Array]) -> Array:
            prior, likelihood = log_ratios(z["z"])
            return 0.5 * jnp.square(z["z"]).sum() - prior - beta * likelihood

        def move(carry: tuple[Array, Array], at: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
            (z, before), (moving, key) = carry, at
            given: Any = {"z": _Some(jnp.where(moving > 0, 0.0, z), moving)}
            new, after, _ = elliptical_slice(key, {"z": z}, before, energy, given, _MOST_TRIES)
            return (new["z"], after), None

        return jax.lax.scan(move, (point, energy_there), (moves, jax.random.split(key, len(moves))))[0][0]

    def body(state: _State) -> _State:
        order_key, move_key = jax.random.split(jax.random.fold_in(key, state.round))
        prior, likelihood = jax.lax.map(log_ratios, state.points, batch_size=batch)
        likelihood = jnp.where(jnp.isfinite(prior + likelihood), likelihood, -jnp.inf)
        step = _next_step(likelihood, state.beta)
        log_weights = jnp.where(jnp.isfinite(likelihood), step * likelihood, -jnp.inf)
        log_mean = logsumexp(log_weights) - math.log(count)
        weights = jnp.exp(log_weights - log_mean)
        beta = jnp.where(step >= 1 - state.beta, 1.0, state.beta + step)
        ranks = (jnp.arange(count) + jax.random.uniform(order_key, dtype=dtype)) * (weights.sum() / count)
        chosen = jnp.searchsorted(jnp.cumsum(weights), ranks).clip(0, count - 1)
        points = state.points[chosen]
        energies = 0.5 * jnp.square(points).sum(1) - (prior + beta * likelihood)[chosen]
        given = points, energies, jax.random.split(move_key, count)
        points = jax.lax.map(lambda at: moved(at[0], at[1], at[2], beta), given, batch_size=batch)
        variance = state.variance + weights.var() / count
        at_one = state.rounds_at_one + (beta >= 1)
        return _State(points, beta, state.log_evidence + log_mean, variance, state.round + 1, at_one)

    zero = jnp.zeros((), dtype)
    first = _State(starts, zero, zero, zero, jnp.zeros((), int), jnp.zeros((), int))
    going = lambda s: (s.rounds_at_one < _ROUNDS_AT_ONE) & jnp.isfinite(s.log_evidence)  # noqa: E731
    end = jax.lax.while_loop(going, body, first)
    return Population(end.points, end.log_evidence, end.variance, end.round - _ROUNDS_AT_ONE + 1)


def _next_step(likelihood: Array, beta: Array) -> Array:
    """By how much the inverse temperature grows: to one, or so far that enough weights count."""
    possible = jnp.isfinite(likelihood)
    relative = jnp.where(possible, likelihood - likelihood.max(), 0.0)

    def share(step: Array) -> Array:
        """The effective number of weights over the number of points that can have one."""
        weights = jnp.where(possible, jnp.exp(step * relative), 0.0)
        return jnp.square(weights.sum()) / jnp.square(weights).sum() / possible.sum()

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        # between numbers of different sizes: the first steps are tiny where the likelihood is concentrated
        middle = jnp.where(low > 0, jnp.sqrt(low * high), high * 1e-3)
        enough = share(middle) > _SHARE
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    rest = 1 - beta
    low, _ = jax.lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros_like(rest), rest))
    return jnp.where(share(rest) > _SHARE, rest, low)
