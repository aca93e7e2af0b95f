"""A process given values at some inputs: at new ones it is conditioned on the nearest of these."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.algebra.conditioning_sets import ConditioningSets, nearest
from numpyro_dgp.algebra.linalg import einsum, jitter
from numpyro_dgp.algebra.vecchia import conditional, each_conditional
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.per_output import Kernels, covariances
from numpyro_dgp.means import Mean
from numpyro_dgp.model.function_inputs import checked_inputs, mean_values, noise_variance, require_noise
from numpyro_dgp.model.function_values import FunctionValues, Origin
from numpyro_dgp.model.neighbour_values import NeighbourValues

__all__ = ["NearestFunction", "conditionals", "nuggets"]


def nuggets(kernels: Kernels, x: Array, noise: ArrayLike | None) -> Array:
    """Variances of noise and jitter on values at x (..., N, D): shape (..., P), P = 1 where outputs share them.

    The jitter is that of the matrix of all values in double precision, relative to their mean variance, and in single
    precision that of a hundred.
    """
    prior = _variances(kernels, x).mean(-1)
    extra = noise_variance(noise, x.dtype)
    return extra + jitter(x.dtype, 100) * (prior + extra)


def _variances(kernels: Kernels, x: Array) -> Array:
    """k(x, x) at rows (..., N, D): shape (..., P, N), P = 1 where outputs share it."""
    shared = (kernels,) if isinstance(kernels, Kernel) else kernels
    return jnp.stack([k.diag(x) for k in shared], -2)


def conditionals(kernels: Kernels, rows: Array, others: Array, present: Array, nugget: Array) -> tuple[Array, Array]:
    """Weights and variances of values given others.

    Args:
        kernels: one kernel, or one per output.
        rows: inputs of the values (N, ..., D).
        others: inputs of their neighbours (N, C, ..., D).
        present: which of these there are (N, C).
        nugget: variances of noise on all values (..., P).

    Returns:
        Weights (N, ..., P, C) and variances (N, ..., P), P = 1 where outputs share them.
    """

    def of_row(x: Array, others: Array, present: Array) -> tuple[Array, Array]:
        x, z = x[..., None, :], jnp.moveaxis(others, 0, -2)
        prior, diagonal = _variances(kernels, x)[..., 0], _variances(kernels, z)
        cross, within = covariances(kernels, x, z)[..., 0, :], covariances(kernels, z, z)
        batch = jnp.broadcast_shapes(prior.shape, nugget.shape)
        cross = jnp.broadcast_to(cross, (*batch, cross.shape[-1]))
        return conditional(within, diagonal, cross, prior, jnp.broadcast_to(nugget, batch), present)

    size = others[0].size // others.shape[-1] * (others.shape[1] + 1) * nugget.shape[-1]
    return each_conditional(of_row, size, rows, others, present)


@pytree
class NearestFunction:
    r"""A Gaussian process given values at N inputs: what ``f.condition(x, values)`` returns for ``dgp.Neighbours``.

    .. math:: f(x) \sim N\bigl(m(x) + b^\top (u_{c} - m(x_{c})),\; d\bigr)

    with the ``num`` of the N inputs that are nearest to x as c. Given all N values, values at new inputs are
    independent of each other.

    Args:
        kernels: one kernel, or one per output.
        x: the inputs (N, D).
        residual: the values there less the mean function (N, P).
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        num: neighbours of a new input.
        noise: standard deviation of the noise in the values, a number or one per output; ``None`` for none.

    Source: Vecchia (1988); Sauer et al. (2023b).
    """

    kernels: Kernels
    x: Array
    residual: Array
    outputs: int | None = static()
    mean: Mean
    num: int = static()
    noise: ArrayLike | None = None

    @property
    def site(self) -> None:
        """Always ``None``: it opens no site."""
        return None

    def __call__(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> FunctionValues:
        """Values at each input on its own.

        Args:
            x: inputs (..., D).
            noise: standard deviation of Gaussian process noise, a number or one per output.

        Returns:
            A distribution with batch shape ``x.shape[:-1]`` and event shape (P,), or () for a scalar function.

        Raises:
            ValueError: inputs of another width, NaN or infinite inputs, noise that is not positive.
        """
        x = checked_inputs(x, self.x.shape[-1], noise)
        require_noise(noise, self.outputs, x.shape[:-1])
        rows = x.reshape(-1, x.shape[-1])
        index = nearest(self.x, rows, self.num)
        present = jnp.ones(index.shape, bool)
        b, d = conditionals(self.kernels, rows, self.x[index], present, nuggets(self.kernels, self.x, self.noise))
        if self.noise is not None:  # the new values have none of it
            least = nuggets(self.kernels, self.x, None)
            d = jnp.maximum(d - noise_variance(self.noise, x.dtype), least)
        known = self.residual[index]
        loc = einsum("npc,ncp->np", jnp.broadcast_to(b, (len(b), known.shape[-1], b.shape[-1])), known)
        shape = x.shape[:-1] if self.outputs is None else (*x.shape[:-1], self.outputs)
        return FunctionValues(
            loc.reshape(shape) + mean_values(self.mean, x, self.outputs),
            jnp.broadcast_to(d, loc.shape).reshape(shape) + noise_variance(noise, x.dtype),
            event_dim=0 if self.outputs is None else 1,
            origin=Origin(self, x, noise),
        )

    def joint(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> NeighbourValues:
        """The same values, independent as they are, as one event of shape (N, P), or (N,), for x (..., N, D)."""
        each = self(x, noise=noise)
        N = each.batch_shape[-1]
        variance = each.variance[..., None] if self.outputs is None else each.variance
        variance = jnp.moveaxis(variance, -1, -2)
        alone = ConditioningSets(np.zeros((N, 0), np.int32), np.arange(N, dtype=np.int32)[None])
        weights = jnp.zeros((*variance.shape, 0), variance.dtype)
        return NeighbourValues(each.loc, weights, variance, alone, 1 if self.outputs is None else 2, each.origin)

    def given(self, x: ArrayLike, values: ArrayLike, noise: ArrayLike | None = None) -> NearestFunction:
        """The function itself: given the values that it has, those at new inputs say nothing about others."""
        return self
