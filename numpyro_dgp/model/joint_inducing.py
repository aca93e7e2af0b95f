"""One Gaussian over the inducing values of all outputs of a layer, which is drawn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.gaussians import kl_full, log_density, log_determinant
from numpyro_dgp.algebra.linalg import matmul, solve_lower
from numpyro_dgp.model.beliefs import InducingPrior
from numpyro_dgp.model.fields_in_order import FieldsInOrder

__all__ = ["JointInducing"]


class JointInducing(FieldsInOrder):
    r"""One covariance for the whitened values of all outputs together: :math:`\operatorname{vec}(v) = m + R\epsilon`.

    It is no ``Belief``: layers integrate outputs one by one, which would lose how these depend on each other.

    Args:
        loc: m, (P, M) or (M,).
        scale_tril: lower triangular factor R (P M, P M); the signs of its diagonal are free.
    """

    arg_constraints = {"loc": constraints.real, "scale_tril": constraints.real}
    reparametrized_params = ["loc", "scale_tril"]

    __repr__ = brief

    def __init__(self, loc: Array, scale_tril: Array) -> None:
        self.loc, self.scale_tril = loc, scale_tril
        super().__init__((), jnp.shape(loc), validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    def around(self, loc: Array) -> JointInducing:
        """The Gaussian of the same covariance around other means."""
        return JointInducing(loc, self.scale_tril)

    def from_white(self, white: Array) -> Array:
        """The draw that standard normal numbers of its shape give."""
        return self.loc + matmul(self.scale_tril, self._flat(white)[..., None]).reshape(white.shape)

    def white(self, value: Array) -> Array:
        """The standard normal numbers that give a draw."""
        return solve_lower(self.scale_tril, self._flat(value - self.loc)[..., None]).reshape(value.shape)

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        white = jax.random.normal(key, self.shape(sample_shape), self.loc.dtype)
        return self.from_white(white), [white]

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.sample_with_intermediates(key, sample_shape)[0]

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        white = intermediates[0] if intermediates else self.white(value)
        return log_density(self._flat(white), log_determinant(self.scale_tril))

    def _flat(self, values: Array) -> Array:
        return values.reshape(*values.shape[: values.ndim - self.event_dim], -1)

    @property
    def mean(self) -> Array:
        return self.loc

    @property
    def variance(self) -> Array:
        return jnp.square(self.scale_tril).sum(-1).reshape(self.loc.shape)


@kl_divergence.register(JointInducing, InducingPrior)
def _kl_joint_inducing(q: JointInducing, prior: InducingPrior) -> Array:
    return kl_full(q.loc.reshape(-1), q.scale_tril)
