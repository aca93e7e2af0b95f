r"""Annealed importance sampling: the log evidence from below, and from above with exact draws of the posterior.

For a standard normal prior of z and a log-likelihood L, the path
:math:`p_\beta(z) \propto N(z; 0, I)\, e^{\beta L(z)}` leads from the prior to the posterior. Weights collected on the
way up have the evidence Z as their mean, so that their mean logarithm is below log Z; on the way down from draws of the
posterior it is above (Neal, 2001; Grosse et al., 2015).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

LogLikelihood = Callable[[jax.Array], jax.Array]


class Path(NamedTuple):
    """Inverse temperatures from 0 to 1 (T + 1,) and the step size of the transition at each but the first (T,)."""

    betas: jax.Array
    step_sizes: jax.Array


def transition(
    log_likelihood: LogLikelihood, z: jax.Array, key: jax.Array, beta: jax.Array, step_size: jax.Array, leapfrogs: int
) -> tuple[jax.Array, jax.Array]:
    """One step of Hamiltonian Monte Carlo at ``beta`` and the probability of its acceptance."""
    slope = jax.value_and_grad(lambda z: beta * log_likelihood(z) - 0.5 * z @ z)
    momentum_key, accept_key = jax.random.split(key)
    momentum = jax.random.normal(momentum_key, z.shape, z.dtype)
    density, gradient = slope(z)

    def leap(_: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        z, p, _, gradient = carry
        p = p + 0.5 * step_size * gradient
        z = z + step_size * p
        density, gradient = slope(z)
        return z, p + 0.5 * step_size * gradient, density, gradient

    new, p, new_density, _ = jax.lax.fori_loop(0, leapfrogs, leap, (z, momentum, density, gradient))
    ratio = new_density - density + 0.5 * (momentum @ momentum - p @ p)
    accept = jnp.exp(jnp.minimum(jnp.where(jnp.isnan(ratio), -jnp.inf, ratio), 0.0))
    return jnp.where(jax.random.uniform(accept_key) < accept, new, z), accept


def tune(
    log_likelihood: LogLikelihood, size: int, key: jax.Array, temperatures: int, chains: int = 16, leapfrogs: int = 8
) -> Path:
    """A path whose step sizes keep the acceptance near 0.75 in a trial run; later runs take them as they are."""
    betas = jnp.linspace(0, 1, temperatures + 1) ** 4

    def step(carry: tuple[jax.Array, jax.Array], at: tuple[jax.Array, jax.Array]) -> tuple:
        z, step_size = carry
        beta, key = at
        keys = jax.random.split(key, chains)
        z, accept = jax.vmap(lambda z, k: transition(log_likelihood, z, k, beta, step_size, leapfrogs))(z, keys)
        return (z, step_size * jnp.exp(0.1 * (accept.mean() - 0.75))), step_size

    z = jax.random.normal(key, (chains, size))
    keys = jax.random.split(jax.random.fold_in(key, 1), temperatures)
    return Path(betas, jax.lax.scan(step, (z, jnp.array(0.2)), (betas[1:], keys))[1])


def climb(
    log_likelihood: LogLikelihood, path: Path, size: int, key: jax.Array, chains: int, leapfrogs: int = 8
) -> jax.Array:
    """Log weights (chains,) of runs from prior to posterior: E[exp(weight)] = Z."""

    def run(key: jax.Array) -> jax.Array:
        def step(carry: tuple, at: tuple) -> tuple:
            z, weight = carry
            before, beta, step_size, key = at
            weight = weight + (beta - before) * log_likelihood(z)
            return (transition(log_likelihood, z, key, beta, step_size, leapfrogs)[0], weight), None

        start_key, key = jax.random.split(key)
        keys = jax.random.split(key, len(path.step_sizes))
        at = path.betas[:-1], path.betas[1:], path.step_sizes, keys
        return jax.lax.scan(step, (jax.random.normal(start_key, (size,)), jnp.zeros(())), at)[0][1]

    return jax.vmap(run)(jax.random.split(key, chains))


def descend(
    log_likelihood: LogLikelihood, path: Path, draws: jax.Array, key: jax.Array, leapfrogs: int = 8
) -> jax.Array:
    """The same from draws of the posterior (chains, size) to the prior: E[exp(-weight)] = 1 / Z."""

    def run(z: jax.Array, key: jax.Array) -> jax.Array:
        def step(carry: tuple, at: tuple) -> tuple:
            z, weight = carry
            before, beta, step_size, key = at
            z, _ = transition(log_likelihood, z, key, beta, step_size, leapfrogs)
            return (z, weight + (beta - before) * log_likelihood(z)), None

        keys = jax.random.split(key, len(path.step_sizes))
        at = path.betas[:-1], path.betas[1:], path.step_sizes, keys
        return jax.lax.scan(step, (z, jnp.zeros(())), at, reverse=True)[0][1]

    return jax.vmap(run)(draws, jax.random.split(key, len(draws)))
