"""S1: the linear algebra under every layer: jitter, Cholesky, triangular solves.

The jitter policy lives here and nowhere else. A Gram matrix ``K`` of ``M`` inputs gets
``jitter(dtype, M) * mean(diag K)`` on its diagonal: relative to the kernel variance, and just above
what rounding does to the smallest eigenvalue (``docs/numerics.md`` has the measurements).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import is_concrete
from numpyro_dgp._typing import Array

__all__ = [
    "cholesky",
    "conditional_cholesky",
    "inverse_cholesky",
    "inverse_factor",
    "inverse_lower",
    "jitter",
    "matmul",
    "resolved",
    "safe_sqrt",
    "set_diagonal",
    "solve_lower",
    "times_transpose",
]

# Outside a compiled program these run as one program each, not as dozens; inside one they leave no trace.
_fused = partial(jax.jit, inline=True)
# Up to this size a triangular solve stays on the thread that calls it.
_SMALL_SOLVE = 25
# From this many matrices of at most that size on, LAPACK, which takes them one by one, is left aside: products over all
# of them at once, down to blocks of the second size, are faster.
_MANY, _LEAF = 8, 4


def jitter(dtype: jnp.dtype, size: int) -> float:
    r"""Relative diagonal jitter for a Gram matrix of ``size`` inputs: :math:`\max(2 M \epsilon, 10^{-10})`.

    Example:
        >>> f"{jitter(jnp.float32, 100):.1e} {jitter(jnp.float64, 100):.1e}"
        '2.4e-05 1.0e-10'
    """
    return max(2 * size * float(jnp.finfo(dtype).eps), 1e-10)


def matmul(a: Array, b: Array) -> Array:
    """``a @ b`` in full precision: never TF32 or bfloat16 passes, which break Gram matrices."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def safe_sqrt(x: Array) -> Array:
    """Square root of ``max(x, 0)`` whose derivative at zero is zero instead of infinite."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


@_fused
def set_diagonal(K: Array, diagonal: Array) -> Array:
    """``K`` of shape (..., N, N) with its diagonal replaced by ``diagonal`` of shape (..., N)."""
    index = jnp.arange(K.shape[-1])
    return K.at[..., index, index].set(diagonal)


def cholesky(K: Array, owner: str = "K") -> Array:
    r"""Lower Cholesky factor of :math:`K + \mathrm{jitter}\cdot\overline{\mathrm{diag}\,K}\, I`.

    Args:
        K: symmetric positive semi-definite (..., M, M).
        owner: whose matrix it is, for the error message.

    Raises:
        ValueError: the factorisation failed (only detectable outside ``jit``; inside, the factor
            is NaN and so is every quantity that follows, see ``dgp.fit``).
    """
    return _checked(jnp.linalg.cholesky(_with_jitter(K)), owner)


@_fused
def _with_jitter(K: Array) -> Array:
    size = K.shape[-1]
    nugget = jitter(K.dtype, size) * jnp.trace(K, axis1=-2, axis2=-1) / size
    return K + nugget[..., None, None] * jnp.eye(size, dtype=K.dtype)


def _checked(factor: Array, owner: str) -> Array:
    if is_concrete(factor) and not np.isfinite(np.asarray(factor)).all():
        raise ValueError(
            f"Cholesky factorisation of {owner} failed: expected a positive definite matrix, got one of size "
            f"{factor.shape[-1]} that is not (dtype {factor.dtype}), which usually means nearly identical inducing "
            "inputs, a very long lengthscale, or NaN hyperparameters: use fewer inducing inputs, spread them "
            "out, bound the lengthscale by a prior, or run in float64"
        )
    return factor


def conditional_cholesky(C: Array, scale: Array) -> Array:
    r"""Lower factors of :math:`C + \epsilon\, \mathrm{diag}(s)`, C a prior covariance less what is explained.

    Rounding of the difference is relative to the prior variances s, not to C. The :math:`\epsilon` of every matrix is
    the first of :func:`jitter`, ten times that, and so on, with which the factorisation succeeds; in double precision,
    and nearly always in single, that is the first.

    Args:
        C: symmetric matrices (..., M, M), positive semi-definite but for rounding.
        scale: prior variances s (..., M).
    """
    size = C.shape[-1]
    nugget = scale[..., None] * jnp.eye(size, dtype=C.dtype)
    least = jitter(C.dtype, max(size, 100))

    def fails(epsilon: Array) -> Array:
        factors = jnp.linalg.cholesky(jax.lax.stop_gradient(C + epsilon[..., None, None] * nugget))
        return jnp.isnan(factors).any((-2, -1)) & (epsilon < 0.1)

    start = jnp.full(C.shape[:-2], least, C.dtype)
    epsilon, _ = jax.lax.while_loop(
        lambda state: state[1].any(),
        lambda state: (e := jnp.where(state[1], 10 * state[0], state[0]), fails(e)),
        (start, fails(start)),
    )
    return jnp.linalg.cholesky(C + epsilon[..., None, None] * nugget)


def _halves(A: Array, B: Array, C: Array) -> Array:
    """[A 0; B C]."""
    zeros = jnp.zeros((*A.shape[:-1], C.shape[-1]), A.dtype)
    return jnp.concatenate([jnp.concatenate([A, zeros], -1), jnp.concatenate([B, C], -1)], -2)


@_fused
def inverse_lower(L: Array) -> Array:
    """Inverse of lower triangular matrices by halves: inv [A 0; B C] = [A' 0; -C' B A', C'] with A', C' inverses.

    Only small blocks meet LAPACK's triangular solve. Larger ones wake the threads of OpenBLAS, which then spin
    on the cores that XLA needs: a third of a training step (docs/performance.md).
    """
    size = L.shape[-1]
    if size <= _SMALL_SOLVE:
        eye = jnp.broadcast_to(jnp.eye(size, dtype=L.dtype), L.shape)
        return jax.lax.linalg.triangular_solve(L, eye, left_side=True, lower=True)
    half = size // 2
    A, C = inverse_lower(L[..., :half, :half]), inverse_lower(L[..., half:, half:])
    return _halves(A, -matmul(C, matmul(L[..., half:, :half], A)), C)


def _inverse_factor_of_many(K: Array) -> Array:
    """Factorisation and inverse by halves in one, with the names of :func:`inverse_lower`."""
    size = K.shape[-1]
    if size <= _LEAF:
        return _inverse_factor_by_rows(K)
    half = size // 2
    A = _inverse_factor_of_many(K[..., :half, :half])
    B = matmul(K[..., half:, :half], A.mT)
    C = _inverse_factor_of_many(K[..., half:, half:] - matmul(B, B.mT))
    return _halves(A, -matmul(C, matmul(B, A)), C)


def _inverse_factor_by_rows(K: Array) -> Array:
    """The same for a few rows: Cholesky's recursion number by number, for all matrices at once."""
    L: dict[tuple[int, int], Array] = {}
    rows: list[Array] = []
    for i, row in enumerate(jnp.eye(K.shape[-1], dtype=K.dtype)):
        pivot = K[..., i, i]
        for j in range(i):
            known = sum((L[i, k] * L[j, k] for k in range(j)), jnp.zeros_like(pivot))
            L[i, j] = (K[..., i, j] - known) / L[j, j]
            pivot = pivot - jnp.square(L[i, j])
            row = row - L[i, j][..., None] * rows[j]
        L[i, i] = jnp.sqrt(pivot)
        rows.append(row / L[i, i][..., None])
    return jnp.stack(rows, -2)


