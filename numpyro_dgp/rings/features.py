r"""Covariances of a process on a ring with the whitened values on its grid, by a trigonometric sum.

Let :math:`\sigma_n^2 = \varrho(\omega_n) / |\Delta|` be the variance of the process at the frequency n of the ring.
Only its part below (``NEAR`` + 1/2) m, seventeen times what the grid can resolve in one dimension, is observed on the
grid (``spectra.NEAR``). With a nugget :math:`\epsilon` it has the eigenvalues
:math:`\lambda_k = M \sum_\nu \sigma_{k + \nu m}^2 + \epsilon`, and a value at a grid position x that is :math:`\delta`
behind a grid point (both in steps) has with the whitened Hartley coordinate k the covariance

.. math:: A_k(x) = (\mathrm{Re} + \mathrm{Im})\; e^{2\pi i k x / m}
          \sum_{|\nu| \le \mathrm{NEAR}} F_{\nu k}\, e^{2\pi i \nu \delta},
          \qquad F_{\nu k} = \sqrt{M / \lambda_k}\; \sigma_{k + \nu m}^2 .

No digits cancel in this sum, and it needs no Gram matrix, no factorisation and no sum over images. The same algebra
gives the conditional variance as a sum of squares:

.. math:: k(x, x) - A A^\top = \mathrm{rest}
          + 4 \sum_{\nu < \nu'} (F F^\top)_{\nu\nu'} \sin^2(\pi (\nu - \nu') \delta) .

It depends on where x lies between two grid points only and is never negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect
from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.stationary import Stationary
from numpyro_dgp.kernels.terms import Summand
from numpyro_dgp.math.linalg import matmul, set_diagonal
from numpyro_dgp.rings.spectra import NEAR, Ring, aliases, frequencies, periodised, spectral_mass

__all__ = ["NUGGET", "RingFeatures", "Waves", "position", "random_waves"]

# Rounding errors of a Fourier transform hardly grow with its size: what single precision needs for a Gram matrix of a
# hundred inputs is enough for any grid, and in both precisions, so that these have the same model.
NUGGET = 2.4e-5


def _differences(alias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct differences (differences, D) of aliases ν < ν', and which of them each pair of aliases has.

    The second is an array (aliases, aliases), with the number of differences where ν >= ν'.
    """
    pairs = alias[:, None] - alias[None]
    earlier = np.triu(np.ones(pairs.shape[:2], bool), 1)
    distinct, which = np.unique(pairs[earlier], axis=0, return_inverse=True)
    index = np.full(pairs.shape[:2], len(distinct))
    index[earlier] = which.ravel()
    return distinct, index


