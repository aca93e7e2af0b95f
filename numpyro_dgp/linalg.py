"""S1: the linear algebra under every layer: jitter, Cholesky, triangular solves, quadratic forms.

The jitter policy lives here and nowhere else. A Gram matrix ``K`` of ``M`` inputs gets
``jitter(dtype, M) * mean(diag K)`` on its diagonal: relative to the kernel variance, and just above
what rounding does to the smallest eigenvalue (``docs/numerics.md`` has the measurements).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_dgp._checks import is_concrete
from numpyro_dgp._typing import Array

__all__ = [
    "cholesky",
    "jitter",
    "matmul",
    "quadratic_forms",
    "safe_sqrt",
    "set_diagonal",
    "solve_lower",
    "squared_distances",
]

# Below this many columns, differences are summed column by column: exact where the product form
# loses digits, and as fast, because XLA fuses the sum into one pass over the N x M result.
_FEW_COLUMNS = 3


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


def set_diagonal(K: Array, diagonal: Array) -> Array:
    """``K`` of shape (..., N, N) with its diagonal replaced by ``diagonal`` of shape (..., N)."""
    index = jnp.arange(K.shape[-1])
    return K.at[..., index, index].set(diagonal)


def squared_distances(X1: Array, X2: Array) -> Array:
    r"""Squared distances :math:`\lVert x_i - x'_j \rVert^2`, shape (..., N1, N2), without an N1 x N2 x D array.

    Up to three columns the differences are squared and summed column by column. Beyond that, one
    matrix product: inputs are centred first, since the product form loses the digits of
    :math:`\lVert x \rVert^2`, and the result is clipped at zero.

    Args:
        X1: inputs (..., N1, D), already divided by the lengthscales.
        X2: inputs (..., N2, D).
    """
    if X1.shape[-1] <= _FEW_COLUMNS:
        columns = range(X1.shape[-1])
        return sum(jnp.square(X1[..., :, None, d] - X2[..., None, :, d]) for d in columns)  # type: ignore[return-value]
    centre = jax.lax.stop_gradient(X2.reshape(-1, X2.shape[-1]).mean(0))
    X1, X2 = X1 - centre, X2 - centre
    norms = jnp.square(X1).sum(-1)[..., :, None] + jnp.square(X2).sum(-1)[..., None, :]
    return jnp.maximum(norms - 2 * matmul(X1, X2.mT), 0)


def cholesky(K: Array, owner: str = "K") -> Array:
    r"""Lower Cholesky factor of :math:`K + \mathrm{jitter}\cdot\overline{\mathrm{diag}\,K}\, I`.

    Args:
        K: symmetric positive semi-definite (..., M, M).
        owner: whose matrix it is, for the error message.

    Raises:
        ValueError: the factorisation failed (only detectable outside ``jit``; inside, the factor
            is NaN and so is every quantity that follows, see ``dgp.fit``).
    """
    size = K.shape[-1]
    nugget = jitter(K.dtype, size) * jnp.trace(K, axis1=-2, axis2=-1) / size
    L = jnp.linalg.cholesky(K + nugget[..., None, None] * jnp.eye(size, dtype=K.dtype))
    if is_concrete(L) and not np.isfinite(np.asarray(L)).all():
        raise ValueError(
            f"Cholesky factorisation of {owner} failed: expected a positive definite {size} x {size} "
            f"matrix, got one that is not (dtype {K.dtype}), which usually means nearly identical "
            "inducing inputs, a very long lengthscale, or NaN hyperparameters: use fewer inducing "
            "inputs, spread them out, bound the lengthscale by a prior, or run in float64"
        )
    return L


def solve_lower(L: Array, B: Array, *, transpose: bool = False) -> Array:
    """``L^{-1} B`` (or ``L^{-T} B``) for lower triangular ``L`` (..., M, M) and ``B`` (..., M, N)."""
    if L.ndim == B.ndim == 2:
        return solve_triangular(L, B, lower=True, trans=int(transpose))
    batch = jnp.broadcast_shapes(L.shape[:-2], B.shape[:-2])
    L = jnp.broadcast_to(L, batch + L.shape[-2:])
    B = jnp.broadcast_to(B, batch + B.shape[-2:])
    return jax.lax.linalg.triangular_solve(L, B, left_side=True, lower=True, transpose_a=transpose)


@jax.custom_jvp
def quadratic_forms(S: Array, A: Array) -> Array:
    r"""All quadratic forms :math:`v_{pn} = a_n^\top S_p\, a_n` at once, shape (P, N).

    The value is one matrix product of shape (P M, M) x (M, N). The derivative is written by hand:
    autodiff does not know that :math:`S_p` is symmetric and spends a third product on
    :math:`\partial v / \partial A = 2 S_p A`, which the value has already computed.

    Args:
        S: symmetric matrices (P, M, M).
        A: columns (M, N) shared by all P, or (P, M, N).

    Source: design measured in ``docs/performance.md``.
    """
    return (A * (S @ A)).sum(-2)


@quadratic_forms.defjvp
def _quadratic_forms_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    S, A = primals
    dS, dA = tangents
    SA = S @ A
    return (A * SA).sum(-2), (A * (dS @ A)).sum(-2) + 2 * (dA * SA).sum(-2)
