"""Where matrices of low rank start."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array

__all__ = ["orthonormal"]


def orthonormal(rows: int, columns: int, dtype: Any) -> Array:
    """Rows that are orthonormal as far as they can be: no direction of the first step is lost."""
    draw = jax.random.normal(jax.random.key(0), (rows, columns), dtype)
    left, _, right = jnp.linalg.svd(draw, full_matrices=False)
    return left @ right
