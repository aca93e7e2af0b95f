r"""Exact regression on regular grids in O(N log N): ``RingNormal``.

On the whole of a ring the covariance of noisy values is circulant, and everything is a sum over frequencies. If only a
part of the ring is observed, because the rest is padding or because observations are missing, the same quantities
follow from the Schur complement in the unobserved points u: with :math:`G = (C + \sigma^2 I)^{-1}` on the whole ring,

.. math:: \log\det(C + \sigma^2 I)_{oo} = -\log\det G + \log\det G_{uu}, \qquad
          (C + \sigma^2 I)_{oo}^{-1} = G_{oo} - G_{ou} G_{uu}^{-1} G_{uo} .

This is exact, and costs the cube of the number of unobserved points. The only approximation to a process on the line is
that the line is closed to a ring; :func:`~numpyro_dgp.rings.wraparound` bounds its error.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._checks import is_concrete, require_finite, require_noise, require_positive
from numpyro_dgp._data import as_numbers
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.gaussians import log_density, log_determinant
from numpyro_dgp.algebra.linalg import jitter, matmul, solve_lower
from numpyro_dgp.kernels import Kernel, as_kernel
from numpyro_dgp.model.drawn_from_white import DrawnFromWhite
from numpyro_dgp.rings.circulant import Circulant, kl_between_circulants
from numpyro_dgp.rings.optimum import optimal_gain, optimal_mean
from numpyro_dgp.rings.series import regular, wraparound
from numpyro_dgp.rings.spectra import Ring, require_ring, spectrum

__all__ = ["Ring", "RingNormal", "optimal_gain", "optimal_mean", "regular", "wraparound"]


class RingNormal(DrawnFromWhite):
    r"""Values of a stationary process on a regular grid, exactly: :math:`y \sim N(m,\, C_{oo} + \sigma^2 I)`.

    ``log_prob`` is the log evidence of exact regression. With ``noise=None`` it is the process itself, to use as a
    latent; under NUTS put ``dgp.for_mcmc(model)`` around the program, which samples it by independent N(0, 1) numbers
    at the frequencies (``NonCentered``).

    NumPyro's ``CirculantNormal`` is the case of one dimension without gaps; in float32 its spectrum, the transform
    of a row, has negative entries for smooth kernels.

    Args:
        kernel: a stationary kernel with a spectral density.
        ring: the grid.
        noise: standard deviation of Gaussian noise; ``None`` for none.
        observed: which points of the grid have values, (M,) of bool or of the shape of the grid; all by default. It
            must be known when the program is compiled: make it outside.
        loc: mean m, a number or one per observed point.

    Values have shape (N,): the observed points in the order of ``ring.points()``.

    Raises:
        ValueError: noise that is not one positive number; indices in place of a mask, a mask of another shape, one
            that is traced or marks no point; a mean, or values, that are not one per observed point; NaN.

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
    pytree_data_fields = ("process", "noise_variance", "present", "missing", "loc")

    def __init__(
        self,
        kernel: Kernel,
        ring: Ring,
        noise: ArrayLike | None = None,
        observed: np.ndarray | None = None,
        loc: ArrayLike = 0.0,
    ) -> None:
        mask = _mask(ring, observed)
        if noise is not None:
            require_noise("RingNormal", noise)
        values = spectrum(as_kernel(kernel), ring)
        nugget = jitter(values.dtype, 100) * values.mean() if noise is None else jnp.square(jnp.asarray(noise))
        self.process = Circulant(values, (ring.sizes,))
        self.noise_variance = jnp.asarray(nugget, values.dtype)
        self.present, self.missing = np.flatnonzero(mask), np.flatnonzero(~mask)
        self.loc = jnp.asarray(self._per_point("loc", loc, np.ndim(loc) == 0), values.dtype)
        super().__init__((), (len(self.present),))

    @property
    def total(self) -> Circulant:
        """The covariance of noisy values on the whole ring."""
        return Circulant(self.process.spectrum + self.noise_variance, self.process.blocks)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.real_vector

    @property
    def mean(self) -> Array:
        return jnp.broadcast_to(self.loc, self.event_shape)

    @property
    def variance(self) -> Array:
        return jnp.broadcast_to(self.total.spectrum.mean(), self.event_shape)

    @property
    def white_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal numbers behind a draw: one per point of the whole ring."""
        return self.process.spectrum.shape

    def from_white(self, white: Array) -> Array:
        """The draw that standard normal numbers (..., M) give."""
        return self.loc + self.total.sqrt(white)[..., self.present]

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.from_white(jax.random.normal(key, sample_shape + self.white_shape, self.process.spectrum.dtype))

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        residual = self._residual(value)
        solved, L = self._solved(residual)
        total = self.total
        square = (self._embed(residual) * solved).sum(-1)
        log_det = 0.5 * total.log_determinant()
        if len(self.missing):
            square = square - jnp.square(self._half(L, solved)).sum(-1)
            log_det = log_det + log_determinant(L)
        zero = jnp.zeros(self.event_shape, solved.dtype)
        return log_density(zero, log_det) - 0.5 * square

    def posterior(self, value: Array) -> tuple[Array, Array]:
        """Mean and variance of the process without noise at every point of the ring, gaps and padding included.

        Args:
            value: observations (N,).

        Returns:
            Mean (M,), less ``loc``, and variance (M,), in the order of ``ring.points()``. Noisy observations there
            have the variance plus the squared noise.

        Raises:
            ValueError: observations that are not one finite number per observed point.

        Source: Tebbutt (2016), equations 1.47 and 1.48 (its factor 1/N is that of the transform).
        """
        solved, L = self._solved(self._residual(value))
        signal, total = self.process.spectrum, self.total.spectrum
        shrunk = Circulant(signal / total, self.process.blocks)
        explained = Circulant(signal * self.noise_variance / total, self.process.blocks)
        mean, variance = self.process.apply(solved), explained.diagonal()
        if len(self.missing):
            columns = self._entries(shrunk, np.arange(len(signal)), self.missing)
            half = solve_lower(L, columns.T)
            mean = mean - matmul(self._half(L, solved), half)
            variance = variance + jnp.square(half).sum(0)
        return mean, variance

    def posterior_mean(self, value: Array, *, tol: float = 1e-8, maxiter: int | None = None) -> Array:
        """The mean of :meth:`posterior` by conjugate gradients, O(M log M) each: for many unobserved points.

        Args:
            value: observations (N,).
            tol: relative residual at which to stop; the relative error of the mean is below ``tol`` times the
                condition number, 1 + largest eigenvalue / noise variance.
            maxiter: steps at most; 10 N by default.

        Raises:
            ValueError: observations that are not one finite number per observed point, ``tol`` that is not positive.
        """
        require_positive("RingNormal.posterior_mean", "tol", tol, "try 1e-8")

        def covariance(x: Array) -> Array:
            return self.total.apply(self._embed(x))[..., self.present]

        weights, _ = cg(covariance, self._residual(value), tol=tol, maxiter=maxiter)
        return self.process.apply(self._embed(weights))

    def _per_point(self, name: str, value: ArrayLike, one: bool = False) -> Any:
        """``value`` if it has one finite number per observed point, or is the ``one`` for all."""
        found = as_numbers(f"{name} of RingNormal", value)
        if not one and np.shape(found)[-1:] != self.present.shape:
            raise ValueError(
                f"RingNormal: expected {name} of shape ({len(self.present)},), one number per observed point, got "
                f"{np.shape(found)}: they go in the order of ring.points(); of a column take y[:, 0]"
            )
        require_finite(f"{name} of RingNormal", found, "leave out what is missing, and mark it False in observed")
        return found

    def _embed(self, x: Array) -> Array:
        """Numbers at the observed points (..., N) as numbers on the ring (..., M), zero elsewhere."""
        shape = (*x.shape[:-1], self.process.spectrum.shape[-1])
        return jnp.zeros(shape, self.process.spectrum.dtype).at[..., self.present].set(x)

    def _residual(self, value: ArrayLike) -> Array:
        """Checked observations less their mean (..., N)."""
        return jnp.asarray(self._per_point("values", value)) - self.loc

    def _solved(self, residual: Array) -> tuple[Array, Array]:
        """G (y - m) on the whole ring, and the Cholesky factor of G_uu."""
        inverse = self.total.power(-1)
        solved = inverse.apply(self._embed(residual))
        return solved, jnp.linalg.cholesky(self._entries(inverse, self.missing, self.missing))

    def _half(self, L: Array, solved: Array) -> Array:
        return solve_lower(L, solved[..., self.missing, None])[..., 0]

    def _entries(self, matrix: Circulant, rows: Any, columns: Any) -> Array:
        """Some entries of a circulant matrix."""
        (sizes,) = matrix.blocks
        row = matrix.row().reshape(sizes)
        i, j = (jnp.unravel_index(jnp.asarray(index), sizes) for index in (rows, columns))
        return row[tuple((a[:, None] - b[None]) % m for a, b, m in zip(i, j, sizes, strict=True))]


def _mask(ring: Ring, observed: Any) -> np.ndarray:
    """Which points of the ring are observed, as a flat mask."""
    require_ring("RingNormal", ring)
    size = math.prod(ring.sizes)
    if observed is None:
        return np.ones(size, bool)
    if not is_concrete(observed):
        raise ValueError(
            "RingNormal: expected observed to be known when the program is compiled, got a traced array: make the mask "
            "outside of the program, and do not pass it as an argument of the model"
        )
    given = np.asarray(observed)
    binary = given.dtype == bool or (given.dtype.kind in "iuf" and np.isin(given, (0, 1)).all())
    if given.shape not in ((size,), ring.sizes) or not binary:
        shapes = f"({size},)" if len(ring.sizes) == 1 else f"({size},) or {ring.sizes}"
        raise ValueError(
            f"RingNormal: expected observed to be a mask of shape {shapes}, True where a grid point has a value, got "
            f"{given.dtype} of shape {given.shape}: of indices make one, mask = np.zeros({size}, bool); "
            "mask[indices] = True; dgp.rings.regular(x, margin) makes it for a series"
        )
    if not given.any():
        raise ValueError(
            f"RingNormal: expected observed to mark some of the {size} grid points, got none marked: "
            "dgp.rings.regular(x, margin) makes it for a series"
        )
    return given.astype(bool).reshape(-1)


@kl_divergence.register(RingNormal, RingNormal)
def _kl_ring_normals(q: RingNormal, p: RingNormal) -> Array:
    if len(q.missing) or len(p.missing) or q.process.blocks != p.process.blocks:
        raise NotImplementedError
    full = jnp.broadcast_to(q.loc, q.event_shape), jnp.broadcast_to(p.loc, p.event_shape)
    return kl_between_circulants((full[0], q.total), (full[1], p.total))
