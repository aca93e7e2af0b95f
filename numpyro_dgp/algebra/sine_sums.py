r"""Weighted sums of sines of the multiples of an angle, without a sine for each of them.

With :math:`j = a + I c`, a from 1 to I, and :math:`\theta = \pi t`

.. math:: \sum_j w_j \sin(j \theta) = \sum_c \Bigl[\sum_a w_{a + I c} \sin(a \theta)\Bigr] \cos(I c\, \theta)
          + \Bigl[\sum_a w_{a + I c} \cos(a \theta)\Bigr] \sin(I c\, \theta) ,

which takes 2 I + 2 M / I sines and cosines in place of M sines, and holds as many numbers for the derivative.
"""

from __future__ import annotations

import math
from functools import reduce

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.belief_moments import ROWS
from numpyro_dgp.algebra.linalg import matmul, products_in_rows

__all__ = ["sines", "sums_of_sines", "sums_of_sines_reference"]


def sines(turns: Array, sizes: tuple[int, ...]) -> Array:
    """Products of :math:`\\sin(\\pi j t)` for j = 1, 2, ... over the columns of ``turns`` (N, D): (N, M)."""
    multiples = [jnp.asarray(math.pi * np.arange(1, m + 1), turns.dtype) for m in sizes]
    return reduce(products_in_rows, [jnp.sin(turns[..., d, None] * by) for d, by in enumerate(multiples)])


def sums_of_sines_reference(turns: Array, sizes: tuple[int, ...], weights: Array) -> Array:
    """``sines(turns, sizes) @ weights.T``."""
    return matmul(checkpoint_name(sines(turns, sizes), ROWS), weights.T)


def sums_of_sines(turns: Array, sizes: tuple[int, ...], weights: Array) -> Array:
    """Values of :func:`sums_of_sines_reference`: in several columns the sums are taken over one after the other.

    Args:
        turns: angles as multiples of pi (N, D).
        sizes: how many sines there are in each column, M together.
        weights: their weights (P, M).

    Returns:
        The sums (N, P).

    Example:
        >>> import jax.numpy as jnp
        >>> print(sums_of_sines(jnp.array([[0.5], [0.25]]), (3,), jnp.array([[2.0, 5.0, 1.0]])).round())
        [[1.]
         [7.]]
    """
    N, P = len(turns), len(weights)
    if len(sizes) > 1 and sizes[0] <= P:  # sums over the first column would be more numbers than there are products
        return sums_of_sines_reference(turns, sizes, weights)
    rest = weights.reshape(P, sizes[0], -1).swapaxes(1, 2).reshape(-1, sizes[0])
    found = _in_one_column(turns[:, 0], rest)
    for d, size in enumerate(sizes[1:], 1):
        by = sines(turns[:, d : d + 1], (size,))
        found = (found.reshape(N, P, size, -1) * by[:, None, :, None]).sum(2)
    return found.reshape(N, P)


def _in_one_column(turns: Array, weights: Array) -> Array:
    """Sums for angles (N,) and weights (P, M)."""
    P, M = weights.shape
    short = math.ceil(math.sqrt(M * (1 + P / 4)))  # with many sums, what follows the sines costs as much as they do
    groups = -(-M // short)
    if 2 * (short + groups) + 0.75 * P * groups >= M:  # sines and cosines, and products with the second ones
        return sums_of_sines_reference(turns[:, None], (M,), weights)
    filled = jnp.pad(weights, [(0, 0), (0, short * groups - M)]).reshape(P * groups, short)
    inner = turns[:, None] * jnp.asarray(math.pi * np.arange(1, short + 1), turns.dtype)
    outer = turns[:, None] * jnp.asarray(math.pi * short * np.arange(groups), turns.dtype)
    waves = [checkpoint_name(f(angles), ROWS) for angles in (inner, outer) for f in (jnp.sin, jnp.cos)]
    sine, cosine = (matmul(a, filled.T).reshape(len(turns), P, groups) for a in waves[:2])
    return (sine * waves[3][:, None] + cosine * waves[2][:, None]).sum(-1)
