"""Checks of inputs and process noise of a random function, and its mean function."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import (
    expect,
    expected,
    is_concrete,
    require_finite,
    require_inputs,
    require_positive,
    require_squares,
)
from numpyro_dgp._data import as_floats, as_numbers
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.means import ConstantMean, Mean, ZeroMean

__all__ = ["checked_inputs", "mean_values", "noise_covariance", "noise_variance", "require_noise"]

_DATA_HINT = "drop, impute or mask the rows with missing values before building the model"


def checked_inputs(x: ArrayLike, dims: int | None, noise: ArrayLike | None) -> Array:
    """``x`` as an array, checked, with its noise."""
    x = as_numbers("inputs of f(x)", x)
    require_inputs(x, dims)
    expect(0 not in np.shape(x), "at least one row and column", f"shape {np.shape(x)}", "X is empty", at="f(x)")
    if is_concrete(x):  # of traced ones the loss is NaN, and a compiled check would need all hidden layers
        require_finite("inputs of f(x)", x, _DATA_HINT)
        require_squares("inputs of f(x)", x)
    if noise is not None:
        require_positive("noise", noise)
    return as_floats("inputs of f(x)", x)


def require_noise(noise: ArrayLike | None, outputs: int | None, batch: tuple[int, ...] = ()) -> None:
    """Raise unless process noise is a number, one per output or, for values that are not joint, one per row.

    Args:
        noise: standard deviation.
        outputs: P, or ``None``.
        batch: shape of the rows that may have their own noise.

    Raises:
        ValueError: another shape.
    """
    shape = batch + (() if outputs is None else (outputs,))
    given = () if noise is None else np.shape(noise)
    if given == (1,) and not shape:  # one output
        return
    if len(given) > len(shape) or any(a not in (1, b) for a, b in zip(given[::-1], shape[::-1], strict=False)):
        raise expected(
            f"noise to be a number{('' if outputs is None else f' or one per output, ({outputs},)')}",
            f"shape {given}",
            "for noise that differs between rows add it at the observations",
            at="f(x)",
        )


def noise_variance(noise: ArrayLike | None, dtype: jnp.dtype) -> Array:
    """Process noise as a variance."""
    return jnp.square(jnp.asarray(0.0 if noise is None else noise, dtype))


def noise_covariance(noise: ArrayLike | None, size: int, dtype: jnp.dtype) -> Array:
    """Process noise as a diagonal matrix (..., N, N)."""
    return noise_variance(noise, dtype)[..., None, None] * jnp.eye(size, dtype=dtype)


def mean_values(mean: Mean, x: Array, outputs: int | None) -> Array:
    """m(x) of shape (..., P), or (...,) for a scalar function."""
    values = mean(x)
    if values is not None and np.ndim(values) == 0:  # one number for all rows
        values = jnp.broadcast_to(jnp.asarray(values, x.dtype), (*x.shape[:-1], outputs or 1))
    expect(
        np.ndim(values) == x.ndim,
        "a mean function from inputs (..., D) to values (..., P)",
        f"{np.shape(values)} for inputs {x.shape}",
        "one output is a column, lambda x: x[..., :1] or (...)[..., None]",
    )
    # A number is meant for all outputs; a column of values is one output.
    if values.shape[-1] != (outputs or 1) and not (values.shape[-1] == 1 and isinstance(mean, ConstantMean | ZeroMean)):
        raise expected(
            f"a mean function with {outputs or 1} output(s)",
            f"one with {values.shape[-1]}",
            f"use dgp.means.pca(X, outputs), or repeat the column, lambda x: jnp.repeat(m(x), {outputs or 1}, -1)",
        )
    return values[..., 0] if outputs is None else values
