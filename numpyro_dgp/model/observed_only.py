"""The support of values that only make sense as observations."""

from __future__ import annotations

from typing import Any, NoReturn

from numpyro.distributions import biject_to, constraints

__all__ = ["ObservedOnly"]


class ObservedOnly(constraints.Constraint):
    """The support of a ``Likelihood`` whose density bounds that of y and is not normalised in y.

    Samplers and autoguides ask for the transformation from real numbers to the support of every latent site. A chain
    that moved y too would have the wrong distribution, so that there is none.

    Args:
        support: of the conditional.
    """

    is_discrete = False  # discrete or not, there is nothing to sum out

    def __init__(self, support: constraints.Constraint) -> None:
        self.base_constraint = support
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
        return (self.base_constraint,), (("base_constraint",), {})


@biject_to.register(ObservedOnly)
def _refuse(constraint: ObservedOnly) -> NoReturn:
    raise ValueError(
        "Likelihood: expected observations in every run of a sampler or an autoguide, got a site without: pass y, as "
        "in mcmc.run(key, X, y); rows that have none belong in numpyro.handlers.mask, not in obs_mask"
    )
