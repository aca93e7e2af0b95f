"""Slice sampling of one number at a time, with a bracket that steps out and shrinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from numpyro_dgp._checks import require_positive
from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.inference.block_moves import Block, Given, SliceState, Untuned

__all__ = ["Slice"]

_MOST_STEPS, _MOST_TRIES = 20, 100


class _Search(NamedTuple):
    key: Array
    low: Array
    high: Array
    at: Array
    energy: Array
    tries: Array
    found: Array


@dataclasses.dataclass(frozen=True)
class Slice(Untuned):
    """Slice sampling of one number after another, on the unconstrained scale: for blocks of ``dgp.Gibbs``.

    No gradient and no tuning: the bracket steps out from ``width`` to the slice and shrinks to it. For a few
    hyperparameters, and for densities without a gradient.

    Args:
        width: of the first bracket; on the unconstrained scale, the logarithm for positive numbers.

    Raises:
        ValueError: a width that is not positive.

    Example:
        >>> from numpyro_dgp import updates
        >>> updates.Slice(width=0.5)
        Slice(width=0.5)

    Source: Neal (2003).
    """

    width: float = 1.0

    __repr__ = brief

    def __post_init__(self) -> None:
        require_positive("Slice", "width", self.width, "try 1.0")

    def move(
        self, key: Array, state: SliceState, z: Block, energy: Array, given: Given
    ) -> tuple[SliceState, Block, Array]:
        flat, unravel = ravel_pytree(z)

        def coordinate(carry: tuple[Array, Array, Array], step: tuple[Array, Array]) -> tuple[Any, None]:
            (flat, energy, count), (i, key) = carry, step
            value, energy, tries = _slice(
                key, flat[i], energy, lambda value: given.density(unravel(flat.at[i].set(value))), self.width
            )
            return (flat.at[i].set(value), energy, count + tries), None

        steps = jnp.arange(len(flat)), jax.random.split(key, len(flat))
        (flat, energy, count), _ = jax.lax.scan(coordinate, (flat, energy, jnp.zeros((), int)), steps)
        return state._replace(evaluations=count), unravel(flat), energy

    def describe(self, state: Any) -> str:
        return f"{int(state.evaluations)} evaluations"


def _slice(
    key: Array, value: Array, energy: Array, density: Callable[[Array], Array], width: float
) -> tuple[Array, Array, Array]:
    """One move of a single number: the new value, its energy, and the number of evaluations."""
    height_key, place_key, steps_key, loop_key = jax.random.split(key, 4)
    level = energy + jax.random.exponential(height_key, dtype=energy.dtype)
    first = value - width * jax.random.uniform(place_key, dtype=value.dtype)
    # The number of steps is limited and divided between both sides at random, which keeps the move reversible.
    left = jnp.floor(_MOST_STEPS * jax.random.uniform(steps_key)).astype(int)

    def step_out(end: Array, step: float, most: Array) -> tuple[Array, Array]:
        def outside(s: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            end, count, _ = s
            reached = ~(density(end) < level)
            return jnp.where(reached, end, end + step), count + 1, reached

        start = end, jnp.zeros((), int), jnp.array(False)
        end, count, _ = jax.lax.while_loop(lambda s: ~s[2] & (s[1] < most), outside, start)
        return end, count

    low, steps_low = step_out(first, -width, left)
    high, steps_high = step_out(first + width, width, _MOST_STEPS - 1 - left)
    start = _Search(loop_key, low, high, value, energy, jnp.zeros((), int), jnp.array(False))

    def shrink(s: _Search) -> _Search:
        key, inside_key = jax.random.split(s.key)
        at = s.low + (s.high - s.low) * jax.random.uniform(inside_key, dtype=value.dtype)
        proposed = density(at)
        low, high = jnp.where(at < value, at, s.low), jnp.where(at < value, s.high, at)
        return _Search(key, low, high, at, proposed, s.tries + 1, proposed < level)

    end = jax.lax.while_loop(lambda s: ~s.found & (s.tries < _MOST_TRIES), shrink, start)
    at, new = jnp.where(end.found, end.at, value), jnp.where(end.found, end.energy, energy)
    return at, new, steps_low + steps_high + end.tries
