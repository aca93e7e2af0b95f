"""What the distribution at a site declares: the kind of the site, and the functions whose values it holds."""

from __future__ import annotations

from typing import Any, ClassVar

import numpyro.distributions as dist

__all__ = ["SiteDistribution", "declared"]


class SiteDistribution(dist.Distribution):
    """A distribution of this package. What it does not declare of a site has the defaults below.

    Its arrays, as the leaves of a pytree, are in the order of their names. NumPyro takes the order of a set, which is
    another one in every process, unless ``PYTHONHASHSEED`` fixes it. A program that stacks, maps or branches over
    such distributions would be another program in the next process, and no checkpoint of it could be continued there.
    """

    site_kind: str | None = None
    """The kind of a site with this distribution (:func:`numpyro_dgp.analysis.sites.site_kind`)."""
    of_latents: ClassVar[bool] = False
    """Whether it is the prior of latents."""
    follows_model: bool = False
    """Whether, as a guide's distribution, it is the model's own conditional."""
    function: Any = None
    """The random function whose values it holds."""
    inputs: Any = None
    """The inputs that its values belong to (..., D)."""
    noise: Any = None
    """Standard deviation of the process noise."""
    determined: ClassVar[bool] = False
    """Whether its function determines the values, so that they have no density."""
    all_rows_together: ClassVar[bool] = False
    """Whether the rows are part of the event, as of values that are correlated over rows."""

    suggested_rule: ClassVar[str] = "dgp.guides.Normal()"
    """A rule for the site, for messages."""
    outcomes: Any = None
    """The range of observations, where it is known."""

    @classmethod
    def gather_pytree_data_fields(cls) -> tuple[str, ...]:
        return tuple(sorted(super().gather_pytree_data_fields()))

    @property
    def function_values(self) -> SiteDistribution:
        """The function values at its site; of a likelihood those that it integrates."""
        return self

    @property
    def layer(self) -> str | None:
        """The site of the inducing values of its function."""
        return None if self.function is None else self.function.site

    @property
    def by_function(self) -> tuple[SiteDistribution, ...]:
        """The values by function; a likelihood may depend on several."""
        return (self,)


_NOTHING = SiteDistribution()


def declared(fn: dist.Distribution) -> SiteDistribution:
    """``fn`` as a distribution that declares what its site is: of NumPyro's, one that declares nothing.

    Example:
        >>> import numpyro.distributions as dist
        >>> declared(dist.Normal()).site_kind, declared(dist.Normal()).function
        (None, None)
    """
    return fn if isinstance(fn, SiteDistribution) else _NOTHING