@jax.custom_jvp
@_fused
def inverse_factor(K: Array) -> Array:
    r""":math:`L^{-1}` of :math:`K = L L^\top`, without jitter; not finite where K is not positive definite."""
    if K.shape[-1] <= _SMALL_SOLVE and math.prod(K.shape[:-2]) >= _MANY:
        return _inverse_factor_of_many(K)
    return inverse_lower(jnp.linalg.cholesky(K))


@inverse_factor.defjvp
def inverse_factor_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # With W = L^{-1}: dL = L Phi(W dK W'), hence dW = -Phi(W dK W') W, where Phi halves the diagonal of the
    # lower triangle. Products only, where differentiating through the factorisation costs triangular solves.
    W = inverse_factor(primals[0])
    inner = jnp.tril(matmul(matmul(W, tangents[0]), W.mT))
    inner = inner - 0.5 * inner * jnp.eye(inner.shape[-1], dtype=inner.dtype)
    return W, -matmul(inner, W)


def inverse_cholesky(K: Array, owner: str = "K") -> Array:
    r"""The whitening matrix :math:`L^{-1}` of :math:`K + \mathrm{jitter} = L L^\top`; jitter as in :func:`cholesky`.

    A product with it has the accuracy of a triangular solve here (both are limited by the factorisation,
    see ``docs/numerics.md``) and is faster, forwards and backwards.

    Args:
        K: symmetric positive semi-definite (..., M, M).
        owner: whose matrix it is, for the error message.

    Raises:
        ValueError: as :func:`cholesky`.
    """
    return _checked(inverse_factor(_with_jitter(K)), owner)


@jax.custom_jvp
def times_transpose(L: Array) -> Array:
    r""":math:`L L^\top` of matrices (..., M, K)."""
    return matmul(L, L.mT)


@times_transpose.defjvp
def _times_transpose_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # One product, where autodiff makes two: its transpose is (dS + dS') L.
    half = matmul(tangents[0], primals[0].mT)
    return times_transpose(primals[0]), half + half.mT


# Error in the precision of one whitened direction, prior precision one, that rounding may make.
_ROUNDING = 0.1


def resolved(whiten: Array, second: Array) -> Array:
    r"""The whitening matrix without the directions of v that rounding drowns.

    :math:`L^{-1} \psi_2 L^{-\top}` multiplies rounding errors of :math:`\psi_2` by the inverse eigenvalues of k(Z, Z),
    which for a smooth kernel go down to the jitter. Where that exceeds ``_ROUNDING``, q(v) keeps the prior, which is
    one of the q(v) allowed: the bound is that of the same layer at this q(v), lower by next to nothing in double
    precision (``docs/numerics.md``).
    """
    rates, directions = jnp.linalg.eigh(jax.lax.stop_gradient(matmul(whiten, whiten.T)))
    errors = jnp.finfo(whiten.dtype).eps * rates * jnp.linalg.norm(jax.lax.stop_gradient(second))
    kept = directions * (errors < _ROUNDING)
    return matmul(matmul(kept, kept.T), whiten)


def solve_lower(L: Array, B: Array, *, transpose: bool = False) -> Array:
    """``L^{-1} B`` (or ``L^{-T} B``) for lower triangular ``L`` (..., M, M) and ``B`` (..., M, N)."""
    batch = jnp.broadcast_shapes(L.shape[:-2], B.shape[:-2])
    L = jnp.broadcast_to(L, batch + L.shape[-2:])
    B = jnp.broadcast_to(B, batch + B.shape[-2:])
    return jax.lax.linalg.triangular_solve(L, B, left_side=True, lower=True, transpose_a=transpose)
