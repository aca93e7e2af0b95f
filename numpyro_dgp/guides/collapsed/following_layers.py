r"""Hidden layers of a collapsed bound whose values depend on others, :math:`q(h \mid v) = N(T v + t, \Omega)` with the
inducing values of the layer or :math:`q(h \mid x) = N(G^\top x + t, \Omega)` with its inputs.

The latter changes nothing in how q(v) enters: h and x are jointly Gaussian, and :math:`E[\log N(h; f(x), s^2)]` is
quadratic in v with :math:`\langle h\, a(x) \rangle` in place of :math:`\langle h \rangle \langle a(x) \rangle`. The
entropy is that of h given x. Values of one datum that depend on the same inputs are correlated, and expectations of the
layer above are taken with their covariance.

Source: Chamberlin (2016), sections 4.3, 4.4 and 4.6. Section 4.6.3 has :math:`\langle a \rangle \langle a \rangle^\top`
where :math:`\langle a a^\top \rangle` belongs, and takes the values of one datum as independent in the layer above,
which gives no bound where several of them depend on one input.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, unwrap
from numpyro_dgp.bounds.collapsed import Quadratic
from numpyro_dgp.bounds.given_inducing import follow, follow_jointly
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.weights import FullBelief
from numpyro_dgp.guides.collapsed.gaussian_uses import Column, Gaussian, Use, over_inputs
from numpyro_dgp.guides.rules.inducing_values import row_scaled_tril
from numpyro_dgp.guides.rules.joint_inducing import JointInducing
from numpyro_dgp.guides.rules.rule import Rule, SiteContext
from numpyro_dgp.guides.rules.structured import (
    GivenInducing,
    JointOutputs,
    given_inducing,
    joint_outputs,
    require_hidden,
)
from numpyro_dgp.kernels.expectations import Integrate
from numpyro_dgp.math.linalg import einsum, times_transpose
from numpyro_dgp.math.matrix_ops import DenseOperations

__all__ = ["FollowedLayer", "GivenValues", "FollowInducing", "FollowJointly", "closed_form", "followed_layers"]


class FollowingValues(FunctionValues):
    r"""q(h | v) given by its mean over v and the ratio r of :math:`\Omega` to the model's conditional variance; T and
    q(v) are optimised later."""


@dataclasses.dataclass(frozen=True)
class FollowInducing(Rule):
    r"""``GivenInducing()`` in a collapsed bound: for every value a mean, and the ratio :math:`r = \Omega / s^2` to the
    process noise, or to the whole conditional variance where the density of h given v is used."""

    only_for: ClassVar[str | None] = "hidden"

    scale: float = 0.5

    def __call__(self, site: SiteContext) -> dist.Distribution:
        fn, _ = require_hidden(self, site)
        loc = site.param("loc", site.initial, event_dim=fn.event_dim)
        ratio = site.param(
            "ratio",
            lambda: jnp.full_like(site.initial(), self.scale**2),
            event_dim=fn.event_dim,
            constraint=constraints.unit_interval,
        )
        return FollowingValues(loc, ratio, event_dim=fn.event_dim)


class FollowingOutputs(FollowingValues):
    r"""The same of outputs together, with the lower triangular root Q (..., P, P) of :math:`S^{-1/2} \Omega S^{-1/2}`,
    S the diagonal matrix of the model's conditional variances."""

    pytree_data_fields = ("share_root",)

    def __init__(self, loc: Array, share_root: Array) -> None:
        self.share_root = share_root
        super().__init__(loc, jnp.square(share_root).sum(-1))

    def expand(self, batch_shape: Any) -> FollowingOutputs:
        shape = (*batch_shape, *self.event_shape)
        root = jnp.broadcast_to(self.share_root, (*shape, shape[-1]))
        return FollowingOutputs(jnp.broadcast_to(self.loc, shape), root)


