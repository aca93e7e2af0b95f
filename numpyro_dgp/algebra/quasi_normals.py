r"""Points of Sobol's sequence, and the standard normal numbers that they give when they are shifted.

.. math:: z = \Phi^{-1}\bigl((t + u) \bmod 1\bigr), \qquad u \sim \mathrm{Uniform}[0, 1]^d

Each number is standard normal over the shifts u, while all points t of one shift cover the unit cube evenly.

Source: Cranley and Patterson (1976).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from numpyro_dgp._typing import Array

__all__ = ["shifted_normals", "sobol_points"]


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
    tiny = jnp.finfo(shift.dtype).eps / 4
    return ndtri(jnp.clip((points + shift) % 1, tiny, 1 - 2 * tiny))
