r"""New layers of a program as near the identity as one likes: :math:`q(v) = p(v)`, and a small variance.

A layer with the mean m(x) = x moves its inputs by a function of variance k(x, x). Where q(v) is the prior that function
costs no divergence, and the bound loses what the movement costs the layers above, which goes to zero with k(x, x). A
narrow q(v) at a given k(x, x) costs :math:`\log(1/s)` for each of the M P inducing values, and leaves what inducing
points do not explain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ExpTransform

from numpyro_dgp._typing import Array
from numpyro_dgp.deepening.parameters_by_site import SharedSites
from numpyro_dgp.guides.record import SiteRecord, record_of
from numpyro_dgp.guides.run import Run
from numpyro_dgp.inference.program_sites import SitesOfFit
from numpyro_dgp.model.program import structure
from numpyro_dgp.model.site_densities import log_prob
from numpyro_dgp.model.sites import site_kind, unwrap, values_of

__all__ = ["NewLayers", "find_new_layers", "with_prior_values"]

_LEAST_EXPONENT = 1e-3
"""Of the variance of a layer in a number, below which the number is not taken for a part of it."""


class NewLayers(NamedTuple):
    """The new layers of a program.

    Args:
        inducing: records of the sites of their inducing values.
        hidden: sites of their values.
        shared: their hyperparameters that are sample sites.
        logarithmic: new parameters that are logarithms of positive numbers.
        positive: new parameters that are positive numbers.
    """

    inducing: dict[str, SiteRecord]
    hidden: tuple[str, ...]
    shared: tuple[str, ...]
    logarithmic: tuple[str, ...]
    positive: tuple[str, ...]

    def variance(self, found: Run) -> Array:
        """Log of the variance by which new layers move their inputs, mean over layers and rows."""
        logs = [jnp.log(jnp.mean(unwrap(found.model[name]["fn"]).variance)) for name in self.hidden]
        return jnp.stack(logs).mean()

    def scaled(self, params: dict[str, Array], factors: dict[str, Array]) -> dict[str, Array]:
        """Parameters of which new positive numbers are multiplied by ``exp(factors)``."""
        times = {name: params[name] * jnp.exp(factors[name]) for name in self.positive}
        plus = {name: params[name] + factors[name] for name in self.logarithmic}
        return params | times | plus

    def directions(self, params: dict[str, Array], run: Callable[[dict[str, Array]], Run]) -> dict[str, np.ndarray]:
        """Which entries of positive numbers the variance rises with, as zeros and ones."""
        names = (*self.positive, *self.logarithmic)
        zero = {name: jnp.zeros_like(params[name]) for name in names}
        slope = jax.jit(jax.grad(lambda factors: self.variance(run(self.scaled(params, factors)))))(zero)
        return {name: np.asarray(slope[name] > _LEAST_EXPONENT, slope[name].dtype) for name in names}

    def log_densities(self, found: Run) -> Array:
        """log p - log q of the hyperparameters of new layers, at their draw."""
        total = jnp.zeros(())
        for name in self.shared:
            for sign, site in ((1, found.model[name]), (-1, found.guide[name])):
                total = total + sign * jnp.sum(log_prob(site))
        return total


def find_new_layers(found: Run, sites: SharedSites, program: SitesOfFit, names: tuple[str, ...]) -> NewLayers:
    """The new layers in a run of guide and model.

    Args:
        found: the run.
        sites: which sites are new.
        program: the sites of guide and model.
        names: of the parameters that are new.

    Raises:
        ValueError: no new layer, or one that is observed; one whose hidden values have a posterior of their own.
    """
    model, guide = found.model, found.guide
    inducing = {name: record_of(guide[name]) for name in sites.new if site_kind(model[name]) == "inducing"}
    if not inducing:
        raise ValueError(
            f"deepen: expected a layer that the fitted program does not have, got the new sites {list(sites.new)}: say "
            "what the layers of the fit are called in the deeper program, names={'f1': 'f0'}"
        )
    if last := sorted(inducing.keys() - structure(model).inner):
        raise ValueError(
            f"deepen: expected new layers below the last one, got {last[0]!r}, which is under the likelihood: say "
            f"which layer of the fit it is, names={{{last[0]!r}: ...}}"
        )
    hidden = tuple(
        name
        for name, site in model.items()
        if site["type"] == "sample"
        and site_kind(site) == "hidden"
        and getattr(values_of(site["fn"]).function, "site", None) in inducing
    )
    if own := [name for name in hidden if record_of(guide[name]).learned]:
        raise ValueError(
            f"deepen: expected values of a new layer that follow the model, got {own[0]!r} with a posterior of its "
            f"own: give it sites={{{own[0]!r}: dgp.guides.Propagate()}}"
        )
    shared = tuple(name for name in sites.new if site_kind(model[name]) == "other")
    positive, logarithmic = [], []
    for name in names:
        owner, rest = sites.owner(name)
        of_guide = rest.startswith(f"_{sites.prefixes[0]}_")  # and not the program's own, named after a layer
        if of_guide and owner in inducing:
            continue
        if _is_positive(program.parameters[name].constraint):
            if not of_guide or rest.endswith("_loc"):
                positive.append(name)
        elif owner in shared and rest.endswith("_loc") and _is_positive(unwrap(model[owner]["fn"]).support):
            logarithmic.append(name)
    return NewLayers(inducing, hidden, shared, tuple(logarithmic), tuple(positive))


def _is_positive(constraint: Any) -> bool:
    while isinstance(constraint, constraints.independent):
        constraint = constraint.base_constraint
    return isinstance(biject_to(constraint), ExpTransform)


def with_prior_values(params: dict[str, Array], layers: NewLayers) -> dict[str, Array]:
    """Parameters at which q(v) of new layers is their prior, where their rules are Gaussians."""
    changed: dict[str, Array] = {}
    for record in layers.inducing.values():
        if record.gaussian is None or record.follows:
            continue
        loc, scale = f"{record.stem}_loc", f"{record.stem}_{record.gaussian.scale}"
        like = params[scale]
        one = jnp.ones_like(like) if record.gaussian.diagonal else jnp.eye(like.shape[-1], dtype=like.dtype)
        changed |= {loc: jnp.zeros_like(params[loc]), scale: jnp.broadcast_to(one, like.shape)}
    return params | changed
