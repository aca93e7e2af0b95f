"""Checks of what kernels are made with: one number, one for each column of the inputs, or the number of a column."""

from __future__ import annotations

import operator
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._checks import expect, require_positive, require_scalar
from numpyro_dgp._data import as_numbers, own
from numpyro_dgp._typing import Number

__all__ = ["by_column", "column_number", "lists_as_arrays", "require_number", "require_positive_array"]


def lists_as_arrays(kernel: Any, *names: str) -> None:
    """Hyperparameters of a kernel that is being made, of which lists of numbers become arrays. Arrays of NumPy are
    copied: their owner may change them.

    Raises:
        ValueError: lists of something else, or of unequal lengths.
    """
    for name in names:
        if isinstance(value := getattr(kernel, name), list | tuple):
            found = jnp.asarray(as_numbers(f"{name} of {type(kernel).__name__}", value))
            object.__setattr__(kernel, name, found)
        else:
            object.__setattr__(kernel, name, own(value))


def require_number(kernel: Any, name: str) -> None:
    """Raise unless the hyperparameter ``name`` is a single positive number."""
    require_scalar(name, getattr(kernel, name))
    require_positive(name, getattr(kernel, name))


def require_positive_array(kernel: Any, name: str) -> None:
    """Raise unless all numbers of the hyperparameter ``name`` are positive; of a list it becomes an array.

    How many there must be is known where the kernel meets its inputs: :func:`by_column`.
    """
    lists_as_arrays(kernel, name)
    require_positive(name, getattr(kernel, name))


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
        "one number, or one per column of its inputs; kernel.on(*columns) picks columns",
    )
    return value


def column_number(value: Any) -> int | None:
    """The number of a column, counted from 0, as an integer of Python; ``None`` of what is none.

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
