"""Rules without parameters: the variational distribution is the model's own."""

from __future__ import annotations

import dataclasses

import numpyro.distributions as dist

from numpyro_dgp._repr import brief
from numpyro_dgp.analysis.sites import is_function_values
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
        return site.fn.propagated() if is_function_values(site.fn) else site.fn  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Prior(Rule):
    """The prior: the site keeps the model's own distribution, without variational parameters.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy(2)
        >>> guide = dgp.guides.InducingPoint(model, sites={"f": dgp.guides.Prior()})
        >>> sorted(dgp.testing.parameter_shapes(guide, X, y))  # none of f
        ['g_auto_loc', 'g_auto_scale_tril']
    """

    follows_model = True

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        return site.fn
