r"""Rules for whitened inducing values: Gaussians with full, diagonal or sparse covariance factors.

**Parameterisation of scale matrices.**

A lower triangular factor is parameterised as :math:`R = \mathrm{diag}(e^\rho)\,(I + F)` with F strictly lower
triangular, and
optimised in the matrix that holds :math:`\rho` on its diagonal and F below. Inner layers start at a small scale
:math:`\sigma`. There the derivative of the divergence by the entries of R is :math:`-1/\sigma`, which the moving
averages of an adaptive optimiser keep for thousands of steps; the derivative by :math:`\rho` is at most one
(``docs/numerics.md``).

For values conditioned on their neighbours, the factor is as sparse as that of the prior.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ParameterFreeTransform

from numpyro_dgp._fields import scale
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import is_function_values
from numpyro_dgp.functions.joint_values import JointValues, WhitenedValues
from numpyro_dgp.functions.neighbours import NeighbourValues, WhitenedNeighbours
from numpyro_dgp.functions.weights import DiagonalBelief, FullBelief, InducingPrior
from numpyro_dgp.guides.rules.rule import (
    GaussianParameters,
    Rule,
    SiteContext,
    initial_scale,
    require_rows,
    require_site,
)
from numpyro_dgp.math.linalg import fused
from numpyro_dgp.rings.ring_beliefs import RingPrior, require_room

__all__ = ["Diagonal", "Full", "RowScaledTransform", "SparseFactor", "row_scaled_tril"]


class _RowScaledTril(constraints.Constraint):
    """Lower triangular matrices (..., M, M) with a positive diagonal, optimised row scale by row scale."""

    is_discrete = False
    event_dim = 2

    def __call__(self, x: Array) -> Array:
        diagonal = jnp.diagonal(x, axis1=-2, axis2=-1)
        return jnp.all(jnp.triu(x, 1) == 0, axis=(-2, -1)) & jnp.all(diagonal > 0, axis=-1)

    def feasible_like(self, prototype: Array) -> Array:
        return jnp.broadcast_to(jnp.eye(prototype.shape[-1], dtype=prototype.dtype), prototype.shape)

    def tree_flatten(self) -> Any:
        return (), ((), {})


row_scaled_tril = _RowScaledTril()


@fused
def _from_factor(y: Array) -> Array:
    scale = jnp.diagonal(y, axis1=-2, axis2=-1)
    # F = diag(e^-rho) R below the diagonal, rho = log diag R on it
    unit = jnp.tril(y * (1 / scale)[..., None], -1)
    return unit + jnp.log(scale)[..., None] * jnp.eye(y.shape[-1], dtype=y.dtype)


class RowScaledTransform(ParameterFreeTransform):
    r"""From a real matrix, :math:`\rho` on the diagonal and F below, to :math:`\mathrm{diag}(e^\rho)(I + F)`."""

    domain = constraints.independent(constraints.real, 2)
    codomain = row_scaled_tril

    def __call__(self, x: Array) -> Array:
        scale = jnp.exp(jnp.diagonal(x, axis1=-2, axis2=-1))
        unit = jnp.tril(x, -1) + jnp.eye(x.shape[-1], dtype=x.dtype)
        return scale[..., None] * unit

    def _inverse(self, y: Array) -> Array:
        return _from_factor(y)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        # Row i of R has i - 1 entries e^rho_i F_ij and the entry e^rho_i: log|dR/dx| = sum_i i rho_i.
        return (jnp.diagonal(x, axis1=-2, axis2=-1) * jnp.arange(1, x.shape[-1] + 1)).sum(-1)


@biject_to.register(_RowScaledTril)
def _transform_to_row_scaled_tril(constraint: _RowScaledTril) -> RowScaledTransform:
    return RowScaledTransform()


@dataclasses.dataclass(frozen=True)
class SparseFactor(Rule):
    r"""Values of a process of ``dgp.Neighbours``: a Gaussian with the sparsity pattern of the prior's factor.

    .. math:: v = t + R \epsilon, \qquad R_{ij} \ne 0 \text{ only for } j = i \text{ and } j \in c(i)

    v are the whitened values, so that R is the identity a priori, and c(i) the neighbours of value i. It has
    N (C + 2) numbers for each output, where a full Gaussian has N (N + 3) / 2: the same for C = N - 1.

    Args:
        scale: initial standard deviation, relative to the prior; by default 1e-2 for inner layers, else 1.

    Raises:
        ValueError: a scale that is not positive, or a site that does not hold values of ``dgp.Neighbours``.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> model = lambda: numpyro.sample("v", dgp.gp("f", dgp.kernels.RBF(), dgp.Neighbours(X, num=3))(X))
        >>> dgp.testing.parameter_shapes(dgp.guides.InducingPoint(model, exact=dgp.guides.SparseFactor()))
        {'v_auto_loc': (1, 20), 'v_auto_scale': (1, 20), 'v_auto_weights': (1, 20, 3)}
    """

    scale: float | None = scale()

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        require_site(NeighbourValues, self, site, "the values of a process of dgp.Neighbours")
        return whitened_neighbours(self, site, self.scale, joined=True)


def whitened_neighbours(rule: Rule, site: SiteContext, scale: float | None, *, joined: bool) -> WhitenedNeighbours:
    """A Gaussian over the whitened values of a site: independent, or ``joined`` to those of their neighbours."""
    fn: Any = site.fn
    rows = fn.to_output_major(fn.loc)
    shift = site.param("loc", lambda: jnp.zeros_like(rows))
    sd = site.param("scale", lambda: jnp.full_like(rows, initial_scale(scale, site)), constraint=constraints.positive)
    require_rows(rule, site, shift.shape, rows.shape)
    if not joined:
        return WhitenedNeighbours(fn, shift, sd)
    shape = (*rows.shape, fn.sets.neighbours.shape[1])
    return WhitenedNeighbours(fn, shift, sd, site.param("weights", lambda: jnp.zeros(shape, rows.dtype)))


@dataclasses.dataclass(frozen=True)
class Full(Rule):
    r"""Full Gaussian per output: :math:`q(v_p) = N(m_p, R_p R_p^\top)`; for inducing values and exact processes.

    At the values of an exact process, the Gaussian is over their whitened coordinates.

    Args:
        scale: initial standard deviation, relative to the prior; by default 1e-2 for inner layers, else 1.

    Raises:
        ValueError: a scale that is not positive, or a site of another kind.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.Full(scale=0.1))
        >>> dgp.testing.parameter_shapes(guide, X, y)
        {'f_auto_loc': (5,), 'f_auto_scale_tril': (5, 5)}

    Source: Salimbeni (2020), equation 2.5, whitened.
    """

    scale: float | None = scale()
    gaussian = GaussianParameters("scale_tril", diagonal=False)

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        require_site((InducingPrior, JointValues), self, site, "inducing values or the values of an exact process")
        if is_function_values(site.fn):
            fn: Any = site.fn
            rows = fn.loc.mT if fn.event_dim == 2 else fn.loc[None]
            shift, root = self._parameters(site, rows.shape, rows.dtype)
            require_rows(self, site, shift.shape, rows.shape)
            return WhitenedValues(fn, shift, root)
        if isinstance(site.fn, RingPrior):
            require_room("its covariance", *2 * site.fn.event_shape[-1:])
        return FullBelief(*self._parameters(site, site.fn.event_shape, site.fn.dtype))

    def _parameters(self, site: SiteContext, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
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
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.Diagonal())
        >>> dgp.testing.parameter_shapes(guide, X, y)
        {'f_auto_loc': (5,), 'f_auto_scale': (5,)}
    """

    scale: float | None = scale()
    gaussian = GaussianParameters("scale", diagonal=True)

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        require_site((InducingPrior, NeighbourValues), self, site, "inducing values or those of dgp.Neighbours")
        if is_function_values(site.fn):
            return whitened_neighbours(self, site, self.scale, joined=False)
        shape, dtype = site.fn.event_shape, site.fn.dtype
        loc = site.param("loc", lambda: jnp.zeros(shape, dtype))
        scale = site.param(
            "scale", lambda: jnp.full(shape, initial_scale(self.scale, site), dtype), constraint=constraints.positive
        )
        return DiagonalBelief(loc, scale)
