r"""Sequential Monte Carlo from a standard normal to N(0, I) times a ratio, by elliptical slice moves.

With the log ratios :math:`r` (of priors to the Gaussian) and :math:`\ell` (the likelihood), the path of densities is

.. math:: p_\beta(z) \propto N(z; 0, I)\, e^{r(z) + \beta\, \ell(z)}, \qquad 0 = \beta_0 < \dots < \beta_T = 1 .

From one :math:`\beta` to the next, points have the weights :math:`e^{(\beta_{t+1} - \beta_t)\, \ell(z)}`. Some are
resampled by these weights and start Markov chains that leave :math:`p_{\beta_{t+1}}` invariant; all positions of these
chains are the points of the next step. The product of the mean weights estimates the integral
:math:`\int N(z; 0, I)\, e^{r(z) + \ell(z)}\, dz` over that of :math:`e^r`, without bias where temperatures are fixed.
The next :math:`\beta` is the one at which the effective number of weights is half the number of points P. The first
weights may be those of many more draws of :math:`p_0`, which cost one evaluation each, so that optima which few of
them are near are found.

**Several runs** share the points between them. The points of one run descend from a few initial ones. Where the target
has modes that no move connects, one run ends in one or two of them and underestimates the uncertainty; independent runs
end in several.

Source: Chopin (2002) for weights, draws and moves in turn; Dau and Chopin (2022) for chains of which all positions
count; Jasra et al. (2011) for the choice of temperatures; Murray et al. (2010) for the moves; Verge et al. (2015),
for runs as islands and their evidence; Yao et al. (2022), for runs that do not mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from scipy.special import logsumexp as scipy_logsumexp
from scipy.special import softmax

from numpyro_dgp._typing import Array
from numpyro_dgp.math.tuning import tuned
from numpyro_dgp.mcmc.slices import elliptical_slice

__all__ = ["LogRatios", "Population", "each", "evenly", "evidence_of_runs", "independent_runs", "populate"]

LogRatios = Callable[[Array], tuple[Array, Array]]
"""From a position (D,) to r and the log likelihood."""

_SHARE = 0.5
"""The effective number of weights at the next temperature, over the number of points P."""
_HALVINGS = 40
_ROUNDS_AT_ONE = 2
"""Rounds of moves at the end, where all points count."""
_MOST_TRIES = 16
_WIDER = 2.0
"""Brackets of angles that moves begin with, over the slices of the temperature before."""
_LEFT = 0.63
"""The factor by which a rejected proposal shrinks a bracket much wider than the slice, as a geometric mean."""


class Population(NamedTuple):
    """Points at the end of the path.

    Args:
        points: (P, D), positions of the chains there.
        log_evidence: log of the product of mean weights.
        variance: of it, as far as chains and temperatures are independent.
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


class _Weighed(NamedTuple):
    """The next inverse temperature, which points chains begin at, and the log mean weight with its variance."""

    beta: Array
    chosen: Array
    log_mean: Array
    variance: Array


class _State(NamedTuple):
    points: Array
    begin: Array
    energies: Array
    brackets: Array
    beta: Array
    log_evidence: Array
    variance: Array
    round: Array
    rounds_at_one: Array


