r"""Means and variances of many inputs under a Gaussian over inducing values, with a derivative that leaves out the
products that cancel.

With rows :math:`a_n = L^{-1} k_n`, :math:`L L^\top = k(Z, Z)` and :math:`k_n = k(Z, x_n)`, an input needs

.. math:: m_p^\top a_n, \qquad a_n^\top a_n, \qquad \delta_{np} = a_n^\top (\Sigma_p - I)\, a_n .

Its variance is :math:`k(x_n, x_n) + \delta_{np}`. :func:`belief_moments_reference` evaluates these equations
directly.

Automatic differentiation goes through the rows a: one product with N rows for the derivative by k, another for that by
:math:`L^{-1}`. Neither is needed: let :math:`\beta_{np}` be the derivative of a loss by :math:`\delta_{np}`, and
:math:`G_p = \sum_n \beta_{np} a_n a_n^\top` that by :math:`\Sigma_p`. Written with bars, the derivatives by :math:`k_n`
and by :math:`L^{-1}` that come from :math:`\delta` are

.. math:: \bar k_n = 2 \sum_p \beta_{np} \bigl((\Sigma_p - I) L^{-1}\bigr)^\top a_n, \qquad
          \overline{L^{-1}}\, L^{-\top} = 2 \sum_p (\Sigma_p - I)\, G_p .
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from numpyro_dgp._typing import Array
from numpyro_dgp.math.linalg import covariance_of, fused, lower_product, matmul, row_sums, times_lower, times_transposed
from numpyro_dgp.math.quadratic_forms import (
    Columns,
    Rows,
    column_sums,
    columns,
    forms_backward,
    forms_forward,
    forms_of_columns,
    keeps_products,
    pull_back,
    quadratic_forms,
    quadratic_forms_reference,
    rows_of_blocks,
    symmetric,
    weighted_rows,
)

__all__ = ["ROWS", "belief_moments", "belief_moments_reference"]

# The name that the rows a_n have for ``jax.checkpoint``, by which :func:`~numpyro_dgp.math.row_blocks.in_blocks` may
# keep them.
ROWS = "whitened rows"

_Moments = tuple[Array, Array, Array]


def belief_moments_reference(whiten: Array, loc: Array, scale_tril: Array, cross: Array) -> _Moments:
    r"""What :func:`belief_moments` computes, one equation a line, differentiated by JAX: the reference in its tests.

    .. math:: a_n = L^{-1} k_n, \qquad m_p^\top a_n, \qquad a_n^\top a_n, \qquad a_n^\top (\Sigma_p - I)\, a_n

    Args:
        whiten: :math:`L^{-1}` (M, M), here with its own derivative.
        loc: means m (P, M).
        scale_tril: R, lower triangular factors of :math:`\Sigma = R R^\top` (P, M, M).
        cross: covariances k (N, M) of N inputs with the inducing values.
    """
    A = matmul(cross, whiten.T)  # rows a_n' = k_n' L^-T
    T = matmul(scale_tril, scale_tril.mT) - jnp.eye(len(whiten), dtype=whiten.dtype)  # Σ_p - I
    mean = matmul(A, loc.T)  # m_p' a_n
    explained = jnp.square(A).sum(-1)  # a_n' a_n
    return mean, explained, quadratic_forms_reference(T, A)


def belief_moments(
    rows: int, change: Array, whiten: Array, loc: Array, scale_tril: Array
) -> Callable[[Array], _Moments]:
    r"""The three moments above, (N, P), (N,) and (N, P), as a function of covariances k (N, M) of N inputs.

    Values and derivatives are those of :func:`belief_moments_reference`, in reverse mode only.

    Args:
        rows: N of all calls together. Where it is large, what does not depend on the inputs is computed here, once.
        change: zeros (M, M) that carry the derivative by :math:`L^{-1}`, lower triangular, from
            :func:`~numpyro_dgp.math.whitening.relative_change`.
        whiten: :math:`L^{-1}` (M, M), lower triangular, without a derivative.
        loc: means m (P, M).
        scale_tril: R, lower triangular factors of :math:`\Sigma = R R^\top` (P, M, M); so is the derivative by it.

    Example:
        >>> import jax.numpy as jnp
        >>> eye = jnp.eye(2)
        >>> moments = belief_moments(3, 0 * eye, eye, jnp.ones((1, 2)), 0.5 * eye[None])
        >>> mean, explained, gain = moments(jnp.full((3, 2), 2.0))
        >>> print(mean[0], explained[0], gain[0])
        [4.] 8.0 [-6.]
    """
    if keeps_products(rows, scale_tril):
        return partial(_few, change, whiten, loc, _less_identity(scale_tril))
    return partial(_many, change, whiten, *_prepared(change, whiten, loc, scale_tril))


def _less_identity(scale_tril: Array) -> Array:
    """Σ - I."""
    return covariance_of(scale_tril) - jnp.eye(scale_tril.shape[-1], dtype=scale_tril.dtype)


def _whitened(whiten: Array, cross: Array) -> Array:
    return checkpoint_name(times_transposed(cross, whiten), ROWS)  # rows a_n' = k_n' L^-T (N, M)


def _moments(A: Array, loc: Array, gain: Array) -> _Moments:
    return matmul(A, loc.T), row_sums(jnp.square(A)), gain  # m_p' a_n, a_n' a_n, a_n' (Σ_p - I) a_n


@jax.custom_vjp
@fused
def _few(change: Array, whiten: Array, loc: Array, T: Array, cross: Array) -> _Moments:
    """The moments of so few inputs that products with a_n are kept, and with them the derivative by a_n is cheap."""
    A = _whitened(whiten, cross)
    return _moments(A, loc, quadratic_forms(T, A))


def _few_forward(change: Array, whiten: Array, loc: Array, T: Array, cross: Array) -> tuple[_Moments, tuple]:
    A = _whitened(whiten, cross)
    gain, forms = forms_forward(T, A)
    return _moments(A, loc, gain), (whiten, loc, forms)


def _few_backward(kept: tuple, weights: _Moments) -> tuple[Array, None, Array, Array, Array]:
    whiten, loc, forms = kept
    A, (by_mean, by_explained, by_gain) = forms[1], weights
    # Bars are derivatives of the loss. With T_p = Σ_p - I: Tbar_p = sum_n β_np a_n a_n' and
    # abar_n = 2 sum_p β_np T_p a_n + sum_p meanbar_np m_p + 2 explainedbar_n a_n.
    by_T, by_rows = forms_backward(forms, by_gain)
    by_rows = by_rows + matmul(by_mean, loc) + 2 * by_explained[:, None] * A
    # With a_n = (I + E) L^-1 k_n: Ebar = tril(sum_n abar_n a_n') and kbar_n = L^-T abar_n;
    # mbar_p = sum_n meanbar_np a_n.
    return lower_product(by_rows.T, A), None, matmul(by_mean.T, A), by_T, times_lower(by_rows, whiten)


_few.defvjp(_few_forward, _few_backward)


@jax.custom_vjp
@fused
def _prepared(change: Array, whiten: Array, loc: Array, scale_tril: Array) -> tuple[Array, Columns, Rows]:
    """m, Σ - I in columns, and (Σ - I) L⁻¹ in blocks of rows, which has no derivative.

    The derivatives of the others also give the derivative by ``change`` through means and gains.
    """
    return _prepared_forward(change, whiten, loc, scale_tril)[0]


def _prepared_forward(
    change: Array, whiten: Array, loc: Array, scale_tril: Array
) -> tuple[tuple[Array, Columns, Rows], tuple[Array, Array, Array]]:
    T = _less_identity(scale_tril)
    return (loc, columns(T), rows_of_blocks(times_lower(T, whiten))), (loc, scale_tril, T)


def _prepared_backward(
    kept: tuple[Array, Array, Array], found: tuple[Array, Columns, Rows]
) -> tuple[Array, None, Array, Array]:
    (loc, scale_tril, T), (by_loc, sums, _) = kept, found
    by_T = symmetric(sums, len(T))  # G_p = sum_n β_np a_n a_n'
    # With a_n = (I + E) L^-1 k_n: Ebar = tril(sum_p m_p mbar_p' + 2 (Σ_p - I) G_p)
    change = jnp.tril(matmul(loc.T, by_loc)) + 2 * lower_product(T, by_T).sum(0)
    return change, None, by_loc, 2 * lower_product(by_T, scale_tril)  # Rbar_p = tril(2 G_p R_p)


_prepared.defvjp(_prepared_forward, _prepared_backward)


@jax.custom_vjp
@fused
def _many(change: Array, whiten: Array, loc: Array, T: Columns, pulled: Rows, cross: Array) -> _Moments:
    """The moments of many inputs; ``T`` comes from :func:`_prepared`, ``pulled`` is the product of Σ - I and L⁻¹."""
    return _many_forward(change, whiten, loc, T, pulled, cross)[0]


def _many_forward(
    change: Array, whiten: Array, loc: Array, T: Columns, pulled: Rows, cross: Array
) -> tuple[_Moments, tuple]:
    A = _whitened(whiten, cross)
    return _moments(A, loc, forms_of_columns(A, T, len(loc))), (whiten, loc, pulled, A)


def _many_backward(kept: tuple, weights: _Moments) -> tuple[Array, None, Array, Columns, None, Array]:
    whiten, loc, pulled, A = kept
    by_mean, by_explained, by_gain = weights
    weighted = weighted_rows(A, by_gain)  # β_np a_n
    # kbar_n = 2 sum_p β_np ((Σ_p - I) L^-1)' a_n + sum_p meanbar_np L^-T m_p
    by_cross = 2 * pull_back(A, by_gain, weighted, pulled) + matmul(by_mean, matmul(loc, whiten))

    def explained(by_cross: Array) -> tuple[Array, Array]:
        rows = 2 * by_explained[:, None] * A  # derivative of a_n' a_n by a_n, weighted
        return lower_product(rows.T, A), by_cross + times_lower(rows, whiten)

    def unused(by_cross: Array) -> tuple[Array, Array]:
        return jnp.zeros_like(whiten), by_cross

    # Zero if only the variance is used, which is the case unless a bound uses its parts separately.
    change, by_cross = jax.lax.cond((by_explained != 0).any(), explained, unused, by_cross)
    return change, None, matmul(by_mean.T, A), column_sums(A, weighted), None, by_cross


_many.defvjp(_many_forward, _many_backward)
