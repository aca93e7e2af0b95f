"""Rules. A rule sees a latent site where it happens and answers with a variational distribution.

Its parameters are ``numpyro.param`` sites called ``"<site>_<prefix>_<parameter>"``, created inside the plates of
the site, so that a per-datum parameter follows the minibatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import IdentityTransform

from numpyro_dgp._checks import require_positive
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.gaussians import opper_archambeau
from numpyro_dgp.algebra.linalg import cholesky
from numpyro_dgp.guides.rules.row_scaled import row_scaled_tril
from numpyro_dgp.model.beliefs import DiagonalBelief, FullBelief, InducingPrior
from numpyro_dgp.model.function_values import FunctionValues, JointValues, WhitenedValues

__all__ = ["Delta", "Diagonal", "Full", "Normal", "OpperArchambeau", "Prior", "Propagate", "Rule", "Site"]

# An inner layer starts almost deterministic, so that the first steps see a shallow model. The code published with
# Salimbeni (2020) has 1e-5; in the logarithm that is a thousand steps of Adam away from the prior, and 1e-2 serves as
# well (docs/numerics.md).
INNER_SCALE = 1e-2


@dataclasses.dataclass(frozen=True)
class Site:
    """A latent site as a rule sees it.

    Args:
        name: of the site, as the program's own handlers named it.
        fn: the model's distribution there, given everything drawn before.
        prefix: goes into the names of parameters.
        in_plate: whether the site lies in a plate.
        is_inner: whether it holds the inducing values of an inner layer.
        initial: gives the initial value of the site, over all data.
        data: gives inputs and observations beside the site, in columns: rows of the minibatch (..., C).
        below: gives the draw of the inducing values that the site follows, where its rule says that it follows some.
    """

    name: str
    fn: dist.Distribution
    prefix: str
    in_plate: bool
    is_inner: Callable[[], bool]
    initial: Callable[[], Array]
    data: Callable[[], Array]
    below: Callable[[], Array]

    def param(
        self, name: str, init: Callable[[], Array], *, event_dim: int | None = None, constraint: Any = constraints.real
    ) -> Array:
        """A variational parameter; ``init`` runs only when it is created."""
        kwargs = {"event_dim": event_dim} if self.in_plate and event_dim is not None else {}
        return numpyro.param(f"{self.name}_{self.prefix}_{name}", lambda _: init(), constraint=constraint, **kwargs)


class Rule:
    """From a latent site to its variational distribution."""

    def __call__(self, site: Site) -> dist.Distribution:
        raise NotImplementedError


def initial_scale(scale: float | None, site: Site) -> float:
    if scale is not None:
        return scale
    return INNER_SCALE if site.is_inner() else 1.0


def require_site(kind: type | tuple[type, ...], rule: Rule, site: Site, what: str) -> None:
    if not isinstance(site.fn, kind):
        raise ValueError(
            f"rule {type(rule).__name__}: expected site {site.name!r} to be {what}, got a "
            f"{type(site.fn).__name__}: choose another rule for it in sites={{{site.name!r}: ...}}"
        )


@dataclasses.dataclass(frozen=True)
class Full(Rule):
    r"""Full Gaussian per output: :math:`q(v_p) = N(m_p, L_p L_p^\top)`; for inducing values and exact processes.

    At the values of an exact process, the Gaussian is over their whitened coordinates.

    Args:
        scale: initial standard deviation, relative to the prior; by default 1e-2 for inner layers, else 1.

    Source: Salimbeni (2020), equation 2.5, whitened.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        require_positive("rule Full", "scale", 1.0 if self.scale is None else self.scale)

    def __call__(self, site: Site) -> dist.Distribution:
        require_site((InducingPrior, JointValues), self, site, "inducing values or the values of an exact process")
        if isinstance(site.fn, JointValues):
            rows = site.fn.loc.mT if site.fn.event_dim == 2 else site.fn.loc[None]
            return WhitenedValues(site.fn, *self._parameters(site, rows.shape, rows.dtype))
        return FullBelief(*self._parameters(site, site.fn.event_shape, site.fn.dtype))

    def _parameters(self, site: Site, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
        def factors() -> Array:
            # In NumPy: JAX would compile every one of these operations.
            one = initial_scale(self.scale, site) * np.eye(shape[-1])
            return jnp.asarray(np.broadcast_to(one, (*shape, shape[-1])), dtype)

        loc = site.param("loc", lambda: jnp.zeros(shape, dtype))
        tril = site.param("scale_tril", factors, constraint=row_scaled_tril)
        return loc, jnp.tril(tril)


@dataclasses.dataclass(frozen=True)
class Diagonal(Rule):
    r"""Independent Gaussians over whitened inducing values: :math:`q(v_{pm}) = N(m_{pm}, s_{pm}^2)`.

    Args:
        scale: initial standard deviation; by default 1e-2 for inner layers, else 1.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        require_positive("rule Diagonal", "scale", 1.0 if self.scale is None else self.scale)

    def __call__(self, site: Site) -> dist.Distribution:
        require_site(InducingPrior, self, site, "inducing values")
        shape, dtype = site.fn.event_shape, site.fn.dtype
        loc = site.param("loc", lambda: jnp.zeros(shape, dtype))
        scale = site.param(
            "scale", lambda: jnp.full(shape, initial_scale(self.scale, site), dtype), constraint=constraints.positive
        )
        return DiagonalBelief(loc, scale)


@dataclasses.dataclass(frozen=True)
class OpperArchambeau(Rule):
    r"""Values of an exact scalar process by 2 N numbers.

    .. math:: q(f) = N\bigl(m + K\alpha,\; (K^{-1} + \mathrm{diag}(\lambda)^2)^{-1}\bigr)

    The optimum over all Gaussians has this form when the likelihood factorises over data.

    Raises:
        ValueError: the site does not hold the values of an exact scalar process.

    Source: Opper and Archambeau (2009); Hensman (2016).
    """

    def __call__(self, site: Site) -> dist.Distribution:
        require_site(JointValues, self, site, "the values of an exact process")
        fn: Any = site.fn
        if fn.event_dim != 1 or fn.batch_shape:
            raise ValueError(
                f"rule OpperArchambeau: expected values of one scalar function at {site.name!r}, got event shape "
                f"{fn.event_shape}: use guides.Full() for several outputs"
            )
        alpha = site.param("alpha", lambda: jnp.zeros_like(fn.loc))
        lam = site.param("lambda", lambda: jnp.ones_like(fn.loc))
        L = cholesky(fn.covariance[0], f"the prior covariance at {site.name!r}")
        shift, root = opper_archambeau(L, alpha, lam)
        return WhitenedValues(fn, shift[None], root[None])


@dataclasses.dataclass(frozen=True)
class Propagate(Rule):
    """Hidden values follow the model: q(h | u, x) = p(h | u, x) (Salimbeni, 2020, section 2.3)."""

    def __call__(self, site: Site) -> dist.Distribution:
        return site.fn.propagated() if isinstance(site.fn, FunctionValues) else site.fn


@dataclasses.dataclass(frozen=True)
class Normal(Rule):
    r"""Independent Gaussians, one per number: :math:`q(z) = N(m, s^2)` on the unconstrained scale.

    For hyperparameters, for latents, and for hidden values (then this is the mean-field family of Chamberlin (2016)).
    A site with a constrained support goes through NumPyro's bijection to it, as ``AutoNormal`` does.

    Args:
        scale: initial standard deviation.
        loc: initial means on the unconstrained scale, over all data; by default where the untrained model is.

    Raises:
        ValueError: a scale that is not positive, or a discrete site.
    """

    scale: float = 0.1
    loc: Any = None

    def __post_init__(self) -> None:
        require_positive("rule Normal", "scale", self.scale)

    def __call__(self, site: Site) -> dist.Distribution:
        transform = _bijection(self, site)
        shape = site.fn.shape()
        event_dim = site.fn.event_dim + len(transform.inverse_shape(shape)) - len(shape)

        def initial() -> Array:
            start = transform.inv(site.initial())
            return start if self.loc is None else jnp.broadcast_to(jnp.asarray(self.loc, start.dtype), start.shape)

        loc = site.param("loc", initial, event_dim=event_dim)
        scale = site.param(
            "scale",
            lambda: jnp.full_like(initial(), self.scale),
            event_dim=event_dim,
            constraint=constraints.positive,
        )
        base = FunctionValues(loc, jnp.square(scale), event_dim=event_dim)
        if isinstance(transform, IdentityTransform) or _is_real(site.fn.support):
            return base
        return dist.TransformedDistribution(base, transform)


@dataclasses.dataclass(frozen=True)
class Delta(Rule):
    """A point: maximum a posteriori on the site's own scale, as ``AutoDelta``.

    Raises:
        ValueError: a discrete site.
    """

    def __call__(self, site: Site) -> dist.Distribution:
        _bijection(self, site)
        fn = site.fn
        value = site.param("loc", site.initial, constraint=fn.support, event_dim=fn.event_dim)
        return dist.Delta(value, event_dim=fn.event_dim)


@dataclasses.dataclass(frozen=True)
class Prior(Rule):
    """The model's own distribution: nothing is learned about the site."""

    def __call__(self, site: Site) -> dist.Distribution:
        return site.fn


def _is_real(support: Any) -> bool:
    base = support.base_constraint if isinstance(support, constraints.independent) else support
    return base is constraints.real


def _bijection(rule: Rule, site: Site) -> Any:
    if site.fn.support.is_discrete:
        raise ValueError(
            f"rule {type(rule).__name__}: expected a continuous site, got discrete site {site.name!r} "
            f"({type(site.fn).__name__}): sum it out in the model, or give it guides.Prior()"
        )
    return biject_to(site.fn.support)
