"""Rules without parameters: the variational distribution is the model's own."""

from __future__ import annotations

import dataclasses

import numpyro.distributions as dist

from numpyro_dgp._repr import brief
from numpyro_dgp.functions.function_values import Values
from numpyro_dgp.guides.rules.rule import Rule, SiteContext

__all__ = ["Prior", "Propagate"]


@dataclasses.dataclass(frozen=True)
class Propagate(Rule):
    """Hidden values are distributed as in the model: q(h | u, x) = p(h | u, x) (Salimbeni, 2020, section 2.3).

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy(2)
        >>> guide = dgp.guides.MeanField(model, hidden=dgp.guides.Propagate())
        >>> dgp.testing.parameter_shapes(guide, X, y)
        {'f_auto_loc': (2, 5), 'f_auto_scale': (2, 5), 'g_auto_loc': (4,), 'g_auto_scale': (4,)}
    """

    follows_model = True

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        return site.fn.propagated() if isinstance(site.fn, Values) else site.fn


@dataclasses.dataclass(frozen=True)
class Prior(Rule):
    """The prior: the site keeps the model's own distribution, without variational parameters.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> import numpyro.distributions as dist
        >>> from numpyro.handlers import seed, trace
        >>> def model(X, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dist.Normal(slope * X[:, 0], noise), obs=y)
        >>> guide = dgp.guides.InducingPoint(model, sites={"noise": dgp.guides.Prior()})
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> with trace() as sites, seed(rng_seed=0):
        ...     draws = guide(X, X[:, 0])
        >>> {name: site["value"].shape for name, site in sites.items() if site["type"] == "param"}
        {'slope_auto_loc': ()}
    """

    follows_model = True

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        return site.fn