def populate(
    log_ratios: LogRatios,
    key: Array,
    seeds: Any,
    draw: Callable[[Any], Array],
    blocks: Array,
    num_points: int,
    sweeps: int,
) -> Population:
    """Move points from the start of the path to its end.

    Moves of the first sweep of a chain search the whole ellipse, others a bracket of angles around the chain, which is
    twice as wide as the slices were at the temperature before: there are about three tries in a move, however narrow
    the target becomes.

    Args:
        log_ratios: r and the log likelihood of one position.
        key: PRNG key.
        seeds: of the draws at the start: arrays with one row for each.
        draw: a point of the density at the start (D,), from one row of these.
        blocks: which coordinates each move of a sweep changes, zeros and ones (B, D).
        num_points: P.
        sweeps: of each chain at each temperature. There are P / sweeps chains C, rounded up.
    """
    chains = -(-num_points // sweeps)
    first_key, key = jax.random.split(key)

    def moved(point: Array, energy_there: Array, key: Array, beta: Array, brackets: Array) -> tuple[Array, Array]:
        """The positions of a chain after each sweep (sweeps, D), and log widths of the slices (sweeps, B)."""

        def energy(z: dict[str, Array]) -> Array:
            prior, likelihood = log_ratios(z["z"])
            return 0.5 * jnp.square(z["z"]).sum() - prior - beta * likelihood  # -log p_beta(z)

        def move(carry: tuple[Array, Array], at: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
            (z, before), (moving, bracket, key) = carry, at
            given: Any = {"z": _Some(jnp.where(moving > 0, 0.0, z), moving)}  # other blocks stay at z
            new, after, tries = elliptical_slice(key, {"z": z}, before, energy, given, _MOST_TRIES, bracket)
            return (new["z"], after), tries

        def sweep(
            carry: tuple[Array, Array], at: tuple[Array, Array]
        ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
            key, first = at
            begin = jnp.where(first, math.tau, brackets)  # now and then, what is far on a slice must be possible
            end, tries = jax.lax.scan(move, carry, (moving, begin, jax.random.split(key, len(blocks))))
            return end, (end[0], _log_width(begin, tries))

        moving = blocks.astype(point.dtype)
        return jax.lax.scan(sweep, (point, energy_there), (jax.random.split(key, sweeps), jnp.arange(sweeps) == 0))[1]

    def body(state: _State) -> _State:
        order_key, move_key = jax.random.split(jax.random.fold_in(key, state.round))
        given = state.begin, state.energies, jax.random.split(move_key, chains)
        ways, widths = each(lambda at: moved(at[0], at[1], at[2], state.beta, state.brackets), given, chains)
        points = ways.reshape(chains * sweeps, -1)
        prior, likelihood = each(log_ratios, points, chains * sweeps)
        weighed = _weigh(order_key, prior, likelihood, state.beta, chains, sweeps, _SHARE)
        begin = points[weighed.chosen]
        return _State(
            points,
            begin,
            _energies(begin, prior, likelihood, weighed),
            jnp.minimum(_WIDER * jnp.exp(widths.mean((0, 1))), math.tau),  # twice their geometric mean
            weighed.beta,
            state.log_evidence + weighed.log_mean,
            state.variance + weighed.variance,
            state.round + 1,
            state.rounds_at_one + (state.beta >= 1),
        )

    count = len(jax.tree.leaves(seeds)[0])
    prior, likelihood = each(lambda seed: log_ratios(draw(seed)), seeds, count)
    least = _SHARE * min(1.0, num_points / count)  # half of P effective weights, of more draws
    weighed = _weigh(first_key, prior, likelihood, jnp.zeros_like(likelihood[0]), chains, 1, least)
    begin = each(draw, jax.tree.map(lambda rows: rows[weighed.chosen], seeds), chains)
    energies = _energies(begin, prior, likelihood, weighed)
    points, none = jnp.repeat(begin, sweeps, 0), jnp.zeros((), int)
    circles = jnp.full(len(blocks), math.tau, points.dtype)
    first = _State(points, begin, energies, circles, weighed.beta, weighed.log_mean, weighed.variance, none, none)
    going = lambda s: (s.rounds_at_one < _ROUNDS_AT_ONE) & jnp.isfinite(s.log_evidence)  # noqa: E731
    end = jax.lax.while_loop(going, body, first)
    return Population(
        end.points[evenly(chains * sweeps, num_points)], end.log_evidence, end.variance, end.round - _ROUNDS_AT_ONE + 1
    )


def evenly(total: int, count: int) -> np.ndarray:
    """Evenly spaced integers below ``total``, at most ``count``."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int)


def each(function: Callable[[Any], Any], arguments: Any, count: int) -> Any:
    """A function of so many arguments, the leading axis of ``arguments``, as many together as the machine likes."""
    together = max(size for size in range(1, min(count, tuned().together) + 1) if count % size == 0)
    return jax.lax.map(function, arguments, batch_size=together)


def _weigh(
    key: Array, prior: Array, likelihood: Array, beta: Array, chains: int, together: int, least: float
) -> _Weighed:
    """Weights of points for the next temperature.

    Args:
        key: PRNG key.
        prior: r of the points (P,).
        likelihood: their log likelihood (P,).
        beta: the inverse temperature that they have.
        chains: the number of points to draw.
        together: that many in turn are dependent.
        least: the least effective number of weights over P.
    """
    count = len(likelihood)
    likelihood = jnp.where(jnp.isfinite(prior + likelihood), likelihood, -jnp.inf)
    step = _next_step(likelihood, beta, least)
    log_weights = jnp.where(jnp.isfinite(likelihood), step * likelihood, -jnp.inf)
    log_mean = logsumexp(log_weights) - math.log(count)  # log mean e^(step l)
    weights = jnp.exp(log_weights - log_mean)  # of mean one
    # Systematic draws: equally spaced ranks, one random shift for all.
    ranks = jnp.arange(chains) + jax.random.uniform(key, dtype=weights.dtype)
    chosen = jnp.searchsorted(jnp.cumsum(weights), ranks * (weights.sum() / chains)).clip(0, count - 1)
    # var[log mean w] = var[mean w] / (mean w)^2, with the mean over one chain as one number
    independent = weights.reshape(-1, together).mean(1)
    variance = independent.var() / len(independent)
    return _Weighed(jnp.where(step >= 1 - beta, 1.0, beta + step), chosen, log_mean, variance)


def _energies(begin: Array, prior: Array, likelihood: Array, weighed: _Weighed) -> Array:
    """Negative log densities at the next temperature, up to a constant, where chains begin."""
    return 0.5 * jnp.square(begin).sum(1) - (prior + weighed.beta * likelihood)[weighed.chosen]


def _log_width(brackets: Array, tries: Array) -> Array:
    """The logarithm of the angle that a slice has, about, from the bracket that a move began with and its tries."""
    return jnp.log(brackets) + (tries - 1) * math.log(_LEFT)  # bracket 0.63^(tries - 1)


def _next_step(likelihood: Array, beta: Array, least: float) -> Array:
    """The increment of the inverse temperature: up to one, or to the largest at which the effective number of weights
    suffices."""
    possible = jnp.isfinite(likelihood)
    relative = jnp.where(possible, likelihood - likelihood.max(), 0.0)

    def share(step: Array) -> Array:
        """The effective number of weights over the number of points that can have one."""
        weights = jnp.where(possible, jnp.exp(step * relative), 0.0)
        return jnp.square(weights.sum()) / jnp.square(weights).sum() / possible.sum()  # (sum w)^2 / sum w^2 / P

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        # between numbers of different sizes: the first steps are tiny where the likelihood is concentrated
        middle = jnp.where(low > 0, jnp.sqrt(low * high), high * 1e-3)
        enough = share(middle) > least
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    rest = 1 - beta
    low, _ = jax.lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros_like(rest), rest))
    return jnp.where(share(rest) > least, rest, low)


def independent_runs(
    log_ratios: LogRatios,
    draw: Callable[[Any], Array],
    blocks: Array,
    key: Array,
    seeds: Any,
    num_points: int,
    sweeps: int,
    num_runs: int,
) -> Population:
    """The ends of R runs, with R as the first axis of all.

    Arguments but the last are those of :func:`populate`. Each run has its share of the points, rounded up, and of the
    draws at the start, in their order.

    Args:
        num_runs: R, if there are as many points and draws at the start.
    """
    count = len(jax.tree.leaves(seeds)[0])
    runs = min(num_runs, num_points, count)
    shares = jax.tree.map(lambda rows: rows[: count // runs * runs].reshape(runs, -1, *rows.shape[1:]), seeds)

    def run(given: tuple[Array, Any]) -> Population:
        return populate(log_ratios, given[0], given[1], draw, blocks, -(-num_points // runs), sweeps)

    return each(run, (jax.random.split(key, runs), shares), runs)


def evidence_of_runs(log_evidence: np.ndarray, variance: np.ndarray) -> tuple[float, float]:
    r"""The log evidence by all runs, and its standard error.

    The mean of estimates of the evidence is without bias if these are:

    .. math:: \hat Z = \tfrac1R \sum_r \hat Z_r, \qquad
              \operatorname{var} \log \hat Z \approx \sum_r w_r^2\, v_r + \frac{\sum_r (R\, w_r - 1)^2}{R\, (R - 1)},
              \qquad w_r = \hat Z_r / \textstyle\sum_s \hat Z_s

    Args:
        log_evidence: of each run, :math:`\log \hat Z_r` (R,).
        variance: of these, as runs see it themselves, :math:`v_r` (R,).
    """
    weights, runs = softmax(log_evidence), len(log_evidence)
    between = np.square(runs * weights - 1).sum() / max(runs * (runs - 1), 1)  # var[Z_r] / (R Z^2)
    error = math.sqrt((np.square(weights) * variance).sum() + between)
    return float(scipy_logsumexp(log_evidence)) - math.log(runs), error
