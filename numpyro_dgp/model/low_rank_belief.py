"""A Gaussian over inducing values whose covariance is a diagonal and a matrix of low rank."""

from __future__ import annotations

import jax.numpy as jnp
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.gaussians import log_density
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.algebra.low_rank import color, kl_low_rank, log_determinant_low_rank, spread_low_rank, whiten
from numpyro_dgp.model.beliefs import Belief, InducingPrior, project

__all__ = ["LowRankBelief"]


class LowRankBelief(Belief):
    r"""Diagonal and low rank: :math:`q(v_p) = N(m_p, \mathrm{diag}(\sigma_p^2) + F_p F_p^\top)`.

    Args:
        loc: means, (P, M) or (M,).
        scale: standard deviations :math:`\sigma` of the same shape; their signs are free.
        factor: F, (P, M, J) or (M, J).
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.real, "factor": constraints.real}
    reparametrized_params = ["loc", "scale", "factor"]

    def __init__(self, loc: Array, scale: Array, factor: Array) -> None:
        self.loc, self.scale, self.factor = loc, scale, factor
        super().__init__((), jnp.shape(loc), validate_args=False)

    def from_white(self, white: Array) -> Array:
        return color(self.loc, self.scale, self.factor, white)

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        white = intermediates[0] if intermediates else whiten(self.loc, self.scale, self.factor, value)
        density = log_density(white, log_determinant_low_rank(self.scale, self.factor))
        return density.sum(-1) if self.event_dim == 2 else density

    @property
    def variance(self) -> Array:
        return jnp.square(self.scale) + jnp.square(self.factor).sum(-1)

    def spread(self, A: Array) -> Array:
        M, J = self.factor.shape[-2:]
        alone = project(jnp.square(self.scale).reshape(-1, M), jnp.square(A))
        return alone + spread_low_rank(A, self.factor.reshape(-1, M, J))

    def spread_covariance(self, A: Array) -> Array:
        M, J = self.factor.shape[-2:]
        alone, together = A * self.scale.reshape(-1, 1, M), matmul(A, self.factor.reshape(-1, M, J))
        return matmul(alone, alone.mT) + matmul(together, together.mT)


@kl_divergence.register(LowRankBelief, InducingPrior)
def _kl_low_rank_belief(q: LowRankBelief, prior: InducingPrior) -> Array:
    return kl_low_rank(q.loc, q.scale, q.factor).sum()
