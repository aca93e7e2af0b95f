r"""Stationary kernels made periodic: rings, spectra by Poisson summation, components of additive kernels.

On a ring of circumference :math:`\Delta` a stationary kernel k becomes :math:`\sum_n k(r + n \Delta)`, which by
Poisson's formula is a Fourier series whose coefficients are the spectral density :math:`\varrho` of k at
:math:`\omega_n = 2\pi n / \Delta`:

.. math:: k_\Delta(r) = \sum_{n \in Z^D} k(r + n \Delta)
          = \frac{1}{|\Delta|} \sum_{n \in Z^D} \varrho(\omega_n)\, e^{i \omega_n r} ,

with :math:`|\Delta|` the product over dimensions. On a grid of m points frequencies n and :math:`n + \nu m` look the
same (aliases). The sum of :math:`\varrho` over the aliases of n is therefore an eigenvalue of the covariance of the
grid: positive in any precision, where the transform of a row of the kernel is rounded to both sides of zero.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expect_kind, expected, require_finite, violated
from numpyro_dgp._data import own_numbers
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.kernels.base import Constant, Kernel, Product, as_kernel
from numpyro_dgp.kernels.terms import Summand
from numpyro_dgp.math.linalg import matmul

__all__ = [
    "MAX_SIZE",
    "NEAR",
    "Ring",
    "aliases",
    "components",
    "frequencies",
    "periodised",
    "require_ring",
    "spectral_mass",
    "spectrum",
]

# By the number of dimensions of the ring: how many aliases on either side are summed one by one, and the number of
# nodes of the quadrature for the rest of the sum.
NEAR = {1: 8, 2: 2, 3: 1}
_TAIL = {1: 4, 2: 8, 3: 5}
# Images of the kernel on either side that are summed, after distances are wrapped to at most half the ring.
_IMAGES = {1: 4, 2: 2, 3: 1}
# Phases are reduced in 32-bit integers, eight bits of a grid index at a time (``rings.features``): up to here.
MAX_SIZE = 2**22
_BLOCK = 64
# Rounding errors of inputs on a ring far from zero, relative to its steps, up to which it is accepted.
_RESOLVED = 0.05


@pytree
class Ring:
    r"""A regular grid on a ring, or on a torus in two or three dimensions.

    The grid points are :math:`z_j = low + (high - low)\, j / size`. ``high`` is the same point of the ring as ``low``
    and not a separate grid point.

    Args:
        low: where the ring begins, units of the input; a number, or (D,).
        high: where it closes; a number, or (D,).
        size: grid points, an integer or one per dimension (D of them, D at most 3).

    Raises:
        ValueError: bounds that are not finite or not in order, or so far from zero that the precision of JAX does not
            resolve the steps between them; a size that is not a positive integer.

    Example:
        >>> from numpyro_dgp.rings import Ring
        >>> print(Ring(0.0, 2.0, 4).points()[:, 0])
        [0.  0.5 1.  1.5]
    """

    low: ArrayLike
    high: ArrayLike
    size: int | tuple[int, ...] = static()

    def __post_init__(self) -> None:
        sizes = (self.size,) if isinstance(self.size, int) else tuple(np.atleast_1d(self.size).tolist())
        expect(
            1 <= len(sizes) <= 3 and all(isinstance(m, int) and 2 <= m <= MAX_SIZE for m in sizes),
            f"size to be one, two or three integers from 2 to {MAX_SIZE}",
            self.size,
            "more input columns need an additive kernel, k.on(0) + k.on(1) + ..., or dgp.Points",
        )
        for name, given in (("low", self.low), ("high", self.high)):
            end = given if isinstance(given, int | float) else own_numbers(name, given)
            object.__setattr__(self, name, end)
            if np.shape(end) not in ((), (len(sizes),)):
                raise expected(
                    f"{name} to be a number or one per dimension, shape ({len(sizes)},)",
                    f"shape {np.shape(end)}",
                    f"size = {self.size} has {len(sizes)} dimension(s)",
                )
            require_finite(name, end, "give finite ends of the ring")
        if violated(lambda low, high: low < high, self.low, self.high):
            raise expected(
                "low < high", f"{self.low} and {self.high}", "leave room for the data and six lengthscales between them"
            )
        object.__setattr__(self, "size", sizes)
        self._require_resolution()

    def _require_resolution(self) -> None:
        if violated(self._is_resolved, self.low, self.high):
            low, high = (np.asarray(end, float) for end in (self.low, self.high))
            step = (high - low) / np.array(self.sizes)
            raise expected(
                f"ends whose steps {self.dtype} resolves",
                f"{low} to {high} with steps of {step}",
                "subtract the first input from low, high and all inputs, in double precision",
            )

    def _is_resolved(self, low: Any, high: Any) -> Any:
        """Whether steps are larger than the rounding of the ends, or one end is near zero."""
        length, eps = high - low, float(jnp.finfo(self.dtype).eps)
        step = length / np.array(self.sizes)
        near = (abs(low) <= length) | (abs(high) <= length)
        return near | ((eps * abs(low) <= _RESOLVED * step) & (eps * abs(high) <= _RESOLVED * step))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Grid points in every dimension."""
        return self.size  # type: ignore[return-value]

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.result_type(self.low, self.high, float)

    @property
    def origin(self) -> Array:
        """The point where the ring begins (D,)."""
        return jnp.broadcast_to(jnp.asarray(self.low, self.dtype), (len(self.sizes),))

    @property
    def length(self) -> Array:
        """Circumferences (D,)."""
        return jnp.broadcast_to(jnp.asarray(self.high, self.dtype), (len(self.sizes),)) - self.origin

    def points(self) -> Array:
        """The grid points (M, D), the last dimension running fastest."""
        index = np.stack(np.meshgrid(*[np.arange(m) for m in self.sizes], indexing="ij"), -1)
        steps = index.reshape(-1, len(self.sizes)) / np.array(self.sizes)
        return self.origin + jnp.asarray(steps, self.dtype) * self.length

    def on(self, dims: tuple[int, ...]) -> Ring:
        """The ring of some of the dimensions."""
        index = np.array(dims)
        return Ring(self.origin[index], (self.origin + self.length)[index], tuple(self.sizes[d] for d in dims))

    def wrap(self, difference: Array) -> Array:
        """Differences (..., D) as the shortest way round the ring."""
        return difference - self.length * jnp.round(difference / self.length)  # between -Delta / 2 and Delta / 2


