"""S1: quadratic forms of many rows with many symmetric matrices: most of the arithmetic of a training step."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array

__all__ = ["quadratic_forms"]


def _products(A: Array, S: Array) -> Array:
    """Products of rows A (N, K) with matrices (P, K, M), by one matrix product: (N, P, M)."""
    side_by_side = jnp.moveaxis(S, 0, 1).reshape(S.shape[1], -1)
    return (A @ side_by_side).reshape(len(A), len(S), -1)


def _sums(A: Array, weights: Array, B: Array) -> Array:
    """Sums over rows of weights w_np (N, P) times the outer products of A (N, K) and B (N, M): (P, K, M)."""
    weighted = (B[:, None, :] * weights[..., None]).reshape(len(B), -1)
    return jnp.moveaxis((A.T @ weighted).reshape(A.shape[1], weights.shape[1], -1), 1, 0)


def _forms(A: Array, products: Array) -> Array:
    return jnp.einsum("nm,npm->np", A, products)


@jax.custom_vjp
@partial(jax.jit, inline=True)
def quadratic_forms(S: Array, A: Array) -> Array:
    r"""All quadratic forms :math:`v_{np} = a_n^\top S_p\, a_n` at once, shape (N, P).

    By matrix products over all p. Symmetry saves a quarter of the value, with halves of the columns
    :math:`a_1^\top S_{11}\, a_1 + (2 S_{21} a_1 + S_{22} a_2)^\top a_2`, and of the derivative by S. Autodiff does
    not know about it, and spends a third product on :math:`\partial v / \partial A = 2 S_p A`. For a derivative the
    products S_p A, N P M numbers, are kept: for many rows call it inside :func:`numpyro_dgp.blocks.in_blocks`.

    Args:
        S: symmetric matrices (P, M, M).
        A: rows (N, M).

    Source: measured in ``docs/performance.md``.
    """
    half = A.shape[1] // 2
    below = jnp.concatenate([2 * S[:, :half, half:], S[:, half:, half:]], 1)
    first = _forms(A[:, :half], _products(A[:, :half], S[:, :half, :half]))
    return first + _forms(A[:, half:], _products(A, below))


def _quadratic_forms_forward(S: Array, A: Array) -> tuple[Array, tuple[Array, Array]]:
    products = _products(A, S)
    return _forms(A, products), (A, products)


def _quadratic_forms_backward(kept: tuple[Array, Array], weights: Array) -> tuple[Array, Array]:
    A, products = kept
    half = A.shape[1] // 2
    left, right = _sums(A[:, :half], weights, A[:, :half]), _sums(A, weights, A[:, half:])
    dS = jnp.concatenate([jnp.concatenate([left, right[:, :half].mT], 1), right], 2)
    return dS, 2 * jnp.einsum("np,npm->nm", weights, products)


quadratic_forms.defvjp(_quadratic_forms_forward, _quadratic_forms_backward)
