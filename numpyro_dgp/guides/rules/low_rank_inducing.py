"""A rule for many inducing values: a diagonal covariance and one of low rank."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_dgp._checks import require_count, require_positive
from numpyro_dgp._typing import Array
from numpyro_dgp.guides.rules.orthonormal import orthonormal
from numpyro_dgp.guides.rules.rule import Rule, Site, initial_scale, require_site
from numpyro_dgp.model.beliefs import InducingPrior
from numpyro_dgp.model.low_rank_belief import LowRankBelief

__all__ = ["LowRank"]

# Length of the columns of F at the start, relative to the standard deviations: one per cent more variance along each.
_START = 0.1


@dataclasses.dataclass(frozen=True)
class LowRank(Rule):
    r"""Diagonal and low rank per output: :math:`q(v_p) = N(m_p, \mathrm{diag}(\sigma_p^2) + F_p F_p^\top)`, F (M, J).

    For thousands of inducing values, where M² numbers and B M² operations are too many: M (J + 2) numbers, and
    variances at B inputs in B M J operations. No M x M matrix is made, but for what the representation itself needs
    (``Points``: the factor of k(Z, Z)). The divergence is in closed form by the matrix determinant lemma,

    .. math:: \mathrm{KL} = \tfrac12 \bigl(\lVert\sigma\rVert^2 + \lVert F\rVert_F^2 + \lVert m\rVert^2 - M\bigr)
              - \sum \log \sigma_m - \tfrac12 \log\lvert I + F^\top \mathrm{diag}(\sigma)^{-2} F\rvert .

    It contains :class:`Diagonal` (F = 0), and with J = M also :class:`Full`. The bound depends on F through
    :math:`F F^\top` only, so that its gradient by F is zero at F = 0; equal columns of F would stay equal. F therefore
    starts with short orthogonal columns.

    Where the data determine v well in all directions, a low rank gains little: what the data explain is then the
    *precision* of v less the identity, which has as many directions as they do.

    Args:
        rank: J.
        scale: initial standard deviation :math:`\sigma`; by default 1e-2 for inner layers, else 1.

    Raises:
        ValueError: a rank that is not a positive integer, a scale that is not positive, or a site that does not hold
            inducing values.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> import numpyro.distributions as dist
        >>> from numpyro.handlers import seed, trace
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.LowRank(2))
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> with trace() as sites, seed(rng_seed=0):
        ...     draws = guide(X, X[:, 0])
        >>> {name: site["value"].shape for name, site in sites.items() if site["type"] == "param"}
        {'f_auto_loc': (5,), 'f_auto_scale': (5,), 'f_auto_factor': (5, 2)}

    Source: Tomczak et al. (2020), for the family; :mod:`numpyro_dgp.algebra.low_rank` has its arithmetic.
    """

    rank: int
    scale: float | None = None

    def __post_init__(self) -> None:
        require_count("rule LowRank", "rank", self.rank, "5")
        require_positive("rule LowRank", "scale", 1.0 if self.scale is None else self.scale)

    def __call__(self, site: Site) -> dist.Distribution:
        require_site(InducingPrior, self, site, "inducing values")
        shape, dtype = site.fn.event_shape, site.fn.dtype

        def columns() -> Array:
            start = _START * initial_scale(self.scale, site) * orthonormal(self.rank, shape[-1], dtype).T
            return jnp.broadcast_to(start, (*shape, self.rank))

        loc = site.param("loc", lambda: jnp.zeros(shape, dtype))
        scale = site.param(
            "scale", lambda: jnp.full(shape, initial_scale(self.scale, site), dtype), constraint=constraints.positive
        )
        return LowRankBelief(loc, scale, site.param("factor", columns))