def components(kernel: Kernel, dims: int) -> dict[tuple[int, ...], Kernel]:
    """The terms of an additive kernel by the columns they act on: ``{(0,): k0, (1,): k1}`` for k0.on(0) + k1.on(1).

    Example:
        >>> from numpyro_dgp.kernels import RBF
        >>> list(components(RBF().on(0) + 2.0 * RBF().on(1) + RBF().on(0), 2))
        [(0,), (1,)]
    """
    found: dict[tuple[int, ...], Kernel] = {}
    for summand in kernel.expanded():
        seen = {factor.columns for factor in summand.factors}
        shared = seen.pop() if len(seen) == 1 else None
        columns = tuple(range(dims)) if shared is None else shared
        if max(columns) >= dims:
            raise expected(
                f"a kernel on columns 0 to {dims - 1} of a {dims}-dimensional ring",
                f".on{columns}",
                "count columns from 0",
            )
        term = _term(summand, shared)
        found[columns] = found[columns] + term if columns in found else term
    return found


def _term(summand: Summand, columns: tuple[int, ...] | None) -> Kernel:
    """A summand as a kernel of inputs that consist of ``columns`` only, if all its factors act on these."""
    kernels = [f.kernel if f.columns in (None, columns) else f.kernel.on(*f.columns) for f in summand.factors]
    constants = [Constant(summand.scale)] if summand.scales or not kernels else []
    return reduce(Product, kernels + constants)


def frequencies(sizes: tuple[int, ...]) -> np.ndarray:
    """The frequencies of a grid as integers (M, D), each from -m/2 to m/2, in the order of the discrete transform."""
    axes = [np.rint(np.fft.fftfreq(m) * m).astype(np.int32) for m in sizes]
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(sizes))


def aliases(sizes: tuple[int, ...]) -> np.ndarray:
    """The alias numbers ν, an array (aliases, D), that are summed one by one."""
    near = range(-NEAR[len(sizes)], NEAR[len(sizes)] + 1)
    return np.array(list(itertools.product(near, repeat=len(sizes))), np.int32)


