r"""S1: values of a process on a ring from the grid points around an input only.

A value f(x) depends on the grid through weights that decay with the distance of a point from x: the row of a square root,
:math:`c(x) = K^{-1/2} k(Z, x)`, or the cardinal function :math:`b(x) = K^{-1} k(Z, x)`. Of M points only the n nearest
count. Their weights are those of a ring of n points with the same step, laid around x: on the line both rings sample
the same function of the frequency, n or M times, so that their weights are its periodic sums,

.. math:: b^{(n)}_d(\theta) = \sum_w b_{d + w n}(\theta) ,

and differ by what lies outside of n points. Everything about one input then costs O(n log n), whatever M is, and the
moments of f(x) are those of a process on a ring: variances are positive, and those of the prior come back exactly.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import is_concrete
from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.circulant import hartley
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.linalg import matmul
from numpyro_dgp.ring_features import RingFeatures, position
from numpyro_dgp.spectra import Ring

__all__ = ["Window", "around"]

# The share of the weights' length in the outer half of a window from which it is refused.
_TOO_SHORT = 1e-2


def around(ring: Ring, sizes: tuple[int, ...]) -> Ring:
    """A ring of ``sizes`` points with the steps of ``ring``, whose middle point is the origin."""
    step = ring.length / jnp.asarray(ring.sizes, ring.dtype)
    middle = jnp.asarray([n // 2 for n in sizes], ring.dtype)
    return Ring(-middle * step, (jnp.asarray(sizes, ring.dtype) - middle) * step, sizes)


@pytree
class Window:
    """What inputs x (N, D) have to do with the n grid points around each of them; :meth:`of` builds it.

    Args:
        ring: the whole grid, M points.
        features: of the kernels on a ring of n points: one for all outputs, or one per output (Q of them).
        first: index of the first of the n points of every input, by dimension (N, D).
        offset: of the inputs from their nearest grid points, units of the input (N, D).
        rows: covariances with the whitened Hartley coordinates of their small rings (Q, N, n).
    """

    ring: Ring
    features: tuple[RingFeatures, ...]
    first: Array
    offset: Array
    rows: Array

    @classmethod
    def of(cls, kernels: tuple[Kernel, ...], ring: Ring, neighbours: tuple[int, ...], x: Array) -> Window:
        """From the kernels, the whole grid, the number of ``neighbours`` in every dimension and inputs x (N, D)."""
        sizes = tuple(min(n, m) for n, m in zip(neighbours, ring.sizes, strict=True))
        small = around(ring, sizes)
        features = tuple(RingFeatures.of(k, small) for k in kernels)
        nearest, theta = position(ring, x, jnp.round)
        middle, whole = (jnp.asarray(s, jnp.int32) for s in ([n // 2 for n in sizes], ring.sizes))
        offset = theta * (ring.length.astype(x.dtype) / whole)
        rows = jnp.stack([f.whitened(offset) for f in features])
        return cls(ring, features, (nearest - middle) % whole, offset, rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Neighbours in every dimension."""
        return self.features[0].ring.sizes

    def weights(self, power: float) -> Array:
        r""":math:`K^{-1/2 - p}\, k(Z, x)` at the n points (Q, N, n): c for the power p = 0, b for p = 1/2.

        Raises:
            ValueError: where more than a hundredth of their length lies in the outer half of the window.
        """
        spectrum = jnp.stack([f.spectrum for f in self.features])[:, None].astype(self.rows.dtype)
        found = hartley(self.rows * spectrum**-power, (self.sizes,))
        if is_concrete(found) and found.size:
            square = np.square(np.asarray(found, float))
            share = math.sqrt((square * _outer(self.sizes, self.ring.sizes)).sum(-1).max() / square.sum(-1).max())
            if share > _TOO_SHORT:
                raise ValueError(
                    f"expected the neighbours of a dgp.Grid to reach as far as its kernel, got {self.sizes} with "
                    f"{100 * share:.2g} % of the weights in their outer half: dgp.rings.neighbours(kernel, grid) says "
                    "how many; with learned hyperparameters take the largest lengthscale, or rules for whitened sites"
                )
        return found

    def take(self, values: Array) -> Array:
        """Of values on the whole grid (P, M) those around every input: (P, N, n)."""
        grid = values.reshape(-1, *self.ring.sizes)
        wide = jnp.pad(grid, [(0, 0), *((0, n - 1) for n in self.sizes)], mode="wrap")
        shape, zero = (len(grid), *self.sizes), jnp.zeros((), self.first.dtype)
        slices = jax.vmap(lambda i: jax.lax.dynamic_slice(wide, (zero, *i), shape), out_axes=1)(self.first)
        return slices.reshape(len(grid), -1, math.prod(self.sizes))

    def entries(self, row: Array) -> Array:
        """Of circulant matrices with first rows (P, M) their entries between the n points: (P, n, n)."""
        points = np.stack(np.meshgrid(*map(np.arange, self.sizes), indexing="ij"), -1).reshape(-1, len(self.sizes))
        lags = (points[:, None] - points[None]) % np.array(self.ring.sizes)
        return row[:, np.ravel_multi_index(tuple(np.moveaxis(lags, -1, 0)), self.ring.sizes)]

    def form(self, y: Array, row: Array) -> Array:
        """Quadratic forms of rows y (P, N, n) with circulant matrices of first rows (P, M): (P, N)."""
        return (matmul(y, self.entries(row)) * y).sum(-1)

    def conditional_variance(self) -> Array:
        """Variances at the inputs given the values on the grid (Q, N)."""
        return jnp.stack([f.conditional_variance(self.offset) for f in self.features])


def _outer(sizes: tuple[int, ...], whole: tuple[int, ...]) -> np.ndarray:
    """Which points of a window (n,) lie in its outer half, in a dimension in which it is not the whole ring."""
    axes = [np.abs(np.arange(n) - n // 2) > (n / 4 if n < m else n) for n, m in zip(sizes, whole, strict=True)]
    return np.array([any(found) for found in itertools.product(*axes)])
