r"""Circulant matrices: the covariances of stationary processes on rings, by their eigenvalues.

A symmetric circulant matrix is diagonal in the discrete Fourier transform, and, because its eigenvalues are even in
the frequency, in the real one of Hartley, :math:`H_{jk} = \mathrm{cas}(2\pi jk / M) / \sqrt M`, cas = cos + sin:
:math:`C = H\, \mathrm{diag}(\lambda)\, H` with :math:`H = H^\top = H^{-1}`. In D dimensions jk / M is a sum over them.

Vectors are flat, the last dimension of the grid running fastest. Several grids one after the other, as an additive
kernel has, make a block diagonal matrix; everything here holds block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.math.gaussians import log_determinant
from numpyro_dgp.math.linalg import times_transpose

__all__ = [
    "Blocks",
    "CirculantMatrix",
    "even_part",
    "hartley",
    "kl_between_circulants",
    "kl_dense_to_circulant",
    "sandwich_trace",
    "split",
]

Blocks = tuple[tuple[int, ...], ...]


GridFunction = Callable[[tuple[int, ...], tuple[int, ...]], Callable[..., Array]]


def _over(blocks: Blocks, function: GridFunction, *arrays: Array) -> Array:
    """``function(sizes, axes)`` applied to every grid (..., m_1, ..., m_D) in flat arrays (..., M), flat again."""
    parts, start = [], 0
    for block in blocks:
        size, axes = math.prod(block), tuple(range(-len(block), 0))
        grids = [a[..., start : start + size].reshape(*a.shape[:-1], *block) for a in arrays]
        result = function(block, axes)(*grids)
        parts.append(result.reshape(*result.shape[: result.ndim - len(block)], size))
        start += size
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def split(x: Array, blocks: Blocks) -> list[Array]:
    """Flat arrays (..., M) grid by grid."""
    return jnp.split(x, np.cumsum([math.prod(block) for block in blocks])[:-1], -1)


def _half(grid: Array, block: tuple[int, ...]) -> Array:
    return grid[..., : block[-1] // 2 + 1]


def hartley(x: Array, blocks: Blocks) -> Array:
    """The orthogonal Hartley transform of flat vectors (..., M); its own inverse.

    Example:
        >>> x = jnp.arange(6.0)
        >>> bool(jnp.allclose(hartley(hartley(x, ((2, 3),)), ((2, 3),)), x, atol=1e-5))
        True
    """

    def transform(block: tuple[int, ...], axes: tuple[int, ...]) -> Callable[[Array], Array]:
        def apply(grid: Array) -> Array:
            waves = jnp.fft.fftn(grid, axes=axes, norm="ortho")
            return waves.real - waves.imag  # sum_j x_j (cos + sin)(2 pi j k / M) / sqrt M

        return apply

    return _over(blocks, transform, x)


def even_part(x: Array, blocks: Blocks) -> Array:
    """The mean of flat numbers (..., M) by frequency and by opposite frequency."""

    def mean(block: tuple[int, ...], axes: tuple[int, ...]) -> Callable[[Array], Array]:
        # (x_k + x_{-k}) / 2: the flip takes k to m - 1 - k, the roll that to m - k.
        return lambda grid: 0.5 * (grid + jnp.roll(jnp.flip(grid, axes), (1,) * len(axes), axes))

    return _over(blocks, mean, x)


@pytree
class CirculantMatrix:
    r"""A symmetric circulant matrix, by its eigenvalues: :math:`C = H\, \mathrm{diag}(\lambda)\, H`.

    Args:
        spectrum: eigenvalues (..., M), even in the frequency, in the order of the discrete Fourier transform.
        blocks: the sizes of the grid in every dimension, in a tuple with one entry per grid.

    Example:
        >>> C = CirculantMatrix.from_row(jnp.array([2.0, 1.0, 0.0, 1.0]), ((4,),))
        >>> print(C.apply(jnp.array([1.0, 0.0, 0.0, 0.0])), float(C.trace().round(3)))
        [2. 1. 0. 1.] 8.0
    """

    spectrum: Array
    blocks: Blocks = static()

    @classmethod
    def from_row(cls, row: Array, blocks: Blocks) -> CirculantMatrix:
        """From first rows (..., M), even: ``row[j] == row[-j]``."""
        return cls(_over(blocks, lambda block, axes: lambda grid: jnp.fft.fftn(grid, axes=axes).real, row), blocks)

    def row(self) -> Array:
        """First rows (..., M); for several blocks those of each."""
        return _over(self.blocks, lambda block, axes: lambda grid: jnp.fft.ifftn(grid, axes=axes).real, self.spectrum)

    def power(self, exponent: float) -> CirculantMatrix:
        """The matrix to any power: ``power(0.5)`` is its symmetric square root, ``power(-1)`` its inverse."""
        return CirculantMatrix(self.spectrum**exponent, self.blocks)

    def apply(self, x: Array) -> Array:
        """C x for vectors (..., M), by two real transforms."""

        def product(block: tuple[int, ...], axes: tuple[int, ...]) -> Callable[[Array, Array], Array]:
            def apply(spectrum: Array, grid: Array) -> Array:
                # C x = F^-1 (lambda * F x), of real x the half of the frequencies
                waves = jnp.fft.rfftn(grid, axes=axes)
                return jnp.fft.irfftn(_half(spectrum, block) * waves, s=block, axes=axes)

            return apply

        return _over(self.blocks, product, self.spectrum, x)

    def solve(self, x: Array) -> Array:
        """C^{-1} x for vectors (..., M)."""
        return self.power(-1).apply(x)

    def sqrt(self, x: Array) -> Array:
        """C^{1/2} x for vectors (..., M), the symmetric root: standard normal numbers become a draw from N(0, C)."""
        return self.power(0.5).apply(x)

    def log_determinant(self) -> Array:
        """log det C, shape (...,)."""
        return jnp.log(self.spectrum).sum(-1)

    def trace(self) -> Array:
        """The trace (...,)."""
        return self.spectrum.sum(-1)

    def diagonal(self) -> Array:
        """The diagonal (..., M), constant on every block."""

        def constant(block: tuple[int, ...], axes: tuple[int, ...]) -> Callable[[Array], Array]:
            return lambda grid: jnp.broadcast_to(grid.mean(axes, keepdims=True), grid.shape)  # C_jj = mean of lambda

        return _over(self.blocks, constant, self.spectrum)

    def matrix(self) -> Array:
        """The dense matrix (..., M, M)."""
        size = self.spectrum.shape[-1]
        return CirculantMatrix(self.spectrum[..., None, :], self.blocks).apply(jnp.eye(size, dtype=self.spectrum.dtype))

    def hadamard(self, other: CirculantMatrix) -> CirculantMatrix:
        """The elementwise product: a circulant matrix with the product of the rows.

        Its eigenvalue at frequency zero, which counts most where diagonals are smooth, is a sum of positive numbers and
        computed as one: transforms round it to the scale of the largest, which can be that of an inverse.
        """
        product = CirculantMatrix.from_row(self.row() * other.row(), self.blocks)

        def exact(block: tuple[int, ...], axes: tuple[int, ...]) -> Callable[[Array, Array], Array]:
            # lambda_0 of C o C' is sum_j c_j c'_j = sum_k lambda_k lambda'_k / M (Parseval).
            return lambda grid, pairs: grid.at[(..., *(0,) * len(block))].set(pairs.mean(axes))

        return CirculantMatrix(_over(self.blocks, exact, product.spectrum, self.spectrum * other.spectrum), self.blocks)

    def sandwich(self, v: Array, other: CirculantMatrix, w: Array) -> Array:
        r""":math:`\mathrm{tr}(C\, \mathrm{diag}(v)\, C'\, \mathrm{diag}(w)) = w^\top (C \circ C') v`, in O(M log M).

        Source: Tebbutt (2016), lemmas 3.4.1 and 3.4.2; see :func:`sandwich_trace`.
        """
        return (w * self.hadamard(other).apply(v)).sum(-1)


def sandwich_trace(a: Array, v: Array, b: Array, w: Array, block: tuple[int, ...]) -> Array:
    r""":math:`\mathrm{tr}(\mathrm{circ}(a)\, \mathrm{diag}(v)\, \mathrm{circ}(b)\, \mathrm{diag}(w))`, any circulants.

    With :math:`\mathrm{circ}(a)_{mn} = a_{(n - m) \bmod M}` it is :math:`w^\top \mathrm{circ}(c)\, v` where
    :math:`c_m = a_m b_{(-m) \bmod M}`.

    Args:
        a, b: first rows (..., M), not necessarily even.
        v, w: diagonals (..., M).
        block: sizes of the grid.

    Source: Tebbutt (2016), lemma 3.4.2, which has :math:`b_{M - m - 1}`: off by one.
    """
    axes = tuple(range(-len(block), 0))
    a, v, b, w = (x.reshape(*x.shape[:-1], *block) for x in (a, v, b, w))
    c = a * jnp.roll(jnp.flip(b, axes), (1,) * len(axes), axes)  # a_m b_{-m}
    # (circ(c) v)_m = sum_n c_{n-m} v_n: a correlation, conj(F c) * F v
    waves = jnp.conj(jnp.fft.rfftn(c, axes=axes)) * jnp.fft.rfftn(v, axes=axes)
    return (w * jnp.fft.irfftn(waves, s=block, axes=axes)).sum(axes)


def kl_between_circulants(q: tuple[Array, CirculantMatrix], p: tuple[Array, CirculantMatrix]) -> Array:
    r""":math:`\mathrm{KL}[N(m_q, C_q) \,\|\, N(m_p, C_p)]`, shape (...,), in O(M log M)."""
    shift, ratio = q[0] - p[0], q[1].spectrum / p[1].spectrum
    square = (shift * p[1].solve(shift)).sum(-1)
    # (d' C_p^-1 d + sum_k (r_k - 1 - log r_k)) / 2, d = m_q - m_p, r = lambda_q / lambda_p
    return 0.5 * (square + (ratio - 1 - jnp.log(ratio)).sum(-1))


def kl_dense_to_circulant(loc: Array, scale_tril: Array, p: tuple[Array, CirculantMatrix]) -> Array:
    r""":math:`\mathrm{KL}[N(m, R R^\top) \,\|\, N(m_p, C_p)]` for a dense factor R (..., M, M): O(M^2)."""
    covariance, C = times_transpose(scale_tril), p[1]
    shift = loc - p[0]
    trace = jnp.trace(CirculantMatrix(C.spectrum[..., None, :], C.blocks).solve(covariance), axis1=-2, axis2=-1)
    log_ratio = C.log_determinant() - 2 * log_determinant(scale_tril)
    # (tr C_p^-1 R R' + d' C_p^-1 d - M + log|C_p| - 2 log|R|) / 2
    return 0.5 * (trace + (shift * C.solve(shift)).sum(-1) - loc.shape[-1] + log_ratio)
