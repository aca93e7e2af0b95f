"""Figures of predictions: functions of one input, observed against predicted, densities."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numpyro_dgp._checks import expect, expect_kind, expected, require_finite
from numpyro_dgp._data import known_numbers
from numpyro_dgp._typing import ArrayLike
from numpyro_dgp.densities import Mixture
from numpyro_dgp.plots.axes import band, figure_of, known, open_axes, pair

__all__ = ["density", "fit", "marginals", "observed"]


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

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: several input columns or outputs, arrays that are not of the length of ``x``, NaN.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp import densities, plots
        >>> x = np.linspace(0, 1, 20)
        >>> prediction = densities.Mixture(np.sin(x)[None], np.full((1, 20), 0.1))  # means and variances (S, N), S = 1
        >>> plots.fit(x, prediction, data=(x, np.sin(x))).axes[0].get_ylabel()
        'y'
    """
    x, (mean, sd) = known_numbers("x", x), _moments(prediction)
    expect(
        x.ndim == 1 and mean.ndim == 1,
        "x of shape (N,) and one output",
        f"{x.shape} and {mean.shape}",
        "plots.observed shows predictions for several inputs",
    )
    known("x", x, len(mean))
    draws = None if functions is None else known("functions", functions, None, len(x))
    rows = None if data is None else pair(data)
    ax = open_axes(ax)
    order = np.argsort(x)
    if draws is not None:
        ax.plot(x[order], draws[:, order].T, color="C0", lw=0.5, alpha=0.6)
    if rows is not None:
        ax.plot(*rows, ".", color="0.2", ms=3, label="data")
    band(ax, x[order], mean[order], sd[order], "C0", "mean, 2 sd")
    ax.set(xlabel="x", ylabel="y")
    ax.legend(frameon=False)
    return figure_of(ax)


def observed(y: ArrayLike, prediction: Mixture, *, ax: Axes | None = None) -> Figure:
    """Observed values (N,) against predicted ones, with two standard deviations and the diagonal.

    Args:
        y: observed values (N,).
        prediction: ``posterior.predict(key, X)`` at the same inputs.
        ax: axes to draw into.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: several outputs, observed values that are not of the length of the prediction, NaN.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp import densities, plots
        >>> x = np.linspace(0, 1, 20)
        >>> prediction = densities.Mixture(np.sin(x)[None], np.full((1, 20), 0.1))  # means and variances (S, N), S = 1
        >>> plots.observed(np.sin(x), prediction).axes[0].get_ylabel()
        'observed'
    """
    mean, sd = _moments(prediction)
    expect(
        mean.ndim == 1,
        "the prediction of one output, shape (N,)",
        mean.shape,
        ("show outputs one by one, dgp.densities.Mixture(prediction.means[..., p], prediction.variances[..., p])"),
    )
    values = known("y", y, len(mean))
    ax = open_axes(ax)
    ax.errorbar(mean, values, xerr=2 * sd, fmt=".", color="C0", ecolor="0.8", ms=3)
    ax.axline((mean.mean(), mean.mean()), slope=1, color="0.3", lw=1)
    ax.set(xlabel="predicted, 2 sd", ylabel="observed")
    return figure_of(ax)


