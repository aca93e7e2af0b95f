r"""Gaussian densities and divergences, as functions of arrays.

A Gaussian over n numbers is a mean ``loc`` (..., n) with a triangular ``scale_tril`` (..., n, n),
the factor R of its covariance :math:`\Sigma = R R^\top`, or with a vector ``scale`` (..., n), the diagonal of an R that
is diagonal. The signs on the diagonal of R are free: only squares matter, so that it needs no constraint.

Gaussians whose covariance or precision is a diagonal and a matrix of low rank: M (J + 2) numbers, O(M J²) work.

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

import math

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.math.linalg import fused, matmul, solve_lower, times_transpose
from numpyro_dgp.math.whitening import inverse_cholesky, inverse_factor

__all__ = [
    "entropy",
    "expected_kl",
    "expected_log_ratio",
    "given_covariance",
    "given_observations",
    "kl_between",
    "kl_diagonal",
    "kl_full",
    "kl_low_rank",
    "log_density",
    "log_determinant",
    "log_determinant_low_rank",
    "low_rank_root",
    "low_rank_root_solve",
    "low_rank_variances",
    "narrower_than_prior",
    "opper_archambeau",
    "signed",
]


def log_determinant(scale_tril: Array) -> Array:
    r""":math:`\log\lvert\det R\rvert` of triangular factors (..., n, n): shape (...,)."""
    return jnp.log(jnp.abs(jnp.diagonal(scale_tril, axis1=-2, axis2=-1))).sum(-1)


def entropy(variance: Array) -> Array:
    r""":math:`\tfrac12 \log(2 \pi e\, \Omega)` of one-dimensional Gaussians with variances :math:`\Omega`, in nats."""
    return 0.5 * jnp.log(2 * math.pi * math.e * variance)


def expected_kl(variance: Array, square: ArrayLike, prior_variance: ArrayLike) -> Array:
    r"""Divergence of one-dimensional Gaussians, elementwise, averaged over the distance of their means.

    .. math::
        E\, \mathrm{KL}\bigl[N(m, \Omega) \,\|\, N(m', c)\bigr]
        = \tfrac12 \Bigl( \frac{\Omega + E (m - m')^2}{c} - 1 + \log c - \log \Omega \Bigr)

    Every divergence of the package between Gaussians without correlations is this one: means that depend on a belief
    add their variance to ``square``, and a prior N(0, 1) has ``square`` :math:`= m^2` and ``prior_variance`` 1.

    Args:
        variance: :math:`\Omega`, of any shape, positive.
        square: the expected square of the distance between the means; broadcasts against ``variance``.
        prior_variance: c, positive; broadcasts against ``variance``.

    Returns:
        One divergence per number, in nats; sum over the numbers of an event for that of the whole.

    Example:
        >>> import jax.numpy as jnp
        >>> print(expected_kl(jnp.array([1.0, 4.0]), jnp.array([0.0, 2.0]), 1.0).round(3))
        [0.    1.807]
    """
    return 0.5 * ((variance + square) / prior_variance - 1 + jnp.log(prior_variance) - jnp.log(variance))


def kl_full(loc: Array, scale_tril: Array) -> Array:
    r"""KL of N(m, RR') to N(0, I): :math:`\tfrac12(\lVert R\rVert_F^2 + \lVert m\rVert^2 - n) - \log|\det R|`."""
    trace = jnp.square(scale_tril).sum((-2, -1))  # tr R R'
    return 0.5 * (trace + jnp.square(loc).sum(-1) - loc.shape[-1]) - log_determinant(scale_tril)


def kl_between(q: tuple[Array, Array], p: tuple[Array, Array]) -> Array:
    r""":math:`\mathrm{KL}[N(m_q, R_q R_q^\top) \,\|\, N(m_p, R_p R_p^\top)]`: :func:`kl_full` in p's own units."""
    shift = solve_lower(p[1], (q[0] - p[0])[..., None])[..., 0]  # R_p^-1 (m_q - m_p)
    # KL[N(R_p^-1 (m_q - m_p), R_p^-1 R_q R_q' R_p^-T) || N(0, I)]
    return kl_full(shift, solve_lower(p[1], q[1]))


def expected_log_ratio(loc: Array, inverse: Array, mean: Array, covariance: Array) -> Array:
    r"""The expected log ratio of a Gaussian to N(0, I), at values that are Gaussian themselves.

    .. math::
        E_{N(v;\, \mu, V)} \log \frac{N(v; m, R R^\top)}{N(v; 0, I)}
        = \tfrac12 \bigl( \lVert \mu \rVert^2 + \mathrm{tr}\, V - \lVert R^{-1} (\mu - m) \rVert^2
          - \mathrm{tr}\, R^{-1} V R^{-\top} \bigr) - \log\lvert\det R\rvert

    It needs no factor of V, which may be singular.

    Args:
        loc: m (..., n).
        inverse: :math:`R^{-1}`, triangular (..., n, n).
        mean: :math:`\mu` (..., n).
        covariance: V (..., n, n).

    Example:
        >>> import jax.numpy as jnp
        >>> one = jnp.ones(1)
        >>> print(expected_log_ratio(one, 2.0 * jnp.eye(1), one, 0.25 * jnp.eye(1)).round(4))
        0.8181
        >>> print(kl_full(one, 0.5 * jnp.eye(1)).round(4))  # under q itself it is the divergence from N(0, I)
        0.8181
    """
    shift = matmul(inverse, (mean - loc)[..., None])[..., 0]  # R^-1 (mu - m)
    within = (matmul(inverse, covariance) * inverse).sum((-2, -1))  # tr R^-1 V R^-T
    # |mu|^2 + tr V, from N(0, I)
    prior = jnp.square(mean).sum(-1) + jnp.trace(covariance, axis1=-2, axis2=-1)
    return 0.5 * (prior - jnp.square(shift).sum(-1) - within) + log_determinant(inverse)  # log|R^-1| = -log|R|


@fused
def narrower_than_prior(loc: Array, scale_tril: Array) -> tuple[Array, Array]:
    r"""The Gaussian with N(0, 1) in every principal direction in which it is wider than that.

    The ratio of :math:`N(v; m, \Sigma)` to N(0, I) can replace a likelihood only where it is bounded, that is where
    :math:`\Sigma < I`, by more than rounding.

    Args:
        loc: m (..., n).
        scale_tril: triangular factor R of :math:`\Sigma = R R^\top` (..., n, n); returned as it is if nothing is wider.

    Returns:
        The mean and a triangular factor.

    Example:
        >>> import jax.numpy as jnp
        >>> loc, root = narrower_than_prior(jnp.array([3.0, 3.0]), jnp.diag(jnp.array([0.5, 1.1])))
        >>> print(loc, jnp.square(root))
        [3. 0.] [[0.25 0.  ]
         [0.   1.  ]]
    """
    U, scales, _ = jnp.linalg.svd(scale_tril)  # Σ = U diag(scales^2) U'
    # A scale within rounding of 1 counts as 1, so that the ratio to N(0, I) is bounded.
    narrow = scales < 1 - math.sqrt(jnp.finfo(scales.dtype).eps)
    within = jnp.where(narrow, matmul(U.mT, loc[..., None])[..., 0], 0)  # U' m, zero in wide directions
    # New root: (U diag(s))' = Q r with s = 1 in wide directions, hence U diag(s^2) U' = r' r.
    factor = jnp.linalg.qr((U * jnp.where(narrow, scales, 1)[..., None, :]).mT, mode="r").mT
    kept = narrow.all(-1)[..., None]
    return jnp.where(kept, loc, matmul(U, within[..., None])[..., 0]), jnp.where(kept[..., None], scale_tril, factor)


def kl_diagonal(loc: Array, scale: Array) -> Array:
    r""":math:`\mathrm{KL}[N(m, R^2) \,\|\, N(0, I)]` with ``scale`` the diagonal of R, summed over the last axis.

    :func:`expected_kl` in terms of ``scale``, whose logarithm stays finite in single precision where its square is
    zero.
    """
    return (0.5 * (jnp.square(scale) + jnp.square(loc) - 1) - jnp.log(jnp.abs(scale))).sum(-1)


def log_density(white: Array, log_det: Array) -> Array:
    r"""Log density of :math:`m + R\epsilon` from the standard normal draw :math:`\epsilon` (..., n) behind it.

    Working from :math:`\epsilon` and not from the value keeps all digits when R is tiny.
    """
    # log N(m + R eps; m, R R') = log N(eps; 0, I) - log|R|
    return -0.5 * (jnp.square(white).sum(-1) + white.shape[-1] * math.log(2 * math.pi)) - log_det


@jax.custom_jvp
@fused
def given_covariance(covariance: Array, residual: Array) -> tuple[Array, Array]:
    r"""Log density of N(0, C) and the whitening matrix :math:`L^{-1}` of :math:`C = L L^\top`.

    .. math::
        \log N(r; 0, C) = -\tfrac12 \lVert L^{-1} r \rVert^2 - \log\lvert L \rvert - \tfrac n2 \log 2\pi, \qquad
        d \log N = -\alpha^\top dr + \tfrac12\, \mathrm{tr}\bigl[(\alpha \alpha^\top - C^{-1})\, dC\bigr], \quad
        \alpha = C^{-1} r

    The derivative needs one product of matrices; that of a factorisation needs two triangular solves and a product.

    Args:
        covariance: C, with its jitter (..., n, n).
        residual: r (..., n); broadcasts against C.

    Returns:
        Log densities (...) and whitening matrices (..., n, n), not finite where C is not positive definite.
    """
    whiten = inverse_factor(covariance)
    return _log_density_of(matmul(whiten, residual[..., None]), whiten), whiten


def _log_density_of(white: Array, whiten: Array) -> Array:
    return log_density(white[..., 0], -log_determinant(whiten))


@given_covariance.defjvp
def _given_covariance_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    (covariance, residual), (covariance_change, residual_change) = primals, tangents
    whiten, whiten_change = jax.jvp(inverse_factor, (covariance,), (covariance_change,))
    white = matmul(whiten, residual[..., None])  # L^-1 r
    alpha = matmul(whiten.mT, white)  # C^-1 r
    slope = 0.5 * (alpha * alpha.mT - matmul(whiten.mT, whiten))  # (alpha alpha' - C^-1) / 2
    # d log N = tr(slope dC) - alpha' dr
    change = (slope * covariance_change).sum((-2, -1)) - (alpha[..., 0] * residual_change).sum(-1)
    return (_log_density_of(white, whiten), whiten), (change, whiten_change)


def given_observations(half: Array, white: Array, owner: str) -> tuple[Array, Array]:
    r"""The Gaussian :math:`q(v) \propto N(v; 0, I)\, N(r; H v, I)`: values that are observed with independent noise.

    .. math:: q(v) = N(\Sigma H^\top r,\, \Sigma), \qquad \Sigma^{-1} = I + H^\top H

    Args:
        half: H (..., N, M).
        white: r (..., N).
        owner: whose precision it is, for the error message.

    Returns:
        The mean (..., M) and the lower triangular factor of the covariance (..., M, M).

    Raises:
        ValueError: the precision is not finite, or not positive definite after rounding.
    """
    # With the order of v turned round, C = L L^T, so that Sigma = U^T U where U, L^{-1} turned back, is upper
    # triangular.
    precision = jnp.eye(half.shape[-1], dtype=half.dtype) + matmul(half.mT, half)  # I + H' H
    scale_tril = inverse_cholesky(precision[..., ::-1, ::-1], owner)[..., ::-1, ::-1].mT
    loc = matmul(scale_tril, matmul(scale_tril.mT, matmul(half.mT, white[..., None])))  # R R' H' r = Σ H' r
    return loc[..., 0], scale_tril


def opper_archambeau(L: Array, alpha: Array, lam: Array) -> tuple[Array, Array]:
    r"""Whitened coordinates of the Gaussian :math:`N(k\alpha, (k^{-1} + \mathrm{diag}(\lambda)^2)^{-1})`, k = k(X, X).

    With :math:`k(X, X) = L L^\top`, a draw is :math:`L(m + R\epsilon)` where :math:`m = L^\top\alpha` and
    :math:`R R^\top = (I + L^\top \mathrm{diag}(\lambda)^2 L)^{-1}`. The matrix inverted has eigenvalues of at least
    one and the determinant of :math:`G = I + \mathrm{diag}(\lambda)\, k(X, X)\, \mathrm{diag}(\lambda)`, the A of the
    sources: ``kl_full(m, R)`` is their
    :math:`\tfrac12(\log|G| + \alpha^\top k(X, X)\, \alpha + \mathrm{tr}\,G^{-1} - N)`.

    Args:
        L: Cholesky factor of the prior covariance k(X, X) (N, N).
        alpha: dual mean (N,).
        lam: square roots of the site precisions (N,); signs are free, zeros allowed.

    Returns:
        m (N,) and R (N, N), upper triangular.

    Source: Opper and Archambeau (2009); Hensman (2016), where the covariance divides by lambda; this form does not. In
    the prediction formula there the matrix to invert is k(X, X) plus the diagonal matrix of :math:`\lambda^{-2}`, not
    of :math:`\lambda^2` as printed.
    """
    half = lam[:, None] * L  # diag(λ) L
    eye = jnp.eye(L.shape[-1], dtype=L.dtype)
    factor = jnp.linalg.cholesky(eye + matmul(half.T, half))  # F F' = I + L' diag(λ^2) L
    # m = L' alpha and R = F^-T, so that R R' = (F F')^-1
    return matmul(alpha, L), solve_lower(factor, eye, transpose=True)


def _triangle(U: Array) -> Array:
    # C C' = I + U' U
    return jnp.linalg.cholesky(times_transpose(U.mT) + jnp.eye(U.shape[-1], dtype=U.dtype))


def _times_root(U: Array, white: Array, inverse: bool, transpose: bool) -> Array:
    """The bracket of R₊, or its inverse, or the transpose of either, times vectors (..., M)."""
    C, inside = _triangle(U), matmul(U.mT, white[..., None])
    shifted = C + jnp.eye(C.shape[-1], dtype=C.dtype)
    if not inverse:
        # w + U (I + C)^-1 U' w, or with (I + C)^-T
        return white + matmul(U, solve_lower(shifted, inside, transpose=transpose))[..., 0]
    # w - U (I + C)^-T C^-1 U' w, or transposed w - U C^-T (I + C)^-1 U' w
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
    low = log_determinant(_triangle(U))  # sum_j log C_jj = log|I + U' U| / 2
    return jnp.log(jnp.abs(scale)).sum(-1) + (-low if precision else low)


def signed(scale: Array, U: Array, precision: bool) -> tuple[Array, int]:
    r"""Columns F (..., M, J) and the sign s in :math:`\Sigma = \mathrm{diag}(\sigma^2) + s F F^\top`."""
    if not precision:
        return scale[..., None] * U, 1
    # Woodbury: (I + U U')^-1 = I - U (C C')^-1 U', hence F = diag(σ) U C^-T.
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
    square = jnp.square(scale) + sign * jnp.square(F).sum(-1) + jnp.square(loc) - 1  # diagonal of Σ + m m' - I
    return 0.5 * square.sum(-1) - log_determinant_low_rank(scale, U, precision)


def low_rank_variances(A: Array, F: Array) -> Array:
    r""":math:`\lVert F_p^\top a_n\rVert^2` (N, P) of rows A (N, M) or (P, N, M) and columns (P, M, J)."""
    if A.ndim == 3:
        return jnp.square(matmul(A, F)).sum(-1).T
    P, M, J = F.shape
    products = matmul(A, jnp.moveaxis(F, 0, 1).reshape(M, P * J))  # F_p' a_n of all p in one product
    return jnp.square(products).reshape(len(A), P, J).sum(-1)
