r"""Rules for inducing values: one Gaussian over all outputs of a layer, and Markov dependence across layers.

A joint Gaussian over all outputs is drawn, not integrated out.

In the Markov rule, inducing values depend on those of the layer below.

With :math:`v^- \sim N(m^-, \Sigma^-)` the values of a layer are Gaussian too, :math:`v \sim N(m, \Sigma)` with

.. math:: m = U m^- + t, \quad \Sigma = U \Sigma^- U^\top + \Omega, \quad \operatorname{Cov}[v, v^-] = U \Sigma^- .

This dependence improves the bound only if the posterior of hidden values depends on inducing values (Chamberlin, 2016,
section 4.5): then a draw of the lower function determines which upper function fits the data.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._checks import expect
from numpyro_dgp._fields import count, kind_of, scale
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.site_distribution import SiteDistribution
from numpyro_dgp.functions.weights import Belief, InducingPrior
from numpyro_dgp.guides.rules.inducing_values import Diagonal, Full, row_scaled_tril
from numpyro_dgp.guides.rules.low_rank_inducing import LowRank
from numpyro_dgp.guides.rules.rule import (
    GaussianParameters,
    Rule,
    SiteContext,
    initial_scale,
    require_site,
)
from numpyro_dgp.math.gaussians import kl_full, log_density, log_determinant
from numpyro_dgp.math.linalg import matmul, orthonormal, solve_lower

__all__ = ["FullJoint", "JointInducing", "MarkovInducing"]


class JointInducing(SiteDistribution):
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
        """The draw for given standard normal numbers of its shape."""
        return self.loc + matmul(self.scale_tril, self._flat(white)[..., None]).reshape(white.shape)  # m + R e

    def white(self, value: Array) -> Array:
        """The standard normal numbers of a draw."""
        # R^-1 (vec v - m)
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
        return jnp.square(self.scale_tril).sum(-1).reshape(self.loc.shape)  # diag R R'


@kl_divergence.register(JointInducing, InducingPrior)
def _kl_joint_inducing(q: JointInducing, prior: InducingPrior) -> Array:
    return kl_full(q.loc.reshape(-1), q.scale_tril)


@dataclasses.dataclass(frozen=True)
class FullJoint(Rule):
    r"""One full Gaussian over the inducing values of all outputs: :math:`q(\operatorname{vec} v) = N(m, R R^\top)`.

    ``Full()`` has a covariance per output, P M² numbers, this rule P² M². Where outputs meet in a layer above or in a
    likelihood, their posteriors depend on each other. v is drawn, once for all data, and the divergence from the prior
    is in closed form given what v depends on. Where outputs are seen one by one the best joint covariance is that of
    ``Full()``, which is integrated and less noisy. With ``MarkovInducing(conditional=FullJoint())`` it is the
    covariance that is left when the layer below is known. For natural gradients take ``Full()``.

    Args:
        scale: initial standard deviation, relative to the prior; by default 1e-2 for inner layers, else 1.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold inducing values.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy(2)
        >>> guide = dgp.guides.InducingPoint(model, sites={"f": dgp.guides.FullJoint()})
        >>> shapes = dgp.testing.parameter_shapes(guide, X, y)
        >>> {name: shape for name, shape in shapes.items() if name.startswith("f_auto")}
        {'f_auto_loc': (2, 5), 'f_auto_scale_tril': (10, 10)}

    Source: Chamberlin (2016), section 4.9, whitened.
    """

    scale: float | None = scale()

    __repr__ = brief

    def __call__(self, site: SiteContext) -> JointInducing:
        require_site(InducingPrior, self, site, "inducing values")
        shape, dtype = site.fn.event_shape, site.fn.dtype
        start = lambda: initial_scale(self.scale, site) * jnp.eye(math.prod(shape), dtype=dtype)  # noqa: E731
        loc = site.param("loc", lambda: jnp.zeros(shape, dtype))
        return JointInducing(loc, jnp.tril(site.param("scale_tril", start, constraint=row_scaled_tril)))


@dataclasses.dataclass(frozen=True)
class MarkovInducing(Rule):
    r"""Inducing values whose mean is linear in those of the layer below.

    .. math:: q(v_p \mid v^-) = N(U_p \operatorname{vec}(v^-) + t_p,\; \Omega_p)

    Every output depends on all outputs of the layer below. U starts at zero, where q(v) is ``conditional`` alone, as it
    is in the first layer of a program.

    Under ``dgp.ELBO`` the values :math:`v^-` are drawn, once for all data, and :math:`v` is integrated out given the
    draw, with the divergence of :math:`q(v \mid v^-)` in closed form. Values that no other layer depends on are
    integrated out.
    The draw makes gradients noisier than those of independent layers: take several, ``ELBO(num_particles=...)``.
    Under :class:`~numpyro_dgp.guides.Markov` nothing is drawn: the bound is in closed form.

    Args:
        below: the site of :math:`v^-`; by default that of the inducing values before this one in the program.
        rank: J, where :math:`U_p` is a matrix (M, J) times one basis O (J, P⁻ M⁻) for all outputs; ``None`` for a
            dense U.
        conditional: rule for :math:`N(t, \Omega)`: ``Full()``, a triangular root of :math:`\Omega` per output, or
            ``Diagonal()``; ``LowRank(J)``, a diagonal and a matrix of low rank per output; or ``FullJoint()``, one
            :math:`\Omega` over all outputs together, with which :math:`v` is drawn too.

    Raises:
        ValueError: a rank that is not a positive integer, another rule as conditional, a site that does not hold
            inducing values, or ``below`` not before it in the program.

    Example:
        >>> import jax, optax
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> from numpyro_dgp.guides import GivenInducing, InducingPoint
        >>> from numpyro_dgp.guides import MarkovInducing
        >>> model, X, y = dgp.testing.toy(2)
        >>> guide = InducingPoint(model, sites={"g": MarkovInducing(below="f"), "h": GivenInducing("free")})
        >>> svi = SVI(model, guide, optax.adam(0.05), dgp.ELBO())
        >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
        >>> result.params["g_auto_transition"].shape
        (4, 10)

    Source: Chamberlin (2016), sections 4.7, 4.9 and A.6, whitened; section 4.7 has one U per pair of outputs, section
    4.9 one :math:`\Omega` for all outputs together, ``FullJoint()``.
    """

    below: str | None = None
    rank: int | None = count(None, "5, or None for a dense matrix")
    conditional: Full | Diagonal | LowRank | FullJoint = kind_of(Full, Diagonal, LowRank, FullJoint)

    __repr__ = brief

    @property
    def gaussian(self) -> GaussianParameters | None:  # type: ignore[override]
        r"""Of t and :math:`\Omega`: the Gaussian given the layer below."""
        return self.conditional.gaussian

    def follows(self, name: str, order: tuple[str, ...]) -> str | None:
        before = order[: order.index(name)]
        if self.below is None and not before:
            return None
        expect(before, f"a layer below {name!r}", f"the first layer of {list(order)}", "give it guides.Full()")
        below = before[-1] if self.below is None else self.below
        expect(
            below in before,
            f"below to be one of {list(before)}, the inducing values that come before {name!r}",
            repr(below),
            "leave it out for the last of them",
        )
        return below

    def __call__(self, site: SiteContext) -> Belief | JointInducing:
        require_site(InducingPrior, self, site, "inducing values")
        q: Any = self.conditional(site)
        below = site.below()
        if below is None:  # of the first layer
            return q
        return q.around(q.loc + self._transition(site, q.loc, below.reshape(-1)))  # N(U vec(v-) + t, Omega)

    def _transition(self, site: SiteContext, loc: Array, below: Array) -> Array:
        """U vec(v⁻), of the shape of ``loc``."""
        rank = self.rank
        if rank is not None:
            size = below.size
            below = matmul(site.param("basis", lambda: orthonormal(rank, size, loc.dtype)), below)  # O vec(v-) (J,)
        # U (P, M, P- M-), or (P, M, J) before O, zero at the start
        return matmul(site.param("transition", lambda: jnp.zeros((*loc.shape, below.size), loc.dtype)), below)
