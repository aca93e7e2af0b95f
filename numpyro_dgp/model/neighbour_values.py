r"""Distributions of the values of a process of which each is conditioned on a few others: Vecchia's approximation.

.. math:: \log p(u) = \sum_i \log N\bigl(u_i - m(x_i);\; b_i^\top (u_{c(i)} - m(x_{c(i)})),\; d_i\bigr)
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.conditioning_sets import ConditioningSets
from numpyro_dgp.algebra.vecchia import from_neighbours, in_order, onto_neighbours, values_first, values_last
from numpyro_dgp.model.function_values import Origin
from numpyro_dgp.model.process_values import ProcessValues, PropagatedProcess

__all__ = ["NeighbourValues", "PropagatedNeighbours"]


class NeighbourValues(ProcessValues):
    r"""Values of P independent functions, each value conditioned on C others that come before it in some order.

    Args:
        loc: means m(x) (..., N, P), or (..., N) for a scalar function.
        weights: :math:`b_i` (..., P, N, C), P = 1 where outputs share them.
        open_variance: :math:`d_i`, variances given the others (..., P, N).
        sets: the others.
        event_dim: 2 for vector-valued functions, 1 for scalar ones.
        origin: which function these are values of, and where.

    Source: Vecchia (1988); Katzfuss and Guinness (2021).
    """

    pytree_data_fields: tuple[str, ...] = ("weights", "open_variance", "sets")
    suggested_rule = "dgp.guides.SparseFactor()"

    def __init__(
        self,
        loc: Array,
        weights: Array,
        open_variance: Array,
        sets: ConditioningSets,
        event_dim: int = 2,
        origin: Origin | None = None,
    ) -> None:
        self.weights, self.open_variance, self.sets = weights, open_variance, sets
        super().__init__(loc, event_dim, origin)

    def whitened(self, residual: Array) -> Array:
        r"""The numbers :math:`D^{-1/2} (I - B)\, r`, a priori N(0, 1), behind values less their mean: (..., P, N)."""
        return self._open(residual) / jnp.sqrt(self.open_variance)

    def correlated(self, v: Array) -> Array:
        r"""Values less their mean behind standard normal numbers, :math:`(I - B)^{-1} D^{1/2} v` (..., P, N)."""
        scaled = jnp.sqrt(self.open_variance) * v
        return values_last(in_order(self.sets, self._weights(scaled), values_first(scaled)))

    def from_white(self, white: Array) -> Array:
        return self.loc + self.to_value(self.correlated(self.to_output_major(white)))

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        if intermediates:
            v = self.to_output_major(intermediates[0])
        else:
            v = self.whitened(self.to_output_major(self.residual(value)))
        return (-0.5 * (jnp.square(v) + math.log(2 * math.pi)) - self.half_log_variance).sum((-2, -1))

    @property
    def half_log_variance(self) -> Array:
        """Half the logarithms of the variances given the others (..., P, N)."""
        return 0.5 * jnp.log(self.open_variance)

    def precision_times(self, residual: Array) -> Array:
        scaled = self._open(self.to_output_major(residual)) / self.open_variance
        first = values_first(scaled)
        return self.to_value(values_last(first - onto_neighbours(self.sets, self._weights(scaled), first)))

    def _open(self, residual: Array) -> Array:
        """What is left of values less their mean without what their neighbours say (..., P, N)."""
        first = values_first(residual)
        return values_last(first - from_neighbours(self.sets, self._weights(residual), first))

    def _weights(self, values: Array) -> Array:
        """The weights with the values first, then their neighbours, for values (..., P, N)."""
        weights = jnp.broadcast_to(self.weights, (*values.shape[:-2], *self.weights.shape[-3:]))
        return jnp.moveaxis(weights, (-2, -1), (0, 1))

    def _expanded(self, batch: tuple[int, ...]) -> NeighbourValues:
        return self._of(type(self), batch)

    def _of(self, kind: type[NeighbourValues], batch: tuple[int, ...]) -> NeighbourValues:
        """The same values as another class of them, expanded to ``batch``."""
        loc = jnp.broadcast_to(self.loc, batch + self.event_shape)
        weights = jnp.broadcast_to(self.weights, batch + self.weights.shape[-3:])
        variance = jnp.broadcast_to(self.open_variance, batch + self.open_variance.shape[-2:])
        return kind(loc, weights, variance, self.sets, self.event_dim, self.origin)

    def propagated(self) -> NeighbourValues:
        return self._of(PropagatedNeighbours, self.batch_shape)


class PropagatedNeighbours(NeighbourValues, PropagatedProcess):
    """Values conditioned on their neighbours that follow the model."""
