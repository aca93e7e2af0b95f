"""What rules have in common whose distribution is bent from a Gaussian, which is their start."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from numpyro_dgp._checks import require_count
from numpyro_dgp.guides.rules.inducing_values import Diagonal, Full
from numpyro_dgp.guides.rules.low_rank_inducing import LowRank
from numpyro_dgp.guides.rules.markov_inducing import MarkovInducing
from numpyro_dgp.guides.rules.rule import Rule, Site, require_site
from numpyro_dgp.model.beliefs import Belief, InducingPrior

__all__ = ["AroundGaussian", "Base"]

Base = Full | Diagonal | LowRank | MarkovInducing


class AroundGaussian(Rule):
    """A rule of inducing values with a field ``base``, the rule of the Gaussian that it starts at, and ``hidden``, the
    units of its networks."""

    least_units: ClassVar[int] = 16
    base: Base
    hidden: int | None

    def require_base(self, purpose: str) -> None:
        """Raise unless base and units are what they have to be; called when the rule is made.

        Args:
            purpose: what the base is for, for the message.
        """
        name = type(self).__name__
        require_count(f"rule {name}", "hidden", self.units(0), "50")
        if not isinstance(self.base, Full | Diagonal | LowRank | MarkovInducing):
            raise ValueError(
                f"rule {name}: expected base=Full(), Diagonal(), LowRank(rank) or MarkovInducing(...), got "
                f"{self.base!r}: it gives the Gaussian {purpose}"
            )

    def follows(self, name: str, order: tuple[str, ...]) -> str | None:
        return self.base.follows(name, order)

    def gaussian_of(self, site: Site) -> tuple[Belief, int]:
        """The Gaussian at a site, and how many numbers there are."""
        require_site(InducingPrior, self, site, "inducing values")
        base: Any = self.base(site)
        return base, math.prod(site.fn.event_shape)

    def units(self, size: int) -> int:
        """Of a hidden layer of a network of ``size`` numbers."""
        return max(2 * size, self.least_units) if self.hidden is None else self.hidden
