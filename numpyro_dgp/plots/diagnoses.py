"""Figures of the results of :mod:`numpyro_dgp.diagnostics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numpyro_dgp._checks import expected
from numpyro_dgp._typing import ArrayLike
from numpyro_dgp.plots.axes import figure_of, open_axes
from numpyro_dgp.plots.programs import bounds

if TYPE_CHECKING:
    from numpyro_dgp.diagnostics.calibration import ClassCalibration
    from numpyro_dgp.diagnostics.comparison import Comparison
    from numpyro_dgp.diagnostics.simulation import Simulated

__all__ = ["calibration", "class_reliability", "comparison", "ranks"]

# Pareto shapes above this: importance weights without usable moments.
_HIGH = 0.7


def comparison(found: Comparison) -> Figure:
    """Bounds, leave-one-out scores with standard errors, Pareto shapes and training curves of several posteriors.

    Scores with unreliable weights for more than a tenth of the data are open circles.

    Args:
        found: from ``diagnostics.compare``.

    Returns:
        A matplotlib figure.
    """
    from numpyro_dgp.diagnostics.comparison import MANY_UNRELIABLE  # needs ArviZ, which the other figures do not

    table = found.table
    curves = {
        name: -tree["fit"]["elbo"].to_numpy()
        for name, tree in found.trees.items()
        if "fit" in tree.children and "elbo" in tree["fit"]
    }
    size = next(iter(found.loo.values())).n_data_points
    panels = [("loo", "loo_se", "leave-one-out score, nats"), ("khat", None, "Pareto k")]
    if "bound" in table:
        panels.insert(0, ("bound", "bound_se", "bound, nats"))
    panels = [panel for panel in panels if panel[0] in table]
    width = len(panels) + bool(curves)
    figure, axes = plt.subplots(
        1, width, figsize=(3.2 * width, 1.6 + 0.35 * len(table)), squeeze=False, layout="constrained"
    )
    rows = np.arange(len(table))[::-1]
    for ax, (column, error, label) in zip(axes[0], panels, strict=False):
        bars = None if error is None else table[error].to_numpy(float)
        values = table[column].to_numpy(float)
        ax.errorbar(np.where(np.isfinite(values), values, np.nan), rows, xerr=bars, fmt="o", color="C0", ms=4)
        ax.set(xlabel=label, yticks=rows, yticklabels=table.index if ax is axes[0, 0] else [])
        ax.set_ylim(-0.6, len(rows) - 0.4)
        if column == "loo":
            doubtful = table["high_k"].to_numpy(float) > MANY_UNRELIABLE
            ax.plot(values[doubtful], rows[doubtful], "o", color="C0", mfc="w", ms=5, zorder=3)
        if column == "khat":
            ax.axvline(_HIGH, color="0.5", lw=1, ls="--")
    if curves:
        bounds(curves, size=size, ax=axes[0, -1])
    return figure


def calibration(u: ArrayLike, *, bins: int = 20, ax: Axes | None = None) -> Figure:
    """Histogram of probability integral transforms, with the band that 95 % of the bars of uniform ones fall in.

    Args:
        u: from ``diagnostics.pit`` (N...).
        bins: number of bars.
        ax: axes to draw into.

    Returns:
        A matplotlib figure.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.plots import calibration
        >>> len(calibration(np.random.default_rng(0).uniform(size=500), bins=10).axes)
        1
    """
    values = np.ravel(np.asarray(u))
    ax = open_axes(ax)
    _band_of_bars(ax, len(values), bins)
    ax.hist(values, bins=bins, range=(0, 1), color="C0", alpha=0.7)
    ax.set(xlabel="probability integral transform", ylabel="data", xlim=(0, 1))
    return figure_of(ax)


def class_reliability(found: ClassCalibration, *, ax: Axes | None = None) -> Figure:
    """How often labels come true, by their probability: a bar for two standard errors, below it the number of data.

    Args:
        found: from ``diagnostics.class_calibration``.
        ax: axes to draw into.

    Returns:
        A matplotlib figure.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.diagnostics import class_calibration
        >>> from numpyro_dgp.plots import class_reliability
        >>> p = np.linspace(0.05, 0.95, 100)
        >>> len(class_reliability(class_calibration(p, p > 0.5)).axes)
        2
    """
    ax = open_axes(ax)
    ax.plot([0, 1], [0, 1], color="0.5", lw=1)
    ax.errorbar(found.probability, found.share, yerr=2 * found.error, fmt="o", color="C0", ms=4)
    title = f"calibration error {found.ece:.3f} ± {found.ece_error:.3f}, by chance {found.ece_by_chance:.3f}"
    ax.set(xlabel="probability", ylabel="share that came true", xlim=(0, 1), ylim=(0, 1), title=title)
    counts = ax.twinx()
    counts.bar(found.probability, found.num_data, width=0.04, color="0.8", zorder=0)
    counts.set(ylabel="data", ylim=(0, 4 * found.num_data.max()))
    ax.set_zorder(counts.get_zorder() + 1)
    ax.patch.set_visible(False)
    return figure_of(ax)


def ranks(found: Simulated, *, bins: int = 10, axes: Mapping[str, Axes] | None = None) -> Figure:
    """Histograms of the ranks of true values by site, with the band that 95 % of the bars of uniform ones fall in.

    Sites with several values have one line for each. A bowl means posteriors that are too narrow, a hump ones that are
    too wide, a slope to the right values that are too low. Above each panel is the smallest p-value of the test of
    uniformity, times the number of values (Bonferroni).

    Args:
        found: from ``diagnostics.sbc``, or ``Simulated.of`` ranks of chains.
        bins: number of bars; S + 1 should be a multiple.
        axes: by site, to draw into these and these sites only; all sites in a new figure by default.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: sites that have no ranks.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.diagnostics import Simulated
        >>> from numpyro_dgp.plots import ranks
        >>> tests = Simulated.of({"slope": np.random.default_rng(0).integers(0, 100, 200)}, num_samples=99)
        >>> len(ranks(tests).axes)
        1
    """
    if axes is None:
        _, new = plt.subplots(
            1, len(found.ranks), figsize=(2.8 * len(found.ranks), 2.4), squeeze=False, sharey=True,
            layout="constrained",
        )  # fmt: skip
        axes = dict(zip(found.ranks, new[0], strict=True))
    if not axes or not set(axes) <= set(found.ranks):
        raise expected(f"axes for some of the sites {list(found.ranks)}", list(axes))
    for name, ax in axes.items():
        columns = found.ranks[name].reshape(len(found.ranks[name]), -1).T
        share = (columns + 0.5) / (found.num_samples + 1)
        _band_of_bars(ax, columns.shape[1], bins)
        edges = np.linspace(0, 1, bins + 1)
        for i, column in enumerate(share):
            counts, _ = np.histogram(column, edges)
            ax.stairs(counts, edges, color=f"C{i % 10}", alpha=0.7, fill=len(share) == 1, lw=1.2)
        smallest = min(1.0, float(np.min(found.uniform[name])) * len(share))
        ax.set(title=f"{name}, p = {smallest:.1g}", xlabel="rank of the truth / draws", xlim=(0, 1), ylim=(0, None))
    next(iter(axes.values())).set(ylabel="replications")
    return figure_of(next(iter(axes.values())))


def _band_of_bars(ax: Axes, size: int, bins: int) -> None:
    """The mean, and the 2.5 and 97.5 per cent quantiles, of the bars of a histogram of uniform values."""
    from scipy.stats import binom

    low, high = binom.ppf([0.025, 0.975], size, 1 / bins)
    ax.axhspan(low, high, color="0.9")
    ax.axhline(size / bins, color="0.5", lw=1)