def density(
    x: ArrayLike,
    y: ArrayLike,
    log_density: ArrayLike,
    *,
    data: tuple[ArrayLike, ArrayLike] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """A conditional density p(y | x) over one input as a heat map; every column is a density.

    With ``grid = jnp.broadcast_to(y[:, None], (len(y), len(x)))`` the densities are
    ``posterior.log_density(key, grid, x[:, None])``.

    Args:
        x: input values (N,), increasing.
        y: levels (G,), increasing.
        log_density: log p(y | x) (G, N).
        data: x and y of the training rows.
        ax: axes to draw into.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: shapes that do not fit together.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp import plots
        >>> x, y = np.linspace(0, 1, 20), np.linspace(-3, 3, 50)
        >>> log_density = -0.5 * (y[:, None] - np.sin(x)) ** 2  # of N(sin x, 1), up to a constant
        >>> plots.density(x, y, log_density).axes[0].get_xlabel()
        'x'

    Source: Salimbeni (2020), figure 5.4.
    """
    x, y = known("x", x, None), known("y", y, None)
    rows = None if data is None else pair(data)
    values = known_numbers("log_density", log_density)
    expect(
        values.shape == (len(y), len(x)),
        f"log_density of shape ({len(y)}, {len(x)}), one row per level and one column per input",
        values.shape,
        "broadcast the levels to that shape and ask posterior.log_density",
    )
    _require_density(values, x=x, y=y)
    ax = open_axes(ax)
    ax.pcolormesh(x, y, np.exp(values), shading="nearest", cmap="magma", rasterized=True)
    if rows is not None:
        ax.plot(*rows, ".", color="w", ms=1, alpha=0.3)
    ax.set(xlabel="x", ylabel="y", xlim=(x.min(), x.max()), ylim=(y.min(), y.max()))
    return figure_of(ax)


def marginals(draws: ArrayLike, y: ArrayLike, log_density: ArrayLike, *, observed: ArrayLike | None = None) -> Figure:
    """Predictive distributions at a few test points: histograms of draws of y under the density of the mixture.

    Args:
        draws: of y (S, N), from ``posterior.sample``; one panel per column.
        y: levels (G,), increasing.
        log_density: log p(y | x) (G, N), as in :func:`density`.
        observed: what was observed there (N,).

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: shapes that do not fit together.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp import plots
        >>> x, y = np.linspace(0, 1, 20), np.linspace(-3, 3, 50)
        >>> log_density = -0.5 * (y[:, None] - np.sin(x)) ** 2  # of N(sin x, 1), up to a constant
        >>> draws = np.random.default_rng(0).normal(np.sin(x[:2]), 1.0, (500, 2))
        >>> len(plots.marginals(draws, y, log_density[:, :2] - 0.92).axes)
        2

    Source: Salimbeni (2020), figures 5.6 and 5.7.
    """
    draws, y = known_numbers("draws", draws), known("y", y, None)
    values = known_numbers("log_density", log_density)
    expect(
        draws.ndim == 2 and values.shape == (len(y), draws.shape[1]),
        f"draws (S, N) and log_density ({len(y)}, N)",
        f"{draws.shape} and {values.shape}",
        "choose a few test points for both",
    )
    require_finite("draws", draws, "check the fit: NaN in its losses?")
    _require_density(values, y=y)
    number = draws.shape[1]
    seen = None if observed is None else known("observed", observed, number)
    figure, axes = plt.subplots(
        1, number, figsize=(2.6 * number, 2.4), squeeze=False, sharey=False, layout="constrained"
    )
    width = (y.max() - y.min()) / 60
    for n, ax in enumerate(axes[0]):
        share = np.full(len(draws), 1 / (len(draws) * width))  # of all draws, those beyond the levels too
        ax.hist(draws[:, n], bins=60, range=(y.min(), y.max()), weights=share, color="0.8")
        ax.plot(y, np.exp(values[:, n]), color="C0", lw=1.5)
        if seen is not None:
            ax.axvline(seen[n], color="0.2", lw=1, ls="--")
        ax.set(xlabel="y", yticks=[])
    return figure


def _moments(prediction: Mixture) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of a prediction, checked."""
    expect_kind(
        prediction,
        Mixture,
        "a dgp.densities.Mixture",
        "posterior.predict(key, X), or of one Gaussian per input Mixture(mean[None], variance[None])",
    )
    mean, variance = np.asarray(prediction.mean), np.asarray(prediction.variance)
    require_finite("prediction", mean, "check the fit: NaN in its losses?")
    if not (variance >= 0).all():
        raise expected(
            "variances of zero or more", f"{np.nanmin(variance):.3g}", "not logarithms or standard deviations"
        )
    return mean, np.sqrt(variance)


def _require_density(log_density: np.ndarray, **axes: np.ndarray) -> None:
    """Raise where a log density is NaN or infinite above, or an axis is not increasing."""
    if np.isnan(log_density).any() or np.isposinf(log_density).any():
        raise expected("log densities", "NaN or inf among them", "NaN in the losses of the fit?")
    for name, values in axes.items():
        rises = len(values) >= 2 and (np.diff(values) > 0).all()
        expect(
            rises, f"{name} to increase, two numbers or more", f"{len(values)} that do not", "np.linspace(low, high)"
        )
