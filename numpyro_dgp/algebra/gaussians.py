r"""Gaussian densities and divergences, as functions of arrays.

A Gaussian over n numbers is a mean ``loc`` (..., n) with a triangular ``scale_tril`` (..., n, n),
:math:`S = L L^\top`, or with a vector ``scale`` (..., n), :math:`S = \mathrm{diag}(s^2)`. The signs on the
diagonal of L and of s are free: only their squares matter, so that neither needs a constraint.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.linalg import matmul, solve_lower

__all__ = [
    "entropy",
    "expected_kl",
    "kl_between",
    "kl_diagonal",
    "kl_full",
    "log_density",
    "log_determinant",
    "opper_archambeau",
]


def log_determinant(scale_tril: Array) -> Array:
    r""":math:`\log\lvert\det L\rvert` of triangular factors (..., n, n): shape (...,)."""
    return jnp.log(jnp.abs(jnp.diagonal(scale_tril, axis1=-2, axis2=-1))).sum(-1)


def entropy(variance: Array) -> Array:
    r""":math:`\tfrac12 \log(2 \pi e\, S)` of one-dimensional Gaussians with variances S of any shape, in nats."""
    return 0.5 * jnp.log(2 * math.pi * math.e * variance)


def expected_kl(variance: Array, square: ArrayLike, prior_variance: ArrayLike) -> Array:
    r"""Divergence of one-dimensional Gaussians, number by number, averaged over the distance of their means.

    .. math::
        E\, \mathrm{KL}\bigl[N(m, S) \,\|\, N(m', c)\bigr]
        = \tfrac12 \Bigl( \frac{S + E (m - m')^2}{c} - 1 + \log c - \log S \Bigr)

    Every divergence of the package between Gaussians without correlations is this one: means that depend on a belief
    add their variance to ``square``, and a prior N(0, 1) has ``square`` :math:`= m^2` and ``prior_variance`` 1.

    Args:
        variance: S, of any shape, positive.
        square: the expected square of the distance between the means; broadcasts against S.
        prior_variance: c, positive; broadcasts against S.

    Returns:
        One divergence per number, in nats; sum over the numbers of an event for that of the whole.

    Example:
        >>> import jax.numpy as jnp
        >>> print(expected_kl(jnp.array([1.0, 4.0]), jnp.array([0.0, 2.0]), 1.0).round(3))
        [0.    1.807]
    """
    return 0.5 * ((variance + square) / prior_variance - 1 + jnp.log(prior_variance) - jnp.log(variance))


def kl_full(loc: Array, scale_tril: Array) -> Array:
    r"""KL of N(m, LL') to N(0, I): :math:`\tfrac12(\lVert L\rVert_F^2 + \lVert m\rVert^2 - n) - \log|\det L|`."""
    trace = jnp.square(scale_tril).sum((-2, -1))
    return 0.5 * (trace + jnp.square(loc).sum(-1) - loc.shape[-1]) - log_determinant(scale_tril)


def kl_between(q: tuple[Array, Array], p: tuple[Array, Array]) -> Array:
    r""":math:`\mathrm{KL}[N(m_q, L_q L_q^\top) \,\|\, N(m_p, L_p L_p^\top)]`: :func:`kl_full` in p's own units."""
    shift = solve_lower(p[1], (q[0] - p[0])[..., None])[..., 0]
    return kl_full(shift, solve_lower(p[1], q[1]))


def kl_diagonal(loc: Array, scale: Array) -> Array:
    r""":math:`\mathrm{KL}[N(m, \mathrm{diag}\,s^2) \,\|\, N(0, I)]`, summed over the last axis.

    :func:`expected_kl` in terms of s, whose logarithm stays finite in single precision where :math:`s^2` is zero.
    """
    return (0.5 * (jnp.square(scale) + jnp.square(loc) - 1) - jnp.log(jnp.abs(scale))).sum(-1)


def log_density(white: Array, log_det: Array) -> Array:
    r"""Log density of :math:`m + L\epsilon` from the standard normal draw :math:`\epsilon` (..., n) behind it.

    Working from :math:`\epsilon` and not from the value keeps all digits when L is tiny.
    """
    return -0.5 * (jnp.square(white).sum(-1) + white.shape[-1] * math.log(2 * math.pi)) - log_det


def opper_archambeau(L: Array, alpha: Array, lam: Array) -> tuple[Array, Array]:
    r"""Whitened coordinates of the Gaussian :math:`N(K\alpha, (K^{-1} + \mathrm{diag}(\lambda)^2)^{-1})`.

    With :math:`K = L L^\top`, a draw is :math:`L(m + R\epsilon)` where :math:`m = L^\top\alpha` and
    :math:`R R^\top = (I + L^\top \mathrm{diag}(\lambda)^2 L)^{-1}`. The matrix inverted has eigenvalues of at least
    one, and its determinant is that of :math:`A = \Lambda K \Lambda + I` in the sources, so that
    ``kl_full(m, R)`` is its :math:`\tfrac12(\log|A| + \alpha^\top K\alpha + \mathrm{tr}\,A^{-1} - N)`.

    Args:
        L: Cholesky factor of the prior covariance (N, N).
        alpha: dual mean (N,).
        lam: square roots of the site precisions (N,); signs are free, zeros allowed.

    Returns:
        m (N,) and R (N, N), upper triangular.

    Source: Opper and Archambeau (2009); Hensman (2016), where the covariance divides by lambda; this form does not. In
    the prediction formula there the matrix to invert is :math:`K + \Lambda^{-2}`, not :math:`K + \Lambda^2` as printed.
    """
    half = lam[:, None] * L
    eye = jnp.eye(L.shape[-1], dtype=L.dtype)
    C = jnp.linalg.cholesky(eye + matmul(half.T, half))
    return alpha @ L, solve_lower(C, eye, transpose=True)