@dataclasses.dataclass(frozen=True)
class FollowJointly(Rule):
    r"""``JointOutputs()`` in a collapsed bound: for every datum a mean, and the lower triangular W (P, P) of

    .. math:: \Omega^{-1} = S^{-1/2} (I + W W^\top) S^{-1/2} ,

    the precision of the process noise and what layers above add to it.
    """

    only_for: ClassVar[str | None] = "hidden"

    scale: float

    def __call__(self, site: SiteContext) -> dist.Distribution:
        fn, _ = require_hidden(self, site)
        expect(fn.event_dim == 1, f"several outputs at {site.name!r}", "a scalar function", "use GivenInducing()")
        P, dtype = fn.event_shape[0], fn.loc.dtype
        loc = site.param("loc", site.initial, event_dim=1)
        start = (1 / self.scale**2 - 1) ** 0.5  # Omega = scale^2 S
        W = site.param(
            "precision_tril",
            lambda: jnp.broadcast_to(start * jnp.eye(P, dtype=dtype), (*site.initial().shape, P)),
            event_dim=2,
            constraint=row_scaled_tril,
        )
        precision = jnp.eye(P, dtype=dtype) + times_transpose(jnp.tril(W))
        return FollowingOutputs(loc, DenseOperations.inverse_root(precision))


@dataclasses.dataclass(frozen=True)
class GivenValues(Rule):
    r"""Hidden values :math:`q(h_n \mid v) = N(T_n v + t_n, \Omega_n)` with these numbers.

    Args:
        weights: T (P, N, M), or (N, P, P, M) where outputs follow together.
        shift: t (N, P).
        variance: :math:`\Omega` (N, P), or (N, P, P).
    """

    only_for: ClassVar[str | None] = "hidden"

    weights: Array
    shift: Array
    variance: Array

    def __call__(self, site: SiteContext) -> dist.Distribution:
        fn, _ = require_hidden(self, site)
        shift = self.shift.reshape(fn.loc.shape)
        if self.weights.ndim == 3:
            return given_inducing(fn, self.weights, shift, self.variance.reshape(fn.loc.shape))
        root = jnp.linalg.cholesky(self.variance).reshape(*fn.loc.shape, -1)
        return joint_outputs(fn, self.weights, shift, root)


@dataclasses.dataclass(frozen=True)
class FollowedLayer(GivenValues):
    """A layer at its optimum, and the rule that draws from it.

    Args:
        inducing: site of its inducing values.
        belief: q(v).
        bound: what the layer contributes to the bound.
        marginal: means and variances of its values (N, P).
    """

    inducing: str
    belief: FullBelief | JointInducing
    bound: Array
    marginal: Gaussian


def closed_form(name: str, rule: Rule) -> Rule:
    """``rule`` in the form that ``Collapsed`` uses.

    Raises:
        ValueError: weights other than the optimal ones, or a scale of one or more.
    """
    if not isinstance(rule, GivenInducing | JointOutputs):
        return rule
    kind = type(rule).__name__
    if rule.weights != type(rule)().weights:
        raise expected(
            f"{kind}() with its default weights for {name!r}",
            repr(rule.weights),
            f"{kind}() finds the best ones; for others use guides.InducingPoint(model, sites=...)",
        )
    if rule.scale is not None and rule.scale >= 1:
        raise expected(f"a scale of {kind}() for {name!r} below 1, relative to the noise", rule.scale, "try 0.5")
    if isinstance(rule, JointOutputs):
        return FollowJointly(rule.scale)
    return FollowInducing() if rule.scale is None else FollowInducing(rule.scale)


