r"""S1: means and variances of many inputs under a Gaussian over inducing values, with a derivative that leaves out the
products that cancel.

With rows :math:`a_n = W k_n`, W the whitening matrix and :math:`k_n = k(Z, x_n)`, an input needs

.. math:: \mu_{np} = m_p^\top a_n, \qquad e_n = a_n^\top a_n, \qquad g_{np} = a_n^\top (S_p - I)\, a_n .

Its variance is :math:`k(x_n, x_n) + g_{np}`. Backwards, autodiff makes the derivative by the rows a, and from it those
by k and by W, one product of N rows each. Neither is needed: with weights :math:`w_{np}` on g and the derivative by S,
:math:`G_p = \sum_n w_{np} a_n a_n^\top`, the terms of g are

.. math:: \bar k_n = 2 \sum_p w_{np} (T_p W)^\top a_n, \qquad \bar W W^\top = 2 \sum_p T_p G_p, \qquad T_p = S_p - I .
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from numpyro_dgp._typing import Array
from numpyro_dgp.linalg import matmul, rows_times
from numpyro_dgp.quadratic import forms_backward, forms_forward, pull_back

__all__ = ["ROWS", "belief_moments"]

# The name of the rows a among what a checkpoint may keep.
ROWS = "whitened rows"

_Kept = tuple[Array, Array, tuple[Array, Array, Array | None]]
_Moments = tuple[Array, Array, Array]


@jax.custom_vjp
@partial(jax.jit, inline=True)
def belief_moments(change: Array, whiten: Array, cross: Array, loc: Array, T: Array) -> _Moments:
    """The three moments above, (N, P), (N,) and (N, P).

    Args:
        change: zeros (M, M), see :func:`~numpyro_dgp.whitening.relative_change`, with the derivative that W lacks.
        whiten: W (M, M).
        cross: covariances k (N, M) of the inputs with the inducing values.
        loc: means m (P, M).
        T: S - I, symmetric (P, M, M).
    """
    return _forward(change, whiten, cross, loc, T)[0]


def _forward(change: Array, whiten: Array, cross: Array, loc: Array, T: Array) -> tuple[_Moments, _Kept]:
    A = checkpoint_name(rows_times(cross, whiten.T), ROWS)
    gain, kept = forms_forward(T, A)
    return (A @ loc.T, jnp.square(A).sum(-1), gain), (whiten, loc, kept)


def _backward(kept: _Kept, weights: _Moments) -> tuple[Array, None, Array, Array, Array]:
    whiten, loc, forms = kept
    T, A, products = forms
    by_mean, by_explained, by_gain = weights
    by_loc = by_mean.T @ A
    if products is None and len(A) > loc.size:  # otherwise T W, P products of M rows, costs more than it saves
        by_T, half = pull_back(A, by_gain, matmul(T, whiten))
        by_cross = 2 * half + matmul(by_mean, matmul(loc, whiten))
        change = matmul(loc.T, by_loc) + 2 * jnp.einsum("pij,pjk->ik", T, by_T)

        def explained(found: tuple[Array, Array]) -> tuple[Array, Array]:
            weighted = 2 * by_explained[:, None] * A
            return found[0] + matmul(weighted.T, A), found[1] + matmul(weighted, whiten)

        # Nothing where only the variance is used, which is always so but for a bound that treats its parts apart.
        used = (by_explained != 0).any()
        change, by_cross = jax.lax.cond(used, explained, lambda found: found, (change, by_cross))
        return change, None, by_cross, by_loc, by_T
    by_T, by_rows = forms_backward(forms, by_gain)
    by_rows = by_rows + matmul(by_mean, loc) + 2 * by_explained[:, None] * A
    return matmul(by_rows.T, A), None, rows_times(by_rows, whiten), by_loc, by_T


belief_moments.defvjp(_forward, _backward)
