"""Expectations under Gaussians, by nodes and weights.

A rule turns independent Gaussians N(loc, variance) into K points and log weights; every expectation
of the package is a weighted sum of a function at those points.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from scipy.special import roots_hermite

from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.algebra.linalg import safe_sqrt, tensordot

__all__ = ["GaussHermite", "MonteCarlo", "Nodes", "Rule", "white_nodes"]


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


class Rule(Protocol):
    """What integrates a function of independent Gaussians."""

    def nodes(self, loc: Array, variance: Array) -> Nodes:
        """Points of shape (K, *loc.shape) and log weights (K,)."""
        ...


@lru_cache
def _hermite(size: int) -> tuple[np.ndarray, np.ndarray]:
    points, weights = roots_hermite(size)
    kept = weights > 1e-30  # other nodes change no digit of a result, and log densities underflow there
    points, weights = points[kept], weights[kept]
    return math.sqrt(2) * points, np.log(weights) - 0.5 * math.log(math.pi)


@pytree
class GaussHermite:
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
        >>> from numpyro_dgp import GaussHermite
        >>> nodes = GaussHermite(3).nodes(jnp.array(1.0), jnp.array(4.0))
        >>> print(nodes.mean(nodes.points**2).round(3))  # 1 + 4
        5.0
    """

    size: int = static(default=20)

    def __post_init__(self) -> None:
        _require_count("GaussHermite", "size", self.size)

    def nodes(self, loc: Array, variance: Array) -> Nodes:
        loc, variance = jnp.broadcast_arrays(loc, variance)
        points, log_weights = (jnp.asarray(a, loc.dtype) for a in _hermite(self.size))
        shape = (-1,) + (1,) * loc.ndim
        return Nodes(loc + safe_sqrt(variance) * points.reshape(shape), log_weights)


@pytree
class MonteCarlo:
    """Independent draws, for functions that mix outputs; their mean is an unbiased estimate of the expectation.

    Args:
        size: number of draws.
        key: a PRNG key; ``dgp.Likelihood`` takes one from the program when this is ``None``.

    Raises:
        ValueError: size is not a positive integer.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp import MonteCarlo
        >>> nodes = MonteCarlo(100_000, jax.random.key(0)).nodes(jnp.zeros(2), jnp.array([1.0, 3.0]))
        >>> nodes.points.shape, bool(abs(nodes.mean(nodes.points.sum(-1) ** 2) - 4) < 0.1)  # 1 + 3
        ((100000, 2), True)
    """

    size: int = static(default=20)
    key: Array | None = None

    def __post_init__(self) -> None:
        _require_count("MonteCarlo", "size", self.size)

    def nodes(self, loc: Array, variance: Array) -> Nodes:
        loc, variance = jnp.broadcast_arrays(loc, variance)
        key = jax.random.key(0) if self.key is None else self.key
        noise = jax.random.normal(key, (self.size, *loc.shape), loc.dtype)
        log_weights = jnp.full((self.size,), -math.log(self.size), loc.dtype)
        return Nodes(loc + safe_sqrt(variance) * noise, log_weights)


# Larger grids of nodes are refused.
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
    if isinstance(rule, MonteCarlo):
        if rule.key is None:
            raise ValueError("expected MonteCarlo(n, key) with a key, got none: pass integrate=MonteCarlo(n, key)")
        return rule.nodes(jnp.zeros(dims, dtype), jnp.ones(dims, dtype))
    if rule.size**dims > _MOST_NODES:
        raise ValueError(
            f"expected at most {_MOST_NODES} nodes, got {rule.size}^{dims} for {dims} input columns: use fewer nodes, "
            "or integrate=dgp.MonteCarlo(1000, key)"
        )
    nodes = rule.nodes(jnp.zeros((), dtype), jnp.ones((), dtype))
    points, log_weights = (jnp.stack([g.ravel() for g in jnp.meshgrid(*[a] * dims, indexing="ij")], -1) for a in nodes)
    return Nodes(points, log_weights.sum(-1))


def _require_count(owner: str, name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"expected {owner}({name}=...) to be a positive integer, got {value!r}: 20 is the default")
