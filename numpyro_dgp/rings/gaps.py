r"""Rings with unobserved points, by dense factorisations over the unobserved or the observed points.

If the rest u of a ring is not observed, the covariance of the observed points follows from the Schur complement in u:
with :math:`G = (C + \sigma^2 I)^{-1}` on the whole ring,

.. math:: \log\det(C + \sigma^2 I)_{oo} = -\log\det G + \log\det G_{uu}, \qquad
          (C + \sigma^2 I)_{oo}^{-1} = G_{oo} - G_{ou} G_{uu}^{-1} G_{uo} .

Where fewer points are observed than not, or have different noise variances, :math:`C_{oo} + D` is factorised itself.

**Many gaps** are solved by conjugate gradients.

With :math:`G = (C + \sigma^2 I)^{-1}` on the whole ring and :math:`G_{uu}` between its unobserved points,

.. math:: \log\det(C + \sigma^2 I)_{oo} = -\log\det G + \log\det G_{uu} , \qquad
          b^\top (C + \sigma^2 I)^{-1}_{oo}\, b = \min_v\; (b - v)^\top G\, (b - v)

for observations b that are zero at unobserved points, and v that is free there and zero elsewhere: :math:`-v` fills the
gaps with the values that fit best. Any others make the form larger, so that its error is of second order in that of v.

:math:`G_{uu}` is divided by its blocks of unobserved neighbours, :math:`P = F F^\top`, Toeplitz matrices whose factors
are the leading parts of one. The remaining matrix, :math:`A = F^{-1} G_{uu} F^{-\top}`, has a diagonal of ones and
differs from the identity only by the correlation between gaps. Its log determinant is estimated by Lanczos iterations
(``math.lanczos``), unless there is one gap only, whose determinant is that of a Toeplitz matrix.

The determinant of a symmetric positive definite Toeplitz matrix, in O(n^2) operations and O(n) memory.

Durbin's recursion gives the coefficients :math:`-a^{(m)}` of the best linear prediction of a value from the m before
it, and the variances :math:`E_m` of its errors, whose product is the determinant. From the last coefficients follows
the first column :math:`x = (1, a) / E` of the inverse, and from it, by the formula of Gohberg and Semencul, the sums
along the diagonals of the inverse, which are the slopes of the log determinant:

.. math:: \sum_i (T^{-1})_{i, i+k} = \frac{1}{x_0} \sum_j (n - k - 2 j)\, x_j x_{j + k} .

Source: Gardner et al. (2018) for the estimate; Stroud et al. (2017) for values that are filled in on a ring.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg

from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.math.gaussians import log_determinant
from numpyro_dgp.math.lanczos import Estimate, log_determinant_by_probes
from numpyro_dgp.math.linalg import matmul, solve_lower
from numpyro_dgp.math.whitening import inverse_factor
from numpyro_dgp.rings.circulant import CirculantMatrix
from numpyro_dgp.rings.pattern import Pattern, Runs, Solver

__all__ = ["FewGaps", "FewValues", "ManyGaps", "toeplitz_log_determinant"]


@pytree
class FewGaps:
    """The covariance of noisy values at the observed points of a ring, by the factor of G_uu; :meth:`of` builds it.

    Args:
        process: the covariance C.
        noise: variance of the noise.
        factor: the Cholesky factor of G_uu.
        pattern: which points are observed.
    """

    process: CirculantMatrix
    noise: Array
    factor: Array
    pattern: Pattern = static()

    @classmethod
    def of(cls, process: CirculantMatrix, noise_variance: Array, pattern: Pattern) -> FewGaps:
        """From the covariance on the ring, the variance of the noise, and where there are observations."""
        inverse = CirculantMatrix(1 / (process.spectrum + noise_variance), process.blocks)
        between = _entries(inverse, pattern.missing, pattern.missing)
        return cls(process, noise_variance, jnp.linalg.cholesky(between), pattern)  # L L' = G_uu

    @property
    def num_columns(self) -> int:
        """How many columns the matrices behind posterior variances have."""
        return len(self.pattern.missing)

    @property
    def total(self) -> CirculantMatrix:
        """C + noise on the whole ring."""
        return CirculantMatrix(self.process.spectrum + self.noise, self.process.blocks)

    def log_determinant(self) -> Estimate:
        """log det of the covariance."""
        found = self.total.log_determinant()
        if len(self.pattern.missing):
            found = found + 2 * log_determinant(self.factor)  # -log|G| + log|G_uu|
        zero = jnp.zeros_like(found)
        return Estimate(found, zero, zero, 1 + zero)

    def solve(self, residual: Array) -> Array:
        """Observations b on the ring, less what fills the gaps best (..., M)."""
        solved = self.total.solve(residual)[..., self.pattern.missing, None]  # (G b)_u
        fill = solve_lower(self.factor, solve_lower(self.factor, solved), transpose=True)[..., 0]  # G_uu^-1 (G b)_u
        return residual.at[..., self.pattern.missing].add(-fill)

    def weights(self, residual: Array, x: Array) -> Array:
        """The covariance's inverse times b on the ring (..., M), zero at unobserved points."""
        return self.total.solve(x)  # G (b - v): G_oo b - G_ou G_uu^-1 G_uo b, and zero in the gaps

    def square(self, residual: Array, x: Array) -> Array:
        """b' times the covariance's inverse times b (...,)."""
        return (x * self.total.solve(x)).sum(-1)  # (b - v)' G (b - v)

    def variance(self) -> Array:
        """The posterior variances of the process on the ring (M,)."""
        # diag(C - C G C) = diag(s^2 C G), and the squares of L^-1 (G C)_u for what is missing
        total = self.total.spectrum
        explained = CirculantMatrix(self.process.spectrum * self.noise / total, self.process.blocks).diagonal()
        return explained + jnp.square(self._half_columns()).sum(0) if len(self.pattern.missing) else explained

    def _half_columns(self) -> Array:
        """L^{-1} (G C)_u of all points (n_u, M)."""
        shrunk = CirculantMatrix(self.process.spectrum / self.total.spectrum, self.process.blocks)
        return solve_lower(self.factor, _entries(shrunk, self.pattern.missing, np.arange(self.pattern.size)))


