"""Posteriors over the values of a process conditioned on neighbours, in the whitened coordinates of their prior."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from numpyro.distributions import kl_divergence

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.vecchia import from_neighbours, in_order, values_first, values_last
from numpyro_dgp.model.neighbour_values import NeighbourValues
from numpyro_dgp.model.process_values import ProcessValues

__all__ = ["WhitenedNeighbours"]


class WhitenedNeighbours(ProcessValues):
    r"""A Gaussian over values :math:`u = m(x) + (I - B)^{-1} D^{1/2} v` of a process conditioned on neighbours.

    .. math:: v_i = t_i + \sigma_i \epsilon_i + r_i^\top \epsilon_{c(i)}, \qquad \epsilon \sim N(0, I)

    so that the divergence from the prior, :math:`v \sim N(0, I)`, is in closed form:

    .. math:: \mathrm{KL} = \sum_i \tfrac12 (t_i^2 + \sigma_i^2 + \lVert r_i \rVert^2 - 1) - \log\sigma_i .

    Args:
        prior: the prior of the values.
        shift: t (P, N).
        scale: :math:`\sigma` (P, N), positive.
        weights: r (P, N, C), or ``None`` for independent numbers.
    """

    pytree_data_fields: tuple[str, ...] = ("prior", "shift", "scale", "weights")

    def __init__(self, prior: NeighbourValues, shift: Array, scale: Array, weights: Array | None = None) -> None:
        if weights is not None:
            weights = jnp.where(prior.sets.present, weights, 0.0)
        self.prior, self.shift, self.scale, self.weights = prior, shift, scale, weights
        super().__init__(prior.loc + prior.to_value(prior.correlated(shift)), prior.event_dim, prior.origin)

    def from_white(self, white: Array) -> Array:
        epsilon = self.to_output_major(white)
        v = self.shift + self.scale * epsilon
        if self.weights is not None:
            rows = values_first(epsilon)
            v = v + values_last(from_neighbours(self.prior.sets, self._rows(self.weights, epsilon), rows))
        return self.prior.loc + self.to_value(self.prior.correlated(v))

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        white = self._white(value) if not intermediates else self.to_output_major(intermediates[0])
        density = -0.5 * (jnp.square(white) + math.log(2 * math.pi)) - jnp.log(self.scale)
        return (density - self.prior.half_log_variance).sum((-2, -1))

    def _white(self, value: Array) -> Array:
        v = self.prior.whitened(self.to_output_major(value - self.prior.loc))
        target = (v - self.shift) / self.scale
        if self.weights is None:
            return target
        weights = self._rows(-self.weights / self.scale[..., None], target)
        return values_last(in_order(self.prior.sets, weights, values_first(target)))

    def _rows(self, weights: Array, values: Array) -> Array:
        """Weights (P, N, C) with the values first, for values (..., P, N)."""
        return jnp.moveaxis(jnp.broadcast_to(weights, (*values.shape, weights.shape[-1])), (-2, -1), (0, 1))


@kl_divergence.register(WhitenedNeighbours, NeighbourValues)
def _kl_whitened(q: WhitenedNeighbours, p: Any) -> Array:
    square = jnp.square(q.shift) + jnp.square(q.scale) - 1.0
    if q.weights is not None:
        square = square + jnp.square(q.weights).sum(-1)
    return (0.5 * square - jnp.log(q.scale)).sum((-2, -1))
