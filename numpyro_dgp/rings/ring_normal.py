r"""Exact regression on regular grids in O(N log N): ``RingNormal``.

On the whole of a ring the covariance of values with one noise variance is circulant, and everything is a sum over
frequencies. If only a part of the ring is observed, because the rest is padding or because observations are missing, or
if noise differs from point to point, one of these does, chosen by numbers that are known when a program is compiled:

- up to ``Solver.exact`` unobserved points, or as few observed ones: a dense factorisation of that size
  (``rings.gaps``), exact;
- above that, conjugate gradients (``rings.gaps``; ``rings.uneven_noise`` where noise differs). The determinant of one
  gap is exact; that of several is exact per gap, and the correlation between gaps is estimated.
  :meth:`RingNormal.log_prob_and_error` returns the error.

The only approximation to a process on the line is that the line is closed to a ring;
:func:`~numpyro_dgp.rings.wraparound` bounds its error.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpyro.distributions import kl_divergence

from numpyro_dgp._checks import expect_kind, expected, require_count, require_noise, require_positive
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.functions.drawn_from_white import DrawnFromWhite
from numpyro_dgp.kernels import Kernel, as_kernel
from numpyro_dgp.math.linalg import jitter
from numpyro_dgp.rings.circulant import CirculantMatrix, kl_between_circulants
from numpyro_dgp.rings.gaps import FewGaps, FewValues, ManyGaps
from numpyro_dgp.rings.local_variances import local_variances, reach_of
from numpyro_dgp.rings.pattern import Pattern, Solver
from numpyro_dgp.rings.spectra import Ring, spectrum
from numpyro_dgp.rings.uneven_noise import UnevenNoise

__all__ = ["RingNormal"]

# Entries of the matrices behind exact posterior variances, above which they are computed from the points around each.
_MOST_ENTRIES = 2**27


class RingNormal(DrawnFromWhite):
    r"""Values of a stationary process on a regular grid, exactly: :math:`y \sim N(m,\, C_{oo} + D)`.

    ``log_prob`` is the log evidence of exact regression. With ``noise=None`` it is the process itself, to use as a
    latent; under NUTS put ``dgp.for_mcmc(model)`` around the program, which samples it by independent N(0, 1) numbers
    at the frequencies (``NonCentered``).

    NumPyro's ``CirculantNormal`` is the case of one dimension without gaps; in float32 its spectrum, the transform
    of a row, has negative entries for smooth kernels.

    Args:
        kernel: a stationary kernel with a spectral density.
        ring: the grid.
        noise: standard deviation of Gaussian noise, a number or one per observed point (N,); ``None`` for none.
        observed: which points of the grid have values, (M,) of bool or of the shape of the grid; all by default. It
            must be known when the program is compiled: make it outside.
        loc: mean m, a number or one per observed point.
        solver: how gaps and noise that differs are solved: up to how many points exactly, and how above that.

    Values have shape (N,): the observed points in the order of ``ring.points()``.

    Raises:
        ValueError: noise that is not positive, or neither one number nor one per observed point; indices in place of a
            mask, a mask of another shape, one that is traced or marks no point; a mean, or values, that are not one
            per observed point; NaN; densities without noise where there are more gaps than ``solver`` takes exactly.

    Example:
        >>> import numpyro_dgp as dgp
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> ring, observed = dgp.rings.regular(np.arange(50.0), margin=18.0)
        >>> y = jnp.sin(jnp.arange(50.0) / 5)
        >>> d = dgp.rings.RingNormal(dgp.kernels.RBF(1.0, 3.0), ring, noise=0.1, observed=observed)
        >>> mean, variance = d.posterior(y)
        >>> bool(d.log_prob(y) > 0), bool(jnp.abs(mean[:50] - y).max() < 0.02)
        (True, True)

    Source: Tebbutt (2016), section 1.3.5, equations 1.46 to 1.48; padding and gaps by Schur complements.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("process", "noise_variance", "loc")
    pytree_aux_fields = ("pattern", "solver", "noisy")
    place, order_of_values = "point", "ring.points()"
    missing_values = "leave out what is missing, and mark it False in observed"

    def __init__(
        self,
        kernel: Kernel,
        ring: Ring,
        noise: ArrayLike | None = None,
        observed: np.ndarray | None = None,
        loc: ArrayLike = 0.0,
        solver: Solver | None = None,
    ) -> None:
        self.pattern = Pattern.of(ring, observed)
        expect_kind(solver, Solver | None, "solver to be a dgp.rings.Solver", "dgp.rings.Solver(probes=32)")
        self.solver, self.noisy = solver or Solver(), noise is not None
        if noise is not None and np.ndim(noise):
            require_positive("noise", self.one_per_place("noise", noise, len(self.present)))
        elif noise is not None:
            require_noise(noise)
        values = spectrum(as_kernel(kernel), ring)
        # the mean of lambda is k(0)
        nugget = jitter(values.dtype, 100) * values.mean() if noise is None else jnp.square(jnp.asarray(noise))
        self.process = CirculantMatrix(values, (ring.sizes,))
        self.noise_variance = jnp.asarray(nugget, values.dtype)
        self.loc = jnp.asarray(self.one_per_place("loc", loc, len(self.present), np.ndim(loc) == 0), values.dtype)
        super().__init__((), (len(self.present),))

    @property
    def present(self) -> np.ndarray:
        """Indices of the observed points (N,)."""
        return self.pattern.present

    @property
    def missing(self) -> np.ndarray:
        """Indices of the unobserved points."""
        return self.pattern.missing

    @property
    def has_even_noise(self) -> bool:
        """Whether all points have one noise variance."""
        return self.noise_variance.ndim == 0

    @property
    def total(self) -> CirculantMatrix:
        """The covariance of noisy values on the whole ring, where all have one noise variance."""
        return CirculantMatrix(self.process.spectrum + self.noise_variance, self.process.blocks)

    @property
    def variance(self) -> Array:
        return jnp.broadcast_to(self.process.spectrum.mean() + self.noise_variance, self.event_shape)  # C_jj + D

    @property
    def white_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal numbers behind a draw: one per point of the ring, and one per uneven noise."""
        return (self.pattern.size + (0 if self.has_even_noise else len(self.present)),)

    def from_white(self, white: Array) -> Array:
        """The draw that standard normal numbers, of shape ``(..., *white_shape)``, give."""
        if self.has_even_noise:
            return self.loc + self.total.sqrt(white)[..., self.present]  # m + (C + s^2 I)^1/2 w, at o
        process, noise = jnp.split(white, [self.pattern.size], -1)
        # m + (C^1/2 w)_o + D^1/2 e
        return self.loc + self.process.sqrt(process)[..., self.present] + jnp.sqrt(self.noise_variance) * noise

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        return self._log_prob(value)[0]

    def log_prob_and_error(self, value: ArrayLike) -> tuple[Array, Array]:
        """The log density and an estimate of its error, zero for exact methods.

        Args:
            value: observations (..., N).

        Returns:
            The log density, that of ``log_prob``, and its standard error, both (...,). The error has half the
            scatter of the log determinant over the probes, what stopping Lanczos' recursion changes, and a bound on
            what conjugate gradients left of the quadratic form. The probes are the same at every call, so that the
            difference of two log densities at near hyperparameters has a much smaller error.

        Raises:
            ValueError: observations that are not one finite number per observed point.
        """
        return self._log_prob(value)

    def _log_prob(self, value: ArrayLike) -> tuple[Array, Array]:
        residual = self._residual(value)
        covariance, embedded = self._covariance(), self._embed(residual)
        determinant = covariance.log_determinant()
        left: Any = jnp.zeros(())
        if covariance.num_columns is None:
            x = covariance.solve(embedded, self.solver.tol, self.solver.maxiter)
            left = covariance.unsolved(embedded, x) / determinant.smallest  # |r|^2 / smallest eigenvalue >= r' A^-1 r
        else:
            x = covariance.solve(embedded)
        square: Array = covariance.square(embedded, x)  # b' (C_oo + D)^-1 b
        size = residual.shape[-1] * math.log(2 * math.pi)
        error = 0.5 * (determinant.standard_error + determinant.truncation + left)
        # log N(y; m, C_oo + D), and the errors of its two terms
        return -0.5 * (square + determinant.value + size), jnp.broadcast_to(error, square.shape)

    def posterior(self, value: ArrayLike, *, reach: int | None = None) -> tuple[Array, Array]:
        """Mean and variance of the process without noise at every point of the ring, gaps and padding included.

        Variances are exact while the matrices behind them, as many rows as the ring and as many columns as the
        unobserved points (or the observed ones, where these are fewer), have at most 2**27 entries. Above that, each
        is computed from the points around it (``rings.local_variances``).

        Args:
            value: observations (N,).
            reach: how many points on either side, and in every dimension, a variance is computed from, for variances
                that are not exact. By default a thousandth of the length of the rows of the smoothing matrix, and,
                where gaps are longer than that, of the kernel, lies beyond; hyperparameters must then be known, not
                traced.

        Returns:
            Mean (M,), less ``loc``, and variance (M,), in the order of ``ring.points()``. Noisy observations there
            have the variance plus the squared noise.

        Raises:
            ValueError: observations that are not one finite number per observed point; a reach that is not a positive
                integer, or with which the systems of the variances are too large; traced hyperparameters without it.

        Source: Tebbutt (2016), equations 1.47 and 1.48 (its factor 1/N is that of the transform).
        """
        if reach is not None:
            require_count("reach", reach, "some lengthscales in steps of the grid")
        embedded, covariance = self._embed(self._residual(value)), self._covariance()
        if covariance.num_columns is None:
            return self.posterior_mean(value), self._local_variance(reach)
        mean = self.process.apply(covariance.weights(embedded, covariance.solve(embedded)))  # C_{.o} (C_oo + D)^-1 b
        exact = covariance.num_columns * self.pattern.size <= _MOST_ENTRIES
        return mean, covariance.variance() if exact else self._local_variance(reach)

    def posterior_mean(self, value: ArrayLike, *, tol: float | None = None, maxiter: int | None = None) -> Array:
        """The mean of :meth:`posterior` by conjugate gradients, O(M log M) each: for many unobserved points.

        Args:
            value: observations (N,).
            tol: relative residual at which to stop, by default that of the solver; the relative error of the mean is
                below ``tol`` times the condition number, 1 + largest eigenvalue / noise variance.
            maxiter: steps at most, by default those of the solver.

        Raises:
            ValueError: observations that are not one finite number per observed point, ``tol`` that is not positive.
        """
        tol = self.solver.tol if tol is None else tol
        require_positive("tol", tol, "try 1e-8")
        embedded = self._embed(self._residual(value))
        if self.has_even_noise and not len(self.missing):
            return self.process.apply(self.total.solve(embedded))  # C (C + s^2 I)^-1 b
        covariance = (ManyGaps if self.has_even_noise else UnevenNoise).of(
            self.process, self.noise_variance, self.pattern, self.solver
        )
        x = covariance.solve(embedded, tol, maxiter or self.solver.maxiter)
        return self.process.apply(covariance.weights(embedded, x))

    def _covariance(self) -> FewGaps | FewValues | ManyGaps | UnevenNoise:
        """The covariance of the observations, in the form that suits their number."""
        N, gaps, pattern = len(self.present), len(self.missing), self.pattern
        if self.has_even_noise and gaps <= min(N, self.solver.exact):
            return FewGaps.of(self.process, self.noise_variance, pattern)
        if self.solver.exact >= N:
            return FewValues.of(self.process, self.noise_variance, pattern)
        if not self.noisy:
            raise expected(
                f"noise, or at most {self.solver.exact} gaps or values",
                f"noise=None with {N} values and {gaps} gaps, whose systems are singular",
                "give the process a small noise, 1e-2 of its standard deviation, or use dgp.for_mcmc(model)",
            )
        if not self.has_even_noise:
            return UnevenNoise.of(self.process, self.noise_variance, pattern, self.solver)
        return ManyGaps.of(self.process, self.noise_variance, pattern, self.solver)

    def _local_variance(self, reach: int | None) -> Array:
        """Posterior variances from the points around each (M,)."""
        size, noise = self.pattern.size, self.noise_variance
        precision = jnp.zeros(size, noise.dtype).at[self.present].set(1 / noise)
        base = noise if self.has_even_noise else 1 / precision.mean()  # s^2
        counted = np.zeros(size, bool)
        counted[self.missing if self.has_even_noise else slice(None)] = True
        every = len(self.pattern.sizes)
        found = (reach,) * every if reach else reach_of(self.process, noise, self.pattern)
        # rho = 1 - s^2 / D, one at unobserved points
        return local_variances(self.process, base, 1 - base * precision, counted, found)

    def _embed(self, x: Array) -> Array:
        """Numbers at the observed points (..., N) as numbers on the ring (..., M), zero elsewhere."""
        shape = (*x.shape[:-1], self.pattern.size)
        return jnp.zeros(shape, self.process.spectrum.dtype).at[..., self.present].set(x)

    def _residual(self, value: ArrayLike) -> Array:
        """Checked observations less their mean (..., N)."""
        return jnp.asarray(self.one_per_place("values", value, len(self.present))) - self.loc


@kl_divergence.register(RingNormal, RingNormal)
def _kl_ring_normals(q: RingNormal, p: RingNormal) -> Array:
    even = q.has_even_noise and p.has_even_noise
    if len(q.missing) or len(p.missing) or not even or q.process.blocks != p.process.blocks:
        raise NotImplementedError
    full = jnp.broadcast_to(q.loc, q.event_shape), jnp.broadcast_to(p.loc, p.event_shape)
    return kl_between_circulants((full[0], q.total), (full[1], p.total))
