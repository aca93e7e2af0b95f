r"""Gaussians whose covariance or precision is a diagonal and a matrix of low rank: M (J + 2) numbers, O(M J²) work.

With standard deviations :math:`\sigma` (..., M) and columns U (..., M, J), relative to them,

.. math:: \Sigma = \mathrm{diag}(\sigma)\, (I + U U^\top)^{\pm 1}\, \mathrm{diag}(\sigma) = R R^\top

where the sign is + for a low rank in the covariance, - for one in the precision. With C (..., J, J) lower triangular,

.. math:: R_+ = \mathrm{diag}(\sigma)\, \bigl(I + U (I + C)^{-1} U^\top\bigr), \qquad
          R_- = \mathrm{diag}(\sigma)\, \bigl(I - U C^{-\top} (I + C)^{-1} U^\top\bigr), \qquad
          C C^\top = I + U^\top U .

The first is a root because :math:`K + K^\top + K\, U^\top U\, K^\top = I` for :math:`K = (I + C)^{-1}`; the bracket of
the second is the inverse, transposed, of that of the first. Neither needs eigenvalues, and at U = 0 both are the
diagonal. By the matrix determinant lemma,
:math:`\log\lvert\det R_\pm\rvert = \sum \log\lvert\sigma\rvert \pm \sum \log C_{jj}`.
"""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.gaussians import log_determinant
from numpyro_dgp.algebra.linalg import matmul, solve_lower, times_transpose

__all__ = [
    "kl_low_rank",
    "log_determinant_low_rank",
    "low_rank_root",
    "low_rank_root_solve",
    "low_rank_spread",
    "signed",
]


def _triangle(U: Array) -> Array:
    return jnp.linalg.cholesky(times_transpose(U.mT) + jnp.eye(U.shape[-1], dtype=U.dtype))


def _times_root(U: Array, white: Array, inverse: bool, transpose: bool) -> Array:
    """The bracket of R₊, or its inverse, or the transpose of either, times vectors (..., M)."""
    C, inside = _triangle(U), matmul(U.mT, white[..., None])
    shifted = C + jnp.eye(C.shape[-1], dtype=C.dtype)
    if not inverse:
        return white + matmul(U, solve_lower(shifted, inside, transpose=transpose))[..., 0]
    first, second = (shifted, C) if transpose else (C, shifted)
    return white - matmul(U, solve_lower(second, solve_lower(first, inside), transpose=True))[..., 0]


def low_rank_root(scale: Array, U: Array, white: Array, precision: bool) -> Array:
    r""":math:`R \epsilon` (..., M) of standard normal numbers :math:`\epsilon` (..., M).

    Args:
        scale: :math:`\sigma` (..., M), not zero; their signs are free.
        U: columns (..., M, J).
        white: :math:`\epsilon` (..., M).
        precision: whether the low rank is in the precision.

    Example:
        >>> import jax.numpy as jnp
        >>> print(low_rank_root(jnp.array([2.0]), jnp.array([[3.0**0.5]]), jnp.ones(1), False))  # standard deviation
        [4.]
        >>> print(low_rank_root(jnp.array([2.0]), jnp.array([[3.0**0.5]]), jnp.ones(1), True))
        [1.]
    """
    return scale * _times_root(U, white, precision, precision)


def low_rank_root_solve(scale: Array, U: Array, value: Array, precision: bool) -> Array:
    """What :func:`low_rank_root` makes ``value`` from."""
    return _times_root(U, value / scale, not precision, precision)


def log_determinant_low_rank(scale: Array, U: Array, precision: bool) -> Array:
    r""":math:`\log\lvert\det R\rvert` (...,)."""
    low = log_determinant(_triangle(U))
    return jnp.log(jnp.abs(scale)).sum(-1) + (-low if precision else low)


def signed(scale: Array, U: Array, precision: bool) -> tuple[Array, int]:
    r"""Columns F (..., M, J) and the sign s in :math:`\Sigma = \mathrm{diag}(\sigma^2) + s F F^\top`."""
    if not precision:
        return scale[..., None] * U, 1
    return scale[..., None] * solve_lower(_triangle(U), U.mT).mT, -1


def kl_low_rank(loc: Array, scale: Array, U: Array, precision: bool) -> Array:
    r""":math:`\mathrm{KL}[N(m, \Sigma) \,\|\, N(0, I)]` in nats, with :func:`signed` columns F: shape (...,).

    .. math:: \tfrac12 \bigl(\lVert\sigma\rVert^2 + s \lVert F\rVert_F^2 + \lVert m\rVert^2 - M\bigr)
              - \log\lvert\det R\rvert

    Args:
        loc: m (..., M).
        scale: :math:`\sigma` (..., M).
        U: columns (..., M, J).
        precision: whether the low rank is in the precision.

    Example:
        >>> import jax.numpy as jnp
        >>> print(kl_low_rank(jnp.zeros(2), jnp.ones(2), jnp.zeros((2, 1)), True))
        0.0
    """
    F, sign = signed(scale, U, precision)
    square = jnp.square(scale) + sign * jnp.square(F).sum(-1) + jnp.square(loc) - 1
    return 0.5 * square.sum(-1) - log_determinant_low_rank(scale, U, precision)


def low_rank_spread(A: Array, F: Array) -> Array:
    r""":math:`\lVert F_p^\top a_n\rVert^2` (N, P) of rows A (N, M) or (P, N, M) and columns (P, M, J)."""
    if A.ndim == 3:
        return jnp.square(matmul(A, F)).sum(-1).T
    P, M, J = F.shape
    products = matmul(A, jnp.moveaxis(F, 0, 1).reshape(M, P * J))
    return jnp.square(products).reshape(len(A), P, J).sum(-1)
