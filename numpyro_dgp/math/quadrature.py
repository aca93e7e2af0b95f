r"""Expectations under Gaussians, by nodes and weights.

A rule turns independent Gaussians N(loc, variance) into K points and log weights; every expectation
of the package is a weighted sum of a function at those points.

Gauss-Hermite quadrature over several Gaussian numbers at a time.

The expectation of a function of D independent numbers is a sum over the product of D one-dimensional rules. One grid
serves any number of columns where each result depends on one column per *direction* of the grid: the mean and the log
scale of every output of a heteroscedastic model take two directions, however many outputs there are.

Points of Sobol's sequence, and the standard normal numbers that they give when they are shifted.

.. math:: z = \Phi^{-1}\bigl((t + u) \bmod 1\bigr), \qquad u \sim \mathrm{Uniform}[0, 1]^d

Each number is standard normal over the shifts u, while all points t of one shift cover the unit cube evenly.

Source: Cranley and Patterson (1976).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp, ndtri
from scipy.special import roots_hermite

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._fields import Checked, count
from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.math.linalg import safe_sqrt, sum_event, tensordot

__all__ = [
    "GaussHermite",
    "MOST_DIRECTIONS",
    "MonteCarlo",
    "Nodes",
    "ProductGrid",
    "QuadratureRule",
    "shifted_normals",
    "sobol_points",
    "white_nodes",
]


class Nodes(NamedTuple):
    """Points (K, ...) and log weights (K,) of a rule."""

    points: Array
    log_weights: Array

    def mean(self, values: Array) -> Array:
        """Weighted mean of ``values`` (K, ...): the expectation of a function."""
        return tensordot(jnp.exp(self.log_weights), values)

    def log_mean_exp(self, log_values: Array) -> Array:
        """Log of the weighted mean of ``exp(log_values)``: the log of the expectation."""
        shape = (-1,) + (1,) * (log_values.ndim - 1)
        return logsumexp(log_values + self.log_weights.reshape(shape), axis=0)


class QuadratureRule:
    """What integrates a function of independent Gaussians."""

    random: ClassVar[bool] = False
    """Whether its points are draws."""
    key: Array | None
    size: Any

    def nodes(self, loc: Array, variance: Array) -> Nodes:
        """Points of shape ``(K, *loc.shape)`` and log weights (K,)."""
        raise NotImplementedError

    def at_mean(self, columns: range) -> QuadratureRule:
        """The rule in which ``columns``, which are integrated otherwise, stay at their means, where it can leave them
        out."""
        return self

    @property
    def only_mean(self) -> bool:
        """Whether its one point is the mean."""
        return False

    def log_mean_exp(
        self, nodes: Nodes, log_values: Array, event_dim: int, observed: Callable[[Array], Array]
    ) -> Array:
        """The log of the expectation of a product over the results of one datum, from the logs of its factors.

        Args:
            nodes: of this rule.
            log_values: logs of the factors at the nodes (K, ...).
            event_dim: how many of the last axes are results of one datum.
            observed: sets numbers (..., ...) of results that are missing to zero.
        """
        return sum_event(observed(nodes.log_mean_exp(log_values)), event_dim)  # sum_p log E[e^l_p]


@lru_cache
def _hermite(size: int) -> tuple[np.ndarray, np.ndarray]:
    points, weights = roots_hermite(size)
    kept = weights > 1e-30  # other nodes change no digit of a result, and log densities underflow there
    points, weights = points[kept], weights[kept]
    # int e^(-x^2) g(x) dx with x = z / sqrt(2): nodes sqrt(2) x of N(0, 1), and weights over sqrt(pi).
    return math.sqrt(2) * points, np.log(weights) - 0.5 * math.log(math.pi)


@pytree
class GaussHermite(Checked, QuadratureRule):
    r"""Gauss-Hermite quadrature: :math:`E[g(h)] \approx \sum_k \beta_k\, g(\mu + \sqrt2\, \sigma\, \chi_k)` for
    :math:`h \sim N(\mu, \sigma^2)`, with the nodes :math:`\chi` of a Hermite polynomial and weights :math:`\beta`.

    Exact for polynomials of degree up to ``2 size - 1``. One set of nodes serves every datum and
    output, so it integrates functions that act on each element of ``loc`` on its own.

    Args:
        size: number of nodes.

    Raises:
        ValueError: size is not a positive integer.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.likelihoods import GaussHermite
        >>> nodes = GaussHermite(3).nodes(jnp.array(1.0), jnp.array(4.0))
        >>> print(nodes.mean(nodes.points**2).round(3))  # 1 + 4
        5.0
    """

    size: int = count(20, static=True)

    def nodes(self, loc: Array, variance: Array) -> Nodes:
        loc, variance = jnp.broadcast_arrays(loc, variance)
        points, log_weights = (jnp.asarray(a, loc.dtype) for a in _hermite(self.size))
        shape = (-1,) + (1,) * loc.ndim
        return Nodes(loc + safe_sqrt(variance) * points.reshape(shape), log_weights)  # mu + σ z_k


@pytree
class MonteCarlo(Checked, QuadratureRule):
    """Independent draws, for functions that mix outputs; their mean is an unbiased estimate of the expectation.

    Args:
        size: number of draws.
        key: a PRNG key; ``dgp.Likelihood`` takes one from the program when this is ``None``.

    Raises:
        ValueError: size is not a positive integer.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.likelihoods import MonteCarlo
        >>> nodes = MonteCarlo(100_000, jax.random.key(0)).nodes(jnp.zeros(2), jnp.array([1.0, 3.0]))
        >>> nodes.points.shape, bool(abs(nodes.mean(nodes.points.sum(-1) ** 2) - 4) < 0.1)  # 1 + 3
        ((100000, 2), True)
    """

    random = True
    size: int = count(20, static=True)
    key: Array | None = None

    def nodes(self, loc: Array, variance: Array) -> Nodes:
        loc, variance = jnp.broadcast_arrays(loc, variance)
        key = jax.random.key(0) if self.key is None else self.key
        noise = jax.random.normal(key, (self.size, *loc.shape), loc.dtype)
        log_weights = jnp.full((self.size,), -math.log(self.size), loc.dtype)
        return Nodes(loc + safe_sqrt(variance) * noise, log_weights)


# Larger grids of nodes raise an error.
_MOST_NODES = 20_000


def white_nodes(rule: GaussHermite | MonteCarlo, dims: int, dtype: jnp.dtype) -> Nodes:
    """Nodes of a standard Gaussian over several numbers: points (K, D) and log weights (K,).

    Args:
        rule: Gauss-Hermite gives a grid of ``size ** dims`` nodes, Monte Carlo ``size`` draws.
        dims: D.
        dtype: of both.

    Raises:
        ValueError: too large a grid, or draws without a key.
    """
    if rule.random:
        expect(rule.key is not None, "MonteCarlo(n, key) with a key", "none", "pass integrate=MonteCarlo(n, key)")
        return rule.nodes(jnp.zeros(dims, dtype), jnp.ones(dims, dtype))
    if rule.size**dims > _MOST_NODES:
        raise expected(
            f"at most {_MOST_NODES} nodes",
            f"{rule.size}^{dims} for {dims} input columns",
            "use fewer nodes, or integrate=dgp.likelihoods.MonteCarlo(1000, key)",
        )
    nodes = rule.nodes(jnp.zeros((), dtype), jnp.ones((), dtype))
    points, log_weights = (jnp.stack([g.ravel() for g in jnp.meshgrid(*[a] * dims, indexing="ij")], -1) for a in nodes)
    # The weight of a node of the grid is the product of those of its coordinates.
    return Nodes(points, log_weights.sum(-1))


MOST_DIRECTIONS = 3
# Nodes per direction, by the number of directions: about six, five and four digits for log densities.
_SIZES = {1: 20, 2: 15, 3: 8}


@pytree
class ProductGrid(QuadratureRule):
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
    def only_mean(self) -> bool:
        return not self.count

    @property
    def each(self) -> int:
        """Nodes per direction."""
        return _SIZES[self.count] if self.nodes_each is None else self.nodes_each

    @property
    def size(self) -> int:  # type: ignore[override]
        """Nodes of the whole grid."""
        return int(self.each**self.count)

    def at_mean(self, columns: range) -> ProductGrid:
        """The grid in which ``columns``, which have a separate direction, stay at their means."""
        (gone,) = {self.directions[column] for column in columns}
        left = sorted(set(self.directions) - {-1, gone})
        renamed = {old: new for new, old in enumerate(left)} | {gone: -1, -1: -1}
        return ProductGrid(tuple(renamed[d] for d in self.directions), self.shared, self.nodes_each)

    def nodes(self, loc: Array, variance: Array) -> Nodes:
        """Points (K, ..., C) and log weights (K,) for Gaussians of C columns."""
        loc, variance = jnp.broadcast_arrays(loc, variance)
        white = white_nodes(GaussHermite(self.each), self.count, loc.dtype)
        # Direction -1 is the last column of the padded points, which is zero.
        columns = jnp.pad(white.points, ((0, 0), (0, 1)))[:, jnp.array(self.directions)]
        shape = (len(columns), *(1,) * (loc.ndim - 1), len(self.directions))
        return Nodes(loc + safe_sqrt(variance) * columns.reshape(shape), white.log_weights)

    def log_mean_exp(
        self, nodes: Nodes, log_values: Array, event_dim: int, observed: Callable[[Array], Array]
    ) -> Array:
        r"""As of any rule:

        .. math:: \log E_s \prod_p E_{v_p}[e^{\ell_p(s, v_p)}],

        with the shared directions s outside, and all other ones inside the product.
        """
        log_values = observed(log_values)
        outer = round(len(nodes.log_weights) ** (self.shared / self.count))
        weights = nodes.log_weights.reshape(outer, -1)
        of_outer = logsumexp(weights, 1)  # log weights of s
        # Log weights of v_p given s.
        own = (weights - of_outer[:, None]).reshape(outer, -1, *(1,) * (log_values.ndim - 1))
        # log E_{v_p}[exp l_p(s, v_p)], for each s
        inner = logsumexp(log_values.reshape(outer, -1, *log_values.shape[1:]) + own, 1)
        total = sum_event(inner, event_dim)  # the product over p
        return logsumexp(total + of_outer.reshape(-1, *(1,) * (total.ndim - 1)), 0)


def sobol_points(count: int, first: int, dims: int) -> np.ndarray:
    """Columns ``first`` to ``first + dims`` of the first points of Sobol's sequence, (count, dims).

    Args:
        count: how many, a power of two.
        first: number of the first column.
        dims: how many columns.
    """
    from scipy.stats.qmc import Sobol  # imported here, since it takes a quarter of a second

    return Sobol(first + dims, scramble=False).random_base2(count.bit_length() - 1)[:, first:]


def shifted_normals(points: Array, shift: Array) -> Array:
    """Standard normal numbers from points of the unit cube and shifts that broadcast against them, without ends."""
    # Φ^-1 is infinite at 0 and 1.
    tiny = jnp.finfo(shift.dtype).eps / 4
    return ndtri(jnp.clip((points + shift) % 1, tiny, 1 - 2 * tiny))
