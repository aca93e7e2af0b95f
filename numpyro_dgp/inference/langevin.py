r"""Langevin dynamics with noisy gradients: one step, and how its mass and the noise are learned.

Coordinates :math:`\theta` have a potential U, a mass M (diagonal) and a velocity v, the distance of one step, which
is :math:`N(0, s)` in equilibrium, :math:`s = \varepsilon^2 / M` with the step size :math:`\varepsilon`. All functions
act on each coordinate on its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array, ArrayLike

__all__ = ["Adaptation", "adapt", "heat", "step"]


class Adaptation(NamedTuple):
    """Running means of the gradient of each coordinate, over a window that is long where noise dominates."""

    window: Array
    """Length of the window, in steps."""
    mean: Array
    """Mean of gradients."""
    square: Array
    """Mean of squared gradients."""
    noise: Array
    """Variance of a gradient at one place, over minibatches and hidden draws."""

    @classmethod
    def start(cls, like: Array) -> Adaptation:
        """Before the first gradient: the squared gradient of a standard normal, no noise."""
        return cls(jnp.ones_like(like), jnp.zeros_like(like), jnp.ones_like(like), jnp.zeros_like(like))

    @property
    def mass(self) -> Array:
        """Root mean square of the gradient: a step then has size step_size ** 2 for any number of data."""
        return jnp.sqrt(self.square)


def adapt(state: Adaptation, first: Array, second: Array) -> Adaptation:
    r"""Update the running means by two independent gradients at the same place.

    With weight :math:`w = 1 / (\tau + 1)` and the first gradient g,

    .. math:: \bar g \mathrel{+}= w (g - \bar g), \quad \bar V \mathrel{+}= w (g^2 - \bar V), \quad
              B \mathrel{+}= w (\tfrac12 (g - g')^2 - B), \quad \tau \leftarrow 1 + \tau (1 - \bar g^2 / \bar V) .

    Args:
        state: :math:`\tau`, :math:`\bar g`, :math:`\bar V` and B, each (n,).
        first: g (n,).
        second: g' (n,), from another minibatch.

    Example:
        >>> import jax.numpy as jnp
        >>> state = adapt(Adaptation.start(jnp.zeros(1)), jnp.array([3.0]), jnp.array([1.0]))
        >>> print(state.square, state.noise)
        [5.] [1.]

    Source: Springenberg et al. (2016), section 3.2, who take all of V for noise; B estimates the noise alone.
    """
    weight = 1 / (state.window + 1)

    def towards(old: Array, new: Array) -> Array:
        return old + weight * (new - old)

    return Adaptation(
        1 + state.window * (1 - jnp.square(state.mean) / state.square),
        towards(state.mean, first),
        towards(state.square, jnp.square(first)),
        towards(state.noise, 0.5 * jnp.square(first - second)),
    )


def heat(mass: ArrayLike, noise: ArrayLike, step_size: float, friction: float) -> Array:
    r"""Bound on the excess temperature that noise in the gradient brings, in any direction.

    .. math:: h = \frac{2 - \alpha}{4 \alpha} \sum_i s_i B_i ,

    a sum, because noise that is correlated between coordinates may all lie in one direction.

    Args:
        mass: M (n,).
        noise: B (n,), variance of the gradient.
        step_size: :math:`\varepsilon`.
        friction: :math:`\alpha`.

    Example:
        >>> import jax.numpy as jnp
        >>> print(heat(jnp.ones(1), jnp.array([100.0]), 0.01, 0.05).round(4))
        0.0975
    """
    return step_size**2 * (2 - friction) / (4 * friction) * jnp.sum(noise / mass)


def step(
    key: Array,
    position: Array,
    velocity: Array,
    gradient: Array,
    mass: ArrayLike,
    step_size: float,
    friction: float,
) -> tuple[Array, Array]:
    r"""One step at temperature one: kick, half a drift, friction and noise, half a drift.

    .. math:: v \leftarrow v - s \nabla U(\theta), \quad \theta \leftarrow \theta + \tfrac12 v, \quad
              v \leftarrow (1 - \alpha) v + \sqrt{(1 - (1 - \alpha)^2) s}\, \xi, \quad
              \theta \leftarrow \theta + \tfrac12 v .

    On a Gaussian of precision :math:`\lambda`, with :math:`a = s \lambda < 4` and noise of variance B in the gradient,
    the stationary variance is

    .. math:: \frac1\lambda \Bigl(1 + \frac{h}{1 - a / 4}\Bigr), \qquad h = \frac{2 - \alpha}{4 \alpha} s B :

    exact for exact gradients, and too wide by :math:`h`, of order :math:`\varepsilon^2`, for noisy ones. Symplectic
    Euler, the usual form, is off by :math:`a / 4`, of order :math:`\varepsilon^2` too, even for exact gradients.

    Args:
        key: PRNG key.
        position: :math:`\theta` (n,).
        velocity: v (n,).
        gradient: an unbiased estimate of :math:`\nabla U(\theta)` (n,).
        mass: M (n,).
        step_size: :math:`\varepsilon`.
        friction: :math:`\alpha` in (0, 1], part of the velocity that is lost in a step.

    Returns:
        Position and velocity.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> zero = jnp.zeros(1)
        >>> position, velocity = step(jax.random.key(0), zero, zero + 1.0, zero, 1.0, 1e-3, 0.5)
        >>> print(position.round(2), velocity.round(2))  # 1/2 + 1/4
        [0.75] [0.5]

    Source: Chen et al. (2014), equation 15, in the splitting of Leimkuhler and Matthews (2013), BAOAB.
    """
    kept = 1 - friction
    variance = step_size**2 / mass
    velocity = velocity - variance * gradient
    position = position + 0.5 * velocity
    noise = jax.random.normal(key, position.shape, position.dtype)
    velocity = kept * velocity + jnp.sqrt((1 - kept**2) * variance) * noise
    return position + 0.5 * velocity, velocity