@pytree
class FewValues:
    """The covariance of noisy values at the observed points of a ring, by its own factor; :meth:`of` builds it.

    Args:
        process: the covariance C.
        factor: the Cholesky factor of C_oo + D.
        pattern: which points are observed.
    """

    process: CirculantMatrix
    factor: Array
    pattern: Pattern = static()

    @classmethod
    def of(cls, process: CirculantMatrix, noise_variance: Array, pattern: Pattern) -> FewValues:
        """From the covariance on the ring, the noise's variance or variances (N,), and where there are observations."""
        noise = jnp.diag(jnp.broadcast_to(noise_variance, (len(pattern.present),)))
        # L L' = C_oo + D
        return cls(process, jnp.linalg.cholesky(_entries(process, pattern.present, pattern.present) + noise), pattern)

    @property
    def num_columns(self) -> int:
        """How many columns the matrices behind posterior variances have."""
        return len(self.pattern.present)

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
        found = solve_lower(self.factor, x[..., None], transpose=True)[..., 0]  # L^-T L^-1 b
        return jnp.zeros_like(residual).at[..., self.pattern.present].set(found)

    def square(self, residual: Array, x: Array) -> Array:
        """b' times the covariance's inverse times b (...,)."""
        return jnp.square(x).sum(-1)

    def variance(self) -> Array:
        """The posterior variances of the process on the ring (M,)."""
        return self.process.diagonal() - jnp.square(self._half_columns()).sum(0)  # C_ii - |L^-1 C_oi|^2

    def _half_columns(self) -> Array:
        """L^{-1} C_o of all points (N, M)."""
        return solve_lower(self.factor, _entries(self.process, self.pattern.present, np.arange(self.pattern.size)))


def _entries(matrix: CirculantMatrix, rows: Any, columns: Any) -> Array:
    """Some entries of a circulant matrix."""
    (sizes,) = matrix.blocks
    row = matrix.row().reshape(sizes)
    i, j = (jnp.unravel_index(jnp.asarray(index), sizes) for index in (rows, columns))
    return row[tuple((a[:, None] - b[None]) % m for a, b, m in zip(i, j, sizes, strict=True))]  # C_ij = c_{i - j}


@jax.custom_vjp
def toeplitz_log_determinant(column: Array) -> Array:
    """log det of the symmetric Toeplitz matrix with a first column (n,): a number.

    Example:
        >>> print(float(jnp.exp(toeplitz_log_determinant(jnp.array([2.0, 1.0]))).round(4)))
        3.0

    Source: Trench (1964).
    """
    return _durbin(column)[0]


