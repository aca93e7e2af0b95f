r"""Annealed importance sampling between a standard normal and N(0, I) times a ratio.

With the log ratio L the path of densities is

.. math:: p_\beta(\epsilon) \propto N(\epsilon; 0, I)\, e^{\beta L(\epsilon)}, \qquad
          Z_\beta = \int N(\epsilon; 0, I)\, e^{\beta L(\epsilon)}\, d\epsilon .

A run along :math:`\beta_0, \dots, \beta_T` begins at a draw of :math:`p_{\beta_0}`. It adds
:math:`(\beta_{t + 1} - \beta_t)\, L(\epsilon)` to its log weight w, takes a step of Hamiltonian Monte Carlo that leaves
:math:`p_{\beta_{t + 1}}` as it is, and goes on. Whatever the path and the steps, as long as they are fixed before the
run, :math:`E[e^w] = Z_{\beta_T} / Z_{\beta_0}`: upwards, from 0 to 1, it is Z, and downwards 1 / Z.

Source: Neal (2001); Grosse et al. (2015).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array

__all__ = ["LogRatio", "Path", "Runs", "anneal", "first_path", "tuned"]

LogRatio = Callable[[Array], tuple[Array, Array]]
"""From positions (C, D) to L (C,) and its gradient (C, D)."""

# The share of proposals that the step size of a trial aims at, and how fast it follows.
_ACCEPTANCE = 0.8
_GAIN = 0.1
# Steps are longer or shorter by up to this share, at random, so that no trajectory closes a circle.
_JITTER = 0.3
# Share of the temperatures that are spaced as in the trial, however little the log ratio varies.
_EVEN = 0.1


class Path(NamedTuple):
    """Inverse temperatures (T + 1,) and the step size at each (T + 1,)."""

    betas: Array
    step_sizes: Array

    def reversed(self) -> Path:
        """From the end to the start."""
        return Path(self.betas[::-1], self.step_sizes[::-1])


class Runs(NamedTuple):
    """C runs along a path."""

    log_weights: Array
    """(C,)."""
    acceptance: Array
    """Mean probability of acceptance at every temperature but the first and the last (T - 1,)."""
    log_ratios: Array
    """L at every temperature but the last (T, C)."""
    step_sizes: Array
    """At every temperature but the last (T,)."""


def first_path(temperatures: int, size: int, dtype: jnp.dtype) -> Path:
    """A path for a trial run, from 0 to 1: more temperatures near the standard normal, step sizes that suit it."""
    betas = jnp.linspace(0, 1, temperatures + 1, dtype=dtype) ** 3
    return Path(betas, jnp.full(temperatures + 1, max(size, 1) ** -0.25, dtype))  # D^-1/4, as acceptance asks


def tuned(path: Path, trial: Runs) -> Path:
    r"""The path for the runs that count, from a trial run that has adapted its step sizes.

    The scale of the log ratio times :math:`\beta_{t + 1} - \beta_t` is the same at all temperatures, which is best
    where runs follow the path closely. The scale is half the distance between two quantiles, because a few runs that
    begin far out would determine a standard deviation.

    Args:
        path: of the trial, from 0 to 1.
        trial: runs along it.
    """
    betas, log_ratios = np.asarray(path.betas, float), np.asarray(trial.log_ratios, float)
    finite = np.where(np.isfinite(log_ratios), log_ratios, np.nan)
    finite[np.isnan(finite).all(1)] = 0.0
    low, high = np.nanquantile(finite, [0.16, 0.84], axis=1)
    # sd[L] (beta_t+1 - beta_t), from the quantiles of a Gaussian at -1 and +1 sd
    length = 0.5 * (high - low) * np.diff(betas)
    even = 1 / len(length)
    share = (1 - _EVEN) * length / length.sum() + _EVEN * even if length.sum() > 0 else np.full(len(length), even)
    reached = np.concatenate([[0.0], np.cumsum(share) / share.sum()])
    new = np.interp(np.linspace(0, 1, len(betas)), reached, betas)  # equal shares of the length
    steps = np.exp(np.interp(new, betas[:-1], np.log(np.asarray(trial.step_sizes, float))))
    return Path(jnp.asarray(new, path.betas.dtype), jnp.asarray(steps, path.step_sizes.dtype))


class _State(NamedTuple):
    """Positions (C, D), the log ratio there (C,) and its gradient (C, D)."""

    position: Array
    log_ratio: Array
    slope: Array


class _Sum(NamedTuple):
    """A sum with the rounding error of its last addition."""

    value: Array
    lost: Array

    def plus(self, term: Array) -> _Sum:
        term = term - self.lost  # Kahan's sum
        value = self.value + term
        return _Sum(value, (value - self.value) - term)


def anneal(log_ratio: LogRatio, path: Path, starts: Array, key: Array, leapfrogs: int, adapt: Array) -> Runs:
    """Runs along a path from draws of its first density.

    Args:
        log_ratio: L and its gradient.
        path: in either direction.
        starts: positions (C, D).
        key: PRNG key.
        leapfrogs: gradients of a step.
        adapt: whether this is a trial, in which step sizes follow the acceptance; its weights mean nothing.
    """

    def step(carry: tuple[_State, _Sum, Array], at: tuple[Array, ...]) -> tuple[Any, tuple[Array, ...]]:
        state, weights, shift = carry
        first, beta, after, step_size, key = at
        step_size = step_size * jnp.exp(shift)
        state, accepted = _transition(log_ratio, state, key, beta, step_size, leapfrogs, first)
        weights = weights.plus((after - beta) * state.log_ratio)  # log w
        shift = jnp.where(adapt & ~first, shift + _GAIN * (accepted - _ACCEPTANCE), shift)  # log step size
        return (state, weights, shift), (accepted, state.log_ratio, step_size)

    chains, temperatures = len(starts), len(path.betas) - 1
    zeros = jnp.zeros(chains, starts.dtype)
    start = _State(starts, zeros, jnp.zeros_like(starts))
    keys = jax.random.split(key, temperatures)
    along = (jnp.arange(temperatures) == 0, path.betas[:-1], path.betas[1:], path.step_sizes[:-1], keys)
    carry = start, _Sum(zeros, zeros), jnp.zeros((), starts.dtype)
    (_, weights, _), (accepted, log_ratios, step_sizes) = jax.lax.scan(step, carry, along)
    # A weight that met the logarithm of zero is zero for good.
    log_weights = jnp.where(jnp.isnan(weights.value), -jnp.inf, weights.value)
    return Runs(log_weights, accepted[1:], log_ratios, step_sizes)


def _transition(
    log_ratio: LogRatio, state: _State, key: Array, beta: Array, step_size: Array, leapfrogs: int, first: Array
) -> tuple[_State, Array]:
    """One step of Hamiltonian Monte Carlo with unit mass for every run, and the mean probability of acceptance.

    The first step evaluates the log ratio where the runs begin and stays there, so that it is compiled once.
    """
    chains, dtype = len(state.position), state.position.dtype
    momentum_key, jitter_key, accept_key = jax.random.split(key, 3)
    momentum = jax.random.normal(momentum_key, state.position.shape, dtype)
    steps = step_size * jax.random.uniform(jitter_key, (chains, 1), dtype, 1 - _JITTER, 1 + _JITTER)
    steps = jnp.where(first, 0.0, steps)

    def force(at: _State) -> Array:
        return beta * at.slope - at.position  # grad log p_beta

    def log_density(at: _State, momentum: Array) -> Array:
        # log p_beta(z) N(momentum)
        return beta * at.log_ratio - 0.5 * (jnp.square(at.position) + jnp.square(momentum)).sum(1)

    def leap(_: int, carry: tuple[_State, Array]) -> tuple[_State, Array]:
        at, momentum = carry
        # Leapfrog: half a kick, a drift, half a kick.
        momentum = momentum + 0.5 * steps * force(at)
        position = at.position + steps * momentum
        value, slope = log_ratio(position)
        at = _State(position, jnp.where(jnp.isfinite(value), value, -jnp.inf), slope)
        return at, momentum + 0.5 * steps * force(at)

    new, end = jax.lax.fori_loop(0, jnp.where(first, 1, leapfrogs), leap, (state, momentum))
    change = log_density(new, end) - log_density(state, momentum)
    accept = jnp.exp(jnp.minimum(jnp.where(jnp.isnan(change), -jnp.inf, change), 0.0))  # min(1, e^change)
    taken = first | (jax.random.uniform(accept_key, (chains,), dtype) < accept)
    chosen = jax.tree.map(lambda a, b: jnp.where(taken.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, state)
    return chosen, accept.mean()
