"""Rings for regular series and for data on product grids."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.fft import next_fast_len

from numpyro_dgp._checks import expect, expected, is_concrete, require_finite
from numpyro_dgp._data import known_numbers
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.kernels import Kernel, as_kernel
from numpyro_dgp.rings.pattern import LONGEST, Solver
from numpyro_dgp.rings.spectra import MAX_SIZE, Ring, periodised, require_ring

__all__ = ["regular", "wraparound"]

# The number of Fourier transforms in a log evidence and its gradient: solved exactly, and by conjugate gradients.
_TRANSFORMS, _MANY_TRANSFORMS = 10, 400
# Points without observations up to which any series is taken as regular with gaps.
_MOST_GAPS = 5000
# How much longer than the data and the margin a ring may be for the sake of its transforms: margins, or points.
_MARGINS, _POINTS = 3, 2000


def regular(x: ArrayLike, margin: ArrayLike) -> tuple[Ring, np.ndarray]:
    """The ring of a regular series, gaps allowed: its points and, behind them, padding. A torus for a product grid.

    Args:
        x: inputs (N,) in order, whole multiples of their smallest difference apart; or (N, D) with two or three
            columns, rows in order by the first, then the second, then the third, each on its own regular grid.
        margin: length of the padding, units of x, a number or (D,); six lengthscales make the two ends independent. A
            ring with padding is a few points longer where that makes its Fourier transforms faster by more than the
            algebra of these unobserved points costs. With 0.0 there is no padding: the first point is the neighbour
            of the last.

    Returns:
        The ring, and which of its points are observed, (M,) of bool.

    Raises:
        ValueError: inputs that are not known numbers, not in order or not on a regular grid; a smallest difference that
            makes a grid almost without observations, as rounded times at no particular places do; a margin that is
            negative, not finite, or makes the ring too large.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.rings import regular
        >>> ring, observed = regular(np.array([0.0, 1.0, 2.0, 4.0]), margin=3.0)
        >>> ring.size, observed.astype(int).tolist()
        ((8,), [1, 1, 1, 0, 1, 0, 0, 0])
        >>> plane = np.array([[0.0, 0.0], [0.0, 0.5], [1.0, 0.0], [1.0, 0.5]])
        >>> regular(plane, margin=[2.0, 0.0])[0].size
        (4, 2)

    Source: Tebbutt (2016), sections 1.3.2 and 1.3.5, with padding.
    """
    x = known_numbers("inputs x", x)
    require_finite("inputs x", x, "drop missing rows: a gap in the inputs is a missing observation")
    D = x.shape[1] if x.ndim == 2 else 1
    if isinstance(margin, bool | str) or np.shape(margin) not in ((), (D,)) or not _are_lengths(margin):
        raise expected("a finite margin of 0 or more", margin, "try six lengthscales, or 0.0 for a periodic process")
    margins = np.broadcast_to(np.asarray(margin, float), (D,))
    if x.ndim == 2 and D in (2, 3):
        return _product(x.astype(float), margins)
    if x.ndim != 1 or len(x) < 2 or not (np.diff(x) > 0).all():
        raise expected(
            "inputs (N,) in increasing order",
            f"shape {x.shape}",
            f"{(_COLUMNS[x.shape[1] > 1] if x.ndim == 2 else 'sort them first, without repeated inputs')}",
        )
    index, step = _axis(x.astype(float), _MOST_GAPS)
    least = _least(index, step, margins[0])
    size = _fast_size(least, int(index[-1]) + 1, len(x)) if margins[0] > 0 else least
    observed = np.zeros(size, bool)
    observed[index] = True
    return Ring(float(x[0]), float(x[0] + size * step), size), observed


_COLUMNS = ("take the column, x[:, 0]", "a product grid has two or three columns")


def _are_lengths(margin: Any) -> bool:
    return bool(np.all((np.asarray(margin) >= 0) & (np.asarray(margin) < math.inf)))


def _product(x: np.ndarray, margins: np.ndarray) -> tuple[Ring, np.ndarray]:
    """The torus of rows (N, D) on a product grid."""
    columns = [np.unique(column) for column in x.T]
    for d, column in enumerate(columns):
        expect(len(column) >= 2, "several values in every column", f"one in column {d}", "leave it out")
    points = math.prod(len(column) for column in columns)
    if points > max(_MOST_GAPS, 9 * len(x)):
        raise expected(
            "rows on a product grid",
            f"{len(x)} rows with {' x '.join(str(len(column)) for column in columns)} different values",
            "use dgp.gp with dgp.Grid, whose data may lie anywhere",
        )
    axes = [_axis(column, 9 * len(column)) for column in columns]
    index = tuple(i[np.searchsorted(c, v)] for (i, _), c, v in zip(axes, columns, x.T, strict=True))
    sizes = []
    for (i, step), margin in zip(axes, margins, strict=True):
        least = _least(i, step, margin)
        sizes.append(_fast_size(least, int(i[-1]) + 1, 0) if margin > 0 else least)
    flat = np.ravel_multi_index(index, sizes)
    expect(
        (np.diff(flat) > 0).all(),
        "rows in order, by the first column, then by the second, without repeated rows",
        "others",
        "order = np.lexsort(x.T[::-1]); x, y = x[order], y[order]",
    )
    observed = np.zeros(math.prod(sizes), bool)
    observed[flat] = True
    low = np.array([column[0] for column in columns])
    high = np.array([c[0] + m * step for c, m, (_, step) in zip(columns, sizes, axes, strict=True)])
    return Ring(low, high, tuple(sizes)), observed


def _axis(x: np.ndarray, most_gaps: int) -> tuple[np.ndarray, float]:
    """Of increasing values: the numbers of the grid points that they are, and the step between these."""
    spacings = np.diff(x)
    steps = (x[-1] - x[0]) / spacings.min()
    if steps - len(x) > max(most_gaps, 9 * len(x)):
        raise expected(
            "inputs on a regular grid",
            f"a spacing {spacings.min():.4g} (median {np.median(spacings):.4g}), {steps + 1:.7g} points, {len(x)} data",
            "use dgp.gp with dgp.Grid for data anywhere, or round the inputs to a coarser grid",
        )
    index = np.rint((x - x[0]) / spacings.min()).astype(int)
    step = (x[-1] - x[0]) / index[-1]  # from the ends: less rounding than in one spacing
    off = np.abs((x - x[0]) / step - index).max()
    if off > 0.01:
        raise expected(
            "inputs on a regular grid",
            f"one {off:.2g} of a step {step:.4g} off (spacings {spacings.min():.4g} to {spacings.max():.4g})",
            "use dgp.gp with dgp.Grid for data anywhere",
        )
    return index, step


def _least(index: np.ndarray, step: float, margin: float) -> int:
    """Points from the first to the last observation and in a margin."""
    if margin / step > MAX_SIZE - index[-1] - 1:
        raise expected(
            f"a margin that leaves the ring at most {MAX_SIZE} points",
            f"{margin} with steps of {step:.4g}",
            "six lengthscales are enough, in units of x",
        )
    return int(index[-1]) + 1 + math.ceil(margin / step - 1e-6)  # 12 * 0.1 makes 12 steps despite rounding


def _fast_size(least: int, span: int, observed: int) -> int:
    r"""The ring size M with the cheapest log evidence of N = ``observed`` points, in operations.

    Sizes from ``least`` to a few margins more, ``least - span`` being the margin, cost
    :math:`t\, M\, \mathrm{work}(M)` for t Fourier transforms, with
    :math:`\mathrm{work}(M) = \min(\sum_{p \mid M} p, 12 \log_2 M)`: a prime factor p of M, as often as it divides M,
    costs about p operations per point, and Bluestein's algorithm, which takes over where factors are large, three
    transforms of twice the length. To these comes a third of the cube of the number of rows that are factorised: the
    unobserved points, or the observed if they are fewer, as long as these are few (:class:`Solver`); otherwise the
    padding, as far as one block goes, and t is larger.
    """
    bluestein, exact = 12 * math.log2(least), Solver().exact
    longest = least + max(_MARGINS * (least - span), _POINTS)
    sizes = np.arange(least, min(next_fast_len(least, real=True), longest) + 1)
    rest, work = sizes.copy(), np.zeros(len(sizes), int)
    for p in range(2, math.isqrt(int(sizes[-1])) + 1):
        while (divides := rest % p == 0).any():  # the sum of the prime factors of every size
            rest[divides] //= p
            work[divides] += p
    work += np.where(rest > 1, rest, 0)
    rows = np.minimum(sizes - observed, observed)
    few = rows <= exact
    rows = np.where(few, rows, np.minimum(sizes - span, LONGEST))
    transforms = np.where(few, _TRANSFORMS, _MANY_TRANSFORMS)
    cost = rows.astype(float) ** 3 / 3 + transforms * sizes * np.minimum(work, bluestein)
    return int(sizes[np.argmin(cost)])


def wraparound(kernel: Kernel, ring: Ring, span: ArrayLike) -> Array:
    r"""The largest error in a correlation made by closing the line to a ring: about :math:`k(\Delta - span) / k(0)`.

    Args:
        kernel: the stationary kernel.
        ring: the ring.
        span: range of the data, units of the input; a number, or (D,).

    Returns:
        The largest error, a share of the variance: a number.

    Raises:
        ValueError: a span that is not a number or one per dimension, or not between zero and the length of the ring.

    Example:
        >>> from numpyro_dgp.kernels import RBF
        >>> from numpyro_dgp.rings import Ring, wraparound
        >>> bool(wraparound(RBF(), Ring(0.0, 16.0, 32), 10.0) < 2e-8)
        True
    """
    require_ring(ring)
    kernel, D = as_kernel(kernel), len(ring.sizes)
    require_finite("span", span, "the range of the data, x.max() - x.min()")
    inside = not is_concrete(span, ring.length) or bool(np.all((np.asarray(span) >= 0) & (span <= ring.length)))
    if np.shape(span) not in ((), (D,)) or not inside:
        raise expected(
            f"a span () or ({D},) from 0 to the length {np.asarray(ring.length) if is_concrete(ring.length) else ''}",
            span,
            "pass the range of the data, x.max() - x.min()",
        )
    reach = jnp.broadcast_to(jnp.asarray(span, ring.dtype), (D,))
    # Differences of 0 or the whole span in each dimension: the nearest to their images.
    corners = jnp.asarray(np.array(list(itertools.product((0.0, 1.0), repeat=D))), ring.dtype) * reach
    origin = jnp.zeros((1, D), ring.dtype)
    error = periodised(kernel, ring, corners, origin) - kernel(corners, origin)
    return jnp.abs(error).max() / kernel.diag(origin)[0]
