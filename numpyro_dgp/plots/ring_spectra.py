r"""Power spectra on rings: of kernels, noise and values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numpyro_dgp._checks import expect, expected, require_finite, require_noise
from numpyro_dgp._data import known_numbers
from numpyro_dgp._typing import ArrayLike
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.plots.axes import figure_of, open_axes
from numpyro_dgp.rings.spectra import Ring, frequencies, require_ring, spectrum

__all__ = ["ring_spectra"]

# Decades below the largest power that are shown.
_DECADES = 8


def ring_spectra(
    ring: Ring,
    kernels: Mapping[str, Kernel],
    *,
    values: ArrayLike | None = None,
    noise: ArrayLike | None = None,
    unit: str = "unit of the input",
    ax: Axes | None = None,
) -> Figure:
    r"""Power spectra on a ring: eigenvalues of kernels at :math:`k / \Delta` cycles per unit of the input.

    .. math:: \lambda_k = E_{u \sim N(0, C)} |\hat u_k|^2, \qquad
              \hat u_k = \frac{1}{\sqrt M} \sum_j u_j\, e^{-2\pi i j k / M}, \qquad 0 < k \le M / 2

    with :math:`\Delta` the circumference and C the covariance of the values on the grid. The power of values on the
    grid is on the same scale: draws from the prior scatter about the curve, with a standard deviation as large as the
    mean. At frequencies where draws from a posterior agree with each other, the data determine them; where they scatter
    about the prior, they do not. Noise of standard deviation :math:`\sigma` has the power :math:`\sigma^2` at every
    frequency: parts of the process with far less power cannot be inferred from data at all points of the grid. The mean
    of the values, frequency zero, is left out.

    Args:
        ring: a ring of one dimension; a ``Grid`` is one, of an additive kernel take ``grid.on((d,))``.
        kernels: ``{name: stationary kernel}``, for instance the terms of a sum.
        values: on the grid (M,), or draws of them (S, M), units of the output: ``posterior.functions(key)`` at
            ``ring.points()``, or the mean from ``RingNormal.posterior``. Of draws the median of the power is shown,
            and the band from its 2.5 to its 97.5 per cent quantile.
        noise: standard deviation, units of the output.
        unit: of the input, in the singular: ``"year"``.
        ax: axes to draw into.

    Raises:
        ValueError: a ring of several dimensions, values not on its grid or not finite, noise that is not one positive
            number, or a kernel without a spectral density.

    Example:
        >>> from numpyro_dgp.kernels import RBF
        >>> figure = ring_spectra(Ring(0.0, 20.0, 64), {"RBF": RBF()}, noise=0.1, unit="second")
        >>> figure.axes[0].get_xlabel()
        'cycles per second'

    Source: Tebbutt (2016), section 1.3 and equation 1.40.
    """
    require_ring(ring)
    expect(
        len(ring.sizes) == 1,
        "a ring of one dimension",
        len(ring.sizes),
        "show additive kernels term by term, on ring.on((d,))",
    )
    M = ring.sizes[0]
    values = None if values is None else known_numbers("values", values)
    if noise is not None:
        require_noise(noise)
    if values is not None and (np.ndim(values) not in (1, 2) or np.shape(values)[-1] != M):
        raise expected(
            f"values at all {M} grid points, ({M},) or (S, {M})",
            f"shape {np.shape(values)}",
            "predict at ring.points()",
        )
    if values is not None:
        require_finite("values", values, "check the fit: NaN in its losses?")
    half = slice(1, M // 2 + 1)
    at = np.abs(frequencies(ring.sizes)[half, 0]) / float(ring.length[0])
    ax = open_axes(ax)
    top = 0.0
    if values is not None:
        power = np.abs(np.fft.fft(np.atleast_2d(np.asarray(values, float)), norm="ortho")[:, half]) ** 2
        low, middle, high = np.quantile(power, [0.025, 0.5, 0.975], axis=0)
        if len(power) > 1:
            ax.fill_between(at, low, high, color="0.5", alpha=0.3, lw=0)
        ax.plot(at, middle, color="0.3", lw=0.8, label="values")
        top = float(high.max())
    for name, kernel in kernels.items():
        eigenvalues = np.asarray(spectrum(kernel, ring))[half]
        ax.plot(at, eigenvalues, lw=1.5, label=name)
        top = max(top, float(eigenvalues.max()))
    if noise is not None:
        ax.axhline(float(np.square(noise)), color="0.3", lw=1, ls="--", label="noise")
    bottom = max(ax.dataLim.y0, top * 10.0**-_DECADES)
    ax.set(xscale="log", yscale="log", xlim=(at[0], at[-1]), ylim=(bottom / 2, 3 * top))
    ax.set(xlabel=f"cycles per {unit}", ylabel="power, squared unit of the output")
    ax.legend(frameon=False)
    return figure_of(ax)
