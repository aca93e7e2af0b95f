"""Helpers of the figures: axes to draw into, their figure, a mean with its band."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numpyro_dgp._typing import ArrayLike

__all__ = ["band", "figure_of", "open_axes"]


def open_axes(ax: Axes | None) -> Axes:
    """``ax``, or the axes of a new figure."""
    return plt.subplots(figsize=(7, 4), layout="constrained")[1] if ax is None else ax


def figure_of(ax: Axes) -> Figure:
    """The figure that axes belong to."""
    figure = ax.get_figure(root=True)
    assert figure is not None  # for type checkers: these axes always have a figure
    return figure


def band(ax: Axes, x: ArrayLike, mean: ArrayLike, sd: ArrayLike, colour: str, label: str | None = None) -> None:
    """A mean with two standard deviations around it."""
    mean, sd = np.asarray(mean), np.asarray(sd)
    ax.fill_between(np.asarray(x), mean - 2 * sd, mean + 2 * sd, color=colour, alpha=0.2, lw=0)
    ax.plot(x, mean, color=colour, lw=1.5, label=label)
