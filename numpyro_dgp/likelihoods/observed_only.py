"""Sites that must be observed: their support, and a warning for programs without observations."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.primitives import Messenger

from numpyro_dgp._checks import expected

__all__ = ["ObservedOnly", "observed_only", "warn_unobserved"]


class ObservedOnly(constraints.Constraint):
    """The support of values that are no latent variables: a ``Likelihood``, whose density bounds that of y and is not
    normalised in y, or a site whose observations have been forgotten.

    Samplers and autoguides ask for the transformation from real numbers to the support of every latent site. A chain
    that moved y too would have the wrong distribution, so that there is none.

    Args:
        support: of the values.
        at: which site raises the error, for the message.
    """

    is_discrete = False  # discrete or not, there is nothing to sum out

    def __init__(self, support: constraints.Constraint, at: str) -> None:
        self.base_constraint, self.at = support, at
        super().__init__()

    @property
    def event_dim(self) -> int:
        return self.base_constraint.event_dim

    def __call__(self, x: Any) -> Any:
        return self.base_constraint(x)

    def __repr__(self) -> str:
        return repr(self.base_constraint)

    def feasible_like(self, prototype: Any) -> Any:
        return self.base_constraint.feasible_like(prototype)

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.base_constraint,), (("base_constraint",), {"at": self.at})


@biject_to.register(ObservedOnly)
def _refuse(constraint: ObservedOnly) -> NoReturn:
    raise expected(
        "observations in every run of a sampler or an autoguide",
        "a site without",
        "pass y, mcmc.run(key, X, y); for missing entries dgp.Likelihood(..., observed=mask)",
        constraint.at,
    )


class _Forgotten(dist.ExpandedDistribution):
    """A distribution as it is, whose support is :class:`ObservedOnly`."""

    pytree_aux_fields = ("at",)

    def __init__(self, fn: dist.Distribution, at: str) -> None:
        self.at = at
        super().__init__(fn, fn.batch_shape)

    @property
    def support(self) -> constraints.Constraint:
        return ObservedOnly(self.base_dist.support, self.at)


class observed_only(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler under which samplers and autoguides raise where these sites are not observed.

    Runs that draw them, as ``Predictive`` does, are the same with and without it.

    Args:
        names: of the sites.

    Example:
        >>> import jax, numpyro
        >>> from numpyro.infer import MCMC, NUTS
        >>> def program():
        ...     with observed_only(["y"]):
        ...         numpyro.sample("y", dist.Normal())
        >>> NUTS(program).init(jax.random.key(0), 1, None, (), {})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: site 'y': expected observations in every run of a sampler or an autoguide, got ...
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        super().__init__()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] in self.names and not msg["is_observed"]:
            msg["fn"] = _Forgotten(msg["fn"], f"site {msg['name']!r}")


def warn_unobserved(sites: dict[str, dict[str, Any]]) -> None:
    """Warn of a fit of a program that observes nothing.

    Args:
        sites: a trace of the program.
    """
    samples = {name: site for name, site in sites.items() if site["type"] == "sample"}
    if samples and not any(site["is_observed"] for site in samples.values()):
        warnings.warn(
            "expected a program that observes data, got one that observes nothing, so that all of "
            f"{', '.join(map(repr, list(samples)[:6]))} follow the prior: pass the observations, as in "
            "svi.run(key, num_steps, X, y); for draws from the prior use Predictive(model, num_samples=100)",
            stacklevel=1,
        )
