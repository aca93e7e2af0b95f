r"""Local windows: values of a process on a ring, computed from the grid points around an input.

A value f(x) depends on the grid through weights that decay with the distance of a point from x: the rows of a square
root, :math:`\alpha(x) = C^{-1/2} k(Z, x)`, or the cardinal functions :math:`\chi(x) = C^{-1} k(Z, x)`. Of the M points
only the n nearest are used. Their weights are those of a ring of n points with the same step, laid around x: the
transforms of both rings are one function of the frequency, at n or at M places, so that the weights are periodic sums
of the same ones,

.. math:: \chi^{(n)}_d(\delta) = \sum_i \chi_{d + i n}(\delta) ,

and differ by what lies outside of n points. Everything about one input then costs O(n log n), or O(n^2) where values on
the grid are correlated a posteriori, whatever M is. The moments of f(x) are those of a process on a ring: variances are
positive, and those of the prior come back, as k(0) on the small ring.

How far n points reach is known from the weights alone. Let r be the root of the share of their squares that lies in the
outer quarter of the window, more than 3n/8 points from x. The prior mean of f(x) is a sum of weights times independent
N(0, 1) numbers at the points, so the error of the mean has, in standard deviations of the prior, the square

.. math:: \sum_{|d| < n/2} \bigl(\chi^{(n)}_d - \chi_d\bigr)^2 + \sum_{|d| \ge n/2} \chi_d^2 ,

of which both parts come from weights beyond n/2 points. Weights that fall by a constant factor per point leave
:math:`r^{4/3}` there, since n/2 is 4/3 of 3n/8; those of a kernel that is too long for the window are spread evenly
over it, with r = 1/2. Up to r = 1/100 the window is accepted. The lengthscale of a layer that is trained changes from
step to step, and so r, which needs three rows of weights, is part of the compiled program: beyond 1/100 values are NaN.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.fft import next_fast_len

from numpyro_dgp._checks import expected, is_concrete
from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.kernels import Kernel, as_kernel
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.rings.circulant import hartley
from numpyro_dgp.rings.features import NUGGET, RingFeatures, position
from numpyro_dgp.rings.spectra import Ring, components

__all__ = ["Window", "around", "neighbours"]

# Points per dimension, by the number of dimensions, of the ring on which the range of a kernel's weights is found.
_LARGEST = {1: 4096, 2: 128, 3: 32}
# A window is too small if more than this share of the length of its weights lies in its outer quarter.
_TOO_SHORT = 1e-2
# Where weights are looked at for that: inputs this many steps behind the nearest grid point.
_OFFSETS = np.array([0.0, 0.25, 0.5])


def around(ring: Ring, sizes: tuple[int, ...]) -> Ring:
    """A ring of ``sizes`` points with the steps of ``ring``, whose middle point is the origin."""
    step = ring.length / jnp.asarray(ring.sizes, ring.dtype)
    middle = jnp.asarray([n // 2 for n in sizes], ring.dtype)
    return Ring(-middle * step, (jnp.asarray(sizes, ring.dtype) - middle) * step, sizes)


@pytree
class Window:
    """The covariances of inputs x (N, D) with the n grid points around each of them; :meth:`of` builds it.

    Args:
        ring: the whole grid, M points.
        features: of the kernels on a ring of n points: one for all outputs, or one per output (P of them).
        first: index of the first of the n points of every input, by dimension (N, D).
        offset: of the inputs from their nearest grid points, units of the input (N, D).
        rows: covariances with the whitened Hartley coordinates of their small rings (P, N, n), P = 1 where shared.
    """

    ring: Ring
    features: tuple[RingFeatures, ...]
    first: Array
    offset: Array
    rows: Array

    @classmethod
    def of(
        cls, kernels: tuple[Kernel, ...], ring: Ring, neighbours: tuple[int, ...], x: Array, nugget: float = NUGGET
    ) -> Window:
        """From the kernels, the whole grid, the number of ``neighbours`` in every dimension, inputs x (N, D), and the
        variance of noise on the grid's values, relative to the kernel's."""
        sizes = tuple(min(n, m) for n, m in zip(neighbours, ring.sizes, strict=True))
        small = around(ring, sizes)
        features = tuple(RingFeatures.of(k, small, nugget) for k in kernels)
        nearest, delta = position(ring, x, jnp.round)
        middle, whole = (jnp.asarray(s, jnp.int32) for s in ([n // 2 for n in sizes], ring.sizes))
        offset = delta * (ring.length.astype(x.dtype) / whole)  # of x from its nearest grid point
        rows = jnp.stack([f.whitened(offset) for f in features])
        return cls(ring, features, (nearest - middle) % whole, offset, rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Neighbours in every dimension."""
        return self.features[0].ring.sizes

    def weights(self, power: float) -> Array:
        r""":math:`C^{-1/2 - p}\, k(Z, x)` at the n points (P, N, n): :math:`\alpha` for p = 0, :math:`\chi` for 1/2.

        NaN in compiled programs where values would raise.

        Raises:
            ValueError: where more than a hundredth of their length lies in the outer quarter of the window.
        """
        scale = _scale(self.features, power, self.rows.dtype)
        cut = [(d, n) for d, (n, m) in enumerate(zip(self.sizes, self.ring.sizes, strict=True)) if n < m]
        if cut:
            sample = _sample(jax.lax.stop_gradient(self.features), power)
            # r^2, the share of squares that lies more than 3 n / 8 points from x.
            outer: Any = sum(_left_out(sample, self.sizes, d)[min(3 * n // 8, n // 2 - 1)] for d, n in cut)
            if not is_concrete(outer):
                scale = jnp.where(outer > _TOO_SHORT**2, jnp.nan, scale)
            elif outer > _TOO_SHORT**2:
                raise expected(
                    "the neighbours of a dgp.Grid to reach as far as its kernel",
                    f"{self.sizes} with {100 * math.sqrt(outer):.2g} % of the weights in their outer quarter",
                    "use grid.local(kernel, scaled=...) at the largest lengthscale that a prior or constraint allows",
                )
        return hartley(self.rows * scale, (self.sizes,))  # H Lambda^-p A', as A' = Lambda^-1/2 H k(Z, x)

    def take(self, values: Array) -> Array:
        """Of values on the whole grid (P, M) those around every input: (P, N, n)."""
        grid = values.reshape(-1, *self.ring.sizes)
        # n - 1 points again: windows past the end are slices
        wide = jnp.pad(grid, [(0, 0), *((0, n - 1) for n in self.sizes)], mode="wrap")
        shape, zero = (len(grid), *self.sizes), jnp.zeros((), self.first.dtype)
        slices = jax.vmap(lambda i: jax.lax.dynamic_slice(wide, (zero, *i), shape), out_axes=1)(self.first)
        return slices.reshape(len(grid), -1, math.prod(self.sizes))

    def entries(self, row: Array) -> Array:
        """Of circulant matrices with first rows (P, M) their entries between the n points: (P, n, n)."""
        points = np.stack(np.meshgrid(*map(np.arange, self.sizes), indexing="ij"), -1).reshape(-1, len(self.sizes))
        lags = (points[:, None] - points[None]) % np.array(self.ring.sizes)  # C_ij = c_{i - j}
        return row[:, np.ravel_multi_index(tuple(np.moveaxis(lags, -1, 0)), self.ring.sizes)]

    def form(self, y: Array, row: Array) -> Array:
        """Quadratic forms of rows y (P, N, n) with circulant matrices of first rows (P, M): (P, N)."""
        return (matmul(y, self.entries(row)) * y).sum(-1)  # y_n' circ(row_p) y_n

    def conditional_variance(self) -> Array:
        """Variances at the inputs given the values on the grid (P, N)."""
        return jnp.stack([f.conditional_variance(self.offset) for f in self.features])


def _scale(features: tuple[RingFeatures, ...], power: float, dtype: Any) -> Array:
    r""":math:`\Lambda^{-p}` of small rings (P, 1, n)."""
    return jnp.stack([f.spectrum for f in features])[:, None].astype(dtype) ** -power


def _sample(features: tuple[RingFeatures, ...], power: float) -> Array:
    """Weights at the offsets that stand for all (P, 3, n)."""
    ring = features[0].ring
    offset = jnp.asarray(_OFFSETS, ring.dtype)[:, None] * (ring.length / jnp.asarray(ring.sizes, ring.dtype))
    rows = jnp.stack([f.whitened(offset) for f in features])
    return hartley(rows * _scale(features, power, rows.dtype), (ring.sizes,))


def _left_out(weights: Array, sizes: tuple[int, ...], d: int) -> Array:
    """What share of squared weights (..., n) lies more than 0, 1, ... points from the middle in dimension d."""
    square = jnp.square(weights).reshape(-1, *sizes)
    along = square.sum([i for i in range(1, square.ndim) if i != d + 1]).max(0)  # the largest of all inputs (n_d,)
    distance = np.abs(np.arange(sizes[d]) - sizes[d] // 2)
    at_distance = jnp.zeros(distance.max() + 2, along.dtype).at[distance].add(along)
    beyond = jnp.cumsum(at_distance[::-1])[::-1]  # sums from distance d on, d = 0, 1, ...
    return beyond[1:] / beyond[0]


def neighbours(kernel: Kernel, ring: Ring, tol: float, power: float, nugget: float = NUGGET) -> tuple[int, ...]:
    r"""How many grid points per dimension hold all but the share ``tol`` of the length of the weights of any input.

    Args:
        kernel: stationary, with concrete hyperparameters; additive over columns or not.
        ring: the grid.
        tol: square root of the sum of squares of the weights left out, relative to all weights.
        power: of :meth:`Window.weights`.
        nugget: of :meth:`Window.of`.

    Example:
        >>> from numpyro_dgp.kernels import RBF
        >>> neighbours(RBF(), Ring(0.0, 1000.0, 2000), 1e-3, 0.0)
        (12,)
    """
    found = dict.fromkeys(range(len(ring.sizes)), 2)
    for dims, part in components(as_kernel(kernel), len(ring.sizes)).items():
        whole = ring.on(dims)
        small = around(whole, tuple(min(_LARGEST[len(dims)], m) for m in whole.sizes))
        weights = _sample((RingFeatures.of(part, small, nugget),), power)
        for i, d in enumerate(dims):
            left = np.asarray(_left_out(weights, small.sizes, i))
            enough = np.flatnonzero(left <= tol**2 / len(dims))
            # h points on either side of x: the middle of 2 h + 2 points is number h + 1.
            reach = whole.sizes[i] if enough[0] + 1 == len(left) else next_fast_len(2 * int(enough[0]) + 2, real=True)
            found[d] = max(found[d], min(reach, whole.sizes[i]))
    return tuple(found.values())
