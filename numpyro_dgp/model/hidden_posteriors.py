r"""Posteriors of hidden values that keep their dependence on the inducing values of their layer.

.. math:: q(h_n \mid v) = N(T_n v + t_n, \Omega_n), \qquad p(h_n \mid v, x_n) = N(m(x_n) + a_n v, c_n)

While a belief :math:`q(v) = N(m, \Sigma)` is integrated out, a draw of h comes from the marginal
:math:`N(T_n m + t_n, \Omega_n + T_n \Sigma T_n^\top)`. The divergence, averaged over v, contains v only in the *gap*
between the two means, :math:`(T_n - a_n) v + t_n - m(x_n)`, which is Gaussian:

.. math:: E_{q(v)} \mathrm{KL}[q(h_n \mid v) \,\|\, p(h_n \mid v)] = \tfrac12 \Bigl(
          \frac{\Omega_n + E[\mathrm{gap}]^2 + \mathrm{var}[\mathrm{gap}]}{c_n} - 1 + \log \frac{c_n}{\Omega_n} \Bigr)

Source: Chamberlin (2016), sections 4.3 and 4.4, whitened; there with log N(h; f, s^2) in place of log p(h | v).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from numpyro.distributions import kl_divergence

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.gaussians import expected_kl, log_density, log_determinant
from numpyro_dgp.algebra.linalg import cholesky, matmul, solve_lower
from numpyro_dgp.model.function_values import FunctionValues, Values, sum_event

__all__ = ["ConditionalValues", "CorrelatedOutputs"]


class ConditionalValues(FunctionValues):
    r"""q(h | v), every number on its own.

    Args:
        loc: means (..., P) or (...,), at the mean of v where a belief about v is integrated out.
        conditional_variance: :math:`\Omega`, of the same shape.
        spread: variances that the belief adds, or ``None``.
        gap: variance of the gap under the belief, or ``None``.
        event_dim: 1 for vector-valued functions, 0 for scalar ones.
    """

    pytree_data_fields = ("gap",)

    def __init__(
        self, loc: Array, conditional_variance: Array, spread: Array | None, gap: Array | None, event_dim: int
    ) -> None:
        self.gap = gap
        super().__init__(loc, conditional_variance, spread, event_dim)

    def expand(self, batch_shape: Any) -> ConditionalValues:
        shape = (*batch_shape, *self.event_shape)
        arrays = (self.loc, self.conditional_variance, self.spread, self.gap)
        loc, variance, spread, gap = (None if a is None else jnp.broadcast_to(a, shape) for a in arrays)
        return ConditionalValues(loc, variance, spread, gap, self.event_dim)  # type: ignore[arg-type]


class CorrelatedOutputs(Values):
    r"""q(h | v), with correlations between the P outputs at each input.

    Args:
        loc: means (..., P), at the mean of v where a belief about v is integrated out.
        scale_tril: triangular roots of :math:`\Omega` (..., P, P).
        spread: covariances that the belief adds (..., P, P), or ``None``.
        gap: variances of the gap under the belief (..., P), or ``None``.
    """

    pytree_data_fields = ("scale_tril", "spread", "gap")

    def __init__(self, loc: Array, scale_tril: Array, spread: Array | None, gap: Array | None) -> None:
        self.scale_tril, self.spread, self.gap = scale_tril, spread, gap
        super().__init__(loc, 1, None)

    @property
    def variance(self) -> Array:
        own = jnp.square(self.scale_tril).sum(-1)
        return own if self.spread is None else own + jnp.diagonal(self.spread, axis1=-2, axis2=-1)

    def from_white(self, white: Array) -> Array:
        root = self.scale_tril
        if self.spread is not None:
            root = cholesky(matmul(root, root.mT) + self.spread, "the covariance of outputs of a hidden layer")
        return self.loc + matmul(root, white[..., None])[..., 0]

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        """Log density given v; only where v is known."""
        if intermediates:
            (white,) = intermediates
        else:
            white = solve_lower(self.scale_tril, (value - self.loc)[..., None])[..., 0]
        return log_density(white, log_determinant(self.scale_tril))

    def expand(self, batch_shape: Any) -> CorrelatedOutputs:
        def wide(a: Array | None, event: int) -> Array | None:
            return None if a is None else jnp.broadcast_to(a, (*batch_shape, *a.shape[a.ndim - event :]))

        return CorrelatedOutputs(*(wide(a, e) for a, e in self._with_event_dims()))  # type: ignore[arg-type]

    def _with_event_dims(self) -> list[tuple[Array | None, int]]:
        return [(self.loc, 1), (self.scale_tril, 2), (self.spread, 2), (self.gap, 1)]


def _gap(q: Any, p: FunctionValues) -> Array:
    """Expected square of the distance between the means of q(h | v) and p(h | v)."""
    return jnp.square(q.loc - p.loc) + (0 if q.gap is None else q.gap)


@kl_divergence.register(ConditionalValues, FunctionValues)
def _kl_conditional(q: ConditionalValues, p: FunctionValues) -> Array:
    return sum_event(expected_kl(q.conditional_variance, _gap(q, p), p.conditional_variance), q.event_dim)


@kl_divergence.register(CorrelatedOutputs, FunctionValues)
def _kl_correlated(q: CorrelatedOutputs, p: FunctionValues) -> Array:
    # The divergence of independent numbers with the variances of Omega, plus the loss of entropy by its correlations.
    own = jnp.square(q.scale_tril).sum(-1)
    correlations = 0.5 * jnp.log(own).sum(-1) - log_determinant(q.scale_tril)
    return expected_kl(own, _gap(q, p), p.conditional_variance).sum(-1) + correlations
