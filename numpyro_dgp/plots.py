"""S4: figures of a fitted program. Import it by name, ``from numpyro_dgp import plots``: it needs matplotlib.

Every function returns the figure, or draws into ``ax`` where one is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.densities import Mixture
from numpyro_dgp.predict import Posterior

__all__ = ["bounds", "density", "fit", "layers", "marginals", "observed"]

_MAX_OUTPUTS = 4


def _axes(ax: Axes | None) -> Axes:
    return plt.subplots(figsize=(7, 4), layout="constrained")[1] if ax is None else ax


def _figure(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None  # an axes we were given or made always has one
    return figure


def _band(ax: Axes, x: ArrayLike, mean: ArrayLike, sd: ArrayLike, colour: str, label: str | None = None) -> None:
    """A mean with two standard deviations around it."""
    mean, sd = np.asarray(mean), np.asarray(sd)
    ax.fill_between(np.asarray(x), mean - 2 * sd, mean + 2 * sd, color=colour, alpha=0.2, lw=0)
    ax.plot(x, mean, color=colour, lw=1.5, label=label)


def fit(
    x: ArrayLike,
    prediction: Mixture,
    *,
    data: tuple[ArrayLike, ArrayLike] | None = None,
    functions: ArrayLike | None = None,
    ax: Axes | None = None,
) -> Figure:
    """A prediction over one input: mean, two standard deviations of y, data, draws of the function.

    Args:
        x: input values (N,).
        prediction: ``posterior.predict(key, x[:, None])``.
        data: x and y of the training rows.
        functions: draws (S, N), from ``posterior.functions``.
        ax: axes to draw into.

    Raises:
        ValueError: several input columns or outputs.
    """
    x = np.asarray(x)
    if x.ndim != 1 or prediction.means.ndim != 2:
        raise ValueError(
            f"plots.fit: expected x of shape (N,) and one output, got {x.shape} and {prediction.means.shape[1:]}: "
            "plots.observed shows predictions for several inputs"
        )
    ax = _axes(ax)
    order = np.argsort(x)
    if functions is not None:
        ax.plot(x[order], np.asarray(functions)[:, order].T, color="C0", lw=0.5, alpha=0.6)
    if data is not None:
        ax.plot(np.asarray(data[0]), np.asarray(data[1]), ".", color="0.2", ms=3, label="data")
    sd = np.sqrt(np.asarray(prediction.variance))
    _band(ax, x[order], np.asarray(prediction.mean)[order], sd[order], "C0", "mean, 2 sd")
    ax.legend(frameon=False)
    return _figure(ax)


def observed(y: ArrayLike, prediction: Mixture, *, ax: Axes | None = None) -> Figure:
    """Observed values (N,) against predicted ones, with two standard deviations and the diagonal."""
    ax = _axes(ax)
    mean, sd = np.asarray(prediction.mean), np.sqrt(np.asarray(prediction.variance))
    ax.errorbar(mean, np.asarray(y), xerr=2 * sd, fmt=".", color="C0", ecolor="0.8", ms=3)
    ax.axline((mean.mean(), mean.mean()), slope=1, color="0.3", lw=1)
    ax.set(xlabel="predicted, 2 sd", ylabel="observed")
    return _figure(ax)


def bounds(losses: Mapping[str, ArrayLike], *, size: int = 1, window: int = 50, ax: Axes | None = None) -> Figure:
    """Curves of the bound per datum against steps, means over ``window`` steps.

    Args:
        losses: ``{name: svi_result.losses}``.
        size: number of data, to divide by.
        window: steps averaged.
        ax: axes to draw into.
    """
    ax = _axes(ax)
    curves = {}
    for name, loss in losses.items():
        values = -np.asarray(loss) / size
        width = max(1, min(window, len(values) // 4))
        curves[name] = values[: len(values) // width * width].reshape(-1, width).mean(1)
        ax.plot((np.arange(len(curves[name])) + 0.5) * width, curves[name], label=name)
    late = np.concatenate([curve[len(curve) // 4 :] for curve in curves.values()])
    top = max(curve.max() for curve in curves.values())
    ax.set(xlabel="step", ylabel="ELBO per datum", ylim=(late.min() - 0.1 * (top - late.min()) - 1e-3, None))
    ax.legend(frameon=False)
    return _figure(ax)


def density(
    x: ArrayLike,
    y: ArrayLike,
    log_density: ArrayLike,
    *,
    data: tuple[ArrayLike, ArrayLike] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """A conditional density p(y | x) over one input as a heat map; every column is a density of its own.

    With ``grid = jnp.broadcast_to(y[:, None], (len(y), len(x)))`` the densities are
    ``posterior.log_density(key, grid, x[:, None])``.

    Args:
        x: input values (N,), increasing.
        y: levels (G,), increasing.
        log_density: log p(y | x) (G, N).
        data: x and y of the training rows.
        ax: axes to draw into.

    Raises:
        ValueError: shapes that do not fit together.

    Source: seed 002, figure 5.4.
    """
    x, y, values = np.asarray(x), np.asarray(y), np.asarray(log_density)
    if values.shape != (len(y), len(x)):
        raise ValueError(
            f"plots.density: expected log_density of shape ({len(y)}, {len(x)}), one row per level and one column per "
            f"input, got {values.shape}: broadcast the levels to that shape and ask posterior.log_density"
        )
    ax = _axes(ax)
    ax.pcolormesh(x, y, np.exp(values), shading="nearest", cmap="magma", rasterized=True)
    if data is not None:
        ax.plot(np.asarray(data[0]), np.asarray(data[1]), ".", color="w", ms=1, alpha=0.3)
    ax.set(xlabel="x", ylabel="y", xlim=(x.min(), x.max()), ylim=(y.min(), y.max()))
    return _figure(ax)


def marginals(draws: ArrayLike, y: ArrayLike, log_density: ArrayLike, *, observed: ArrayLike | None = None) -> Figure:
    """Predictive distributions at a few test points: histograms of draws of y under the density of the mixture.

    Args:
        draws: of y (S, N), from ``posterior.sample``; one panel per column.
        y: levels (G,), increasing.
        log_density: log p(y | x) (G, N), as in :func:`density`.
        observed: what was observed there (N,).

    Raises:
        ValueError: shapes that do not fit together.

    Source: seed 002, figures 5.6 and 5.7.
    """
    draws, y, values = np.asarray(draws), np.asarray(y), np.asarray(log_density)
    if draws.ndim != 2 or values.shape != (len(y), draws.shape[1]):
        raise ValueError(
            f"plots.marginals: expected draws (S, N) and log_density ({len(y)}, N), got {draws.shape} and "
            f"{values.shape}: choose a few test points for both"
        )
    number = draws.shape[1]
    figure, axes = plt.subplots(
        1, number, figsize=(2.6 * number, 2.4), squeeze=False, sharey=False, layout="constrained"
    )
    for n, ax in enumerate(axes[0]):
        ax.hist(draws[:, n], bins=60, range=(y.min(), y.max()), density=True, color="0.8")
        ax.plot(y, np.exp(values[:, n]), color="C0", lw=1.5)
        if observed is not None:
            ax.axvline(np.asarray(observed)[n], color="0.2", lw=1, ls="--")
        ax.set(xlabel="y", yticks=[])
    return figure


def layers(posterior: Posterior, key: Array, X: ArrayLike, *args: Any, num_points: int = 200) -> Figure:
    """Every layer as a function of its own inputs, with its inducing points.

    One row per layer, one column per output (at most four). A panel shows the posterior of the layer's function, two
    standard deviations wide, along the first principal direction of its inputs and through their mean; with one
    input column that is the function itself. Bars are the posterior at the inducing inputs, which lie off the line
    where the inputs have several columns. Ticks at the bottom are the inputs that reach the layer.

    Args:
        posterior: a fitted program.
        key: PRNG key, for the draw of the inputs of deeper layers.
        X: inputs (N, D), the first argument of the model.
        *args: its other arguments.
        num_points: resolution.

    Raises:
        ValueError: a program without layers.

    Source: seed 000, figures 3.5 and 3.7.
    """
    found = posterior.layers(key, X, *args)
    if not found:
        raise ValueError("plots.layers: expected a program with dgp.gp layers, got none: nothing to draw")
    widths = [min(f.outputs or 1, _MAX_OUTPUTS) for f, _ in found.values()]
    size = (max(4.0 + 3.0 * (max(widths) - 1), 6.0), 2.4 * len(found))
    figure, axes = plt.subplots(len(found), max(widths), figsize=size, squeeze=False, layout="constrained")
    for row, (name, (function, inputs)), width in zip(axes, found.items(), widths, strict=True):
        _layer(row[:width], name, function, np.asarray(inputs), num_points)
        for ax in row[width:]:
            ax.set_visible(False)
    return figure


def _layer(axes: np.ndarray, name: str, function: Any, inputs: np.ndarray, num_points: int) -> None:
    """One row of :func:`layers`."""
    centre = inputs.mean(0)
    direction = np.ones(1) if len(centre) == 1 else np.linalg.svd(inputs - centre, full_matrices=False)[2][0]
    centre = centre - direction * (centre @ direction)
    data = inputs @ direction
    line = np.linspace(data.min(), data.max(), num_points)
    curve = function(jnp.asarray(centre + line[:, None] * direction))
    for p, ax in enumerate(axes):
        Z = function.Z if function.Z.ndim == 2 else function.Z[p]
        at_Z = function(Z)
        mean, variance, mean_Z, variance_Z = (
            np.asarray(a).reshape(len(a), -1)[:, p] for a in (curve.mean, curve.variance, at_Z.mean, at_Z.variance)
        )
        _band(ax, line, mean, np.sqrt(variance), f"C{p}")
        ax.errorbar(np.asarray(Z) @ direction, mean_Z, 2 * np.sqrt(variance_Z), fmt="o", color="0.2", ms=2.5, lw=0.8)
        bottom = ax.get_ylim()[0]
        ax.plot(data, np.full_like(data, bottom), "|", color="0.5", ms=6, alpha=0.3)
        where = "input" if len(centre) == 1 else "first principal direction of the inputs"
        ax.set(xlabel=where, ylabel=name if len(axes) == 1 else f"{name}[{p}]")
