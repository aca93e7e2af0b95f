r"""Hidden layers of a collapsed bound with :math:`q(h \mid v) = N(T v + t, \Omega)`."""

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
from numpyro_dgp.bounds.given_inducing import follow
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.weights import FullBelief
from numpyro_dgp.guides.collapsed.gaussian_uses import Column, Gaussian, Use
from numpyro_dgp.guides.rules.rule import Rule, SiteContext
from numpyro_dgp.guides.rules.structured import GivenBelow, GivenInducing, JointOutputs, given_inducing, require_hidden
from numpyro_dgp.kernels.expectations import Integrate
from numpyro_dgp.math.linalg import einsum

__all__ = ["FollowedLayer", "FollowInducing", "closed_form", "followed_layers"]


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


@dataclasses.dataclass(frozen=True)
class FollowedLayer(Rule):
    r"""A layer at its optimum, and the rule that draws from it: :math:`q(h \mid v) = N(T v + t, \Omega)`.

    Args:
        inducing: site of its inducing values.
        belief: q(v).
        bound: what the layer contributes to the bound.
        marginal: means and variances of its values (N, P).
        weights: T (P, N, M).
        shift: t (N, P).
        variance: :math:`\Omega` (N, P).
    """

    inducing: str
    belief: FullBelief
    bound: Array
    marginal: Gaussian
    weights: Array
    shift: Array
    variance: Array

    def __call__(self, site: SiteContext) -> dist.Distribution:
        fn, _ = require_hidden(self, site)
        shift, variance = (a.reshape(fn.loc.shape) for a in (self.shift, self.variance))
        return given_inducing(fn, self.weights, shift, variance)


def closed_form(name: str, rule: Rule) -> Rule:
    """``rule`` in the form that ``Collapsed`` uses.

    Raises:
        ValueError: a rule that keeps other dependencies, weights other than the model's, or a scale of one or more.
    """
    expect(
        not isinstance(rule, GivenBelow | JointOutputs),
        "rule Normal(), Delta() or GivenInducing() for hidden values",
        f"{type(rule).__name__} for {name!r}",
        "guides.InducingPoint(model, sites=...) takes it, and draws them",
    )
    if not isinstance(rule, GivenInducing):
        return rule
    if rule.weights != "model":
        raise expected(
            f"GivenInducing() with the model's weights for {name!r}",
            repr(rule.weights),
            "GivenInducing() finds the best ones; for others use guides.InducingPoint(model, sites=...)",
        )
    if rule.scale is not None and rule.scale >= 1:
        raise expected(f"a scale of GivenInducing() for {name!r} below 1, relative to the noise", rule.scale, "try 0.5")
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
    their values added.

    Raises:
        ValueError: such a layer whose function has other uses.
    """
    found: dict[str, FollowedLayer] = {}
    for name, use in uses.items():
        if name not in guide_sites or not isinstance(unwrap(guide_sites[name]["fn"]), FollowingValues):
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
        beta = sites[inducing]["scale"]
        found[name] = _optimum(inducing, use, columns[name], known, integrate, 1.0 if beta is None else beta)
        known = known | {name: found[name].marginal}
    return found, known


def _optimum(
    inducing: str, use: Use, columns: tuple[Column, ...], known: dict[str, Gaussian], integrate: Integrate, beta: Any
) -> FollowedLayer:
    # (Phi, b, c) of the layer with h at its mean; Omega enters through r.
    exact = dataclasses.replace(use, target_variance=jnp.zeros_like(use.target))
    data, features = exact.statistics(columns, known, integrate)
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
        inducing=inducing,
        belief=FullBelief(take(optimum.loc), take(optimum.scale_tril)),
        bound=beta * optimum.bound.sum(),
        marginal=Gaussian(use.target, optimum.marginal_variance.T),  # Omega + T Sigma T'
        weights=optimum.weights,
        shift=shift,
        variance=ratio * jnp.square(noise),  # Omega = r s^2
    )
