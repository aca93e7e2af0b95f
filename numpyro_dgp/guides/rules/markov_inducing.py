r"""A rule for inducing values that depend on those of the layer below: Markov dynamics across layers.

With :math:`v^- \sim N(m^-, \Sigma^-)` the values of a layer are Gaussian too, :math:`v \sim N(m, \Sigma)` with

.. math:: m = U m^- + t, \quad \Sigma = U \Sigma^- U^\top + \Omega, \quad \operatorname{Cov}[v, v^-] = U \Sigma^- .

If the posterior of hidden values does not depend on inducing values, this dependence does not improve the bound
(Chamberlin, 2016, section 4.5). If it does, a draw of the lower function determines which upper function fits the data,
and the bound gains.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._checks import require_count
from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.guides.rules.inducing_values import Diagonal, Full
from numpyro_dgp.guides.rules.joint_inducing_values import FullJoint
from numpyro_dgp.guides.rules.low_rank_inducing import LowRank
from numpyro_dgp.guides.rules.orthonormal import orthonormal
from numpyro_dgp.guides.rules.rule import GaussianParameters, Rule, Site, require_site
from numpyro_dgp.model.beliefs import Belief, InducingPrior
from numpyro_dgp.model.joint_inducing import JointInducing

__all__ = ["MarkovInducing"]


@dataclasses.dataclass(frozen=True)
class MarkovInducing(Rule):
    r"""Inducing values whose mean is linear in those of the layer below.

    .. math:: q(v_p \mid v^-) = N(U_p \operatorname{vec}(v^-) + t_p,\; \Omega_p)

    Every output depends on all outputs of the layer below. U starts at zero, where q(v) is ``conditional`` alone.

    Under ``dgp.ELBO`` the values :math:`v^-` are drawn, once for all data, and :math:`v` is integrated out given the
    draw, with the divergence of :math:`q(v \mid v^-)` in closed form. Values that no other layer depends on are
    integrated out.
    The draw makes gradients noisier than those of independent layers: take several, ``ELBO(num_particles=...)``.
    :mod:`numpyro_dgp.bounds.markov_layers` has the bound in closed form.

    Args:
        below: the site of :math:`v^-`; by default that of the inducing values before this one in the program.
        rank: J, where :math:`U_p` is a matrix (M, J) times one basis O (J, P⁻ M⁻) for all outputs; ``None`` for a
            dense U.
        conditional: rule for :math:`N(t, \Omega)`: ``Full()``, a triangular root of :math:`\Omega` per output, or
            ``Diagonal()``; ``LowRank(J)``, a diagonal and a matrix of low rank per output; or ``FullJoint()``, one
            :math:`\Omega` over all outputs together, with which :math:`v` is drawn too.

    Raises:
        ValueError: a rank that is not a positive integer, another rule as conditional, a site that does not hold
            inducing values, or one without a layer below, or with ``below`` not before it in the program.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> from numpyro_dgp.guides import GivenInducing, InducingPoint
        >>> from numpyro_dgp.guides import MarkovInducing
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]), outputs=2)
        ...     g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 8).reshape(4, 2)))
        ...     with numpyro.plate("data", len(X)):
        ...         h = numpyro.sample("h", f(X, noise=0.1))
        ...         numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> guide = InducingPoint(model, sites={"g": MarkovInducing(below="f"), "h": GivenInducing("free")})
        >>> svi = SVI(model, guide, optax.adam(0.05), dgp.ELBO())
        >>> result = svi.run(jax.random.key(0), 20, X, X[:, 0] ** 2, progress_bar=False)
        >>> result.params["g_auto_transition"].shape
        (4, 10)

    Source: Chamberlin (2016), sections 4.7, 4.9 and A.6, whitened; section 4.7 has one U per pair of outputs, section
    4.9 one :math:`\Omega` for all outputs together, ``FullJoint()``.
    """

    below: str | None = None
    rank: int | None = None
    conditional: Full | Diagonal | LowRank | FullJoint = dataclasses.field(default_factory=Full)

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.rank is not None:
            require_count("rule MarkovInducing", "rank", self.rank, "5, or None for a dense matrix")
        if not isinstance(self.conditional, Full | Diagonal | LowRank | FullJoint):
            raise ValueError(
                f"rule MarkovInducing: expected conditional=Full(), Diagonal(), LowRank(rank) or FullJoint(), got "
                f"{self.conditional!r}: it gives the covariance of inducing values when those of the layer below are "
                "known"
            )

    @property
    def gaussian(self) -> GaussianParameters | None:  # type: ignore[override]
        r"""Of t and :math:`\Omega`: the Gaussian given the layer below."""
        return self.conditional.gaussian

    def follows(self, name: str, order: tuple[str, ...]) -> str:
        before = order[: order.index(name)]
        if not before:
            raise ValueError(
                f"rule MarkovInducing: expected a layer below {name!r}, got the first layer of {list(order)}: give it "
                "guides.Full()"
            )
        below = before[-1] if self.below is None else self.below
        if below not in before:
            raise ValueError(
                f"rule MarkovInducing: expected below to be one of {list(before)}, the inducing values that come "
                f"before {name!r}, got {below!r}: leave it out for the last of them"
            )
        return below

    def __call__(self, site: Site) -> Belief | JointInducing:
        require_site(InducingPrior, self, site, "inducing values")
        q: Any = self.conditional(site)
        return q.around(q.loc + self._transition(site, q.loc, site.below().reshape(-1)))

    def _transition(self, site: Site, loc: Array, below: Array) -> Array:
        """U vec(v⁻), of the shape of ``loc``."""
        rank = self.rank
        if rank is not None:
            size = below.size
            below = matmul(site.param("basis", lambda: orthonormal(rank, size, loc.dtype)), below)
        return matmul(site.param("transition", lambda: jnp.zeros((*loc.shape, below.size), loc.dtype)), below)
