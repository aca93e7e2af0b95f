"""The input space of designs and searches: bounds, integer columns and label columns."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, is_concrete, require_finite, require_key
from numpyro_dgp._data import known_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike

__all__ = ["Box", "as_box", "generator"]


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Inputs between bounds, some columns of which may hold whole numbers or labels of categories.

    Wherever ``dgp.design`` takes ``bounds``, an array (D, 2) is a box without such columns.

    Args:
        bounds: the lowest and the highest value of every column (D, 2), in the units of the program's inputs.
        integers: columns, counted from 0, of whole numbers in order, both bounds included.
        categories: columns of labels without order: the whole numbers from one bound to the other, as
            ``dgp.kernels.Categorical`` takes them.

    Raises:
        ValueError: bounds that are not (D, 2), not finite, or low >= high; columns that are not there or named twice;
            bounds of such columns that are not whole.

    Example:
        >>> import numpy as np
        >>> import numpyro_dgp as dgp
        >>> box = dgp.design.Box([[0.0, 1.0], [1, 5], [0, 2]], integers=[1], categories=[2])
        >>> print(box.snapped(np.array([[0.3, 2.6, 0.9]])))
        [[0.3 3.  1. ]]
    """

    bounds: ArrayLike
    integers: Sequence[int] = ()
    categories: Sequence[int] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        bounds = np.array(known_numbers("bounds", self.bounds), float)  # not the caller's, to change
        object.__setattr__(self, "bounds", bounds)
        expect(
            bounds.ndim == 2 and bounds.shape[1] == 2 and len(bounds),
            "bounds of shape (D, 2), one row of lowest and highest value per input column",
            f"shape {bounds.shape}",
            "np.array([[0.0, 1.0]] * D) is the unit cube",
        )
        require_finite("bounds", bounds, "inputs are searched between finite bounds")
        for d, (low, high) in enumerate(bounds):
            if not low < high:
                raise expected(
                    "low < high in every row of bounds",
                    f"{low:g} and {high:g} for column {d}",
                    "leave out a constant column",
                )
        object.__setattr__(self, "integers", _columns("integers", self.integers, len(bounds)))
        object.__setattr__(self, "categories", _columns("categories", self.categories, len(bounds)))
        if both := sorted({*self.integers} & {*self.categories}):
            raise expected(
                "integers and categories of different columns",
                f"column {both[0]} in both",
                "numbers in order are integers, labels are categories",
            )
        for d in self.whole:
            if (bounds[d] != bounds[d].round()).any():
                raise expected(
                    "whole bounds of integers or labels",
                    f"{bounds[d]} for column {d}",
                    "[0, 2] has the values 0, 1 and 2",
                )

    @property
    def dims(self) -> int:
        """The number of columns, D."""
        return len(self.low)

    @property
    def low(self) -> np.ndarray:
        """The lowest values (D,)."""
        return np.asarray(self.bounds)[:, 0]

    @property
    def high(self) -> np.ndarray:
        """The highest values (D,)."""
        return np.asarray(self.bounds)[:, 1]

    @property
    def whole(self) -> list[int]:
        """Columns of whole numbers and of labels."""
        return sorted([*self.integers, *self.categories])

    @property
    def num_combinations(self) -> int:
        """C, the number of combinations of labels; one where there are no labels."""
        return math.prod(int(self.high[d] - self.low[d]) + 1 for d in self.categories)

    def combinations(self) -> np.ndarray:
        """All combinations of labels (C, number of ``categories``)."""
        values = [np.arange(self.low[d], self.high[d] + 1) for d in self.categories]
        return np.array(list(itertools.product(*values)), float)

    def from_unit(self, u: np.ndarray) -> np.ndarray:
        """Points of the unit cube (..., D) in the box; every whole number gets the same share of the unit interval."""
        found = self.low + u * (self.high - self.low)
        for d in self.whole:
            found[..., d] = np.minimum(
                self.low[d] + np.floor(u[..., d] * (self.high[d] - self.low[d] + 1)), self.high[d]
            )
        return np.clip(found, self.low, self.high)

    def snapped(self, X: ArrayLike) -> np.ndarray:
        """The nearest points of the box (..., D), with whole numbers in their columns."""
        found = np.array(X, float)
        found[..., self.whole] = found[..., self.whole].round()
        return np.clip(found, self.low, self.high)

    def places(self, X: ArrayLike) -> np.ndarray:
        """Coordinates in which distances count: columns in units of their range, two different labels one apart."""
        numbers = [d for d in range(self.dims) if d not in self.categories]
        X = np.asarray(X, float)
        found = [(X[..., numbers] - self.low[numbers]) / (self.high[numbers] - self.low[numbers])]
        for d in self.categories:
            labels = np.arange(self.low[d], self.high[d] + 1)
            found.append(np.sqrt(0.5) * (X[..., d, None].round() == labels))  # |e_a - e_b|^2 / 2 = 1 for a != b
        return np.concatenate(found, -1)

    def require_points(self, name: str, X: Any) -> np.ndarray:
        """Points (N, D) as an array, checked to be in the box."""
        found = np.asarray(known_numbers(name, X), float)
        expect(
            found.ndim == 2 and found.shape[1] == self.dims,
            f"{name} of shape (N, {self.dims}), one column per row of bounds",
            found.shape,
            "a single point is x[None, :]",
        )
        require_finite(name, found, "leave out points that are not known")
        slack = 1e-6 * (self.high - self.low)  # of points that were rounded to single precision
        outside = np.argwhere((found < self.low - slack) | (found > self.high + slack))
        if len(outside):
            n, d = outside[0]
            raise expected(
                f"{name} within bounds",
                f"{found[n, d]:g} in row {n}, column {d}, outside [{self.low[d]:g}, {self.high[d]:g}]",
                "widen the bounds or leave out the point",
            )
        if len(wrong := np.argwhere(found[:, self.whole] != found[:, self.whole].round())):
            n, d = wrong[0][0], self.whole[wrong[0][1]]
            raise expected(
                f"whole numbers in column {d} of {name}", f"{found[n, d]:g} in row {n}", "Box.snapped(X) rounds them"
            )
        return np.clip(found, self.low, self.high)

    def require_resolved(self) -> None:
        """Raise unless the precision of JAX has at least a thousand different values between the bounds of a column."""
        # between neighbouring numbers
        step = float(jnp.finfo(jnp.result_type(float)).eps) * np.maximum(abs(self.low), abs(self.high))
        least = np.where(np.isin(np.arange(self.dims), self.whole), 1.0, (self.high - self.low) / 1000)
        if len(wrong := np.flatnonzero(step > least)):
            d = wrong[0]
            raise expected(
                f"bounds between which {jnp.result_type(float)} tells values apart",
                f"{self.low[d]:.12g} to {self.high[d]:.12g} for column {d}, where it has steps of {step[d]:.2g}",
                'subtract the lower bound and add it in the simulator, or jax.config.update("jax_enable_x64", True)',
            )

    def facts(self) -> dict[str, Any]:
        """What the box is, in plain lists and numbers."""
        return {"bounds": np.asarray(self.bounds).tolist(), "integers": [*self.integers],
                "categories": [*self.categories]}  # fmt: skip


def as_box(bounds: Any) -> Box:
    """``bounds`` as a :class:`Box`, checked."""
    return bounds if isinstance(bounds, Box) else Box(bounds)


def generator(key: Array) -> np.random.Generator:
    """A generator of NumPy, seeded by a PRNG key."""
    require_key(key)
    expect(is_concrete(key), "a known key", "a traced one", "call it outside jit")
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return np.random.default_rng(np.asarray(data).ravel())


def _columns(name: str, columns: Any, dims: int) -> list[int]:
    given = list(columns) if np.iterable(columns) else [columns]
    whole = all(isinstance(d, int | np.integer) and not isinstance(d, bool) and 0 <= d < dims for d in given)
    expect(
        whole and len(set(given)) >= len(given),
        f"{name} to be different numbers of columns, counted from 0 to {dims - 1}",
        repr(columns),
        f"{name}=[0] is the first",
    )
    return sorted(map(int, given))
