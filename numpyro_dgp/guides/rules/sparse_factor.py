"""A rule for values conditioned on their neighbours: a Gaussian with as sparse a factor as the prior has."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_dgp._shown import brief
from numpyro_dgp.guides.rules.rule import Rule, Site, initial_scale, require_rows, require_scale, require_site
from numpyro_dgp.model.neighbour_posteriors import WhitenedNeighbours
from numpyro_dgp.model.neighbour_values import NeighbourValues

__all__ = ["SparseFactor"]


@dataclasses.dataclass(frozen=True)
class SparseFactor(Rule):
    r"""Values of a process of ``dgp.Neighbours``: a Gaussian whose factor is as sparse as the prior's.

    .. math:: v = t + R \epsilon, \qquad R_{ij} \ne 0 \text{ only for } j = i \text{ and } j \in c(i)

    v are the whitened values, so that R is the identity a priori, and c(i) the neighbours of value i. It has
    N (C + 2) numbers for each output, where a full Gaussian has N (N + 3) / 2: the same for C = N - 1.

    Args:
        scale: initial standard deviation, relative to the prior; by default 1e-2 for inner layers, else 1.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold values of ``dgp.Neighbours``.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> import numpyro.distributions as dist
        >>> from numpyro.handlers import seed, trace
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> near = dgp.Neighbours(X, num=3)
        >>> def model(X, y=None):
        ...     v = numpyro.sample("v", dgp.gp("f", dgp.kernels.RBF(), near)(X))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dist.Bernoulli(logits=v), obs=y)
        >>> guide = dgp.guides.InducingPoint(model, exact=dgp.guides.SparseFactor())
        >>> with trace() as sites, seed(rng_seed=0):
        ...     draws = guide(X, X[:, 0] > 0.5)
        >>> {name: site["value"].shape for name, site in sites.items() if site["type"] == "param"}
        {'v_auto_loc': (1, 20), 'v_auto_scale': (1, 20), 'v_auto_weights': (1, 20, 3)}
    """

    scale: float | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        require_scale("rule SparseFactor", 1.0 if self.scale is None else self.scale)

    def __call__(self, site: Site) -> dist.Distribution:
        require_site(NeighbourValues, self, site, "the values of a process of dgp.Neighbours")
        return whitened_neighbours(self, site, self.scale, joined=True)


def whitened_neighbours(rule: Rule, site: Site, scale: float | None, *, joined: bool) -> WhitenedNeighbours:
    """A Gaussian over the whitened values of a site: independent, or ``joined`` to those of their neighbours."""
    fn: Any = site.fn
    rows = fn.to_output_major(fn.loc)
    shift = site.param("loc", lambda: jnp.zeros_like(rows))
    spread = site.param(
        "scale", lambda: jnp.full_like(rows, initial_scale(scale, site)), constraint=constraints.positive
    )
    require_rows(rule, site, shift.shape, rows.shape)
    if not joined:
        return WhitenedNeighbours(fn, shift, spread)
    shape = (*rows.shape, fn.sets.neighbours.shape[1])
    return WhitenedNeighbours(fn, shift, spread, site.param("weights", lambda: jnp.zeros(shape, rows.dtype)))