@pytree
class RingFeatures:
    """One component of a process on a ring, ready to be called at inputs; :meth:`of` builds it.

    Args:
        kernel: the kernel before it is made periodic.
        ring: the grid.
        roots: F of the module's docstring (aliases, M).
        spectrum: eigenvalues of the covariance of the grid's values, nugget included (M,).
        variance: of the process, ().
        rest: the conditional variance on the grid points, ().
        between: what is added between them, by difference of aliases (differences,).
    """

    kernel: Kernel
    ring: Ring
    roots: Array
    spectrum: Array
    variance: Array
    rest: Array
    between: Array

    @classmethod
    def of(cls, kernel: Kernel, ring: Ring, nugget: float = NUGGET) -> RingFeatures:
        """From a stationary kernel with a spectral density.

        Args:
            kernel: k, before it is made periodic.
            ring: the grid.
            nugget: variance of the noise on the grid's values, relative to the kernel's.

        Raises:
            ValueError: a kernel without one.
        """
        k, a, sizes = frequencies(ring.sizes), aliases(ring.sizes), np.array(ring.sizes)
        multiples = k[None] + a[:, None] * sizes  # k + nu m (aliases, M, D)
        symmetric = (np.abs(multiples) <= _last_frequency(ring)).all(-1)
        # sigma^2_{k + nu m}, zero beyond the last observed frequency
        mass = spectral_mass(kernel, ring, jnp.asarray(multiples, ring.dtype)) * symmetric
        origin = jnp.zeros((1, len(sizes)), ring.dtype)
        observed = mass.sum()
        variance = jnp.maximum(periodised(kernel, ring, origin, origin)[0, 0], observed)
        eigenvalues = len(k) * mass.sum(0)  # lambda_k - epsilon = M sum_nu sigma^2_{k + nu m}
        spectrum = eigenvalues + nugget * variance
        roots = mass * jnp.sqrt(len(k) / spectrum)  # F = sqrt(M / lambda_k) sigma^2_{k + nu m}
        # What the nugget hides on grid points: tr(e - e^2 / lambda) / M, with e = lambda - epsilon.
        noise = (eigenvalues * (spectrum - eigenvalues) / spectrum).mean()
        distinct, which = _differences(a)
        gram = matmul(roots, roots.T)
        # Sums of (F F')_{nu nu'} by nu - nu'; pairs with nu >= nu' go to the last place.
        between = jnp.zeros(len(distinct) + 1, gram.dtype).at[which].add(gram)[:-1]
        return cls(kernel, ring, roots, spectrum, variance, variance - observed + noise, 4 * between)

    def whitened(self, x: Array) -> Array:
        """A, covariances of the values at x (N, D) with the whitened Hartley coordinates: (N, M)."""
        steps, delta = position(self.ring, x, jnp.floor)
        cycles: Any = 0
        for d, m in enumerate(self.ring.sizes):
            k = frequencies(self.ring.sizes)[:, d]
            # Whole steps are reduced modulo the ring in integers, so that the phase is exact at high frequencies.
            whole = _product(steps[:, d, None], k, m).astype(delta.dtype)
            cycles = cycles + whole / m + delta[:, d, None] * jnp.asarray(k / m, delta.dtype)
        phase = 2 * math.pi * cycles  # 2 pi k x / m
        alias = 2 * math.pi * matmul(delta, jnp.asarray(aliases(self.ring.sizes).T, delta.dtype))
        roots = self.roots.astype(delta.dtype)
        even, odd = matmul(jnp.cos(alias), roots), matmul(jnp.sin(alias), roots)  # sum_nu F cos, F sin (2 pi nu delta)
        # (Re + Im) e^{i phase} (even + i odd)
        return jnp.cos(phase) * (even + odd) + jnp.sin(phase) * (even - odd)

    def power(self, x: Array) -> Array:
        r"""Sums of squares of the columns of A, averaged over opposite frequencies: (M,), exactly, in O(N + M).

        .. math:: \tfrac12 \sum_n (A_{nk}^2 + A_{n,-k}^2)
                  = \sum_{\nu\nu'} F_{\nu k} F_{\nu' k} \sum_n \cos\bigl(2\pi (\nu - \nu') \delta_n\bigr)

        With E aliases it takes O(N E + M E^2) operations.
        """
        _, delta = position(self.ring, x, jnp.floor)
        alias = 2 * math.pi * matmul(delta, jnp.asarray(aliases(self.ring.sizes).T, delta.dtype))
        even, odd, roots = jnp.cos(alias), jnp.sin(alias), self.roots.astype(delta.dtype)
        # cos a cos b + sin a sin b = cos(a - b), summed over n (aliases, aliases)
        return (roots * matmul(matmul(even.T, even) + matmul(odd.T, odd), roots)).sum(0)

    def conditional_variance(self, x: Array) -> Array:
        """Variance at x (N, D) given the values on the grid: (N,), in O(N) once the features exist."""
        _, delta = position(self.ring, x, jnp.floor)
        distinct, _ = _differences(aliases(self.ring.sizes))
        # sin^2(pi (nu - nu') delta)
        waves = jnp.square(jnp.sin(math.pi * matmul(delta, jnp.asarray(distinct.T, delta.dtype))))
        return self.rest + matmul(waves, self.between.astype(delta.dtype))

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        """The periodised kernel between inputs (..., N, D): (..., N, N)."""
        found = periodised(self.kernel, self.ring, x, x if y is None else y)
        if y is not None:
            return found
        return set_diagonal(found, jnp.broadcast_to(self.variance.astype(found.dtype), found.shape[:-1]))


