r"""Observed points of a ring by dense factorisations: of as many rows as points are unobserved, or observed.

If the rest u of a ring is not observed, the covariance of the observed points follows from the Schur complement in u:
with :math:`G = (C + \sigma^2 I)^{-1}` on the whole ring,

.. math:: \log\det(C + \sigma^2 I)_{oo} = -\log\det G + \log\det G_{uu}, \qquad
          (C + \sigma^2 I)_{oo}^{-1} = G_{oo} - G_{ou} G_{uu}^{-1} G_{uo} .

Where fewer points are observed than not, or have noise of their own, :math:`C_{oo} + D` is factorised itself.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.algebra.gaussians import log_determinant
from numpyro_dgp.algebra.lanczos import Estimate
from numpyro_dgp.algebra.linalg import solve_lower
from numpyro_dgp.rings.circulant import Circulant
from numpyro_dgp.rings.pattern import Pattern

__all__ = ["FewGaps", "FewValues"]


@pytree
class FewGaps:
    """The covariance of noisy values at the observed points of a ring, by the factor of G_uu; :meth:`of` builds it.

    Args:
        process: the covariance C.
        noise: variance of the noise.
        factor: the Cholesky factor of G_uu.
        pattern: which points are observed.
    """

    process: Circulant
    noise: Array
    factor: Array
    pattern: Pattern = static()

    @classmethod
    def of(cls, process: Circulant, noise_variance: Array, pattern: Pattern) -> FewGaps:
        """From the covariance on the ring, the variance of the noise, and where there are observations."""
        inverse = Circulant(1 / (process.spectrum + noise_variance), process.blocks)
        between = _entries(inverse, pattern.missing, pattern.missing)
        return cls(process, noise_variance, jnp.linalg.cholesky(between), pattern)

    @property
    def total(self) -> Circulant:
        """C + noise on the whole ring."""
        return Circulant(self.process.spectrum + self.noise, self.process.blocks)

    def log_determinant(self) -> Estimate:
        """log det of the covariance."""
        found = self.total.log_determinant()
        if len(self.pattern.missing):
            found = found + 2 * log_determinant(self.factor)
        zero = jnp.zeros_like(found)
        return Estimate(found, zero, zero, 1 + zero)

    def solve(self, residual: Array) -> Array:
        """Observations b on the ring, less what fills the gaps best (..., M)."""
        solved = self.total.solve(residual)[..., self.pattern.missing, None]
        fill = solve_lower(self.factor, solve_lower(self.factor, solved), transpose=True)[..., 0]
        return residual.at[..., self.pattern.missing].add(-fill)

    def weights(self, residual: Array, x: Array) -> Array:
        """The covariance's inverse times b on the ring (..., M), zero at unobserved points."""
        return self.total.solve(x)

    def square(self, residual: Array, x: Array) -> Array:
        """b' times the covariance's inverse times b (...,)."""
        return (x * self.total.solve(x)).sum(-1)

    def variance(self) -> Array:
        """The posterior variances of the process on the ring (M,)."""
        total = self.total.spectrum
        explained = Circulant(self.process.spectrum * self.noise / total, self.process.blocks).diagonal()
        return explained + jnp.square(self._half_columns()).sum(0) if len(self.pattern.missing) else explained

    def _half_columns(self) -> Array:
        """L^{-1} (G C)_u of all points (n_u, M)."""
        shrunk = Circulant(self.process.spectrum / self.total.spectrum, self.process.blocks)
        return solve_lower(self.factor, _entries(shrunk, self.pattern.missing, np.arange(self.pattern.size)))


@pytree
class FewValues:
    """The covariance of noisy values at the observed points of a ring, by its own factor; :meth:`of` builds it.

    Args:
        process: the covariance C.
        factor: the Cholesky factor of C_oo + D.
        pattern: which points are observed.
    """

    process: Circulant
    factor: Array
    pattern: Pattern = static()

    @classmethod
    def of(cls, process: Circulant, noise_variance: Array, pattern: Pattern) -> FewValues:
        """From the covariance on the ring, the noise's variance or variances (N,), and where there are observations."""
        noise = jnp.diag(jnp.broadcast_to(noise_variance, (len(pattern.present),)))
        return cls(process, jnp.linalg.cholesky(_entries(process, pattern.present, pattern.present) + noise), pattern)

    def log_determinant(self) -> Estimate:
        """log det of the covariance."""
        found = 2 * log_determinant(self.factor)
        zero = jnp.zeros_like(found)
        return Estimate(found, zero, zero, 1 + zero)

    def solve(self, residual: Array) -> Array:
        """L^{-1} b for observations b on the ring (..., M): (..., N)."""
        return solve_lower(self.factor, residual[..., self.pattern.present, None])[..., 0]

    def weights(self, residual: Array, x: Array) -> Array:
        """The covariance's inverse times b on the ring (..., M), zero at unobserved points."""
        found = solve_lower(self.factor, x[..., None], transpose=True)[..., 0]
        return jnp.zeros_like(residual).at[..., self.pattern.present].set(found)

    def square(self, residual: Array, x: Array) -> Array:
        """b' times the covariance's inverse times b (...,)."""
        return jnp.square(x).sum(-1)

    def variance(self) -> Array:
        """The posterior variances of the process on the ring (M,)."""
        return self.process.diagonal() - jnp.square(self._half_columns()).sum(0)

    def _half_columns(self) -> Array:
        """L^{-1} C_o of all points (N, M)."""
        return solve_lower(self.factor, _entries(self.process, self.pattern.present, np.arange(self.pattern.size)))


def _entries(matrix: Circulant, rows: Any, columns: Any) -> Array:
    """Some entries of a circulant matrix."""
    (sizes,) = matrix.blocks
    row = matrix.row().reshape(sizes)
    i, j = (jnp.unravel_index(jnp.asarray(index), sizes) for index in (rows, columns))
    return row[tuple((a[:, None] - b[None]) % m for a, b, m in zip(i, j, sizes, strict=True))]
