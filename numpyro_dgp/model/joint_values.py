"""Distributions of function values with their correlations between inputs, which ``f.joint(x)`` returns."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from numpyro.distributions import kl_divergence

from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.gaussians import given_covariance, kl_full, log_density, log_determinant
from numpyro_dgp.algebra.linalg import checked_joint, joint_cholesky, joint_jitter, matmul, solve_lower
from numpyro_dgp.algebra.whitening import inverse_lower
from numpyro_dgp.model.function_values import FunctionValues, MixedValues, Origin
from numpyro_dgp.model.process_values import ProcessValues, PropagatedProcess

__all__ = ["JointValues", "KnownValues", "PropagatedJoint", "WhitenedValues"]


class JointValues(ProcessValues):
    """Values of P independent functions with their correlations over the last batch dimension.

    Args:
        loc: means (..., N, P), or (..., N) for a scalar function.
        conditional_covariance: covariances given u (..., P, N, N), P = 1 where outputs share it.
        spread: covariances that a belief about u adds (..., P, N, N), or ``None``.
        event_dim: 2 for vector-valued functions, 1 for scalar ones.
        scale: variances (..., P, 1) that rounding of the covariances is relative to, where those are differences of
            larger ones (``linalg.rounding_scale``); by default their own.
        origin: which function these are values of, and where.

    Raises:
        ValueError: by ``log_prob``, for a value that has not the event shape.
    """

    pytree_data_fields: tuple[str, ...] = ("conditional_covariance", "spread", "scale")
    suggested_rule = "dgp.guides.Full()"

    def __init__(
        self,
        loc: Array,
        conditional_covariance: Array,
        spread: Array | None = None,
        event_dim: int = 2,
        scale: Array | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.conditional_covariance, self.spread, self.scale = conditional_covariance, spread, scale
        super().__init__(loc, event_dim, origin)

    @property
    def covariance(self) -> Array:
        """Total covariances (..., P, N, N)."""
        return self.conditional_covariance if self.spread is None else self.conditional_covariance + self.spread

    @property
    def variance(self) -> Array:
        return self._diagonal(self.covariance)

    def _diagonal(self, covariance: Array) -> Array:
        return jnp.broadcast_to(self.to_value(jnp.diagonal(covariance, axis1=-2, axis2=-1)), self.loc.shape)

    def factor(self, covariance: Array | None = None) -> Array:
        """Lower factors (..., P, N, N) of the covariances given u, with jitter; or of others as large as these."""
        return joint_cholesky(self.conditional_covariance if covariance is None else covariance, self.scale)

    def from_white(self, white: Array) -> Array:
        L = self.factor(self.covariance)
        return self.loc + self.to_value(matmul(L, self.to_output_major(white)[..., None])[..., 0])

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        C = joint_jitter(self.conditional_covariance, self.scale)
        density, whiten = given_covariance(C, self.to_output_major(self.residual(value)))
        checked_joint(whiten)
        return (density - 0.5 * self.excess(whiten)).sum(-1)

    def precision_times(self, residual: Array) -> Array:
        L, rows = self.factor(), self.to_output_major(residual)[..., None]
        return self.to_value(solve_lower(L, solve_lower(L, rows), transpose=True)[..., 0])

    def excess(self, whiten: Array) -> Array | float:
        """The increase of the expected squared residual by the variance of u, with the inverse of the factor given u:
        (..., P)."""
        return 0.0 if self.spread is None else (matmul(whiten, self.spread) * whiten).sum((-2, -1))

    def _expanded(self, batch: tuple[int, ...]) -> JointValues:
        return self._of(type(self), batch)

    def _of(self, kind: type[JointValues], batch: tuple[int, ...]) -> JointValues:
        """The same values as another class of them, expanded to ``batch``."""

        def wide(a: Array | None, dims: int) -> Any:
            return None if a is None else jnp.broadcast_to(a, batch + a.shape[-dims:])

        loc = jnp.broadcast_to(self.loc, batch + self.event_shape)
        C, S, scale = wide(self.conditional_covariance, 3), wide(self.spread, 3), wide(self.scale, 2)
        return kind(loc, C, S, self.event_dim, scale, self.origin)

    def propagated(self) -> JointValues:
        return self._of(PropagatedJoint, self.batch_shape)

    def mix(self, W: ArrayLike) -> MixedValues:
        """Mixtures of the functions, each datum on its own, for a ``Likelihood``: ``FunctionValues.mix``."""
        return self.marginals().mix(W)

    def marginals(self) -> FunctionValues:
        """The same values without their correlations: a :class:`FunctionValues` over (..., N)."""
        diagonal = self._diagonal(self.conditional_covariance)
        spread = None if self.spread is None else self._diagonal(self.spread)
        return FunctionValues(self.loc, diagonal, spread, self.event_dim - 1, origin=self.origin)


class PropagatedJoint(JointValues, PropagatedProcess):
    """Joint values that follow the model."""


class KnownValues(JointValues):
    """Joint values of one draw of a function: deterministic but for process noise."""

    def from_white(self, white: Array) -> Array:
        return self.marginals().from_white(white)

    def propagated(self) -> KnownValues:
        return self


class WhitenedValues(JointValues):
    r"""A Gaussian over joint values in the whitened coordinates of their prior: :math:`m(x) + L(m + R\epsilon)`.

    A posterior over the values of an exact process is nearly singular wherever its prior is. In these
    coordinates its divergence from the prior and its log density are exact all the same.

    Args:
        prior: the prior of the values, mean m(x) and covariance :math:`L L^\top` given u.
        shift: m, whitened means (P, N).
        root: R, triangular (P, N, N); signs on the diagonal are free.
    """

    pytree_data_fields = ("shift", "root", "L")

    def __init__(self, prior: JointValues, shift: Array, root: Array) -> None:
        self.shift, self.root = shift, root
        self.L = prior.factor()
        half = matmul(self.L, root)
        loc = prior.loc + prior.to_value(matmul(self.L, shift[..., None])[..., 0])
        super().__init__(loc, matmul(half, half.mT), event_dim=prior.event_dim, origin=prior.origin)

    def from_white(self, white: Array) -> Array:
        return self.loc + self.to_value(
            matmul(matmul(self.L, self.root), self.to_output_major(white)[..., None])[..., 0]
        )

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        if intermediates:
            white = self.to_output_major(intermediates[0])
        else:
            unit = solve_lower(self.L, self.to_output_major(value - self.loc)[..., None])
            white = jnp.linalg.solve(self.root, unit)[..., 0]
        return log_density(white, log_determinant(self.L) + log_determinant(self.root)).sum(-1)

    def _expanded(self, batch: tuple[int, ...]) -> JointValues:
        return self._of(JointValues, batch)


@kl_divergence.register(WhitenedValues, JointValues)
def _kl_whitened(q: WhitenedValues, p: JointValues) -> Array:
    """KL to the prior of ``q``, averaged over u where a belief about u is integrated out."""
    return (kl_full(q.shift, q.root) + 0.5 * p.excess(inverse_lower(q.L))).sum(-1)
