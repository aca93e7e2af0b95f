"""Distributions of function values with their correlations between inputs, which ``f.joint(x)`` returns.

Some values are deterministic given v, and uncertain only through q(v): those of a projection, and those of a basis
expansion without process noise.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
from numpyro.distributions import kl_divergence

from numpyro_dgp._checks import expect, expected, violated
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.functions.function_values import FunctionValues, MixedValues, Origin, ProcessValues, Values
from numpyro_dgp.functions.site_distribution import declared
from numpyro_dgp.math.gaussians import given_covariance, kl_full, log_density, log_determinant
from numpyro_dgp.math.linalg import checked_joint, joint_cholesky, joint_jitter, matmul, solve_lower
from numpyro_dgp.math.whitening import inverse_lower

__all__ = [
    "Determined",
    "DeterminedJoint",
    "JointValues",
    "KnownValues",
    "WhitenedValues",
    "require_following",
]


class JointValues(ProcessValues):
    r"""Values of P independent functions with their correlations over the last batch dimension.

    Args:
        loc: means (..., N, P), or (..., N) for a scalar function.
        conditional_covariance: covariances given v (..., P, N, N), P = 1 where outputs share it.
        belief_covariance: :math:`\operatorname{Cov}_{q(v)} E[f \mid v]` (..., P, N, N), what a belief about v adds, or
            ``None``.
        event_dim: 2 for vector-valued functions, 1 for scalar ones.
        scale: variances (..., P, 1) that rounding of the covariances is relative to, where those are differences of
            larger ones (``linalg.rounding_scale``); by default their own.
        origin: which function these are values of, and where.

    Raises:
        ValueError: by ``log_prob``, for a value that has not the event shape.
    """

    pytree_data_fields: tuple[str, ...] = ("conditional_covariance", "belief_covariance", "scale")
    suggested_rule = "dgp.guides.Full()"

    def __init__(
        self,
        loc: Array,
        conditional_covariance: Array,
        belief_covariance: Array | None = None,
        event_dim: int = 2,
        scale: Array | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.conditional_covariance, self.scale = conditional_covariance, scale
        self.belief_covariance = belief_covariance
        super().__init__(loc, event_dim, origin)

    @property
    def covariance(self) -> Array:
        """Total covariances (..., P, N, N)."""
        given, added = self.conditional_covariance, self.belief_covariance
        return given if added is None else given + added

    @property
    def variance(self) -> Array:
        return self._diagonal(self.covariance)

    def _diagonal(self, covariance: Array) -> Array:
        return jnp.broadcast_to(self.to_value(jnp.diagonal(covariance, axis1=-2, axis2=-1)), self.loc.shape)

    def factor(self, covariance: Array | None = None) -> Array:
        """Lower factors (..., P, N, N) of the covariances given v, with jitter; or of others as large as these."""
        return joint_cholesky(self.conditional_covariance if covariance is None else covariance, self.scale)

    def from_white(self, white: Array) -> Array:
        L = self.factor(self.covariance)
        return self.loc + self.to_value(matmul(L, self.to_output_major(white)[..., None])[..., 0])  # m + L eps

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        C = joint_jitter(self.conditional_covariance, self.scale)
        density, whiten = given_covariance(C, self.to_output_major(self.residual(value)))
        checked_joint(whiten)
        return (density - 0.5 * self.excess(whiten)).sum(-1)  # E_q log N(r; 0, C) = log N(r; 0, C) - tr(C^-1 S) / 2

    def precision_times(self, residual: Array) -> Array:
        L, rows = self.factor(), self.to_output_major(residual)[..., None]
        return self.to_value(solve_lower(L, solve_lower(L, rows), transpose=True)[..., 0])  # C^-1 r = L^-T L^-1 r

    def excess(self, whiten: Array) -> Array | float:
        """The increase of the expected squared residual by the variance of v, with the inverse of the factor given v:
        (..., P)."""
        # tr(W S W'), W = L^-1
        S = self.belief_covariance
        return 0.0 if S is None else (matmul(whiten, S) * whiten).sum((-2, -1))

    def _expanded(self, batch: tuple[int, ...]) -> JointValues:
        return self._of(type(self), batch)

    def _of(self, kind: type[JointValues], batch: tuple[int, ...]) -> JointValues:
        """The same values as another class of them, expanded to ``batch``."""

        def wide(a: Array | None, dims: int) -> Any:
            return None if a is None else jnp.broadcast_to(a, batch + a.shape[-dims:])

        loc = jnp.broadcast_to(self.loc, batch + self.event_shape)
        C, S, scale = wide(self.conditional_covariance, 3), wide(self.belief_covariance, 3), wide(self.scale, 2)
        found = kind(loc, C, S, self.event_dim, scale, self.origin)
        found.follows_model = self.follows_model
        return found

    def mix(self, W: ArrayLike) -> MixedValues:
        """Mixtures of the functions, each datum on its own, for a ``Likelihood``: ``FunctionValues.mix``."""
        return self.marginals().mix(W)

    def marginals(self) -> FunctionValues:
        """The same values without their correlations: a :class:`FunctionValues` over (..., N)."""
        diagonal = self._diagonal(self.conditional_covariance)
        belief_variance = None if self.belief_covariance is None else self._diagonal(self.belief_covariance)
        return FunctionValues(self.loc, diagonal, belief_variance, self.event_dim - 1, origin=self.origin)


class KnownValues(JointValues):
    """Joint values of one draw of a function: deterministic except for process noise."""

    def from_white(self, white: Array) -> Array:
        return self.marginals().from_white(white)


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
    of_prior = False  # type: ignore[assignment]

    def __init__(self, prior: JointValues, shift: Array, root: Array) -> None:
        self.shift, self.root = shift, root
        self.L = prior.factor()
        # f = m(x) + L (m + R eps): mean m(x) + L m, covariance L R R' L'.
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
            # eps = R^-1 L^-1 (f - m(x) - L m); R may be upper or lower triangular.
            unit = solve_lower(self.L, self.to_output_major(value - self.loc)[..., None])
            white = jnp.linalg.solve(self.root, unit)[..., 0]
        # log N(eps; 0, I) - log|L| - log|R|
        return log_density(white, log_determinant(self.L) + log_determinant(self.root)).sum(-1)

    def _expanded(self, batch: tuple[int, ...]) -> JointValues:
        return self._of(JointValues, batch)


@kl_divergence.register(WhitenedValues, JointValues)
def _kl_whitened(q: WhitenedValues, p: JointValues) -> Array:
    """KL to the prior of ``q``, averaged over u where a belief about u is integrated out."""
    # KL[N(m, R R') || N(0, I)] + tr(C^-1 S) / 2
    return (kl_full(q.shift, q.root) + 0.5 * p.excess(inverse_lower(q.L))).sum(-1)


class _AtLoc(Values):
    """Values that are at ``loc``, with the log density 0 there and minus infinity elsewhere."""

    determined = True

    @property
    def uncertain(self) -> bool:
        """Whether a belief about v is integrated out."""
        raise NotImplementedError

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        if self.uncertain:  # given the function, prior and posterior are the same point
            return jnp.zeros(self.batch_shape, self.loc.dtype)
        near = _is_near(value, self.loc).all(tuple(range(-self.event_dim, 0)))
        return jnp.where(near, 0.0, -jnp.inf).astype(self.loc.dtype)

    def _validate_sample(self, value: Array) -> None:
        expect(
            not violated(_is_near, value, self.loc),
            f"values that a {type(self.function).__name__} determines",
            "others",
            "they have no density for NUTS and autoguides; use dgp.for_mcmc(model), or process noise, f(x, noise=s)",
        )


def _is_near(value: Any, loc: Any) -> Any:
    # half of the digits: loc may be computed in another order
    return abs(value - loc) <= jnp.finfo(loc.dtype).eps ** 0.5 * (1 + abs(loc))


class Determined(_AtLoc, FunctionValues):
    """Values at each input on its own."""

    @property
    def uncertain(self) -> bool:
        return self.belief_variance is not None


class DeterminedJoint(_AtLoc, JointValues):
    """As :class:`Determined`, with the correlations over the last batch dimension."""

    @property
    def uncertain(self) -> bool:
        return self.belief_covariance is not None

    def from_white(self, white: Array) -> Array:
        return super().from_white(white) if self.uncertain else jnp.broadcast_to(self.loc, white.shape)


def require_following(name: str, values: Any, q: Any) -> None:
    """Raise if a guide has a distribution for values that are deterministic given v: they have no density.

    Args:
        name: of the site.
        values: the model's distribution there.
        q: the guide's.

    Raises:
        ValueError: such values, and a distribution that is not that of the model.
    """
    own = declared(q)
    if declared(values).determined and not (own.follows_model or (own.determined and own.all_rows_together)):
        has_noise = "noise" in inspect.signature(type(values.function).__call__).parameters
        advice = (
            f"give the site the rule Propagate, sites={{{name!r}: dgp.guides.Propagate()}}"
            f"{', or the layer process noise, f(x, noise=s)' if has_noise else ''}; for Collapsed take InducingPoint"
        )
        raise expected(
            "a guide under which values that v determines follow the model",
            f"a distribution of its own for {name!r}, which a {type(values.function).__name__} gives no variance",
            advice,
        )
