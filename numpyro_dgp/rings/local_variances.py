r"""Posterior variances on a ring with gaps or heteroscedastic noise, from local windows.

With the notation of ``rings.uneven_noise`` the posterior covariance of the process on the ring is

.. math:: s^2 K\, (I - \rho K)^{-1} = s^2 K + s^2 K\, (\rho^{-1} - K)^{-1} K ,

so that only the points with :math:`\rho \ne 0` enter: the unobserved ones, :math:`\rho = 1`, if the others have one
noise variance :math:`s^2`. The variance at a point is computed as if :math:`\rho` were zero further than
``reach`` points from its tile, that is, as if there were observations with the noise :math:`s^2`. Entries of K decay
with distance, and inside of long gaps those of C do. Under one noise variance what is left out makes the variance
smaller, and less so the longer the reach.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, is_concrete
from numpyro_dgp._typing import Array
from numpyro_dgp.rings.circulant import CirculantMatrix
from numpyro_dgp.rings.pattern import Pattern

__all__ = ["local_variances", "reach_of"]

# Share of the length (root of the sum of squares) of rows of K and C that may lie beyond the reach.
_TOL = 1e-3
# Points of a tile at least: fewer would make more systems than they make them smaller.
_TILE = {1: 64, 2: 8, 3: 4}
# Entries of the systems that are solved at once.
_TOGETHER = 2**22
# Most multiplications for variances.
_MOST = 3e13

Windows = tuple[np.ndarray, np.ndarray]


def reach_of(process: CirculantMatrix, noise_variance: Array, pattern: Pattern) -> tuple[int, ...]:
    """How many points per dimension the posterior variance at a point depends on, on either side of it.

    Args:
        process: C, known.
        noise_variance: of the noise, one number or one per observed point, known.
        pattern: which points are observed.

    Raises:
        ValueError: hyperparameters that are traced.
    """
    expect(
        is_concrete(process.spectrum, noise_variance),
        "known hyperparameters, or reach=, to find the points that a variance depends on",
        "traced ones",
        "posterior(y, reach=...) with some lengthscales in steps of the grid",
    )
    # In NumPy, because inside of a compiled program JAX would trace what is known.
    spectrum, noise = np.asarray(process.spectrum, float), np.asarray(noise_variance, float)
    base = noise if noise.ndim == 0 else pattern.size / (1 / noise).sum()  # 1 / s^2 is the mean of 1 / D
    found = _beyond(spectrum / (spectrum + base), pattern.sizes)
    longest = max((length for _, length in pattern.runs()[1]), default=0) if len(pattern.missing) else 0
    if longest > found[-1] or len(pattern.sizes) > 1:
        found = tuple(map(max, found, _beyond(spectrum, pattern.sizes)))
    return found


def _beyond(eigenvalues: np.ndarray, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The lag in every dimension beyond which the share of a circulant matrix's row is below the tolerance."""
    square = np.square(np.fft.ifftn(eigenvalues.reshape(sizes)).real)  # c_j^2, of the first row
    found = []
    for d, size in enumerate(sizes):
        along = square.sum(tuple(i for i in range(len(sizes)) if i != d))
        lag = np.minimum(np.arange(size), size - np.arange(size))
        by_lag = np.bincount(lag, along)
        beyond = np.append(np.cumsum(by_lag[::-1])[::-1][1:], 0)
        found.append(max(1, int(np.argmax(beyond <= _TOL**2 * by_lag.sum()))))
    return tuple(found)


def local_variances(
    process: CirculantMatrix, base: Array, share: Array, counted: np.ndarray, reach: tuple[int, ...]
) -> Array:
    """The posterior variances of the process at all points of the ring (M,).

    Args:
        process: the covariance C.
        base: the reference variance.
        share: rho (M,).
        counted: where rho may differ from zero (M,) of bool.
        reach: points on either side per dimension.

    Raises:
        ValueError: windows with so many unobserved points that their systems take too long.
    """
    (sizes,) = process.blocks
    smooth = CirculantMatrix(process.spectrum / (process.spectrum + base), process.blocks).row()
    found = jnp.zeros_like(share)
    for inner, outer in _windows(sizes, reach, counted):
        values = _explained(smooth, share, jnp.asarray(inner, jnp.int32), jnp.asarray(outer, jnp.int32), sizes)
        found = found.at[inner.reshape(-1)].set(values.reshape(-1))
    return base * (smooth[0] + found)  # s^2 (K_ii + k_i' (rho^-1 - K)^-1 k_i)


