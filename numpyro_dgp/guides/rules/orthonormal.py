"""Initial values of matrices of low rank."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import matmul

__all__ = ["orthonormal"]


def orthonormal(rows: int, columns: int, dtype: Any) -> Array:
    """A matrix whose rows (or columns, if there are fewer of those) are orthonormal: all directions can be learned."""
    draw = jax.random.normal(jax.random.key(0), (rows, columns), dtype)
    left, _, right = jnp.linalg.svd(draw, full_matrices=False)
    return matmul(left, right)