def _durbin(column: Array) -> tuple[Array, Array]:
    """The log determinant, and the first column of the inverse (n,)."""
    n = len(column)
    # The last m entries of a reversed vector are its first m in reversed order: slices of fixed length n do for all m.
    zeros = jnp.zeros_like(column)

    def backwards(values: Array, m: Array) -> Array:
        """``values[m], values[m - 1], ..., values[0], 0, ...`` (n,)."""
        return jax.lax.dynamic_slice(jnp.concatenate([values[::-1], zeros]), (n - 1 - m,), (n,))

    def step(m: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        a, error, total = state  # a[0] = 1 and the coefficients of order m - 1
        # Levinson's step: the new last coefficient is -(c_m + sum_j a_j c_{m-j}) / E.
        reflection = -(a * backwards(column, m)).sum() / error
        a = a + reflection * backwards(a, m)
        error = error * (1 - jnp.square(reflection))  # E_m = E_{m-1} (1 - reflection^2)
        return a, error, total + jnp.log(error)

    start = zeros.at[0].set(1), column[0], jnp.log(column[0])
    a, error, total = jax.lax.fori_loop(1, n, step, start)
    return total, a / error  # log|T| = sum_m log E_m, x = (1, a) / E


def _forward(column: Array) -> tuple[Array, Array]:
    return _durbin(column)


def _backward(x: Array, slope: Array) -> tuple[Array]:
    n = len(x)
    k = jnp.arange(n, dtype=x.dtype)
    waves = jnp.fft.rfft(x, 2 * n)

    def correlation(left: Array) -> Array:
        """Sums of ``left[j] x[j + k]`` over j (n,)."""
        # padded to 2 n, so that nothing wraps around
        return jnp.fft.irfft(jnp.conj(jnp.fft.rfft(left, 2 * n)) * waves, 2 * n)[:n]

    # sum_j (n - k - 2 j) x_j x_{j+k} / x_0; for k > 0 the diagonals k and -k depend on c_k.
    sums = ((n - k) * correlation(x) - 2 * correlation(k * x)) / x[0]
    return (slope * jnp.where(k == 0, 1, 2) * sums,)


toeplitz_log_determinant.defvjp(_forward, _backward)


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
    def circulant(self) -> CirculantMatrix:
        """The matrix G."""
        return CirculantMatrix(self.inverse, (self.pattern.sizes,))

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
        # y' G y = sum_k |F y|_k^2 / (lambda_k + s^2) / M; k and -k are one entry of the half.
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
    num_columns: ClassVar[None] = None  # no matrices: systems are solved by conjugate gradients

    @classmethod
    def of(cls, process: CirculantMatrix, noise_variance: Array, pattern: Pattern, solver: Solver) -> ManyGaps:
        """From the covariance on the ring, the variance of the noise, and where there are observations."""
        total = process.spectrum + noise_variance
        row = CirculantMatrix(1 / total, process.blocks).row()
        _, runs = pattern.runs()
        longest = max(length for _, length in runs)
        whiten = inverse_factor(row[np.abs(np.arange(longest)[:, None] - np.arange(longest))])
        # log|P| = -2 sum_j (how many runs are longer than j) log W_jj
        longer = np.array([sum(count for count, length in runs if length > j) for j in range(longest)])
        log_blocks = -2 * (longer.astype(row.dtype) * jnp.log(jnp.diagonal(whiten))).sum()
        reach = len(pattern.missing) if pattern.is_one_gap else 0
        return cls(total, _Whitened(1 / total, whiten, pattern), log_blocks, row[:reach], solver)

    def log_determinant(self) -> Estimate:
        """log det of the covariance."""
        whole, zero, solver = jnp.log(self.total).sum(), jnp.zeros((), self.row.dtype), self.solver
        if len(self.row):
            return Estimate(whole + toeplitz_log_determinant(self.row), zero, zero, 1 + zero)  # -log|G| + log|G_uu|
        found = log_determinant_by_probes(self.whitened, solver.seed, solver.probes, solver.steps)
        return found._replace(value=whole + self.log_blocks + found.value)  # -log|G| + log|P| + log|A|

    def solve(self, residual: Array, tol: float, maxiter: int) -> Array:
        """What fills the gaps, in the coordinates of A, for observations b on the ring (..., M): (..., n).

        Its derivatives are those of the solution, not of the steps.
        """
        # A x = F^-1 (G b)_u, v = F^-T x
        return cg(self.whitened.apply, self._right(residual), tol=tol, maxiter=maxiter)[0]

    def weights(self, residual: Array, x: Array) -> Array:
        """The covariance's inverse times b on the ring (..., M), zero at unobserved points up to the error of x."""
        return self.whitened.circulant.apply(residual - self.whitened.inward(x))  # G (b - v)

    def square(self, residual: Array, x: Array) -> Array:
        """b' times the covariance's inverse times b (...,): at least that."""
        filled = residual - self.whitened.inward(x)
        return (filled * self.whitened.circulant.apply(filled)).sum(-1)

    def unsolved(self, residual: Array, x: Array) -> Array:
        """The squared residual of the system that x solves (...,), which bounds the error of the square."""
        return jnp.square(self._right(residual) - self.whitened.apply(x)).sum(-1)

    def _right(self, residual: Array) -> Array:
        return self.whitened.outward(self.whitened.circulant.apply(residual))
