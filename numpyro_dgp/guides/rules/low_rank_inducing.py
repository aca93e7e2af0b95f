"""A rule for many inducing values: a Gaussian whose covariance or precision is a diagonal plus a matrix of low rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._fields import count, one_of, scale
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.weights import Belief, InducingPrior, matvec
from numpyro_dgp.guides.rules.rule import Rule, SiteContext, initial_scale, require_site
from numpyro_dgp.math.gaussians import (
    kl_low_rank,
    log_density,
    log_determinant_low_rank,
    low_rank_root,
    low_rank_root_solve,
    low_rank_variances,
    signed,
)
from numpyro_dgp.math.linalg import matmul, orthonormal

__all__ = ["LowRank", "LowRankBelief"]


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
        return jnp.square(self.scale) + sign * jnp.square(F).sum(-1)  # diag(Sigma), Sigma = diag(sigma^2) + s F F'

    def feature_variance(self, A: Array) -> Array:
        return self.feature_variances()(A)

    def feature_variances(self) -> Callable[[Array], Array]:
        scale, F, sign = self._by_output()

        def feature_variance(A: Array) -> Array:
            found = matvec(jnp.square(scale), jnp.square(A)) + sign * low_rank_variances(A, F)
            return jnp.maximum(found, 0)  # a difference may round to less

        return feature_variance

    def feature_covariance(self, A: Array) -> Array:
        scale, F, sign = self._by_output()
        alone, together = A * scale[:, None], matmul(A, F)
        return matmul(alone, alone.mT) + sign * matmul(together, together.mT)  # A diag(sigma^2) A' + s A F (A F)'

    def _by_output(self) -> tuple[Array, Array, Any]:
        M, J = self.factor.shape[-2:]
        F, sign = signed(self.scale, self.factor, self.precision)
        return self.scale.reshape(-1, M), F.reshape(-1, M, J), sign


@kl_divergence.register(LowRankBelief, InducingPrior)
def _kl_low_rank_belief(q: LowRankBelief, prior: InducingPrior) -> Array:
    return kl_low_rank(q.loc, q.scale, q.factor, q.precision).sum()


# Length of the columns of U at the start: along each of them one per cent more variance, or precision.
_START = 0.1


@dataclasses.dataclass(frozen=True)
class LowRank(Rule):
    r"""Diagonal and low rank per output, in the precision or in the covariance:

    .. math:: q(v_p) = N\bigl(m_p,\;
              \mathrm{diag}(\sigma_p)\, (I + U_p U_p^\top)^{\pm 1}\, \mathrm{diag}(\sigma_p)\bigr)

    with U (M, J). For thousands of inducing values, where M² numbers and B M² operations are too many: M (J + 2)
    numbers, and variances at B inputs in B M J operations. No M x M matrix is made, except for what the representation
    itself needs (``Points``: the factor of k(Z, Z)). The divergence is in closed form by the matrix determinant lemma.

    It contains :class:`Diagonal` (U = 0), and with J = M also :class:`Full`. The bound depends on U through
    :math:`U U^\top` only, so that its gradient by U is zero at U = 0, and equal columns stay equal. U therefore starts
    with short orthogonal columns.

    **Which one?** Data add a matrix to the precision of v, whose rank is that of what they determine: with a Gaussian
    likelihood and features A of the data the optimum is :math:`\Sigma^{-1} = I + A^\top A / \sigma_y^2`. A low rank in
    the precision follows it; one in the covariance has to represent the many directions in which the data do not change
    q(v). (Where M is so small that the data determine all of v, either may be the better one.) Gaps to the
    full Gaussian in nats, 200 rows, M = 80, the best q of each family (``benchmarks/low_rank_gaps.py``):

    ==================================  =====  =====  =====  =====
    kernel, lengthscale; low rank in    J = 1  5      10     20
    ==================================  =====  =====  =====  =====
    RBF, 0.1; precision                 77.6   24.0   1.0    0.0
    RBF, 0.1; covariance                88.3   81.5   73.5   57.7
    Matern12, 0.2; precision            60.0   26.7   12.8   3.3
    Matern12, 0.2; covariance           73.6   68.1   61.5   48.9
    ==================================  =====  =====  =====  =====

    Args:
        rank: the rank, J.
        of: ``"precision"`` (default), the sign -, or ``"covariance"``, the sign +.
        scale: initial standard deviation :math:`\sigma`; by default 1e-2 for inner layers, else 1.

    Raises:
        ValueError: a rank that is not a positive integer, another word for ``of``, a scale that is not positive, or a
            site that does not hold inducing values.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.LowRank(2))
        >>> dgp.testing.parameter_shapes(guide, X, y)
        {'f_auto_loc': (5,), 'f_auto_scale': (5,), 'f_auto_factor': (5, 2)}

    Source: Tomczak et al. (2020), for the covariance.
    """

    rank: int = count(hint="5")
    of: Literal["precision", "covariance"] = one_of("precision", "covariance")
    scale: float | None = scale()

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        require_site(InducingPrior, self, site, "inducing values")
        shape, dtype = site.fn.event_shape, site.fn.dtype

        def columns() -> Array:
            return jnp.broadcast_to(_START * orthonormal(self.rank, shape[-1], dtype).T, (*shape, self.rank))

        loc = site.param("loc", lambda: jnp.zeros(shape, dtype))
        scale = site.param(
            "scale", lambda: jnp.full(shape, initial_scale(self.scale, site), dtype), constraint=constraints.positive
        )
        return LowRankBelief(loc, scale, site.param("factor", columns), self.of == "precision")
