r"""Gauss-Hermite quadrature over several Gaussian numbers at a time.

The expectation of a function of D independent numbers is a sum over the product of D one-dimensional rules. One grid
serves any number of columns where each result depends on one column per *direction* of the grid: the mean and the log
scale of every output of a heteroscedastic model take two directions, however many outputs there are.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.scipy.special import logsumexp

from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.algebra.linalg import safe_sqrt
from numpyro_dgp.algebra.quadrature import GaussHermite, Nodes, white_nodes

__all__ = ["MOST_DIRECTIONS", "ProductGrid"]

MOST_DIRECTIONS = 3
# Nodes per direction, by the number of directions: about six, five and four digits for log densities.
_SIZES = {1: 20, 2: 15, 3: 8}


@pytree
class ProductGrid:
    """The product of one-dimensional rules, for columns that are integrated along given directions.

    Args:
        directions: of every column; -1 for a column that stays at its mean.
        shared: the first directions are those of columns that several results of one datum depend on.
        nodes_each: nodes per direction; ``None`` for a number that suits how many directions there are.

    Raises:
        ValueError: too large a grid.

    Example:
        >>> import jax.numpy as jnp
        >>> nodes = ProductGrid((0, 1)).nodes(jnp.array([1.0, 2.0]), jnp.array([0.5, 0.1]))
        >>> print(f"{nodes.mean(nodes.points[:, 0] ** 2 * nodes.points[:, 1]):.3f}")  # (1 + 0.5) * 2
        3.000
    """

    directions: tuple[int, ...] = static()
    shared: int = static(default=0)
    nodes_each: int | None = static(default=None)

    @property
    def count(self) -> int:
        """How many directions there are."""
        return len(set(self.directions) - {-1})

    @property
    def each(self) -> int:
        """Nodes per direction."""
        return _SIZES[self.count] if self.nodes_each is None else self.nodes_each

    @property
    def size(self) -> int:
        """Nodes of the whole grid."""
        return int(self.each**self.count)

    def at_mean(self, columns: range) -> ProductGrid:
        """The grid in which ``columns``, which have a direction of their own, stay at their means."""
        (gone,) = {self.directions[column] for column in columns}
        left = sorted(set(self.directions) - {-1, gone})
        renamed = {old: new for new, old in enumerate(left)} | {gone: -1, -1: -1}
        return ProductGrid(tuple(renamed[d] for d in self.directions), self.shared, self.nodes_each)

    def nodes(self, loc: Array, variance: Array) -> Nodes:
        """Points (K, ..., C) and log weights (K,) for Gaussians of C columns."""
        loc, variance = jnp.broadcast_arrays(loc, variance)
        white = white_nodes(GaussHermite(self.each), self.count, loc.dtype)
        columns = jnp.pad(white.points, ((0, 0), (0, 1)))[:, jnp.array(self.directions)]
        shape = (len(columns), *(1,) * (loc.ndim - 1), len(self.directions))
        return Nodes(loc + safe_sqrt(variance) * columns.reshape(shape), white.log_weights)

    def log_mean_exp(self, nodes: Nodes, log_values: Array, event_dim: int) -> Array:
        r"""The log of the expectation of a product over the results of one datum, from the logs of its factors.

        .. math:: \log E_s \prod_p E_{v_p}[e^{\ell_p(s, v_p)}],

        with the shared directions s outside, and all other ones inside the product.

        Args:
            nodes: of this grid.
            log_values: :math:`\ell` at the nodes (K, ...).
            event_dim: how many of the last axes are results of one datum.
        """
        outer = round(len(nodes.log_weights) ** (self.shared / self.count))
        weights = nodes.log_weights.reshape(outer, -1)
        of_outer = logsumexp(weights, 1)
        own = (weights - of_outer[:, None]).reshape(outer, -1, *(1,) * (log_values.ndim - 1))
        inner = logsumexp(log_values.reshape(outer, -1, *log_values.shape[1:]) + own, 1)
        total = inner.sum(tuple(range(-event_dim, 0)))
        return logsumexp(total + of_outer.reshape(-1, *(1,) * (total.ndim - 1)), 0)
