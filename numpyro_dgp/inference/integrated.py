r"""Blocks that a sweep integrates: exact conditionals of whitened inducing values under a Gaussian likelihood.

The negative log density is quadratic in such values v given all others, :math:`E(v) = E(0) + g^\top v +
\tfrac12 v^\top H v` with :math:`H = I + \Phi`. Gradient and Hessian at zero hold all of it, masks, scales and several
likelihoods included:

.. math:: v \sim N(-H^{-1} g,\, H^{-1}), \qquad
          -\log \int e^{-E(v)} dv = E(0) - \tfrac12 g^\top H^{-1} g + \tfrac12 \log|H| + \text{const.}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_dgp._typing import Array
from numpyro_dgp.inference.block_moves import Block

__all__ = ["Conjugate", "Integrated", "integrated"]


@dataclasses.dataclass(frozen=True)
class Conjugate:
    """The exact draw of the inducing values of a layer that a Gaussian likelihood sees: for blocks of ``dgp.Gibbs``.

    The layer is integrated while all other blocks move, and drawn from its exact conditional at the end of the sweep.
    ``dgp.Gibbs`` does so wherever it applies: give a block another update to have it sampled instead.

    Example:
        >>> from numpyro_dgp import updates
        >>> updates.Conjugate()
        Conjugate()

    Source: Titsias (2009) for the integral; Sauer et al. (2023) for the sweep.
    """


class Integrated(NamedTuple):
    """Gaussian conditionals of blocks given everything else.

    Args:
        energy: negative log density with the blocks integrated, up to a constant.
        least: the least of the negative log density over values of the blocks.
        means: by site, as (P, M); P = 1 where outputs are mixed or the function is scalar.
        roots: lower Cholesky factors (P, M, M) of the precisions by site.
    """

    energy: Array
    least: Array
    means: Block
    roots: Block

    def draw(self, key: Array, shapes: Block) -> tuple[Block, Array]:
        """Values of the shapes of ``shapes``, and the negative log density there."""
        found, energy = {}, self.least
        for name, part in zip(sorted(self.means), jax.random.split(key, len(self.means)), strict=True):
            white = jax.random.normal(part, self.means[name].shape, self.means[name].dtype)
            step = solve_triangular(self.roots[name], white[..., None], lower=True, trans=1)[..., 0]
            found[name] = (self.means[name] + step).reshape(shapes[name].shape)
            energy = energy + 0.5 * jnp.square(white).sum()
        return found, energy


def integrated(density: Callable[[Block], Array], values: Block, mixed: dict[str, bool]) -> Integrated:
    """Integrate blocks in whose values a negative log density is quadratic, each on its own.

    Args:
        density: from values of the blocks to their negative log density.
        values: examples by site, (P, M) or (M,).
        mixed: by site, whether the quadratic has terms between outputs.
    """
    zeros = jax.tree.map(jnp.zeros_like, values)
    start, slope = jax.value_and_grad(density)(zeros)
    energy, least = start, start
    means, roots = {}, {}
    for name, zero in zeros.items():
        rows = (1, zero.size) if mixed[name] else (zero.size // zero.shape[-1], zero.shape[-1])

        def gradient(v: Array, name: str = name) -> Array:
            return jax.grad(lambda v: density(zeros | {name: v}))(v)

        def column(direction: Array, gradient: Callable[[Array], Array] = gradient, zero: Array = zero) -> Array:
            return jax.jvp(gradient, (zero,), (direction,))[1]

        # One direction for all outputs at once: outputs that are not mixed have no terms in common.
        directions = jnp.broadcast_to(jnp.eye(rows[1], dtype=zero.dtype)[:, None], (rows[1], *rows))
        H = jax.vmap(column)(directions.reshape(rows[1], *zero.shape)).reshape(rows[1], *rows)
        root = jnp.linalg.cholesky(jnp.moveaxis(H, 0, -1))
        half = solve_triangular(root, slope[name].reshape(*rows, 1), lower=True)
        means[name] = -solve_triangular(root, half, lower=True, trans=1)[..., 0]
        roots[name] = root
        gain = 0.5 * jnp.square(half).sum()
        least = least - gain
        energy = energy - gain + jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)).sum()
    return Integrated(energy, least, means, roots)
