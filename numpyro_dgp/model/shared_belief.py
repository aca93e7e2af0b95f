"""A Gaussian belief with one covariance for all outputs, as that of observations which all outputs have alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.gaussians import kl_full, log_density, log_determinant
from numpyro_dgp.algebra.linalg import matmul, solve_lower, times_transpose
from numpyro_dgp.algebra.quadratic_forms import quadratic_forms
from numpyro_dgp.model.beliefs import Belief, InducingPrior

__all__ = ["SharedBelief"]


class SharedBelief(Belief):
    r"""One full covariance for all outputs: :math:`q(v_p) = N(m_p, R R^\top)`.

    Args:
        loc: means (P, M).
        scale_tril: the lower triangular factor R (M, M).
    """

    arg_constraints = {"loc": constraints.real, "scale_tril": constraints.real}
    reparametrized_params = ["loc", "scale_tril"]

    def __init__(self, loc: Array, scale_tril: Array) -> None:
        self.loc, self.scale_tril = loc, scale_tril
        super().__init__((), jnp.shape(loc), validate_args=False)

    def from_white(self, white: Array) -> Array:
        return self.loc + matmul(white, self.scale_tril.T)

    def around(self, loc: Array) -> SharedBelief:
        return SharedBelief(loc, self.scale_tril)

    def white(self, value: Array) -> Array:
        rows = (value - self.loc).reshape(-1, self.loc.shape[-1])
        return solve_lower(self.scale_tril, rows.T).T.reshape(value.shape)

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        white = intermediates[0] if intermediates else self.white(value)
        return log_density(white, log_determinant(self.scale_tril)).sum(-1)

    @property
    def variance(self) -> Array:
        return jnp.broadcast_to(jnp.square(self.scale_tril).sum(-1), self.loc.shape)

    def spread(self, A: Array) -> Array:
        S = times_transpose(self.scale_tril)[None]
        if A.ndim == 3:
            return jax.vmap(lambda A_p: quadratic_forms(S, A_p)[:, 0], out_axes=1)(A)
        return jnp.broadcast_to(quadratic_forms(S, A), (len(A), len(self.loc)))

    def spread_covariance(self, A: Array) -> Array:
        half = matmul(A, self.scale_tril)
        found = matmul(half, half.mT)
        return jnp.broadcast_to(found, (len(self.loc), *found.shape[-2:]))


@kl_divergence.register(SharedBelief, InducingPrior)
def _kl_shared_belief(q: SharedBelief, prior: InducingPrior) -> Array:
    return kl_full(q.loc, q.scale_tril).sum()