def followed_layers(
    sites: dict[str, Message],
    guide_sites: dict[str, Message],
    uses: dict[str, Use],
    columns: dict[str, tuple[Column, ...]],
    known: dict[str, Gaussian],
    integrate: Integrate,
) -> tuple[dict[str, FollowedLayer], dict[str, Gaussian]]:
    """The optimum of every hidden layer with q(h | v), from the first to the last, and ``known`` with the moments of
    their values, and of those with q(h | x), over what they depend on.

    Raises:
        ValueError: such a layer whose function has other uses.
    """
    found: dict[str, FollowedLayer] = {}
    for name, use in uses.items():
        if use.target_slopes is not None:
            known = known | {name: over_inputs(name, use, columns[name], known)}
        if name not in guide_sites or not isinstance(q := unwrap(guide_sites[name]["fn"]), FollowingValues):
            continue
        others = [n for n, other in uses.items() if n != name and other.function.site == use.function.site]
        expect(
            not others,
            f"hidden layer {name!r}, which follows its inducing values, to be the only use of its function",
            f"uses at {others} too",
            f"give {name!r} the rule guides.Normal()",
        )
        if use.function.blocked:
            raise expected(
                f"hidden layer {name!r}, which follows its inducing values, opened outside of plates",
                f"a function for each of {use.function.groups} groups",
                f"give {name!r} the rule guides.Normal()",
            )
        inducing: Any = use.function.site
        beta = 1.0 if sites[inducing]["scale"] is None else sites[inducing]["scale"]
        # (Phi, b, c) of the layer with h at its mean; Omega enters through its share of the noise.
        exact = dataclasses.replace(use, target_variance=jnp.zeros_like(use.target))
        data, features = exact.statistics(columns[name], known, integrate)
        if isinstance(q, FollowingOutputs):
            found[name] = _joint_optimum(name, use, data, features, q.share_root, beta)
        else:
            found[name] = _optimum(use, data, features, beta)
        known = known | {name: found[name].marginal}
    return found, known


def _optimum(use: Use, data: Quadratic, features: Array, beta: Any) -> FollowedLayer:
    noise = jnp.broadcast_to(use.noise, use.target.shape)
    ratio = use.target_variance  # r = Omega / s^2 (N, P): the variance of FollowingValues

    def output(data: Quadratic, features: Array, noise: Array, ratio: Array) -> Any:
        return follow(data, features, noise, ratio, weights=use.weights[:, 0] / beta)

    # E[log p] - beta KL = beta (E[log p] / beta - KL): quadratic and weights of data over beta.
    each = None if data.Phi.ndim == 2 else 0
    tempered = data.over(beta)
    axes = (Quadratic(each, 0, 0, 0), each, 1, 1)  # type: ignore[arg-type]
    optimum = jax.vmap(output, axes)(tempered, features, noise, ratio)
    shift = use.target - einsum("pnm,pm->np", optimum.weights, optimum.loc)  # t = E[h] - T m
    scalar = use.function.outputs is None
    take = lambda a: a[0] if scalar else a  # noqa: E731
    return FollowedLayer(
        inducing=use.function.site,
        belief=FullBelief(take(optimum.loc), take(optimum.scale_tril)),
        bound=beta * optimum.bound.sum(),
        marginal=Gaussian(use.target, optimum.marginal_variance.T),  # Omega + T Sigma T'
        weights=optimum.weights,
        shift=shift,
        variance=ratio * jnp.square(noise),  # Omega = r s^2
    )


def _joint_optimum(
    name: str, use: Use, data: Quadratic, features: Array, share_root: Array, beta: Any
) -> FollowedLayer:
    (N, P), M = use.target.shape, features.shape[-1]
    data = data._replace(Phi=jnp.broadcast_to(data.Phi, (P, M, M)))
    optimum = follow_jointly(
        data.over(beta),
        jnp.broadcast_to(features, (P, N, M)),
        use.noise,
        share_root.reshape(N, P, P),
        weights=use.weights[:, 0] / beta,
    )
    covariance = optimum.marginal_variance  # Omega + T Sigma T' (N, P, P)
    variance = jnp.diagonal(covariance, axis1=-2, axis2=-1)
    return FollowedLayer(
        inducing=use.function.site,
        belief=JointInducing(optimum.loc, optimum.scale_tril),
        bound=beta * optimum.bound,
        marginal=Gaussian(use.target, variance, covariances={name: covariance}),
        weights=optimum.weights,
        shift=use.target - einsum("npqm,qm->np", optimum.weights, optimum.loc),  # t = E[h] - T vec(m)
        variance=optimum.variance,
    )
