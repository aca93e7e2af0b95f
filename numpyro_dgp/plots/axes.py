"""Helpers of the figures: axes, and a mean with its band."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numpyro_dgp._checks import expect, expected, require_finite
from numpyro_dgp._data import known_numbers
from numpyro_dgp._typing import ArrayLike

__all__ = ["band", "figure_of", "known", "open_axes", "pair"]


def open_axes(ax: Axes | None) -> Axes:
    """``ax``, or the axes of a new figure."""
    return plt.subplots(figsize=(7, 4), layout="constrained")[1] if ax is None else ax


def figure_of(ax: Axes) -> Figure:
    """The figure that axes belong to."""
    figure = ax.get_figure(root=True)
    assert figure is not None  # for type checkers: these axes always have a figure
    return figure


def known(name: str, value: ArrayLike, *shape: int | None) -> np.ndarray:
    """``value`` as finite numbers of that ``shape``, in which ``None`` stands for any number.

    Raises:
        ValueError: other shapes, NaN or infinite values.
    """
    found = known_numbers(name, value)
    if found.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, found.shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "")
        raise expected(
            f"{name} of shape ({wanted})",
            found.shape,
            "one number per input along the last axis, draws along the first; of a column take values[:, 0]",
        )
    require_finite(name, found, "leave out the rows with missing values")
    return found


def pair(data: tuple[ArrayLike, ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
    """x and y of training rows, of one length.

    Raises:
        ValueError: other data.
    """
    expect(isinstance(data, tuple | list) and len(data) == 2, "data to be a pair (x, y)", type(data).__name__, "(x, y)")
    x = known("x of data", data[0], None)
    return x, known("y of data", data[1], len(x))


def band(ax: Axes, x: ArrayLike, mean: ArrayLike, sd: ArrayLike, colour: str, label: str | None = None) -> None:
    """A mean with two standard deviations around it."""
    mean, sd = np.asarray(mean), np.asarray(sd)
    ax.fill_between(np.asarray(x), mean - 2 * sd, mean + 2 * sd, color=colour, alpha=0.2, lw=0)
    ax.plot(x, mean, color=colour, lw=1.5, label=label)
