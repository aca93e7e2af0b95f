"""Figures of a fitted program: the trace of its bound, its layers, its latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure

from numpyro_dgp._checks import expect, expected, require_count, require_finite, require_positive
from numpyro_dgp._data import known_numbers
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.plots.axes import band, figure_of, known, open_axes
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["bounds", "latent_space", "layers"]

_MAX_OUTPUTS = 4


def bounds(losses: Mapping[str, ArrayLike], *, size: int = 1, window: int = 50, ax: Axes | None = None) -> Figure:
    """Curves of the bound per datum against steps, means over ``window`` steps.

    Args:
        losses: ``{name: svi_result.losses}``.
        size: number of data, to divide by.
        window: steps averaged.
        ax: axes to draw into.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: losses that are not by name, not of shape (steps,) or not finite; counts that are not positive.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp import plots
        >>> plots.bounds({"Adam": 100 / np.arange(1, 501)}, size=20).axes[0].get_xlabel()
        'step'
    """
    expect(isinstance(losses, Mapping) and losses, "losses by name", type(losses).__name__, '{"ELBO": result.losses}')
    require_positive("size", size, "give the number of data")
    require_count("window", window, "50")
    steps = {name: known(f"losses of {name!r}", loss, None) for name, loss in losses.items()}
    ax = open_axes(ax)
    curves = {}
    for name, loss in steps.items():
        values = -loss / size
        width = max(1, min(window, len(values) // 4))
        curves[name] = values[: len(values) // width * width].reshape(-1, width).mean(1)
        ax.plot((np.arange(len(curves[name])) + 0.5) * width, curves[name], label=name)
    late = np.concatenate([curve[len(curve) // 4 :] for curve in curves.values()])
    top = max(curve.max() for curve in curves.values())
    room = 0.1 * (top - late.min()) + 1e-3
    ax.set(xlabel="step", ylabel="ELBO per datum", ylim=(late.min() - room, top + room))
    ax.legend(edgecolor="none")
    return figure_of(ax)


def layers(posterior: Posterior, key: Array, X: ArrayLike, *args: Any, num_points: int = 200) -> Figure:
    """Every layer as a function of its inputs, with its inducing points.

    One row per layer, one column per output (at most four). A panel shows the posterior of the layer's function, two
    standard deviations wide, along the first principal direction of its inputs and through their mean; with one
    input column that is the function itself. Bars are the posterior at the inducing inputs; with several input columns
    these do not lie on the line. An inducing input beyond the inputs of the layer is an arrow at the edge of the panel,
    at the height of its posterior mean, as far as the panel goes. Ticks at the bottom are the inputs of the layer.

    Args:
        posterior: a fitted program.
        key: PRNG key, for the draw of the inputs of deeper layers.
        X: inputs (N, D), the first argument of the model.
        *args: its other arguments.
        num_points: resolution.

    Raises:
        ValueError: a program without layers.

    Source: Chamberlin (2016), figures 3.5 and 3.7.
    """
    found = posterior.layers(key, X, *args)
    expect(found, "a program with dgp.gp layers", "none", "nothing to draw")
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
        band(ax, line, mean, np.sqrt(variance), f"C{p}")
        _inducing_points(ax, np.asarray(Z) @ direction, mean_Z, 2 * np.sqrt(variance_Z))
        bottom = ax.get_ylim()[0]
        ax.plot(data, np.full_like(data, bottom), "|", color="0.5", ms=6, alpha=0.3)
        where = "input" if len(centre) == 1 else "first principal direction of the inputs"
        ax.set(xlabel=where, ylabel=name if len(axes) == 1 else f"{name}[{p}]")


def _inducing_points(ax: Axes, places: np.ndarray, mean: np.ndarray, reach: np.ndarray) -> None:
    """Bars where an axis shows the inputs, and arrows at its edges for those beyond, which would stretch it."""
    left, right = ax.get_xlim()
    within = (left <= places) & (places <= right)
    ax.errorbar(places[within], mean[within], reach[within], fmt="o", color="0.2", ms=2.5, lw=0.8)
    ax.set_xlim(left, right)
    heights = np.clip(mean, *ax.get_ylim())
    for arrow, edge, beyond in (("<", left, places < left), (">", right, places > right)):
        if beyond.any():
            ax.plot(np.full(beyond.sum(), edge), heights[beyond], arrow, color="0.2", ms=4, clip_on=False)


def latent_space(
    draws: ArrayLike, *, colours: ArrayLike | None = None, label: str | None = None, ax: Axes | None = None
) -> Figure:
    r"""The latents of every datum: posterior means, and two standard deviations around them.

    Two columns: ellipses of the covariance :math:`V_n` of the draws,
    :math:`\{w : (w - \bar w_n)^\top V_n^{-1} (w - \bar w_n) = 4\}`. One column: bars, the data in the order of their
    means.

    Args:
        draws: of the latents (S, N, 1) or (S, N, 2): ``guide.sample_posterior(key, params, *args, sample_shape=(S,))``,
            ``mcmc.get_samples()`` or a tree of ``to_arviz`` has them under the name of the site.
        colours: one value per datum (N,): integers or strings are labels, other numbers get a colour bar.
        label: what the colours are, with their unit.
        ax: axes to draw into.

    Raises:
        ValueError: draws of another shape, fewer than three of them, or colours that are not one per datum.

    Example:
        >>> draws = np.random.default_rng(0).normal(size=(100, 20, 2))
        >>> latent_space(draws, colours=["odd", "even"] * 10).axes[0].get_xlabel()
        'latent 0'

    Source: Salimbeni (2020), section 4.4 and figure 4.7.
    """
    draws = known_numbers("draws", draws)
    expect(
        draws.ndim == 3 and draws.shape[-1] in (1, 2) and len(draws) >= 3,
        "draws (S, N, 1) or (S, N, 2) with S at least 3",
        f"shape {draws.shape}",
        "choose two columns, draws[..., [0, 1]]",
    )
    require_finite("draws", draws, "check the fit: NaN in its losses?")
    mean = draws.mean(0)
    if colours is not None and np.shape(colours) != mean.shape[:1]:
        raise expected(f"colours of shape ({len(mean)},), one per datum", np.shape(colours))
    ax = open_axes(ax)
    order = np.argsort(mean[:, 0])
    places = mean if mean.shape[1] == 2 else np.stack([mean[:, 0], np.argsort(order)], -1)
    shades = _shades(ax, colours, label, len(mean))
    deviations = draws - mean
    covariances = np.einsum("snp,snq->npq", deviations, deviations) / (len(draws) - 1)
    if mean.shape[1] == 2:
        values, vectors = np.linalg.eigh(covariances)
        angle = np.linspace(0, 2 * np.pi, 60)
        circle = np.stack([np.cos(angle), np.sin(angle)], -1)
        roots = vectors * np.sqrt(np.maximum(values, 0))[:, None]
        outlines = mean[:, None] + 2 * circle @ roots.swapaxes(-1, -2)
        ax.add_collection(PolyCollection(list(outlines), facecolors=shades, edgecolors=shades, alpha=0.2, lw=0.5))
        ax.set(xlabel="latent 0", ylabel="latent 1")
    else:
        reach = 2 * np.sqrt(covariances[:, 0, 0])
        ends = places[:, None] + np.stack([-reach, reach], -1)[..., None] * [1, 0]
        ax.add_collection(LineCollection(list(ends), colors=list(shades), alpha=0.4, lw=1))
        ax.set(xlabel="latent", ylabel="data, in the order of their means")
    ax.scatter(places[:, 0], places[:, 1], c=shades, s=9, lw=0, zorder=3)
    return figure_of(ax)


def _shades(ax: Axes, colours: ArrayLike | None, label: str | None, number: int) -> np.ndarray:
    """A colour for every datum (N, 4), and what they mean: a legend for labels, a bar for numbers."""
    if colours is None:
        return np.tile(to_rgba("C0"), (number, 1))
    values = np.asarray(colours)
    if values.dtype.kind == "f":
        scale = ScalarMappable(Normalize(values.min(), values.max()), "viridis")
        figure_of(ax).colorbar(scale, ax=ax, label=label or "")
        return scale.to_rgba(values)
    names, which = np.unique(values, return_inverse=True)
    palette = plt.get_cmap("tab10" if len(names) <= 10 else "tab20")
    shades = palette(which % palette.N)
    for name, shade in zip(names, palette(np.arange(len(names)) % palette.N), strict=True):
        ax.plot([], [], "o", color=shade, ms=4, label=str(name))
    ax.legend(title=label, frameon=False)
    return shades