@lru_cache
def _tail_rule(near: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Gaussian quadrature for sums: :math:`\sum_\nu g(\nu) \approx \sum_k \beta_k\, g(\nu_k)`, :math:`\nu` > ``near``.

    The weights :math:`\beta` are positive. It is exact for :math:`\nu^{-2}` times a polynomial in :math:`1 / \nu` of
    degree ``2 nodes - 1``: the nodes and weights of the discrete measure :math:`\sum_\nu \nu^{-2} \delta_{1/\nu}`, by
    Stieltjes' recurrence. Its own far end is an integral.
    """
    last = 20_000
    a = np.arange(near + 1, last + 1.0)
    x, w = np.polynomial.legendre.leggauss(20)
    end = 1 / (last + 0.5)
    # Points s = 1 / nu with masses nu^-2; beyond the last nu an integral, d nu / nu^2 = ds.
    s, mass = np.concatenate([1 / a, 0.5 * end * (x + 1)]), np.concatenate([a**-2, 0.5 * end * w])
    diagonal, beside, before, now, beta = [], [], np.zeros_like(s), np.full_like(s, mass.sum() ** -0.5), 0.0
    for _ in range(nodes):
        # s p_i = beta_{i+1} p_{i+1} + alpha_i p_i + beta_i p_{i-1}, p orthonormal under the masses.
        diagonal.append((mass * s * now**2).sum())
        following = (s - diagonal[-1]) * now - beta * before
        beta = np.sqrt((mass * following**2).sum())
        beside.append(beta)
        before, now = now, following / beta
    # Nodes s_k and weights mu_0 u_1k^2 of the tridiagonal matrix (Golub and Welsch);
    # g(nu) = s^2 (g / s^2) puts 1 / s_k^2 into the weights of g.
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1))
    return 1 / values, mass.sum() * vectors[0] ** 2 / values**2


def spectral_mass(kernel: Kernel, ring: Ring, multiples: Array) -> Array:
    """Variance of the periodised kernel at the lattice frequencies ``multiples`` (..., D): shape (...,)."""
    omega = 2 * math.pi * multiples / ring.length
    # sigma_n^2 = rho(omega_n) / |Delta|
    return as_kernel(kernel).cast(omega.dtype).spectral_density(omega) / jnp.prod(ring.length)


def require_ring(ring: Any) -> None:
    """Raise unless ``ring`` is a :class:`Ring`."""
    expect_kind(ring, Ring, "a dgp.rings.Ring", "dgp.rings.regular(x, margin) makes one")


def spectrum(kernel: Kernel, ring: Ring) -> Array:
    r"""Eigenvalues (M,) of the covariance of the periodised kernel on the grid, in the order of the discrete transform.

    .. math:: \lambda_k = \frac{M}{|\Delta|} \sum_{\nu \in Z^D} \varrho\bigl(2\pi (k + \nu m) / \Delta\bigr)

    The nearest aliases are summed one by one, the others by a quadrature with positive weights. Relative error: 1e-12
    in one dimension; below 1e-7 in two and 1e-4 in three; ``Matern12``, whose sums hardly converge, 1e-3 and 2e-2.

    Args:
        kernel: a stationary kernel with a ``spectral_density``.
        ring: the grid.

    Raises:
        ValueError: a kernel without a spectral density.

    Example:
        >>> from numpyro_dgp.kernels import RBF
        >>> ring = Ring(0.0, 10.0, 8)
        >>> row = periodised(RBF(), ring, ring.points()[:1], ring.points())[0]
        >>> bool(jnp.allclose(spectrum(RBF(), ring), jnp.fft.fft(row).real, atol=1e-5))
        True

    Source: Tebbutt (2016), section 1.3, with the kernel of equation 1.40 continued to all images.
    """
    D = len(ring.sizes)
    t, w = _tail_rule(NEAR[D], _TAIL[D])
    one = np.arange(-NEAR[D], NEAR[D] + 1.0)
    # nu: near aliases one by one, the nodes of the rule for far ones on either side.
    nodes = np.array(list(itertools.product(np.concatenate([-t, one, t]), repeat=D)))
    weights = np.array(list(itertools.product(np.concatenate([w, np.ones_like(one), w]), repeat=D))).prod(-1)
    spare = -len(nodes) % _BLOCK if len(nodes) > _BLOCK else 0
    blocks = (
        jnp.asarray(np.pad(nodes, ((0, spare), (0, 0))).reshape(-1, min(_BLOCK, len(nodes)), D), ring.dtype),
        jnp.asarray(np.pad(weights, (0, spare)).reshape(-1, min(_BLOCK, len(nodes))), ring.dtype),
    )
    k = jnp.asarray(frequencies(ring.sizes), ring.dtype)

    @jax.checkpoint
    def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        a, w = block
        mass = spectral_mass(kernel, ring, k[:, None, :] + a * jnp.asarray(ring.sizes, ring.dtype))
        return total + matmul(mass, w), None

    total, _ = jax.lax.scan(add, jnp.zeros(len(k), ring.dtype), blocks)
    return len(k) * total  # lambda_k = M sum_nu sigma^2_{k + nu m}


def periodised(kernel: Kernel, ring: Ring, X1: Array, X2: Array) -> Array:
    r"""The periodised kernel :math:`\sum_n k(x - x' + n \Delta)` between inputs (N1, D) and (N2, D), or (..., N, D).

    Differences are wrapped to at most half the ring; then 9 images in one dimension, 25 in two and 27 in three are
    summed. What is left out begins at :math:`k(4.5 \Delta)`, :math:`k(2.5 \Delta)` and :math:`k(1.5 \Delta)`. A sum
    over the spectrum would need several terms per pair for every grid point.
    """
    D = len(ring.sizes)
    difference = ring.wrap(X1[..., :, None, :] - X2[..., None, :, :])
    images = range(-_IMAGES[D], _IMAGES[D] + 1)
    shifts = jnp.asarray(np.array(list(itertools.product(images, repeat=D))), difference.dtype) * ring.length
    origin = jnp.zeros((1, D), difference.dtype)
    kernel = as_kernel(kernel)
    # One image after the other: all at once would need memory for 25 Gram matrices.
    return sum(kernel(difference[..., None, :] + shift, origin)[..., 0, 0] for shift in shifts)  # type: ignore[return-value]