def position(ring: Ring, x: Array, rounded: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Whole steps from the origin, as integers within the ring, and what is left, in steps: each (N, D)."""
    sizes = jnp.asarray(ring.sizes, x.dtype)
    steps = (x - ring.origin.astype(x.dtype)) / ring.length.astype(x.dtype) * sizes
    whole = rounded(jax.lax.stop_gradient(steps))  # constant: the slope is that of what is left
    return (whole % sizes).astype(jnp.int32), steps - whole


def _product(i: Array, k: np.ndarray, m: int) -> Array:
    """``i * k % m`` for i from 0 to m - 1 and k from -m / 2 to m / 2, in 32-bit integers."""
    if m < 2**16:
        return i * k % m
    found = jnp.zeros((), jnp.int32)
    for shift in (16, 8, 0):
        found = (256 * found + (i >> shift & 255) * k) % m  # i in bytes; below 2^31 for m up to 2^22
    return found


def _last_frequency(ring: Ring) -> np.ndarray:
    """The largest multiple (D,) observed on the grid, such that the multiples are symmetric about zero."""
    sizes = np.array(ring.sizes)
    return NEAR[len(sizes)] * sizes + (sizes - 1) // 2


@pytree
class Waves:
    r"""Random functions :math:`\alpha_i \cos(2\pi n_i x / \Delta + \chi_i)` on a ring.

    Args:
        ring: the ring.
        multiples: n, whole numbers (num, D).
        amplitude: :math:`\alpha` (num,).
        phase: :math:`\chi` (num,).
    """

    ring: Ring
    multiples: Array
    amplitude: Array
    phase: Array

    def __call__(self, x: Array) -> Array:
        """Values (N, num) at x (N, D)."""
        turns = (x - self.ring.origin) / self.ring.length
        return self.amplitude * jnp.cos(2 * math.pi * matmul(turns, self.multiples.T) + self.phase)

    def observed(self) -> Waves:
        """The waves up to the highest frequency that the values on the grid depend on."""
        known = (jnp.abs(self.multiples) <= _last_frequency(self.ring)).all(-1)
        return Waves(self.ring, self.multiples, self.amplitude * known, self.phase)


def random_waves(kernel: Kernel, key: Array, ring: Ring, num: int) -> list[Waves]:
    r"""Random functions whose covariance, summed over the list, is the periodised kernel: exactly, for any ``num``.

    A frequency :math:`\omega` drawn from the kernel's own spectral density is rounded to the nearest frequency
    :math:`\omega_n` of the ring, and the variance of the wave multiplied by
    :math:`\varrho(\omega_n) / \varrho(\omega)`.

    Raises:
        ValueError: a kernel that is not a sum or multiple of stationary kernels with frequencies to draw from.
    """
    summands = kernel.cast(ring.dtype).expanded()
    keys = [key] if len(summands) == 1 else jax.random.split(key, len(summands))
    return [_waves(summand, key, ring, num) for summand, key in zip(summands, keys, strict=True)]


def _waves(summand: Summand, key: Array, ring: Ring, num: int) -> Waves:
    stationary = summand.alone
    expect(
        isinstance(stationary, Stationary),
        "a stationary kernel, or sums and positive multiples of them, to draw functions on a ring",
        summand,
        "draw at fixed inputs with f.joint(x)",
    )
    frequency_key, phase_key = jax.random.split(key)
    omega = stationary.frequencies(frequency_key, (len(ring.sizes), num), ring.dtype).T / stationary.lengthscale
    multiples = jnp.round(omega * ring.length / (2 * math.pi))  # omega_n is the nearest to omega
    density = stationary.spectral_density
    # Over omega ~ rho, the mean ratio in the cell of omega_n is rho(omega_n) times its size.
    ratio = density(2 * math.pi * multiples / ring.length) / density(omega)
    phase = jax.random.uniform(phase_key, (num,), ring.dtype, maxval=2 * math.pi)
    # E[2 cos(a + chi) cos(b + chi)] = cos(a - b) over the phase chi
    return Waves(ring, multiples, jnp.sqrt(2 * summand.scale * stationary.variance * ratio), phase)
