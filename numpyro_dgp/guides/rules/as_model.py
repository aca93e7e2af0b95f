"""Rules under which a site follows the model: nothing is learned about it."""

from __future__ import annotations

import dataclasses

import numpyro.distributions as dist

from numpyro_dgp.guides.rules.rule import Rule, Site
from numpyro_dgp.model.function_values import FunctionValues
from numpyro_dgp.model.joint_values import JointValues

__all__ = ["Prior", "Propagate"]


@dataclasses.dataclass(frozen=True)
class Propagate(Rule):
    """Hidden values follow the model: q(h | u, x) = p(h | u, x) (Salimbeni, 2020, section 2.3)."""

    follows_model = True

    def __call__(self, site: Site) -> dist.Distribution:
        return site.fn.propagated() if isinstance(site.fn, FunctionValues | JointValues) else site.fn


@dataclasses.dataclass(frozen=True)
class Prior(Rule):
    """The model's own distribution: nothing is learned about the site."""

    follows_model = True

    def __call__(self, site: Site) -> dist.Distribution:
        return site.fn
