"""Shapes of hyperparameters against the columns of the inputs."""

from __future__ import annotations

import operator
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._checks import expect
from numpyro_dgp._typing import Number

__all__ = ["by_column", "column_number"]


def by_column(kernel: Any, name: str, columns: int) -> Number:
    """The hyperparameter ``name`` where it meets inputs with D columns: a number, or an array (1,) or (D,).

    Any other shape would broadcast along rows, or make columns.

    Args:
        kernel: the kernel.
        name: of one of its fields.
        columns: D.

    Raises:
        ValueError: another shape.

    Example:
        >>> from numpyro_dgp.kernels import RBF
        >>> by_column(RBF(lengthscale=0.5), "lengthscale", columns=3)
        0.5
    """
    value = getattr(kernel, name)
    expect(
        jnp.shape(value) in ((), (1,), (columns,)),
        f"{name} of shape () or ({columns},)",
        jnp.shape(value),
        "one number, or one per input column",
        type(kernel).__name__,
    )
    return value


def column_number(value: Any) -> int | None:
    """A column index, counted from 0, as a Python integer; ``None`` if ``value`` is not one.

    Example:
        >>> import numpy as np
        >>> column_number(np.int64(2)), column_number(True), column_number(-1)
        (2, None, None)
    """
    try:
        found = operator.index(value)
    except TypeError:
        return None
    return None if isinstance(value, bool) or found < 0 else found
