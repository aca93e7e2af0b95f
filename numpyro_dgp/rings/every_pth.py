r"""The sparse approximation of a process on a ring by every J-th of its points, in O(N log N).

With N data at the points X of the ring and inducing points Z at every J-th of them, M = N / J, the approximate
covariance

.. math:: A A^\top = k(X, Z)\, k(Z, Z)^{-1}\, k(Z, X)

is block diagonal in the frequencies that look the same on the coarse grid: m, m + M, ..., m + (J - 1) M are aliases.
Write :math:`\lambda_m` for the J eigenvalues of the exact covariance C of all points in that class. The coarse grid has
the eigenvalues :math:`1^\top \lambda_m / J`, and the block of class m is of rank one, in Hartley's coordinates as in
Fourier's:

.. math:: \lambda_m \beta_m^\top, \qquad \beta_m = \frac{\lambda_m}{1^\top \lambda_m} .

So the determinant and the inverse of :math:`A A^\top + \sigma^2 I` follow from M rank-one updates, without a linear
system. The difference to C, :math:`\mathrm{diag}(\lambda_m) - \lambda_m \beta_m^\top`, is zero where one alias has all
the variance: M inducing points are enough once the kernel's spectrum ends below the frequency that the coarse grid
resolves.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_finite, require_noise
from numpyro_dgp._data import as_numbers
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.rings.circulant import hartley
from numpyro_dgp.rings.spectra import Ring, require_ring, spectrum

__all__ = ["Subsampled"]


@pytree
class Subsampled:
    r"""A process at all N points of a ring, approximated through every J-th point; :meth:`of` builds it.

    Args:
        eigenvalues: :math:`\lambda`, of the covariance C of all points, by alias and class (J, M).
        sizes: points of the ring in every dimension.
        every: J in every dimension.

    Raises:
        ValueError: J that does not divide the size of the ring, a kernel without a spectral density, observations of
            another shape, or noise that is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import RBF
        >>> from numpyro_dgp.rings import Ring, Subsampled
        >>> ring = Ring(0.0, 40.0, 400)
        >>> y = jnp.sin(ring.points()[:, 0])
        >>> few, many = (Subsampled.of(RBF(), ring, every) for every in (20, 5))
        >>> float(few.bound(y, 0.3)) < float(many.bound(y, 0.3)) <= float(many.evidence(y, 0.3)) + 1e-2
        True

    Source: Tebbutt (2016), chapter 2, equation 2.14, whose discussion (section 2.2) leaves the inverse and the
    determinant open.
    """

    eigenvalues: Array
    sizes: tuple[int, ...] = static()
    every: tuple[int, ...] = static()

    @classmethod
    def of(cls, kernel: Kernel, ring: Ring, every: int | tuple[int, ...]) -> Subsampled:
        """From a stationary kernel with a spectral density.

        Args:
            kernel: the kernel, before it is made periodic.
            ring: the grid of all points.
            every: J, a divisor of the size of the ring; an integer for all dimensions, or one for each.

        Raises:
            ValueError: J that does not divide the size of the ring, a kernel without a spectral density.
        """
        require_ring(ring)
        D = len(ring.sizes)
        periods = tuple(every) if isinstance(every, list | tuple) else (every,) * D
        if len(periods) != D or not all(
            type(p) is int and p >= 1 and m % p == 0 for p, m in zip(periods, ring.sizes, strict=False)
        ):
            raise expected(
                f"every to divide the size {ring.sizes} of the ring",
                every,
                "use RingNormal for all points, or dgp.Grid for inducing points that are no data",
            )
        return cls(_by_class(spectrum(kernel, ring), ring.sizes, periods), ring.sizes, periods)

    @property
    def weights(self) -> Array:
        r""":math:`\beta_m = \lambda_m / 1^\top \lambda_m` (J, M): shares of the aliases in the variance of their class.

        Zero where the variance of the class is negligible, because derivatives divide by its square. Inducing values of
        such classes keep their prior.
        """
        total = self.eigenvalues.sum(0)
        seen = total > jnp.finfo(total.dtype).eps ** 2 * total.max()
        return self.eigenvalues / jnp.where(seen, total, jnp.inf)

    def lost_variance(self) -> Array:
        r""":math:`\mathrm{tr}(C - A A^\top) / N`: the mean variance of the process given its inducing values."""
        a, w = self.eigenvalues, self.weights
        return (a * (1 - w)).sum() / a.size  # sum_m (1'lambda_m - beta_m' lambda_m) / N

    def apply(self, x: Array) -> Array:
        """A A' x for vectors (..., N), in O(N log N).

        Raises:
            ValueError: vectors of another length.
        """
        x = self._to_classes(self._vectors(x))
        # lambda_m (beta_m' x_m)
        return self._from_classes(self.eigenvalues * (self.weights * x).sum(-2, keepdims=True))

    def solve(self, x: Array, noise: ArrayLike) -> Array:
        r""":math:`(A A^\top + \sigma^2 I)^{-1} x` for vectors (..., N), in O(N log N); noise as in :meth:`bound`.

        Raises:
            ValueError: vectors of another length, noise that is not one positive number.
        """
        require_noise(noise)
        x = self._to_classes(self._vectors(x))
        # (x - B (B + s^2 I)^-1 x) / s^2, B = A A'
        return self._from_classes((x - self._explained(x, noise)) / jnp.square(noise))

    def log_determinant(self, noise: ArrayLike) -> Array:
        r""":math:`\log\det(A A^\top + \sigma^2 I)`, in O(N).

        Raises:
            ValueError: noise that is not one positive number.
        """
        require_noise(noise)
        s2 = jnp.square(jnp.asarray(noise, self.eigenvalues.dtype))
        # log|lambda_m beta_m' / s^2 + I| = log(1 + beta_m' lambda_m / s^2)
        return jnp.log1p(self._signal() / s2).sum() + self.eigenvalues.size * jnp.log(s2)

    def bound(self, y: ArrayLike, noise: ArrayLike) -> Array:
        r"""The bound on the log evidence of M inducing points at the optimal q(v).

        .. math:: \log N(y; 0, A A^\top + \sigma^2 I) - \mathrm{tr}(C - A A^\top) / 2\sigma^2

        Args:
            y: observations at all points of the ring (N,), less the mean function.
            noise: standard deviation.

        Raises:
            ValueError: observations of another shape, noise that is not positive.

        Source: Tebbutt (2016), equation 1.17 at the optimum 1.16, by the blocks of equation 2.14.
        """
        y, s2 = self._data(y, noise)
        N, x = self.eigenvalues.size, self._to_classes(y)
        square = (jnp.square(x).sum() - (x * self._explained(x, noise)).sum()) / s2  # y' (B + s^2 I)^-1 y
        log_density = -0.5 * (square + self.log_determinant(noise) + N * math.log(2 * math.pi))
        return log_density - 0.5 * N * self.lost_variance() / s2  # less tr(C - B) / (2 s^2)

    def evidence(self, y: ArrayLike, noise: ArrayLike) -> Array:
        """The log evidence of the exact process; arguments and errors as :meth:`bound`."""
        y, s2 = self._data(y, noise)
        total, x = self.eigenvalues + s2, self._to_classes(y)
        # sum_k log N(x_k; 0, lambda_k + s^2)
        return -0.5 * (jnp.square(x) / total + jnp.log(2 * math.pi * total)).sum()

    def expected_gap(self, noise: ArrayLike) -> Array:
        r"""The expected gap between bound and log evidence over data from the model, in nats: O(N).

        This is the mean divergence of the approximate posterior from the exact one:

        .. math:: \tfrac12 \Bigl( \mathrm{tr}\bigl((A A^\top + \sigma^2 I)^{-1} (C + \sigma^2 I)\bigr) - N
            + \log \frac{\lvert A A^\top + \sigma^2 I \rvert}{\lvert C + \sigma^2 I \rvert}
            + \mathrm{tr}(C - A A^\top) / \sigma^2 \Bigr)

        In class m, with the mean :math:`\bar\lambda_m = \beta_m^\top \lambda_m` and the variance :math:`V_m` of
        :math:`\lambda_m` under the weights :math:`\beta_m`, the first trace less J is
        :math:`\bigl(1^\top \lambda_m - \bar\lambda_m - V_m / (\sigma^2 + \bar\lambda_m)\bigr) / \sigma^2`.

        Args:
            noise: standard deviation.

        Raises:
            ValueError: noise that is not positive.
        """
        require_noise(noise)
        a, w, signal = self.eigenvalues, self.weights, self._signal()
        s2 = jnp.square(jnp.asarray(noise, a.dtype))
        lost = (a * (1 - w)).sum(0)  # 1'lambda_m - mean (M,), mean = beta_m' lambda_m
        variance = (w * jnp.square(a - signal)).sum(0)  # V_m
        log_ratio = jnp.log1p(signal / s2) - jnp.log1p(a / s2).sum(0)
        # (lost - V / (s^2 + mean)) / s^2 of the first trace, lost / s^2 of the last one, log ratio
        return 0.5 * ((2 * lost - variance / (s2 + signal)) / s2 + log_ratio).sum()

    def posterior(self, y: ArrayLike, noise: ArrayLike) -> tuple[Array, Array]:
        """The approximate posterior at all points: means and variances of the function, each (N,).

        The variances repeat from one inducing point to the next, and cost O(N J log N).

        Args:
            y: observations (N,), less the mean function.
            noise: standard deviation.

        Raises:
            ValueError: as :meth:`bound`.

        Source: Tebbutt (2016), equations 1.23 and 1.24.
        """
        y, s2 = self._data(y, noise)
        mean = self._from_classes(self._explained(self._to_classes(y), noise))
        # The rows of the transform at the points from one inducing point to the next.
        steps = np.stack(np.meshgrid(*[np.arange(p) for p in self.every], indexing="ij"), -1).reshape(
            -1, len(self.sizes)
        )
        rows = np.zeros((len(steps), self.eigenvalues.size))
        rows[np.arange(len(steps)), np.ravel_multi_index(tuple(steps.T), self.sizes)] = 1
        waves, signal = self._to_classes(jnp.asarray(rows, y.dtype)), self._signal()
        # C - B (B + s^2 I)^-1 B, with (h'lambda_m) (h'beta_m) b_m / (s^2 + b_m) of class m at a
        # point with the row h of H; b_m = beta_m' lambda_m.
        forms = (waves * self.eigenvalues).sum(-2) * (waves * self.weights).sum(-2)
        known = (forms * signal / (s2 + signal)).sum(-1).reshape(self.every)
        copies = tuple(m // p for m, p in zip(self.sizes, self.every, strict=True))
        return mean, self.eigenvalues.mean() - jnp.tile(known, copies).reshape(-1)

    def _data(self, y: ArrayLike, noise: ArrayLike) -> tuple[Array, Array]:
        require_noise(noise)
        y = as_numbers("observations y", y)
        require_finite("observations y", y, "of a series with gaps use RingNormal, or a layer on a dgp.Grid")
        expect(
            np.shape(y) == (self.eigenvalues.size,),
            f"an observation at each of the {self.eigenvalues.size} points of the ring",
            f"shape {np.shape(y)}",
            "with gaps or padding use RingNormal, or a layer on a dgp.Grid",
        )
        return jnp.asarray(y, self.eigenvalues.dtype), jnp.square(jnp.asarray(noise, self.eigenvalues.dtype))

    def _vectors(self, x: ArrayLike) -> Array:
        expect(
            np.shape(x)[-1:] == (self.eigenvalues.size,),
            f"vectors of shape (..., {self.eigenvalues.size}), a number at each point of the ring",
            np.shape(x),
            "they go along the last axis",
        )
        return jnp.asarray(x, self.eigenvalues.dtype)

    def _signal(self) -> Array:
        r""":math:`\beta_m^\top \lambda_m` (M,): the one eigenvalue of a block that is not zero."""
        return (self.weights * self.eigenvalues).sum(0)

    def _explained(self, x: Array, noise: ArrayLike) -> Array:
        r""":math:`A A^\top (A A^\top + \sigma^2 I)^{-1} x`, by class (..., J, M)."""
        # lambda beta' (lambda beta' + s^2 I)^-1 x = lambda (beta'x) / (s^2 + beta'lambda)
        scale = (self.weights * x).sum(-2, keepdims=True) / (jnp.square(noise) + self._signal())
        return self.eigenvalues * scale

    def _to_classes(self, x: Array) -> Array:
        return _by_class(hartley(x, (self.sizes,)), self.sizes, self.every)

    def _from_classes(self, x: Array) -> Array:
        D, coarse = len(self.sizes), [m // p for m, p in zip(self.sizes, self.every, strict=True)]
        grid = x.reshape(*x.shape[:-2], *self.every, *coarse)  # (..., J_1, ..., J_D, M_1, ..., M_D)
        lead = list(range(x.ndim - 2))
        order = [len(lead) + d + part * D for d in range(D) for part in (0, 1)]
        return hartley(grid.transpose(lead + order).reshape(*x.shape[:-2], -1), (self.sizes,))


def _by_class(values: Array, sizes: tuple[int, ...], every: tuple[int, ...]) -> Array:
    """Numbers by frequency (..., N) as (..., J, M): in every dimension, frequency j M + m is alias j of class m."""
    split = [part for m, p in zip(sizes, every, strict=True) for part in (p, m // p)]
    lead = list(range(values.ndim - 1))
    order = [len(lead) + 2 * d + part for part in (0, 1) for d in range(len(sizes))]
    grid = values.reshape(*values.shape[:-1], *split).transpose(lead + order)
    return grid.reshape(*values.shape[:-1], math.prod(every), -1)
