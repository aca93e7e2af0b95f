"""Whitening matrices, the inverses of Cholesky factors, and their derivatives."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.math.linalg import checked_factor, fused, jitter, lower_congruence, matmul, times_lower, with_jitter
from numpyro_dgp.math.tuning import tuned

__all__ = [
    "factor_and_inverse",
    "inverse_cholesky",
    "inverse_factor",
    "inverse_lower",
    "residual_variance",
    "relative_change",
    "resolved",
]

# The largest rounding error that is allowed in the precision of a direction of v, whose prior precision is one.
_ROUNDING = 0.1


def _halves(F: Array, G: Array, V: Array) -> Array:
    """[F 0; G V]."""
    zeros = jnp.zeros((*F.shape[:-1], V.shape[-1]), F.dtype)
    return jnp.concatenate([jnp.concatenate([F, zeros], -1), jnp.concatenate([G, V], -1)], -2)


@fused
def inverse_lower(L: Array) -> Array:
    """Inverse of lower triangular matrices by halves: inv [F 0; G V] = [F' 0; -V' G F', V'] with F', V' inverses.

    On a CPU only small blocks meet LAPACK's triangular solve. Larger ones wake the threads of OpenBLAS, which then spin
    on the cores that XLA needs: a third of a training step (docs/results/speed.md).
    """
    size = L.shape[-1]
    if size <= tuned().small_solve:
        eye = jnp.broadcast_to(jnp.eye(size, dtype=L.dtype), L.shape)
        return jax.lax.linalg.triangular_solve(L, eye, left_side=True, lower=True)
    half = size // 2
    F, V = inverse_lower(L[..., :half, :half]), inverse_lower(L[..., half:, half:])
    # L^-1 = [F 0; -V L_21 F, V] with F = L_11^-1 and V = L_22^-1
    return _halves(F, -matmul(V, matmul(L[..., half:, :half], F)), V)


def _inverse_factor_of_many(K: Array) -> Array:
    """Factorisation and inverse by halves in one, with the names of :func:`inverse_lower`."""
    size = K.shape[-1]
    if size <= tuned().leaf:
        return _inverse_factor_by_rows(K)
    half = size // 2
    F = _inverse_factor_of_many(K[..., :half, :half])  # L_11^-1
    G = matmul(K[..., half:, :half], F.mT)  # L_21 = K_21 L_11^-T
    V = _inverse_factor_of_many(K[..., half:, half:] - matmul(G, G.mT))  # L_22 L_22' = K_22 - L_21 L_21'
    return _halves(F, -matmul(V, matmul(G, F)), V)


def _inverse_factor_by_rows(K: Array) -> Array:
    """The same for matrices of a few rows: Cholesky's recursion entry by entry, for all matrices at once."""
    L: dict[tuple[int, int], Array] = {}
    rows: list[Array] = []
    for i, row in enumerate(jnp.eye(K.shape[-1], dtype=K.dtype)):
        pivot = K[..., i, i]
        for j in range(i):
            known = sum((L[i, k] * L[j, k] for k in range(j)), jnp.zeros_like(pivot))
            L[i, j] = (K[..., i, j] - known) / L[j, j]  # (K_ij - sum_{k<j} L_ik L_jk) / L_jj
            pivot = pivot - jnp.square(L[i, j])  # K_ii - sum_{k<i} L_ik^2
            row = row - L[i, j][..., None] * rows[j]  # row i of L^-1: (e_i - sum_{j<i} L_ij row_j) / L_ii
        L[i, i] = jnp.sqrt(pivot)
        rows.append(row / L[i, i][..., None])
    return jnp.stack(rows, -2)


def factor_and_inverse(K: Array) -> tuple[Array, Array]:
    """L and its inverse by halves, with the names of :func:`inverse_lower`, so that LAPACK sees small matrices only.

    G is a product with an inverse, whose error grows with the condition number of F; its remainder is corrected once.
    """
    size = K.shape[-1]
    if size <= tuned().single_factor:
        L = jnp.linalg.cholesky(K)
        return L, inverse_lower(L)
    half = size // 2
    F, F_inverse = factor_and_inverse(K[..., :half, :half])
    below = K[..., half:, :half]
    G = matmul(below, F_inverse.mT)  # L_21 = K_21 L_11^-T
    G = G + matmul(below - matmul(G, F.mT), F_inverse.mT)  # + (K_21 - L_21 L_11') L_11^-T
    V, V_inverse = factor_and_inverse(K[..., half:, half:] - matmul(G, G.mT))  # L_22 L_22' = K_22 - L_21 L_21'
    return _halves(F, G, V), _halves(F_inverse, -matmul(V_inverse, matmul(G, F_inverse)), V_inverse)


