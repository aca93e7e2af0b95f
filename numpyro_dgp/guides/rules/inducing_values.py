"""Rules for whitened inducing values: Gaussians with full covariances or independent numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.guides.rules.row_scaled import row_scaled_tril
from numpyro_dgp.guides.rules.rule import (
    GaussianParameters,
    Rule,
    Site,
    initial_scale,
    require_rows,
    require_scale,
    require_site,
)
from numpyro_dgp.guides.rules.sparse_factor import whitened_neighbours
from numpyro_dgp.model.beliefs import DiagonalBelief, FullBelief, InducingPrior
from numpyro_dgp.model.joint_values import JointValues, WhitenedValues
from numpyro_dgp.model.neighbour_values import NeighbourValues
from numpyro_dgp.rings.ring_beliefs import RingPrior, require_room

__all__ = ["Diagonal", "Full"]


@dataclasses.dataclass(frozen=True)
class Full(Rule):
    r"""Full Gaussian per output: :math:`q(v_p) = N(m_p, R_p R_p^\top)`; for inducing values and exact processes.

    At the values of an exact process, the Gaussian is over their whitened coordinates.

    Args:
        scale: initial standard deviation, relative to the prior; by default 1e-2 for inner layers, else 1.

    Raises:
        ValueError: a scale that is not positive, or a site of another kind.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> import numpyro.distributions as dist
        >>> from numpyro.handlers import seed, trace
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.Full(scale=0.1))
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> with trace() as sites, seed(rng_seed=0):
        ...     draws = guide(X, X[:, 0])
        >>> {name: site["value"].shape for name, site in sites.items() if site["type"] == "param"}
        {'f_auto_loc': (5,), 'f_auto_scale_tril': (5, 5)}

    Source: Salimbeni (2020), equation 2.5, whitened.
    """

    scale: float | None = None
    gaussian = GaussianParameters("scale_tril", diagonal=False)

    __repr__ = brief

    def __post_init__(self) -> None:
        require_scale("rule Full", 1.0 if self.scale is None else self.scale)

    def __call__(self, site: Site) -> dist.Distribution:
        require_site((InducingPrior, JointValues), self, site, "inducing values or the values of an exact process")
        if isinstance(site.fn, JointValues):
            rows = site.fn.loc.mT if site.fn.event_dim == 2 else site.fn.loc[None]
            shift, root = self._parameters(site, rows.shape, rows.dtype)
            require_rows(self, site, shift.shape, rows.shape)
            return WhitenedValues(site.fn, shift, root)
        if isinstance(site.fn, RingPrior):
            require_room("rule Full", "its covariance", *2 * site.fn.event_shape[-1:])
        return FullBelief(*self._parameters(site, site.fn.event_shape, site.fn.dtype))

    def _parameters(self, site: Site, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
        def factors() -> Array:
            # In NumPy, because JAX would compile each of these operations.
            one = initial_scale(self.scale, site) * np.eye(shape[-1])
            return jnp.asarray(np.broadcast_to(one, (*shape, shape[-1])), dtype)

        loc = site.param("loc", lambda: jnp.zeros(shape, dtype))
        tril = site.param("scale_tril", factors, constraint=row_scaled_tril)
        return loc, jnp.tril(tril)


@dataclasses.dataclass(frozen=True)
class Diagonal(Rule):
    r"""Independent Gaussians over whitened inducing values: :math:`q(v_{pm}) = N(m_{pm}, \sigma_{pm}^2)`.

    At the values of a process of ``dgp.Neighbours``, the Gaussians are over the N(0, 1) numbers behind these.

    Args:
        scale: initial standard deviation; by default 1e-2 for inner layers, else 1.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold inducing values or values of
            ``dgp.Neighbours``.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> import numpyro.distributions as dist
        >>> from numpyro.handlers import seed, trace
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.Diagonal())
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> with trace() as sites, seed(rng_seed=0):
        ...     draws = guide(X, X[:, 0])
        >>> {name: site["value"].shape for name, site in sites.items() if site["type"] == "param"}
        {'f_auto_loc': (5,), 'f_auto_scale': (5,)}
    """

    scale: float | None = None
    gaussian = GaussianParameters("scale", diagonal=True)

    __repr__ = brief

    def __post_init__(self) -> None:
        require_scale("rule Diagonal", 1.0 if self.scale is None else self.scale)

    def __call__(self, site: Site) -> dist.Distribution:
        require_site((InducingPrior, NeighbourValues), self, site, "inducing values or those of dgp.Neighbours")
        if isinstance(site.fn, NeighbourValues):
            return whitened_neighbours(self, site, self.scale, joined=False)
        shape, dtype = site.fn.event_shape, site.fn.dtype
        loc = site.param("loc", lambda: jnp.zeros(shape, dtype))
        scale = site.param(
            "scale", lambda: jnp.full(shape, initial_scale(self.scale, site), dtype), constraint=constraints.positive
        )
        return DiagonalBelief(loc, scale)
