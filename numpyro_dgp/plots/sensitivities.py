"""Figures of sensitivity: Sobol' indices of the columns, main effects over each."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numpyro_dgp._checks import caller, expect_kind, expected
from numpyro_dgp.design.sensitivity import MainEffects, SobolIndices
from numpyro_dgp.plots.axes import figure_of, open_axes

__all__ = ["main_effects", "sobol_indices"]


def sobol_indices(
    indices: SobolIndices, *, reference: SobolIndices | None = None, level: float = 0.9, ax: Axes | None = None
) -> Figure:
    """First-order and total indices of every column: means, intervals of the emulator, error of the integration.

    The pale bar is the central interval over draws of the function, the dark line with ends is the mean with two
    standard errors of the integration on either side.

    Args:
        indices: from ``dgp.design.sobol_indices``.
        reference: indices to compare with, such as those of the simulator itself, as open diamonds.
        level: probability of the interval over draws.
        ax: axes to draw into.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: something else than indices, or a reference with other columns.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> from numpyro_dgp import plots
        >>> draws = lambda X: jnp.array([[1.0, 0.5], [1.0, 0.6]]) @ X.T
        >>> indices = dgp.design.sobol_indices(draws, {"speed, m/s": (0, 1), "mass, kg": (0, 1)}, jax.random.key(0))
        >>> plots.sobol_indices(indices).axes[0].get_xlabel()
        'share of the variance'
    """
    _require(SobolIndices, indices, reference)
    ax = open_axes(ax)
    rows = np.arange(len(indices.names))[::-1]
    known = (None, None) if reference is None else (reference.first, reference.total)
    for shift, colour, label, found, true in (
        (0.17, "C0", "first order", indices.first, known[0]),
        (-0.17, "C1", "total", indices.total, known[1]),
    ):
        low, high = found.interval(level)
        ax.barh(rows + shift, high - low, 0.24, left=low, color=colour, alpha=0.35, lw=0, label=label)
        ax.errorbar(
            found.mean, rows + shift, xerr=2 * found.integration_error, fmt="o", color=colour, ms=3.5, lw=1, capsize=2.5
        )
        if true is not None:
            mark = "reference" if label == "total" else None
            ax.plot(true.mean, rows + shift, "D", color="0.2", mfc="none", ms=6, mew=0.9, zorder=3, label=mark)
    ax.axvline(0, color="0.5", lw=0.8)
    ax.set(xlabel="share of the variance", yticks=rows, yticklabels=indices.names, ylim=(-0.6, len(rows) - 0.4))
    ax.legend(frameon=False)
    return figure_of(ax)


def main_effects(
    effects: MainEffects, *, reference: MainEffects | None = None, label: str = "mean of f", level: float = 0.9
) -> Figure:
    """Main effects, a panel for every column: mean, interval of the emulator (pale), integration error (dark).

    Args:
        effects: from ``dgp.design.main_effects``.
        reference: main effects to compare with, such as those of the simulator itself, as dashed lines.
        label: of the vertical axes, with the unit of f.
        level: probability of the interval over draws.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: something else than main effects, or a reference with other columns.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> from numpyro_dgp import plots
        >>> draws = lambda X: jnp.array([[1.0, 0.5], [1.0, 0.6]]) @ X.T
        >>> effects = dgp.design.main_effects(draws, {"speed, m/s": (0, 1), "mass, kg": (0, 1)}, jax.random.key(0))
        >>> [ax.get_xlabel() for ax in plots.main_effects(effects, label="mean of the range, m").axes]
        ['speed, m/s', 'mass, kg']
    """
    _require(MainEffects, effects, reference)
    D = len(effects.names)
    across = min(D, 4)
    down = -(-D // across)
    figure, axes = plt.subplots(
        down, across, figsize=(2.7 * across, 2.3 * down), squeeze=False, sharey=True, layout="constrained"
    )
    mean, error = effects.curves.mean, effects.curves.integration_error
    low, high = effects.curves.interval(level)
    for d, (ax, name) in enumerate(zip(axes.flat, effects.names, strict=False)):
        x = effects.x[d]
        ax.fill_between(x, low[d], high[d], color="C0", alpha=0.25, lw=0)
        ax.fill_between(x, mean[d] - 2 * error[d], mean[d] + 2 * error[d], color="C0", alpha=0.6, lw=0)
        ax.plot(x, mean[d], color="C0", lw=1.5)
        if reference is not None:
            ax.plot(reference.x[d], reference.curves.mean[d], "--", color="0.2", lw=1)
        ax.locator_params(axis="x", nbins=3)
        ax.set(xlabel=name)
    for ax in axes[:, 0]:
        ax.set(ylabel=label)
    for ax in axes.flat[D:]:
        ax.remove()
    return figure


def _require(kind: type[Any], found: Any, reference: Any) -> None:
    """Raise unless ``found`` is of a kind, and a reference too, with the same names."""
    function = caller().replace("plots", "dgp.design")
    for given in (found,) if reference is None else (found, reference):
        expect_kind(given, kind, f"what {function} returns", f"{function}(posterior, inputs, key)")
    if reference is not None and reference.names != found.names:
        raise expected(
            f"a reference with the columns {', '.join(found.names)}",
            ", ".join(reference.names),
            f"call {function} with these inputs",
        )
