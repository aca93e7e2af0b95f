"""S1: quadratic forms of many rows with many symmetric matrices: most of the arithmetic of a training step."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array

__all__ = ["quadratic_forms"]

# Rows whose products with P matrices stay in cache.
_BLOCK = 2000


def _side_by_side(S: Array) -> Array:
    """Symmetric matrices (P, M, M) as one matrix (M, P M)."""
    return jnp.moveaxis(S, 0, 1).reshape(S.shape[1], -1)


def _products(C: Array, A: Array) -> Array:
    """Products of rows A (N, M) with P matrices side by side, C (M, P M), by one matrix product: (N, P, M)."""
    return (A @ C).reshape(len(A), -1, C.shape[0])


def _blocks(rows: Array) -> Array:
    """Rows (N, ...) as (rows per block, blocks, ...), with zero rows added at the end where no number of blocks fits.

    A block has rows from everywhere, so that every device has its share where the rows are spread over devices.
    """
    least = -(-len(rows) // _BLOCK)
    count = next((c for c in range(least, 2 * least) if len(rows) % c == 0), least)
    size = -(-len(rows) // count)
    padded = jnp.pad(rows, [(0, count * size - len(rows))] + [(0, 0)] * (rows.ndim - 1))
    return padded.reshape(size, count, *rows.shape[1:])


@jax.custom_vjp
@partial(jax.jit, inline=True)
def quadratic_forms(S: Array, A: Array) -> Array:
    r"""All quadratic forms :math:`v_{np} = a_n^\top S_p\, a_n` at once, shape (N, P).

    The value is one matrix product of shape (N, M) x (M, P M), and its layout makes the sum run over contiguous
    numbers. The derivative is written by hand. Autodiff does not know that :math:`S_p` is symmetric and spends a
    third product on :math:`\partial v / \partial A = 2 S_p A`, which the value has already computed; and it keeps all
    N P M numbers of the product, so that many rows are done in blocks that stay in cache and computed again backwards.

    Args:
        S: symmetric matrices (P, M, M).
        A: rows (N, M).

    Source: measured in ``docs/performance.md``.
    """
    C = _side_by_side(S)
    if len(A) <= _BLOCK:
        return (_products(C, A) * A[:, None, :]).sum(-1)
    blocks = _blocks(A)

    def values(i: Array) -> Array:
        rows = blocks[:, i]
        return (_products(C, rows) * rows[:, None, :]).sum(-1)

    return jax.lax.map(values, jnp.arange(blocks.shape[1])).swapaxes(0, 1).reshape(-1, len(S))[: len(A)]


def _quadratic_forms_forward(S: Array, A: Array) -> tuple[Array, tuple[Array, Array, Array | None]]:
    if len(A) > _BLOCK:
        return quadratic_forms(S, A), (S, A, None)
    products = _products(_side_by_side(S), A)
    return (products * A[:, None, :]).sum(-1), (S, A, products)


def _quadratic_forms_backward(kept: tuple[Array, Array, Array | None], weights: Array) -> tuple[Array, Array]:
    S, A, products = kept
    C = _side_by_side(S)

    def block(rows: Array, w: Array, products: Array) -> tuple[Array, Array]:
        weighted = (rows[:, None, :] * w[..., None]).reshape(len(rows), -1)
        return rows.T @ weighted, 2 * jnp.einsum("np,npm->nm", w, products)

    if products is not None:
        dC, dA = block(A, weights, products)
    else:
        rows, w = _blocks(A), _blocks(weights)

        def step(total: Array, i: Array) -> tuple[Array, Array]:
            dC, dA = block(rows[:, i], w[:, i], _products(C, rows[:, i]))
            return total + dC, dA

        dC, dA = jax.lax.scan(step, jnp.zeros_like(C), jnp.arange(rows.shape[1]))
        dA = dA.swapaxes(0, 1).reshape(-1, A.shape[1])[: len(A)]
    return jnp.moveaxis(dC.reshape(A.shape[1], *S.shape[:2]), 1, 0), dA


quadratic_forms.defvjp(_quadratic_forms_forward, _quadratic_forms_backward)