@jax.custom_jvp
@fused
def inverse_factor(K: Array) -> Array:
    r""":math:`L^{-1}` of :math:`k(Z, Z) = L L^\top`, without jitter; not finite where that is not positive definite."""
    sizes = tuned()
    if K.shape[-1] <= sizes.small_solve and math.prod(K.shape[:-2]) >= sizes.many_matrices:
        return _inverse_factor_of_many(K)
    return factor_and_inverse(K)[1]


@inverse_factor.defjvp
def inverse_factor_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    whiten = inverse_factor(primals[0])
    return whiten, times_lower(_relative_change(whiten, tangents[0]), whiten)  # dL^-1 = dE L^-1


def _relative_change(whiten: Array, change: Array) -> Array:
    # With dk the change of k(Z, Z) = L L': dL = L half(L^{-1} dk L^{-T}), hence dL^{-1} = -half(L^{-1} dk L^{-T})
    # L^{-1}, where half(.) is the lower triangle with half the diagonal. This needs products only; differentiating the
    # factorisation would need triangular solves.
    inner = lower_congruence(whiten, change)
    return 0.5 * inner * jnp.eye(inner.shape[-1], dtype=inner.dtype) - inner


@jax.custom_jvp
def _no_change(K: Array, whiten: Array) -> Array:
    return jnp.zeros_like(whiten)


@_no_change.defjvp
def _no_change_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _no_change(*primals), _relative_change(primals[1], tangents[0])


def relative_change(K: Array, whiten: Array) -> Array:
    r"""Zeros E whose derivative is that of the whitening matrix, :math:`dL^{-1} = dE\, L^{-1}`.

    A function of :math:`(I + E) L^{-1}`, with :math:`L^{-1}` held, has the value and the derivative of the same
    function of :math:`L^{-1}`; the derivative by E may be much cheaper.

    Args:
        K: what :func:`inverse_cholesky` was given (M, M).
        whiten: what it returned.
    """
    return _no_change(with_jitter(K), jax.lax.stop_gradient(whiten))


def inverse_cholesky(K: Array, owner: str = "K") -> Array:
    r"""The whitening matrix :math:`L^{-1}`, :math:`L L^\top = k(Z, Z) + \mathrm{jitter}`, as in :func:`cholesky`.

    A product with it has the accuracy of a triangular solve here (both are limited by the factorisation,
    see ``docs/numerics.md``) and is faster, forwards and backwards.

    Args:
        K: k(Z, Z), symmetric positive semi-definite (..., M, M).
        owner: whose matrix it is, for the error message.

    Raises:
        ValueError: as :func:`cholesky`.
    """
    return checked_factor(inverse_factor(with_jitter(K)), owner, matrix=K)


def residual_variance(prior: Array, explained: ArrayLike, size: int) -> Array:
    r"""A variance given M inducing values, :math:`\max(k - a^\top a,\; \mathrm{jitter}(M)\, k)`.

    Exactly, :math:`k(x, x) - a^\top a` is positive, and at an inducing input it is about the jitter that
    :func:`inverse_cholesky` has put on the diagonal of k(Z, Z). Its rounding error is of that size too, relative to k,
    and may have either sign. What is below the jitter is therefore set to it: no variance is zero or negative, no
    bound gains from a negative one, and the derivative there is that of the jitter.

    Args:
        prior: k(x, x), of any shape.
        explained: :math:`a^\top a`, which broadcasts against ``prior``.
        size: M, the number of inducing values.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.extend import residual_variance
        >>> left = residual_variance(jnp.array([2.0, 2.0], jnp.float32), jnp.array([0.5, 2.1], jnp.float32), 100)
        >>> f"{left[0]:.1e} {left[1]:.1e}"
        '1.5e+00 4.8e-05'
    """
    return jnp.maximum(prior - explained, jitter(jnp.result_type(prior, explained), size) * prior)


def resolved(whiten: Array, second: Array) -> Array:
    r"""The whitening matrix without the directions of v whose precision, given data, would be mostly rounding error.

    That precision, :math:`L^{-1} \psi_2 L^{-\top}`, multiplies rounding errors of :math:`\psi_2` by the inverse
    eigenvalues of k(Z, Z), which for a smooth kernel go down to the jitter. Where the product exceeds ``_ROUNDING``,
    q(v) keeps the prior, which is one of the q(v) allowed: the bound is that of the same layer at this q(v), lower by
    next to nothing in double precision (``docs/numerics.md``).

    Args:
        whiten: :math:`L^{-1}` (M, M).
        second: :math:`\psi_2` (M, M), weighted by the precisions of the data.
    """
    # Eigenvalues of L^-1 L^-T are those of k(Z, Z)^-1: |L^-T u|^2 for a direction u.
    rates, directions = jnp.linalg.eigh(jax.lax.stop_gradient(matmul(whiten, whiten.T)))
    errors = jnp.finfo(whiten.dtype).eps * rates * jnp.linalg.norm(jax.lax.stop_gradient(second))
    # U U' L^-1 with the directions U that are kept
    kept = directions * (errors < _ROUNDING)
    return matmul(matmul(kept, kept.T), whiten)