@partial(jax.jit, static_argnames="sizes")
def _explained(smooth: Array, share: Array, inner: Array, outer: Array, sizes: tuple[int, ...]) -> Array:
    """What K gets added on its diagonal at the points of tiles (tiles, points), from those around (tiles, most)."""
    row = smooth.reshape(sizes)

    def entries(i: Array, j: Array) -> Array:
        pairs = zip(jnp.unravel_index(i, sizes), jnp.unravel_index(j, sizes), sizes, strict=True)
        return row[tuple((a[:, None] - b) % m for a, b, m in pairs)]

    def in_window(window: tuple[Array, Array]) -> Array:
        tile, around = window
        known = share.at[around].get(mode="fill", fill_value=0)[:, None]
        between = entries(around, tile)
        # (rho^-1 - K)^-1 = (I - rho K)^-1 rho, in which rho may be zero.
        system = jnp.eye(len(around), dtype=share.dtype) - known * entries(around, around)
        return (between * jnp.linalg.solve(system, known * between)).sum(0)

    width = outer.shape[-1]
    together = max(1, min(64, _TOGETHER // (width * (width + inner.shape[-1]))))
    return jax.lax.map(in_window, (inner, outer), batch_size=together)


def _windows(sizes: tuple[int, ...], reach: tuple[int, ...], counted: np.ndarray) -> list[Windows]:
    """Tiles that cover the grid, and around each the points that count, in groups of about as many.

    Returns:
        Pairs of the points of tiles (tiles, points), and those that count around them (tiles, most), filled up with the
        number of all points.
    """
    tile = tuple(min(max(h, _TILE[len(sizes)]), m) for h, m in zip(reach, sizes, strict=True))
    starts = itertools.product(*(range(0, m, t) for m, t in zip(sizes, tile, strict=True)))
    inner, outer = [], []
    for start in starts:
        inner.append(_box(start, tile, sizes))
        wide = tuple(min(t + 2 * h, m) for t, h, m in zip(tile, reach, sizes, strict=True))
        around = _box(tuple(s - h for s, h in zip(start, reach, strict=True)), wide, sizes)
        outer.append(around[counted[around]])
    counts = np.array([len(points) for points in outer])
    most = np.ceil(np.log2(np.maximum(counts, 8))).astype(int)
    groups = []
    work = 0.0
    for group in np.unique(most):
        chosen = np.flatnonzero(most == group)
        width = max(int(counts[chosen].max()), 1)
        # n^3 / 3 of a factorisation, 2 n^2 for each point
        work += len(chosen) * width**2 * (width / 3 + 2 * len(inner[0]))
        filled = np.full((len(chosen), width), math.prod(sizes))
        for row, i in zip(filled, chosen, strict=True):
            row[: counts[i]] = outer[i]
        groups.append((np.stack([inner[i] for i in chosen]), filled))
    if work > _MOST:
        raise expected(
            "variances that depend on few points nearby",
            f"{reach} points on either side, up to {counts.max()} gaps or noisy ones, {work:.1g} multiplications",
            "use posterior_mean(y) for the mean, or a smaller reach, posterior(y, reach=...)",
        )
    return groups


def _box(start: tuple[int, ...], extent: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """Flat indices of a box on the torus."""
    axes = [(s + np.arange(n)) % m for s, n, m in zip(start, extent, sizes, strict=True)]
    return np.ravel_multi_index(tuple(np.meshgrid(*axes, indexing="ij")), sizes).reshape(-1)
