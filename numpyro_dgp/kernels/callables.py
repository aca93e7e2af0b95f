"""Functions ``k(X1, X2)`` that users write, called and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from numpyro_dgp._typing import Array

__all__ = ["matrix", "variances"]


def matrix(function: Callable[[Array, Array], Any], X1: Array, X2: Array) -> Any:
    """``function(X1, X2)``, the Gram matrix (..., N1, N2) of inputs (..., N1, D) and (..., N2, D).

    Raises:
        ValueError: it is no such matrix.
    """
    found, expected = function(X1, X2), (X1.shape[-2], X2.shape[-2])
    if np.shape(found)[-2:] != expected:
        raise ValueError(
            f"kernel: expected a function from inputs {X1.shape} and {X2.shape} to a matrix {expected}, got shape "
            f"{np.shape(found)}: write it for arrays of inputs and not for two points; of a function k(x, y) of two "
            "points it is jax.vmap(lambda x: jax.vmap(lambda y: k(x, y))(X2))(X1)"
        )
    return found


def variances(function: Any, X: Array) -> Any:
    """k(x, x) at inputs (..., N, D): ``function.diag`` where there is one, otherwise row by row."""
    if hasattr(function, "diag"):
        return function.diag(X)
    rows = X.reshape(-1, X.shape[-1])
    return jax.vmap(lambda x: matrix(function, x[None], x[None])[0, 0])(rows).reshape(X.shape[:-1])
