r"""Observed points of a ring with many gaps, by conjugate gradients.

With :math:`G = (C + \sigma^2 I)^{-1}` on the whole ring and :math:`G_{uu}` between its unobserved points,

.. math:: \log\det(C + \sigma^2 I)_{oo} = -\log\det G + \log\det G_{uu} , \qquad
          b^\top (C + \sigma^2 I)^{-1}_{oo}\, b = \min_v\; (b - v)^\top G\, (b - v)

for observations b that are zero at unobserved points, and v that is free there and zero elsewhere: :math:`-v` fills the
gaps with the values that fit best. Any others make the form larger, so that its error is of second order in that of v.

:math:`G_{uu}` is divided by its blocks of unobserved neighbours, :math:`P = F F^\top`, Toeplitz matrices whose factors
are the leading parts of one. What is left, :math:`A = F^{-1} G_{uu} F^{-\top}`, has a diagonal of ones and is the
identity but for what gaps know of each other. Its log determinant is estimated (``algebra.lanczos``), unless there is
one gap only, whose determinant ``algebra.toeplitz`` has exactly.

Source: Gardner et al. (2018) for the estimate; Stroud et al. (2017) for values that are filled in on a ring.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg

from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.algebra.lanczos import Estimate, log_determinant_by_probes
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.algebra.toeplitz import toeplitz_log_determinant
from numpyro_dgp.algebra.whitening import inverse_factor
from numpyro_dgp.rings.circulant import Circulant
from numpyro_dgp.rings.pattern import Pattern, Runs
from numpyro_dgp.rings.solver import Solver

__all__ = ["ManyGaps"]


@pytree
class _Whitened:
    r""":math:`A = F^{-1} G_{uu} F^{-\top}` of the module's docstring.

    Args:
        inverse: eigenvalues of G (M,).
        whiten: inverse factor of the Toeplitz block of the longest run; its leading parts are those of shorter ones.
        pattern: which points are observed.
    """

    inverse: Array
    whiten: Array
    pattern: Pattern = static()

    @property
    def size(self) -> int:
        return len(self.pattern.missing)

    @property
    def dtype(self) -> Any:
        return self.inverse.dtype

    @property
    def circulant(self) -> Circulant:
        """The matrix G."""
        return Circulant(self.inverse, (self.pattern.sizes,))

    def inward(self, x: Array) -> Array:
        r""":math:`F^{-\top} x` for vectors (..., n), as numbers on the ring (..., M)."""
        order, runs = self.pattern.runs()
        return jnp.zeros((*x.shape[:-1], self.pattern.size), x.dtype).at[..., order].set(_times(x, self.whiten, runs))

    def outward(self, y: Array) -> Array:
        r""":math:`F^{-1}` times what numbers on the ring (..., M) are at the unobserved points: (..., n)."""
        order, runs = self.pattern.runs()
        return _times(y[..., order], self.whiten.T, runs)

    def apply(self, x: Array) -> Array:
        """A x for vectors (..., n)."""
        return self.outward(self.circulant.apply(self.inward(x)))

    def form(self, x: Array) -> Array:
        """x' A x for a vector (n,), by one transform."""
        sizes = self.pattern.sizes
        waves = jnp.fft.rfftn(self.inward(x).reshape(sizes))
        last = np.arange(waves.shape[-1])
        pairs = np.where((last == 0) | (2 * last == sizes[-1]), 1.0, 2.0).astype(self.dtype)
        power = pairs * (jnp.square(waves.real) + jnp.square(waves.imag)) / self.pattern.size
        return (self.inverse.reshape(sizes)[..., : len(last)] * power).sum()

    def squared_rest(self) -> None:
        """Not known."""
        return None


def _times(x: Array, factor: Array, runs: Runs) -> Array:
    """Vectors (..., n) run by run times the leading part of a factor."""
    parts, start = [x[..., :0]], 0
    for count, length in runs:
        rows = x[..., start : start + count * length].reshape(*x.shape[:-1], count, length)
        parts.append(matmul(rows, factor[:length, :length]).reshape(*x.shape[:-1], count * length))
        start += count * length
    return jnp.concatenate(parts, -1)


@pytree
class ManyGaps:
    """The covariance of noisy values at the observed points of a ring with gaps; :meth:`of` builds it.

    Args:
        total: its eigenvalues on the whole ring (M,).
        whitened: the matrix A.
        log_blocks: log det P.
        row: the first row of G, as far as the gap if there is only one.
        solver: numbers of probes and steps.
    """

    total: Array
    whitened: _Whitened
    log_blocks: Array
    row: Array
    solver: Solver = static()

    @classmethod
    def of(cls, process: Circulant, noise_variance: Array, pattern: Pattern, solver: Solver) -> ManyGaps:
        """From the covariance on the ring, the variance of the noise, and where there are observations."""
        total = process.spectrum + noise_variance
        row = Circulant(1 / total, process.blocks).row()
        _, runs = pattern.runs()
        longest = max(length for _, length in runs)
        whiten = inverse_factor(row[np.abs(np.arange(longest)[:, None] - np.arange(longest))])
        longer = np.array([sum(count for count, length in runs if length > j) for j in range(longest)])
        log_blocks = -2 * (longer.astype(row.dtype) * jnp.log(jnp.diagonal(whiten))).sum()
        reach = len(pattern.missing) if pattern.is_one_gap else 0
        return cls(total, _Whitened(1 / total, whiten, pattern), log_blocks, row[:reach], solver)

    def log_determinant(self) -> Estimate:
        """log det of the covariance."""
        whole, zero, solver = jnp.log(self.total).sum(), jnp.zeros((), self.row.dtype), self.solver
        if len(self.row):
            return Estimate(whole + toeplitz_log_determinant(self.row), zero, zero, 1 + zero)
        found = log_determinant_by_probes(self.whitened, solver.seed, solver.probes, solver.steps)
        return found._replace(value=whole + self.log_blocks + found.value)

    def solve(self, residual: Array, tol: float, maxiter: int) -> Array:
        """What fills the gaps, in the coordinates of A, for observations b on the ring (..., M): (..., n).

        Its derivatives are those of the solution, not of the steps.
        """
        return cg(self.whitened.apply, self._right(residual), tol=tol, maxiter=maxiter)[0]

    def weights(self, residual: Array, x: Array) -> Array:
        """The covariance's inverse times b on the ring (..., M), zero at unobserved points but for the error of x."""
        return self.whitened.circulant.apply(residual - self.whitened.inward(x))

    def square(self, residual: Array, x: Array) -> Array:
        """b' times the covariance's inverse times b (...,): at least that."""
        filled = residual - self.whitened.inward(x)
        return (filled * self.whitened.circulant.apply(filled)).sum(-1)

    def unsolved(self, residual: Array, x: Array) -> Array:
        """The squared residual of the system that x solves (...,), which bounds the error of the square."""
        return jnp.square(self._right(residual) - self.whitened.apply(x)).sum(-1)

    def _right(self, residual: Array) -> Array:
        return self.whitened.outward(self.whitened.circulant.apply(residual))
