r"""Rings with heteroscedastic noise, gaps included, by conjugate gradients.

With the noise variances D, infinite where nothing is observed, a reference :math:`s^2`, and

.. math:: K = C\, (C + s^2 I)^{-1} , \qquad \rho = 1 - s^2 / D , \qquad
          A = I - K^{1/2}\, \mathrm{diag}(\rho)\, K^{1/2} ,

the covariance of the observations is :math:`C + D = (D / s^2)\, (I - \rho K)\, (C + s^2 I)`, and therefore

.. math:: \log\det(C + D)_{oo} = \log\det(C + s^2 I) - \sum_o \log(s^2 / D) - n_u \log s^2 + \log\det A

with :math:`n_u` unobserved points. The best values of the function, :math:`f = s^2 K^{1/2} x` with
:math:`A x = K^{1/2} D^{-1} b`, give

.. math:: b^\top (C + D)^{-1}_{oo}\, b = \min_f\; (b - f)^\top D^{-1} (b - f) + f^\top C^{-1} f ,

with an error of second order in that of f. With :math:`1 / s^2` the mean of 1 / D over the ring, the mean of
:math:`\rho` is zero and A has a diagonal of ones at the frequencies (Hartley's coordinates, in which all vectors are
kept). A is the identity both where the process is below the noise and where it is smooth enough to average it, and
:math:`\mathrm{tr}(A - I)^2 = \rho^\top (K \circ K)\, \rho` is known.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg

from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.math.lanczos import Estimate, log_determinant_by_probes
from numpyro_dgp.rings.circulant import Blocks, CirculantMatrix, hartley
from numpyro_dgp.rings.pattern import Pattern, Solver

__all__ = ["UnevenNoise"]


@pytree
class _Weighted:
    """A of the module's docstring.

    Args:
        root: the square roots of the eigenvalues of K (M,).
        share: rho (M,).
        blocks: sizes of the grid.
    """

    root: Array
    share: Array
    blocks: Blocks = static()

    @property
    def size(self) -> int:
        return len(self.root)

    @property
    def dtype(self) -> Any:
        return self.root.dtype

    def apply(self, x: Array) -> Array:
        """A x for vectors (..., M)."""
        # x - K^1/2 H diag(rho) H K^1/2 x
        return x - self.root * hartley(self.share * hartley(self.root * x, self.blocks), self.blocks)

    def form(self, x: Array) -> Array:
        """x' A x for a vector (M,)."""
        # x'x - (H K^1/2 x)' diag(rho) H K^1/2 x
        return (x * x).sum() - (self.share * jnp.square(hartley(self.root * x, self.blocks))).sum()

    def squared_rest(self) -> Array:
        """The trace of (A - I)^2."""
        smooth = CirculantMatrix(jnp.square(self.root), self.blocks)
        return smooth.sandwich(self.share, smooth, self.share)


@pytree
class UnevenNoise:
    """The covariance of values with noise per observed point of a ring; :meth:`of` builds it.

    Args:
        spectrum: eigenvalues of C (M,).
        base: the reference variance s^2.
        precision: 1 / D on the ring (M,), zero where nothing is observed.
        weighted: the matrix A.
        log_noise: the sum of the logarithms of D at observed points.
        solver: numbers of probes and steps.
    """

    spectrum: Array
    base: Array
    precision: Array
    weighted: _Weighted
    log_noise: Array
    solver: Solver = static()
    num_columns: ClassVar[None] = None  # no matrices: systems are solved by conjugate gradients

    @classmethod
    def of(cls, process: CirculantMatrix, noise_variance: Array, pattern: Pattern, solver: Solver) -> UnevenNoise:
        """From the covariance on the ring, the variances of the noise (N,), and where there are observations."""
        precision = jnp.zeros(pattern.size, process.spectrum.dtype).at[pattern.present].set(1 / noise_variance)
        base = 1 / precision.mean()  # s^2
        # K^1/2 = (lambda / (lambda + s^2))^1/2 and rho = 1 - s^2 / D
        weighted = _Weighted(
            jnp.sqrt(process.spectrum / (process.spectrum + base)), 1 - base * precision, process.blocks
        )
        return cls(process.spectrum, base, precision, weighted, jnp.log(noise_variance).sum(), solver)

    def log_determinant(self) -> Estimate:
        """log det of the covariance."""
        # log|C + s^2 I| - sum_o log(s^2 / D) - n_u log s^2: the M logarithms of s^2 cancel.
        whole = jnp.log1p(self.spectrum / self.base).sum() + self.log_noise
        solver = self.solver
        found = log_determinant_by_probes(self.weighted, solver.seed, solver.probes, solver.steps)
        return found._replace(value=whole + found.value)

    def solve(self, residual: Array, tol: float, maxiter: int) -> Array:
        """The function that fits best, in the coordinates of A, to observations b on the ring (..., M): (..., M).

        Its derivatives are those of the solution, not of the steps.
        """
        return cg(self.weighted.apply, self._right(residual), tol=tol, maxiter=maxiter)[0]

    def weights(self, residual: Array, x: Array) -> Array:
        """The covariance's inverse times b on the ring (..., M), zero at unobserved points."""
        return self.precision * (residual - self._function(x))  # D^-1 (b - f)

    def square(self, residual: Array, x: Array) -> Array:
        """b' times the covariance's inverse times b (...,): at least that."""
        misfit = (self.precision * jnp.square(residual - self._function(x))).sum(-1)  # (b - f)' D^-1 (b - f)
        # f' C^-1 f = sum_k s^4 x_k^2 / (lambda_k + s^2)
        return misfit + (jnp.square(self.base * x) / (self.spectrum + self.base)).sum(-1)

    def unsolved(self, residual: Array, x: Array) -> Array:
        """The squared residual of the system that x solves (...,), in the units of the square."""
        # s^2 |K^1/2 D^-1 b - A x|^2
        return self.base * jnp.square(self._right(residual) - self.weighted.apply(x)).sum(-1)

    def _function(self, x: Array) -> Array:
        return self.base * hartley(self.weighted.root * x, self.weighted.blocks)  # f = s^2 H K^1/2 x

    def _right(self, residual: Array) -> Array:
        return self.weighted.root * hartley(self.precision * residual, self.weighted.blocks)  # K^1/2 H D^-1 b
