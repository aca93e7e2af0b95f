"""Rules that factorise over the entries of a site, on any support: a Gaussian or a point."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import IdentityTransform

from numpyro_dgp._checks import expect
from numpyro_dgp._data import own
from numpyro_dgp._fields import scale
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.guides.rules.rule import GaussianParameters, Rule, SiteContext

__all__ = ["Delta", "Normal"]


@dataclasses.dataclass(frozen=True)
class Normal(Rule):
    r"""Independent Gaussians, one per entry: :math:`q(z) = N(\mu, \sigma^2)` on the unconstrained scale.

    It is for hyperparameters, for latents, and for hidden values, where it is the mean-field family of
    Chamberlin (2016).
    A site with a constrained support goes through NumPyro's bijection to it, as ``AutoNormal`` does.

    Args:
        scale: initial standard deviation.
        loc: initial means on the unconstrained scale, over all data; by default the value that ``init_loc_fn`` gives.

    Raises:
        ValueError: a scale that is not positive, or a discrete site.

    Example:
        >>> import numpyro, numpyro.distributions as dist, numpyro_dgp as dgp
        >>> model = lambda y: numpyro.sample("y", dist.Normal(0.0, numpyro.sample("noise", dist.LogNormal())), obs=y)
        >>> guide = dgp.guides.InducingPoint(model, other=dgp.guides.Normal(scale=0.2))
        >>> dgp.testing.parameter_shapes(guide, 0.5)
        {'noise_auto_loc': (), 'noise_auto_scale': ()}
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     bool(guide(0.5)["noise"] > 0)  # a Gaussian on the unconstrained scale, here the logarithm
        True
    """

    scale: float = scale(0.1)
    loc: Any = None
    gaussian = GaussianParameters("scale", diagonal=True)

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "loc", own(self.loc))

    def __call__(self, site: SiteContext) -> dist.Distribution:
        transform = _bijection(self, site)
        shape = site.fn.shape()
        event_dim = site.fn.event_dim + len(transform.inverse_shape(shape)) - len(shape)

        def initial() -> Array:
            start = transform.inv(site.initial())
            return start if self.loc is None else jnp.broadcast_to(jnp.asarray(self.loc, start.dtype), start.shape)

        loc = site.param("loc", initial, event_dim=event_dim)
        scale = site.param(
            "scale",
            lambda: jnp.full_like(initial(), self.scale),
            event_dim=event_dim,
            constraint=constraints.positive,
        )
        base = FunctionValues(loc, jnp.square(scale), event_dim=event_dim)  # of T^-1(z)
        if isinstance(transform, IdentityTransform) or _is_real(site.fn.support):
            return base
        return dist.TransformedDistribution(base, transform)


@dataclasses.dataclass(frozen=True)
class Delta(Rule):
    r"""A point: maximum a posteriori on the site's own scale, as ``AutoDelta``.

    The scale matters where a prior is wide: ``LogNormal(m, s)`` has its median at :math:`e^m` and its largest density
    at :math:`e^{m - s^2}`, the logarithm of such a number has both at m. With s of 2 and more sample the logarithm,
    ``jnp.exp(numpyro.sample("log_noise", dist.Normal(m, s)))``, or take ``Normal()``.

    Raises:
        ValueError: a discrete site.

    Example:
        >>> import numpyro, numpyro.distributions as dist, numpyro_dgp as dgp
        >>> model = lambda y: numpyro.sample("y", dist.Normal(0.0, numpyro.sample("noise", dist.LogNormal())), obs=y)
        >>> guide = dgp.guides.InducingPoint(model, other=dgp.guides.Delta())
        >>> with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data={"noise_auto_loc": 0.3}):
        ...     guide(0.5)["noise"]  # the parameter itself, on the scale of the site
        0.3
    """

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        _bijection(self, site)
        fn = site.fn
        value = site.param("loc", site.initial, constraint=fn.support, event_dim=fn.event_dim)
        return dist.Delta(value, event_dim=fn.event_dim)


def _is_real(support: Any) -> bool:
    base = support.base_constraint if isinstance(support, constraints.independent) else support
    return base is constraints.real


def _bijection(rule: Rule, site: SiteContext) -> Any:
    expect(
        not site.fn.support.is_discrete,
        "a continuous site",
        f"{site.name!r} ({type(site.fn).__name__})",
        "marginalise it in the model, or give it guides.Prior()",
        f"rule {type(rule).__name__}",
    )
    return biject_to(site.fn.support)
