"""The linear algebra under every layer: jitter, Cholesky, triangular solves.

The jitter policy lives here and nowhere else. A Gram matrix k(Z, Z) of M inputs gets
``jitter(dtype, M)`` times its mean diagonal on the diagonal: relative to the kernel variance, and just above
what rounding does to the smallest eigenvalue (``docs/numerics.md``).

Products with large lower triangular matrices skip zero blocks.

Every function is a product in blocks of columns or rows: one block, the plain product, or two halves, of which one
meets only half of the triangular matrix. :func:`~numpyro_dgp.math.tuning.tuned` gives the least size.

Initial values of matrices of low rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expected, is_concrete
from numpyro_dgp._typing import Array
from numpyro_dgp.math.tuning import tuned

__all__ = [
    "checked_factor",
    "checked_joint",
    "cholesky",
    "computed_once",
    "conditional_cholesky",
    "conditional_jitter",
    "covariance_of",
    "fused",
    "halves",
    "jitter",
    "joint_cholesky",
    "joint_jitter",
    "lower_congruence",
    "lower_product",
    "matmul",
    "nugget",
    "orthonormal",
    "products_in_rows",
    "rounding_scale",
    "row_sums",
    "rows_times",
    "safe_sqrt",
    "set_diagonal",
    "solve_lower",
    "sum_event",
    "times_lower",
    "times_transpose",
    "times_transposed",
    "with_jitter",
]

# Outside a compiled program each of these is compiled as a whole, not operation by operation; inside, it is inlined.
fused = partial(jax.jit, inline=True)
_ADVICE = (
    "nearly identical inducing inputs, a very long lengthscale, or NaN hyperparameters: use fewer inducing inputs, "
    "spread them out, bound the lengthscale by a prior, or run in float64"
)
_JOINT_ADVICE = (
    "nearly identical inputs, a very long lengthscale, or NaN hyperparameters: give the function process noise, bound "
    "the lengthscale by a prior, or run in float64"
)


_ROUNDING = 10
"""Eigenvalues that are so many jitters below zero are no rounding."""


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


def einsum(subscripts: str, *operands: Array) -> Array:
    """``jnp.einsum`` in full precision."""
    return jnp.einsum(subscripts, *operands, precision=jax.lax.Precision.HIGHEST)


def tensordot(a: Array, b: Array) -> Array:
    """The sum over the last axis of ``a`` and the first of ``b``, in full precision."""
    return jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)


@fused
def computed_once(x: Array) -> Array:
    """``x`` (..., P) as a product with the identity.

    XLA computes a cheap expression again in whatever it fuses it with, and keeps what it needs for that; it does not
    fuse products. Wide ones are left as they are, because the product would cost more.
    """
    if x.ndim == 0 or x.shape[-1] > tuned().narrow:
        return x
    return matmul(x, jnp.eye(x.shape[-1], dtype=x.dtype))


def rows_times(A: Array, B: Array) -> Array:
    """``A @ B`` for many rows A (N, M), in full precision.

    XLA's CPU backend may leave a product of about a thousand rows to one thread, and gives a batch of two products to
    two (``benchmarks/train_step.py``).
    """
    sizes = tuned()
    if len(A) % 2 or len(A) not in sizes.one_thread or A.shape[1] >= sizes.large:
        return matmul(A, B)
    halves = A.reshape(2, -1, A.shape[1])
    return matmul(halves, jnp.broadcast_to(B, (2, *B.shape))).reshape(len(A), -1)


def row_sums(x: Array) -> Array:
    """Sums over the last axis of ``x`` (..., M), on a CPU as a product with ones, which is a quarter of the time."""
    if not tuned().summed:
        return x.sum(-1)
    return matmul(x, jnp.ones(x.shape[-1], x.dtype))


def sum_event(values: Array, event_dim: int) -> Array:
    """Sums over the last ``event_dim`` axes."""
    return values.sum(tuple(range(-event_dim, 0))) if event_dim else values


@jax.custom_jvp
@fused
def safe_sqrt(x: Array) -> Array:
    """Square root of ``max(x, 0)`` whose derivative at zero is zero instead of infinite.

    Continuous in x, so that XLA may compute x with different rounding wherever it needs it: ``where(x > 0, ...)``
    around ``where(x > 0, x, 1)`` gives 1 where only one of the two finds x above zero.
    """
    return jnp.sqrt(jnp.maximum(x, 0))


@safe_sqrt.defjvp
def _safe_sqrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    root = safe_sqrt(*primals)
    # d sqrt(x) = dx / (2 sqrt(x)), and 1 / inf = 0 at zero
    return root, 0.5 / jnp.where(root == 0, jnp.inf, root) * tangents[0]


def products_in_rows(A: Array, B: Array) -> Array:
    """All products of a number of a row of A (..., I) with one of the same row of B (..., J): (..., I J)."""
    return (A[..., :, None] * B[..., None, :]).reshape(*A.shape[:-1], -1)


@fused
def set_diagonal(K: Array, diagonal: Array) -> Array:
    """A matrix of shape (..., N, N) with its diagonal replaced by ``diagonal`` of shape (..., N)."""
    return jnp.where(jnp.eye(K.shape[-1], dtype=bool), diagonal[..., None], K)


def cholesky(K: Array, owner: str = "K") -> Array:
    r"""Lower Cholesky factor of a matrix such as k(Z, Z), with :func:`jitter` times its mean diagonal on the diagonal.

    Args:
        K: the matrix, symmetric positive semi-definite (..., M, M).
        owner: whose matrix it is, for the error message.

    Raises:
        ValueError: the factorisation failed (only detectable outside ``jit``; inside, the factor
            is NaN and so is every quantity that follows, see ``dgp.fit``).
    """
    return checked_factor(jnp.linalg.cholesky(with_jitter(K)), owner, matrix=K)


@fused
def with_jitter(K: Array) -> Array:
    """A matrix with the jitter of its size and dtype on its diagonal."""
    return K + nugget(K)[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)


def nugget(K: Array) -> Array:
    """What :func:`with_jitter` adds to the diagonal of a matrix (..., M, M): shape (...)."""
    size = K.shape[-1]
    # jitter times tr K / M
    return jitter(K.dtype, size) * jnp.trace(K, axis1=-2, axis2=-1) / size


def checked_factor(factor: Array, owner: str, advice: str = _ADVICE, matrix: Array | None = None) -> Array:
    """``factor``; if it is concrete and not finite, an error that names the owner of the matrix, with ``advice``.

    Args:
        factor: what came of the factorisation.
        owner: whose matrix it is.
        advice: for a matrix that rounding has made indefinite.
        matrix: what was factorised, before jitter: one that no rounding explains is that of no kernel.
    """
    if is_concrete(factor) and not np.isfinite(np.asarray(factor)).all():
        least = None if matrix is None or not is_concrete(matrix) else _least_eigenvalue(np.asarray(matrix, float))
        if least is not None and least < -_ROUNDING * jitter(factor.dtype, factor.shape[-1]):
            advice = (
                f"a kernel that is not positive definite: the smallest eigenvalue is {least:.2g} times the mean "
                "variance, more than rounding explains. A function of a distance that is not Euclidean need not be a "
                "kernel: for places on a sphere take dgp.kernels.Chordal or dgp.kernels.GreatCircle"
            )
        raise expected(
            "a positive definite matrix",
            f"one of size {factor.shape[-1]} that is not (dtype {factor.dtype}), which usually means {advice}",
            at=f"Cholesky factorisation of {owner} failed",
        )
    return factor


def _least_eigenvalue(K: np.ndarray) -> float | None:
    """The smallest of matrices (..., M, M) over their mean diagonal; ``None`` where they are not finite."""
    if not np.isfinite(K).all():
        return None
    scale = np.abs(np.trace(K, axis1=-2, axis2=-1)) / K.shape[-1]
    return float((np.linalg.eigvalsh(K).min(-1) / np.where(scale > 0, scale, 1)).min())


def _least(dtype: jnp.dtype, size: int) -> float:
    return jitter(dtype, max(size, 100))


def rounding_scale(variances: Array, noise: Array) -> Array:
    """The scale of the jitter that :func:`conditional_jitter` adds to a matrix with ``noise`` on its diagonal.

    Args:
        variances: prior variances (..., M); their mean counts, because some may be zero.
        noise: variances (...) that are on the diagonal already.

    Returns:
        Scales (..., 1).
    """
    # jitter * scale = jitter * mean - noise: the noise on the diagonal counts as jitter.
    mean = variances.mean(-1) - noise / _least(variances.dtype, variances.shape[-1])
    return jnp.maximum(mean, 0)[..., None]


def joint_cholesky(C: Array, scale: Array | None) -> Array:
    """Lower factors of joint covariances with :func:`joint_jitter`."""
    return checked_joint(jnp.linalg.cholesky(joint_jitter(C, scale)), C)


def joint_jitter(C: Array, scale: Array | None) -> Array:
    """C with the jitter of a Gram matrix, and with that of ``scale`` where the matrix is a difference."""
    C = with_jitter(C)
    return C if scale is None else conditional_jitter(C, scale)


def checked_joint(factor: Array, matrix: Array | None = None) -> Array:
    """A factor of a joint covariance, or its inverse; an error if it is concrete and not finite."""
    return checked_factor(factor, "the joint covariance of function values", _JOINT_ADVICE, matrix)


def conditional_cholesky(C: Array, scale: Array) -> Array:
    """Lower factors of differences with :func:`conditional_jitter`."""
    return jnp.linalg.cholesky(conditional_jitter(C, scale))


def conditional_jitter(C: Array, scale: Array) -> Array:
    r"""A prior covariance less what is explained, plus :math:`\epsilon` times a diagonal of ``scale``.

    Rounding of the difference is relative to the prior variances ``scale``, not to the difference. The :math:`\epsilon`
    of every matrix is the first of :func:`jitter`, ten times that, and so on, with which the factorisation succeeds; in
    double precision, and nearly always in single, that is the first.

    Args:
        C: the differences, symmetric matrices (..., M, M), positive semi-definite up to rounding.
        scale: prior variances (..., M).
    """
    size = C.shape[-1]
    nugget = scale[..., None] * jnp.eye(size, dtype=C.dtype)
    least = _least(C.dtype, size)

    def fails(epsilon: Array) -> Array:
        factors = jnp.linalg.cholesky(jax.lax.stop_gradient(C + epsilon[..., None, None] * nugget))
        # The search ends where ε reaches a tenth of the variances, even if the factor is still NaN.
        return jnp.isnan(factors).any((-2, -1)) & (epsilon < 0.1)

    start = jnp.full(C.shape[:-2], least, C.dtype)
    epsilon, _ = jax.lax.while_loop(
        lambda state: state[1].any(),
        lambda state: (e := jnp.where(state[1], 10 * state[0], state[0]), fails(e)),
        (start, fails(start)),
    )
    return C + epsilon[..., None, None] * nugget


@jax.custom_jvp
def times_transpose(L: Array) -> Array:
    r""":math:`L L^\top` of matrices L (..., M, J)."""
    return matmul(L, L.mT)


@times_transpose.defjvp
def _times_transpose_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # One product; automatic differentiation would need two. Its transpose is (G + G') L for a derivative G.
    half = matmul(tangents[0], primals[0].mT)  # d(L L') = dL L' + (dL L')'
    return times_transpose(primals[0]), half + half.mT


def solve_lower(L: Array, B: Array, *, transpose: bool = False) -> Array:
    """``L^{-1} B`` (or ``L^{-T} B``) for lower triangular ``L`` (..., M, M) and ``B`` (..., M, N)."""
    batch = jnp.broadcast_shapes(L.shape[:-2], B.shape[:-2])
    L = jnp.broadcast_to(L, batch + L.shape[-2:])
    B = jnp.broadcast_to(B, batch + B.shape[-2:])
    return jax.lax.linalg.triangular_solve(L, B, left_side=True, lower=True, transpose_a=transpose)


def halves(size: int) -> list[tuple[int, int]]:
    """Bounds ``start:end`` of the two halves of large matrices, or of all of a small one."""
    half = size // 2
    return [(0, size)] if size < tuned().halves else [(0, half), (half, size)]


def times_lower(A: Array, L: Array) -> Array:
    """``A @ L`` for A (..., N, M) and lower triangular L (..., M, M)."""
    # Columns start:end of L are zero above row start.
    return _side_by_side([_product(A[..., start:], L[..., start:, start:end]) for start, end in halves(L.shape[-1])])


def times_transposed(A: Array, L: Array) -> Array:
    """``A @ L.mT`` for A (..., N, M) and lower triangular L (..., M, M)."""
    # Rows start:end of L are zero after column end.
    return _side_by_side([_product(A[..., :end], L[..., start:end, :end].mT) for start, end in halves(L.shape[-1])])


def lower_product(A: Array, B: Array) -> Array:
    """``jnp.tril(A @ B)`` for A (..., M, N) and B (..., N, M)."""
    # Rows start:end of the lower triangle end at column end.
    return _lower([matmul(A[..., start:end, :], B[..., :end]) for start, end in halves(B.shape[-1])])


def lower_congruence(L: Array, K: Array) -> Array:
    """``jnp.tril(L @ K @ L.mT)`` for lower triangular L (..., M, M) and K (..., M, M)."""
    # Rows start:end of L K L', up to column end, need rows and columns :end of L and K only.
    return _lower(
        [
            matmul(matmul(L[..., start:end, :end], K[..., :end, :end]), L[..., :end, :end].mT)
            for start, end in halves(L.shape[-1])
        ]
    )


@jax.custom_vjp
def covariance_of(R: Array) -> Array:
    r""":math:`R R^\top` of lower triangular factors (..., M, M), for functions whose derivative by it is symmetric.

    In reverse mode only. The derivative by R, :math:`2 G R` with that symmetric derivative G, is lower triangular too.
    """
    return times_transposed(R, R)


def _covariance_forward(R: Array) -> tuple[Array, Array]:
    return covariance_of(R), R


def _covariance_backward(R: Array, G: Array) -> tuple[Array]:
    return (2 * lower_product(G, R),)


covariance_of.defvjp(_covariance_forward, _covariance_backward)


def _product(A: Array, B: Array) -> Array:
    return rows_times(A, B) if A.ndim == B.ndim == 2 else matmul(A, B)


def _lower(rows: list[Array]) -> Array:
    """The lower triangle of a matrix in blocks of rows, without the zeros to the right of each."""
    size = rows[-1].shape[-1]
    full = [jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, size - a.shape[-1])]) for a in rows]
    return jnp.tril(full[0] if len(full) == 1 else jnp.concatenate(full, -2))


def _side_by_side(columns: list[Array]) -> Array:
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, -1)


def orthonormal(rows: int, columns: int, dtype: Any) -> Array:
    """A matrix whose rows (or columns, if there are fewer of those) are orthonormal: it has full rank."""
    draw = jax.random.normal(jax.random.key(0), (rows, columns), dtype)
    left, _, right = jnp.linalg.svd(draw, full_matrices=False)
    return matmul(left, right)  # the orthogonal factor of a polar decomposition
