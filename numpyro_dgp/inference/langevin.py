r"""Langevin dynamics with noisy gradients: one step, and how its mass and the noise are learned.

Coordinates :math:`\varphi` have a potential V, a mass (diagonal) and a velocity :math:`\dot\varphi`, the distance of
one step, which is :math:`N(0, \kappa)` in equilibrium, with :math:`\kappa` the squared step size divided by the mass.
All functions act on each coordinate on its own.
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

    The new value has the weight 1 / (window + 1) in each of them: it is the first gradient in the mean, its square in
    the mean square, and half the squared difference of the two gradients in the noise. The window becomes

    .. math:: 1 + \mathrm{window}\, (1 - \mathrm{mean}^2 / \mathrm{square}) ,

    with the numbers from before this update.

    Args:
        state: the window and the running means, one of each per coordinate.
        first: a gradient.
        second: a gradient from another minibatch.

    Example:
        >>> import jax.numpy as jnp
        >>> state = adapt(Adaptation.start(jnp.zeros(1)), jnp.array([3.0]), jnp.array([1.0]))
        >>> print(state.square, state.noise)
        [5.] [1.]

    Source: Springenberg et al. (2016), section 3.2, who take all of the mean square for noise; here the
    noise is estimated alone.
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

    .. math:: \mathrm{heat} = \frac{2 - \alpha}{4 \alpha} \sum_i \kappa_i\, \mathrm{noise}_i ,

    a sum, because noise that is correlated between coordinates may all lie in one direction.

    Args:
        mass: of every coordinate.
        noise: variance of the gradient, by coordinate.
        step_size: a number.
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

    .. math:: \dot\varphi \leftarrow \dot\varphi - \kappa\, \nabla V(\varphi), \quad
              \varphi \leftarrow \varphi + \tfrac12 \dot\varphi, \quad
              \dot\varphi \leftarrow (1 - \alpha)\, \dot\varphi + \sqrt{(1 - (1 - \alpha)^2)\, \kappa}\; \epsilon, \quad
              \varphi \leftarrow \varphi + \tfrac12 \dot\varphi .

    On a Gaussian of variance :math:`\sigma^2 > \kappa / 4`, with noise in the gradient, the stationary variance is

    .. math:: \sigma^2 \Bigl(1 + \frac{\mathrm{heat}}{1 - \kappa / 4 \sigma^2}\Bigr), \qquad
              \mathrm{heat} = \frac{2 - \alpha}{4 \alpha}\, \kappa\, \mathrm{noise} :

    exact for exact gradients, and too wide by the heat, of the order of the squared step size, for noisy ones.
    Symplectic Euler, the usual form, is off by :math:`\kappa / 4 \sigma^2`, of that order too, even for exact
    gradients.

    Args:
        key: PRNG key.
        position: :math:`\varphi`.
        velocity: :math:`\dot\varphi`, of the same shape.
        gradient: an unbiased estimate of :math:`\nabla V(\varphi)`.
        mass: of every coordinate, or one for all.
        step_size: a number.
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
