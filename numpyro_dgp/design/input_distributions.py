"""Distributions of the inputs of a simulator: independent columns, and points that cover them evenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_dgp._checks import require_count, require_finite
from numpyro_dgp._data import known_numbers
from numpyro_dgp._typing import Array, ArrayLike

__all__ = ["Inputs", "InputColumns", "input_columns", "unit_points"]

Inputs: TypeAlias = ArrayLike | Sequence[Any] | Mapping[str, Any]

# A distribution without ends is shown between these quantiles.
_ENDS = 0.005, 0.995


class InputColumns(NamedTuple):
    """Independent columns of inputs.

    Args:
        names: of the columns, D of them.
        columns: a box (low, high) or a distribution for each.
    """

    names: tuple[str, ...]
    columns: tuple[Any, ...]

    def at(self, levels: np.ndarray) -> np.ndarray:
        """Quantiles of the columns at ``levels`` (..., D) between 0 and 1."""
        pairs = zip(self.columns, np.moveaxis(levels, -1, 0), strict=True)
        return np.stack([_quantile(column, level) for column, level in pairs], -1)

    def lines(self, num: int) -> np.ndarray:
        """``num`` values of each column, evenly spaced: end to end of a box, or between outer quantiles (D, num)."""
        ends = [c if isinstance(c, tuple) else _quantile(c, np.array(_ENDS)) for c in self.columns]
        return np.stack([np.linspace(low, high, num) for low, high in ends])


def input_columns(owner: str, inputs: Inputs) -> InputColumns:
    """Names and distributions of columns.

    Args:
        owner: who asks, for messages.
        inputs: per column a pair (low, high) or a distribution of single numbers: as an array (D, 2), as a list, or by
            name.

    Raises:
        ValueError: what is neither, boxes without width, distributions of several numbers or without ``icdf``.
    """
    if isinstance(inputs, Mapping):
        names, given = tuple(map(str, inputs)), list(inputs.values())
    elif isinstance(inputs, Sequence) and not isinstance(inputs, str):
        names, given = (), list(inputs)
    else:
        found = known_numbers(f"inputs of {owner}", inputs)
        names, given = (), list(found) if found.ndim else []
    if not given:
        raise ValueError(
            f"{owner}: expected inputs with a pair (low, high) or a distribution for every column, got none: "
            '[(0.0, 1.0), dist.Normal(2.0, 0.5)], or by name, {"speed, m/s": (0.0, 1.0)}'
        )
    names = names or tuple(f"x{d}" for d in range(len(given)))
    return InputColumns(names, tuple(_column(owner, name, c) for name, c in zip(names, given, strict=True)))


def unit_points(owner: str, key: Array, num_randomisations: int, num_points: int, dims: int) -> np.ndarray:
    """Scrambled Sobol points in the open unit cube, independently for every randomisation: (R, n, dims).

    Args:
        owner: who asks, for messages.
        key: PRNG key.
        num_randomisations: R, at least two.
        num_points: n, a power of two.
        dims: of the cube.

    Raises:
        ValueError: other numbers.
    """
    from scipy.stats.qmc import Sobol  # imported here, since it takes a quarter of a second

    for name, value in (("num_randomisations", num_randomisations), ("num_points", num_points)):
        require_count(owner, name, value, "256, a power of two" if name == "num_points" else "8")
    if num_randomisations < 2:
        raise ValueError(
            f"{owner}: expected at least two randomisations, got {num_randomisations}: the error of the integration is "
            "estimated from their spread, 8 is usual"
        )
    if num_points < 2 or num_points & (num_points - 1):
        raise ValueError(
            f"{owner}: expected num_points to be a power of two, at least 2, got {num_points}: at 64, 128, 256, ... "
            "Sobol's points cover the unit cube evenly"
        )
    seeds = np.asarray(jax.random.bits(key, (num_randomisations,), jnp.uint32))
    points = [Sobol(dims, seed=int(seed)).random_base2(int(num_points).bit_length() - 1) for seed in seeds]
    edge = float(jnp.finfo(jnp.result_type(float)).eps) / 2
    return np.clip(np.stack(points), edge, 1 - edge)


def _column(owner: str, name: str, column: Any) -> Any:
    if not isinstance(column, dist.Distribution):
        ends = known_numbers(f"inputs of {owner}, column {name!r}", column).astype(float)
        if ends.shape != (2,):
            raise ValueError(
                f"{owner}: expected a pair (low, high) or a distribution for column {name!r}, got shape {ends.shape}: "
                "inputs have one entry per column of X, as an array of shape (D, 2)"
            )
        require_finite(
            f"ends of {name!r} in {owner}", ends, "a column without ends needs a distribution, dist.Normal()"
        )
        if not ends[0] < ends[1]:
            raise ValueError(
                f"{owner}: expected low < high for column {name!r}, got {ends[0]:.6g} and {ends[1]:.6g}: leave out a "
                "column that does not vary, lambda X: f(insert it again)"
            )
        return float(ends[0]), float(ends[1])
    if column.batch_shape + column.event_shape or column.is_discrete:
        shape = f"of shape {column.batch_shape + column.event_shape}"
        raise ValueError(
            f"{owner}: expected a continuous distribution of single numbers for column {name!r}, got "
            f"{type(column).__name__}, {'discrete' if column.is_discrete else shape}: give every column its own; for "
            "whole numbers a box half a unit wider, and an emulator that rounds: lambda X: draws(jnp.round(X))"
        )
    try:
        _quantile(column, np.array(0.5))
    except (NotImplementedError, ImportError) as error:
        raise ValueError(
            f"{owner}: expected a distribution with quantiles for column {name!r}, got {type(column).__name__}, whose "
            f"icdf is missing ({str(error) or type(error).__name__}): take a box, or a distribution that has it, such "
            "as Normal, LogNormal, TruncatedNormal"
        ) from error
    return column


def _quantile(column: Any, levels: np.ndarray) -> np.ndarray:
    if isinstance(column, tuple):
        return column[0] + (column[1] - column[0]) * levels
    return np.asarray(column.icdf(jnp.asarray(levels)), float)
