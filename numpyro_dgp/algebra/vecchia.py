r"""Gaussian values that are conditioned on a few others each: weights, variances, and sums over the values.

With :math:`u_i \mid u_{c(i)} \sim N(b_i^\top u_{c(i)},\, d_i)` for every i, the matrix B of the weights is strictly
triangular in the order of the values, and

.. math:: u = (I - B)^{-1} D^{1/2} v, \qquad v \sim N(0, I), \qquad \log p(u) = \log N(v; 0, I) - \tfrac12 \log\det D .

Arrays here have the values first: u (N, ...), weights (N, C, ...).

Source: Vecchia (1988); Katzfuss and Guinness (2021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.conditioning_sets import ConditioningSets
from numpyro_dgp.algebra.linalg import matmul, solve_lower
from numpyro_dgp.algebra.tuning import tuned

__all__ = [
    "conditional",
    "each_conditional",
    "from_neighbours",
    "in_order",
    "onto_neighbours",
    "values_first",
    "values_last",
]


def conditional(
    within: Array, diagonal: Array, cross: Array, prior: Array, nugget: Array, present: Array
) -> tuple[Array, Array]:
    r"""Weights and variance of one value given its neighbours, of noise of variance ``nugget`` on all of them.

    .. math:: b = (K_{cc} + \epsilon I)^{-1} k_c, \qquad d = k - k_c^\top b + \epsilon

    Args:
        within: :math:`K_{cc}` (..., C, C), of which the diagonal does not count.
        diagonal: its diagonal (..., C).
        cross: :math:`k_c` (..., C).
        prior: k, the variance of the value (...).
        nugget: :math:`\epsilon` (...).
        present: which of the C neighbours there are (C,); the weights of the others are zero.

    Returns:
        b (..., C) and d (...).
    """
    alone = jnp.eye(len(present), dtype=bool)
    own = jnp.where(present, diagonal + nugget[..., None], 1.0)
    K = jnp.where(alone, own[..., None], jnp.where(present & present[:, None], within, 0.0))
    k = jnp.where(present, cross, 0.0)
    b = solve_positive(K, k)
    return b, jnp.maximum(prior - (k * b).sum(-1), 0.0) + nugget


@jax.custom_jvp
def solve_positive(K: Array, k: Array) -> Array:
    """``K^{-1} k`` for positive definite matrices (..., C, C) and vectors (..., C)."""
    return _solve(jnp.linalg.cholesky(K), k)


@solve_positive.defjvp
def _solve_positive_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # K db = dk - dK b, with the same factor; the derivative of the factorisation would cost several solves of matrices.
    (K, k), (dK, dk) = primals, tangents
    L = jnp.linalg.cholesky(K)
    b = _solve(L, k)
    return b, _solve(L, dk - matmul(dK, b[..., None])[..., 0])


def _solve(L: Array, k: Array) -> Array:
    return solve_lower(L, solve_lower(L, k[..., None]), transpose=True)[..., 0]


def each_conditional(function: Callable[..., Any], size: int, *rows: Any) -> Any:
    """``jax.vmap(function)(*rows)``, in small blocks where that would need much memory; these are computed again for
    derivatives.

    Args:
        function: of one row of each of ``rows``.
        size: how many numbers it has in memory for one row.
        *rows: arrays (N, ...).
    """
    block = max(1, tuned().cells // (8 * size))
    if len(rows[0]) <= 64 * block:
        return jax.vmap(function)(*rows)
    return jax.lax.map(jax.checkpoint(lambda row: function(*row)), rows, batch_size=block)


def values_first(a: Array) -> Array:
    """From (..., N) to (N, ...)."""
    return jnp.moveaxis(a, -1, 0)


def values_last(a: Array) -> Array:
    """From (N, ...) to (..., N)."""
    return jnp.moveaxis(a, 0, -1)


def from_neighbours(sets: ConditioningSets, weights: Array, u: Array) -> Array:
    """B u, the sums of each value's neighbours with its weights: (N, ...)."""
    return (weights * u[sets.neighbours]).sum(1)


def onto_neighbours(sets: ConditioningSets, weights: Array, u: Array) -> Array:
    """B' u, each value added to its neighbours with its weights: (N, ...)."""
    return jnp.zeros_like(u).at[sets.neighbours].add(weights * u[:, None])


def in_order(sets: ConditioningSets, weights: Array, target: Array) -> Array:
    r""":math:`(I - B)^{-1}` times numbers (N, ...), one step of the schedule after the other."""
    N, steps = len(target), jnp.asarray(sets.steps)
    neighbours = jnp.asarray(sets.neighbours)

    def parts(rows: Array, b: Array) -> tuple[Array, Array]:
        return neighbours.at[rows].get(mode="clip"), b.at[rows].get(mode="clip")

    def forward(y: Array) -> Array:
        def step(u: Array, rows: Array) -> tuple[Array, None]:
            others, b = parts(rows, held)
            new = y.at[rows].get(mode="clip") + (b * u[others]).sum(1)
            return u.at[rows].set(new, mode="drop"), None

        return jax.lax.scan(step, jnp.zeros_like(y), steps)[0]

    def backward(y: Array) -> Array:
        def step(u: Array, rows: Array) -> tuple[Array, None]:
            others, b = parts(rows, held)
            new = jnp.where((rows < N).reshape(-1, *(1,) * (u.ndim - 1)), u.at[rows].get(mode="clip"), 0.0)
            return u.at[others].add(b * new[:, None]), None

        return jax.lax.scan(step, y, steps, reverse=True)[0]

    held = jax.lax.stop_gradient(weights)
    return jax.lax.custom_linear_solve(
        lambda u: u - from_neighbours(sets, weights, u),
        target,
        lambda _, y: forward(y),
        lambda _, y: backward(y),
    )
