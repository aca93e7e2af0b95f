r"""How a guide's scale matrices are parameterised for gradient steps.

A lower triangular factor is written :math:`R = \mathrm{diag}(e^\rho)\,(I + F)` with F strictly lower triangular, and
optimised in the matrix that holds :math:`\rho` on its diagonal and F below. Inner layers start at a small scale
:math:`\sigma`. There the divergence has slope :math:`-1/\sigma` in the entries of R, which an adaptive optimiser
remembers for thousands of steps; its slope in :math:`\rho` is at most one (``docs/numerics.md``).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ParameterFreeTransform

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import fused

__all__ = ["RowScaledTransform", "row_scaled_tril"]


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
        return (jnp.diagonal(x, axis1=-2, axis2=-1) * jnp.arange(1, x.shape[-1] + 1)).sum(-1)


@biject_to.register(_RowScaledTril)
def _transform_to_row_scaled_tril(constraint: _RowScaledTril) -> RowScaledTransform:
    return RowScaledTransform()
