r"""Elliptical slice sampling: moves of values with Gaussian priors, without gradients, step sizes or tuning.

The target is :math:`p(z) \propto N(z; m, C)\, L(z)`. With :math:`\nu \sim N(m, C)`, the ellipse
:math:`z(\theta) = m + (z - m) \cos\theta + (\nu - m) \sin\theta` has points with L above a random height; one is drawn
by shrinking a bracket of angles towards the current point, :math:`\theta = 0`. The Gaussian need not be the prior: any
Gaussian that does not depend on z works, with L the rest of the density. The initial bracket may be less than the full
circle, at a random place around the current point: where few angles are on the slice, fewer proposals are needed.

Slice sampling of one coordinate at a time, with a bracket that steps out and shrinks.

Source: Murray et al. (2010); Neal (2003, section 4.1) for brackets of any width; for deep GPs Sauer et al. (2023).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree

from numpyro_dgp._fields import Checked, count, positive
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.mcmc.block_moves import Block, BlockTarget, Priors, SliceState, Untuned

__all__ = ["EllipticalSlice", "Slice", "elliptical_slice"]

# A bracket is then smaller than the rounding error of an angle, in double precision too.
_MOST_TRIES = 120


class _Search(NamedTuple):
    key: Array
    angle: Array
    low: Array
    high: Array
    point: Block
    energy: Array
    tries: Array
    found: Array


def elliptical_slice(
    key: Array,
    z: Block,
    energy: Array,
    density: Callable[[Block], Array],
    priors: Priors,
    most_tries: int = _MOST_TRIES,
    bracket: Array | float = math.tau,
) -> tuple[Block, Array, Array]:
    """One elliptical slice move: the new point, its energy, and the number of evaluations.

    Args:
        key: PRNG key.
        z: current values by site.
        energy: negative log density there.
        density: from values to their negative log density, the Gaussian included.
        priors: a Gaussian by site. They must not depend on ``z``.
        most_tries: after which the point stays where it is. Every sequence of tries is as probable backwards, so that
            the target is left as it is by any number.
    """
    draw_key, height_key, angle_key, loop_key = jax.random.split(key, 4)
    keys = dict(zip(sorted(z), jax.random.split(draw_key, len(z)), strict=True))
    mean = {name: jnp.broadcast_to(priors[name].mean, z[name].shape).astype(z[name].dtype) for name in z}
    across = {name: priors[name].sample(keys[name]).astype(z[name].dtype) - mean[name] for name in z}
    along = {name: z[name] - mean[name] for name in z}

    def square(x: Block) -> Array:
        """Squared length in units of the Gaussian."""
        # x' C^-1 x
        return sum(2 * (_log_prob(priors[n], mean[n]) - _log_prob(priors[n], mean[n] + x[n])) for n in x)  # type: ignore[return-value]

    here, there = square(along), square(across)
    both = (square(jax.tree.map(jnp.add, along, across)) - here - there) / 2  # along' C^-1 across

    def at(angle: Array) -> tuple[Block, Array]:
        """The point at an angle, and its log density under the Gaussian up to a constant."""
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        point = {name: mean[name] + cos * along[name] + sin * across[name] for name in z}
        return point, -0.5 * (cos**2 * here + 2 * cos * sin * both + sin**2 * there)  # -|cos along + sin across|^2 / 2

    # log u L(z): log L(z) = -energy + (z - m)' C^-1 (z - m) / 2, and -log u is Exp(1).
    height = 0.5 * here - energy - jax.random.exponential(height_key, dtype=energy.dtype)
    place, first = jax.random.uniform(angle_key, (2,), energy.dtype) * bracket

    def search(s: _Search) -> _Search:
        point, gaussian = at(s.angle)
        proposed = density(point)
        # Angle 0, the current point, stays inside.
        low, high = jnp.where(s.angle < 0, s.angle, s.low), jnp.where(s.angle < 0, s.high, s.angle)
        key, angle_key = jax.random.split(s.key)
        inside = low + (high - low) * jax.random.uniform(angle_key, dtype=energy.dtype)
        # log L at the proposal is -proposed - gaussian.
        return _Search(key, inside, low, high, point, proposed, s.tries + 1, -proposed - gaussian > height)

    low = place - bracket
    start = _Search(loop_key, low + first, low, place, z, energy, jnp.zeros((), int), jnp.array(False))
    end = jax.lax.while_loop(lambda s: ~s.found & (s.tries < most_tries), search, start)
    # Without a point on the slice, as where the density is NaN at z, the chain stays where it is.
    chosen = jax.tree.map(lambda new, old: jnp.where(end.found, new, old), (end.point, end.energy), (z, energy))
    return *chosen, end.tries


def _log_prob(prior: dist.Distribution, value: Array) -> Array:
    return prior.log_prob(value).sum()


@dataclasses.dataclass(frozen=True)
class EllipticalSlice(Checked, Untuned):
    r"""Elliptical slice sampling of sites that are Gaussian a priori, together: for blocks of ``dgp.mcmc.Gibbs``.

    No step size, no gradient, always a new point. Suited to inducing values, non-centred hidden values, values of exact
    layers and Gaussian latents; several sites in one block must be standard normal a priori, as the sites of
    ``dgp.for_mcmc`` are.

    Args:
        repeat: moves in every sweep.

    Raises:
        ValueError: ``repeat`` that is not a positive integer.

    Example:
        >>> from numpyro_dgp.mcmc import EllipticalSlice
        >>> EllipticalSlice(repeat=3)
        EllipticalSlice(repeat=3)

    Source: Murray et al. (2010).
    """

    repeat: int = count(1)

    __repr__ = brief

    def move(
        self, key: Array, state: SliceState, z: Block, energy: Array, given: BlockTarget
    ) -> tuple[SliceState, Block, Array]:
        def once(carry: tuple[Block, Array, Array], key: Array) -> tuple[tuple[Block, Array, Array], None]:
            moved, new, tries = elliptical_slice(key, carry[0], carry[1], given.density, given.priors)
            return (moved, new, carry[2] + tries), None

        start = z, energy, jnp.zeros((), int)
        (z, energy, tries), _ = jax.lax.scan(once, start, jax.random.split(key, self.repeat))
        return state._replace(evaluations=tries), z, energy

    def describe(self, state: Any) -> str:
        return f"{float(state.evaluations) / self.repeat:.1f} tries"


_MOST_STEPS, _MOST_TRIES = 20, 100


class _LineSearch(NamedTuple):
    key: Array
    low: Array
    high: Array
    at: Array
    energy: Array
    tries: Array
    found: Array


@dataclasses.dataclass(frozen=True)
class Slice(Checked, Untuned):
    """Slice sampling of one coordinate at a time, on the unconstrained scale: for blocks of ``dgp.mcmc.Gibbs``.

    No gradient and no tuning: the bracket steps out from ``width`` to the slice and shrinks to it. For a few
    hyperparameters, and for densities without a gradient.

    Args:
        width: of the first bracket; on the unconstrained scale, the logarithm for positive numbers.

    Raises:
        ValueError: a width that is not positive.

    Example:
        >>> from numpyro_dgp.mcmc import Slice
        >>> Slice(width=0.5)
        Slice(width=0.5)

    Source: Neal (2003).
    """

    width: float = positive(1.0, "try 1.0")

    __repr__ = brief

    def move(
        self, key: Array, state: SliceState, z: Block, energy: Array, given: BlockTarget
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
    level = energy + jax.random.exponential(height_key, dtype=energy.dtype)  # -log u p(z)
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
    start = _LineSearch(loop_key, low, high, value, energy, jnp.zeros((), int), jnp.array(False))

    def shrink(s: _LineSearch) -> _LineSearch:
        key, inside_key = jax.random.split(s.key)
        at = s.low + (s.high - s.low) * jax.random.uniform(inside_key, dtype=value.dtype)
        proposed = density(at)
        low, high = jnp.where(at < value, at, s.low), jnp.where(at < value, s.high, at)
        return _LineSearch(key, low, high, at, proposed, s.tries + 1, proposed < level)

    end = jax.lax.while_loop(lambda s: ~s.found & (s.tries < _MOST_TRIES), shrink, start)
    at, new = jnp.where(end.found, end.at, value), jnp.where(end.found, end.energy, energy)
    return at, new, steps_low + steps_high + end.tries
