r"""Gaussians whose covariance is a diagonal and a matrix of low rank, in O(M J) numbers and O(M J²) work.

With standard deviations :math:`\sigma` (..., M) and a factor F (..., M, J),

.. math:: \Sigma = \mathrm{diag}(\sigma^2) + F F^\top = R R^\top, \qquad
          R = \mathrm{diag}(\sigma) \bigl(I + U (I + C)^{-1} U^\top\bigr), \qquad
          U = \mathrm{diag}(\sigma)^{-1} F, \qquad C C^\top = I + U^\top U

with C (..., J, J) lower triangular. That :math:`R R^\top = \Sigma` follows from
:math:`K + K^\top + K\, U^\top U\, K^\top = I` for :math:`K = (I + C)^{-1}`. The root needs no eigenvalues and exists at
F = 0, where it is the diagonal. By the matrix determinant lemma,
:math:`\log\lvert\det R\rvert = \sum \log\lvert\sigma\rvert + \sum \log C_{jj}`.
"""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.gaussians import log_determinant
from numpyro_dgp.algebra.linalg import fused, matmul, solve_lower, times_transpose

__all__ = ["color", "kl_low_rank", "log_determinant_low_rank", "root_factors", "spread_low_rank", "whiten"]


@fused
def root_factors(scale: Array, factor: Array) -> tuple[Array, Array]:
    """U (..., M, J) and C (..., J, J) of the root above.

    Args:
        scale: standard deviations (..., M), not zero; their signs are free.
        factor: F (..., M, J).

    Example:
        >>> import jax.numpy as jnp
        >>> U, C = root_factors(jnp.array([1.0, 2.0]), jnp.array([[0.0], [2.0]]))
        >>> print(C.round(3))
        [[1.414]]
    """
    U = factor / scale[..., None]
    return U, jnp.linalg.cholesky(times_transpose(U.mT) + jnp.eye(U.shape[-1], dtype=U.dtype))


@fused
def color(loc: Array, scale: Array, factor: Array, white: Array) -> Array:
    r"""The draw :math:`m + R \epsilon` (..., M) that standard normal numbers :math:`\epsilon` (..., M) give."""
    U, C = root_factors(scale, factor)
    inside = solve_lower(C + jnp.eye(C.shape[-1], dtype=C.dtype), matmul(U.mT, white[..., None]))
    return loc + scale * white + matmul(factor, inside)[..., 0]


@fused
def whiten(loc: Array, scale: Array, factor: Array, value: Array) -> Array:
    r""":math:`\epsilon = R^{-1} (v - m)` (..., M) of a draw v (..., M)."""
    U, C = root_factors(scale, factor)
    rest = (value - loc) / scale
    inside = solve_lower(C, matmul(U.mT, rest[..., None]))
    inside = solve_lower(C + jnp.eye(C.shape[-1], dtype=C.dtype), inside, transpose=True)
    return rest - matmul(U, inside)[..., 0]


def log_determinant_low_rank(scale: Array, factor: Array) -> Array:
    r""":math:`\log\lvert\det R\rvert` (...,), by the matrix determinant lemma."""
    return jnp.log(jnp.abs(scale)).sum(-1) + log_determinant(root_factors(scale, factor)[1])


def kl_low_rank(loc: Array, scale: Array, factor: Array) -> Array:
    r""":math:`\mathrm{KL}[N(m, \mathrm{diag}(\sigma^2) + F F^\top) \,\|\, N(0, I)]`, in nats: shape (...,).

    .. math:: \tfrac12 \bigl(\lVert\sigma\rVert^2 + \lVert F\rVert_F^2 + \lVert m\rVert^2 - M\bigr)
              - \log\lvert\det R\rvert

    Args:
        loc: m (..., M).
        scale: :math:`\sigma` (..., M).
        factor: F (..., M, J).

    Example:
        >>> import jax.numpy as jnp
        >>> print(kl_low_rank(jnp.zeros(2), jnp.ones(2), jnp.zeros((2, 1))))
        0.0
    """
    square = jnp.square(scale) + jnp.square(factor).sum(-1) + jnp.square(loc) - 1
    return 0.5 * square.sum(-1) - log_determinant_low_rank(scale, factor)


def spread_low_rank(A: Array, factor: Array) -> Array:
    r""":math:`\lVert F_p^\top a_n\rVert^2` (N, P) of rows A (N, M) or (P, N, M) and factors (P, M, J)."""
    if A.ndim == 3:
        return jnp.square(matmul(A, factor)).sum(-1).T
    P, M, J = factor.shape
    products = matmul(A, jnp.moveaxis(factor, 0, 1).reshape(M, P * J))
    return jnp.square(products).reshape(len(A), P, J).sum(-1)
