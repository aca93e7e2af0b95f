"""A Gaussian over inducing values whose covariance or precision is a diagonal and a matrix of low rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.gaussians import log_density
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.algebra.low_rank import (
    kl_low_rank,
    log_determinant_low_rank,
    low_rank_root,
    low_rank_root_solve,
    low_rank_spread,
    signed,
)
from numpyro_dgp.model.beliefs import Belief, InducingPrior, project

__all__ = ["LowRankBelief"]


class LowRankBelief(Belief):
    r"""Diagonal and low rank:
    :math:`q(v_p) = N(m_p, \mathrm{diag}(\sigma_p) (I + U_p U_p^\top)^{\pm 1} \mathrm{diag}(\sigma_p))`.

    Args:
        loc: means, (P, M) or (M,).
        scale: :math:`\sigma` of the same shape; signs are free.
        factor: U, (P, M, J) or (M, J).
        precision: whether the low rank is in the precision, with the sign -, or in the covariance.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.real, "factor": constraints.real}
    reparametrized_params = ["loc", "scale", "factor"]
    pytree_aux_fields: tuple[str, ...] = ("precision",)

    def __init__(self, loc: Array, scale: Array, factor: Array, precision: bool) -> None:
        self.loc, self.scale, self.factor, self.precision = loc, scale, factor, precision
        super().__init__((), jnp.shape(loc), validate_args=False)

    def from_white(self, white: Array) -> Array:
        return self.loc + low_rank_root(self.scale, self.factor, white, self.precision)

    def around(self, loc: Array) -> LowRankBelief:
        return LowRankBelief(loc, self.scale, self.factor, self.precision)

    def white(self, value: Array) -> Array:
        return low_rank_root_solve(self.scale, self.factor, value - self.loc, self.precision)

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        white = intermediates[0] if intermediates else self.white(value)
        density = log_density(white, log_determinant_low_rank(self.scale, self.factor, self.precision))
        return density.sum(-1) if self.event_dim == 2 else density

    @property
    def variance(self) -> Array:
        F, sign = signed(self.scale, self.factor, self.precision)
        return jnp.square(self.scale) + sign * jnp.square(F).sum(-1)

    def spread(self, A: Array) -> Array:
        return self.spreading()(A)

    def spreading(self) -> Callable[[Array], Array]:
        scale, F, sign = self._by_output()

        def spread(A: Array) -> Array:
            found = project(jnp.square(scale), jnp.square(A)) + sign * low_rank_spread(A, F)
            return jnp.maximum(found, 0)  # a difference may round to less

        return spread

    def spread_covariance(self, A: Array) -> Array:
        scale, F, sign = self._by_output()
        alone, together = A * scale[:, None], matmul(A, F)
        return matmul(alone, alone.mT) + sign * matmul(together, together.mT)

    def _by_output(self) -> tuple[Array, Array, Any]:
        M, J = self.factor.shape[-2:]
        F, sign = signed(self.scale, self.factor, self.precision)
        return self.scale.reshape(-1, M), F.reshape(-1, M, J), sign


@kl_divergence.register(LowRankBelief, InducingPrior)
def _kl_low_rank_belief(q: LowRankBelief, prior: InducingPrior) -> Array:
    return kl_low_rank(q.loc, q.scale, q.factor, q.precision).sum()
