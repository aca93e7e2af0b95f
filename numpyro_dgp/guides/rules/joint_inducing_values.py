"""A rule for the inducing values of a layer: one Gaussian over all outputs together."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from numpyro_dgp._shown import brief
from numpyro_dgp.guides.rules.row_scaled import row_scaled_tril
from numpyro_dgp.guides.rules.rule import Rule, Site, initial_scale, require_scale, require_site
from numpyro_dgp.model.beliefs import InducingPrior
from numpyro_dgp.model.joint_inducing import JointInducing

__all__ = ["FullJoint"]


@dataclasses.dataclass(frozen=True)
class FullJoint(Rule):
    r"""One full Gaussian over the inducing values of all outputs: :math:`q(\operatorname{vec} v) = N(m, R R^\top)`.

    ``Full()`` has a covariance per output, P M² numbers, this rule P² M². Where outputs meet in a layer above or in a
    likelihood, their posteriors depend on each other. v is drawn, once for all data, and the divergence from the prior
    is in closed form given what v depends on. Where outputs are seen one by one the best joint covariance is that of
    ``Full()``, which is integrated and less noisy. With ``MarkovInducing(conditional=FullJoint())`` it is the
    covariance that is left when the layer below is known. For natural gradients take ``Full()``.

    Args:
        scale: initial standard deviation, relative to the prior; by default 1e-2 for inner layers, else 1.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold inducing values.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> import numpyro.distributions as dist
        >>> from numpyro.handlers import seed, trace
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]), outputs=2)
        ...     g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 8).reshape(4, 2)))
        ...     with numpyro.plate("data", len(X)):
        ...         h = numpyro.sample("h", f(X))
        ...         numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> guide = dgp.guides.InducingPoint(model, sites={"f": dgp.guides.FullJoint()})
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> with trace() as sites, seed(rng_seed=0):
        ...     draws = guide(X, X[:, 0])
        >>> {name: site["value"].shape for name, site in sites.items() if name.startswith("f_auto")}
        {'f_auto_loc': (2, 5), 'f_auto_scale_tril': (10, 10)}

    Source: Chamberlin (2016), section 4.9, whitened.
    """

    scale: float | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        require_scale("rule FullJoint", 1.0 if self.scale is None else self.scale)

    def __call__(self, site: Site) -> JointInducing:
        require_site(InducingPrior, self, site, "inducing values")
        shape, dtype = site.fn.event_shape, site.fn.dtype
        start = lambda: initial_scale(self.scale, site) * jnp.eye(math.prod(shape), dtype=dtype)  # noqa: E731
        loc = site.param("loc", lambda: jnp.zeros(shape, dtype))
        return JointInducing(loc, jnp.tril(site.param("scale_tril", start, constraint=row_scaled_tril)))
