"""S2: random functions: by values at inducing inputs (``SparseFunction``), or exactly (``ExactFunction``)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.beliefs import Belief, FunctionDraw, project
from numpyro_dgp.induced import InducedFunction, checked_inputs, mean_values, noise_covariance
from numpyro_dgp.inducing import Kernels, covariances, cross_covariance, features, gram, variances
from numpyro_dgp.linalg import inverse_cholesky, jitter, matmul
from numpyro_dgp.means import Mean
from numpyro_dgp.values import JointValues

__all__ = ["ExactFunction", "SparseFunction"]


def _whiten_columns(whiten: Array, values: Array) -> Array:
    """Whitened values (P, M) of values (M, P) at the inducing inputs."""
    return (whiten @ values.T[..., None])[..., 0]


@dataclasses.dataclass(frozen=True, eq=False)
class SparseFunction(InducedFunction):
    """A function represented by whitened values at inducing inputs; ``dgp.gp`` makes it.

    Args:
        kernels: one kernel, or one per output.
        Z: inducing inputs (M, D) or (P, M, D).
        whiten: :math:`L^{-1}`, the inverse Cholesky factor of k(Z, Z), (M, M) or (P, M, M).
        u: what is known about the whitened values: an array, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
    """

    kernels: Kernels
    Z: Array
    whiten: Array
    u: Array | Belief | FunctionDraw
    outputs: int | None
    mean: Mean

    @property
    def size(self) -> int:
        return self.Z.shape[-2]

    @property
    def dims(self) -> int:
        return self.Z.shape[-1]

    def _whitened(self, rows: Array) -> Array:
        """A = k(x, Z) L^{-T}."""
        dtype = jnp.result_type(rows, self.whiten)
        cross = cross_covariance(self.kernels, rows, self.Z).astype(dtype)
        return matmul(cross, self.whiten.astype(dtype).mT)

    def _covariances(self, x: Array) -> Array:
        return covariances(self.kernels, x)

    def _conditional_variance(self, rows: Array, A: Array) -> Array:
        k = variances(self.kernels, rows)
        # Rounding can push the difference below zero; what is left there is the jitter.
        return jnp.maximum(k - jnp.square(A).sum(-1), jitter(A.dtype, self.size) * k)

    def _prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        def values(x: Array) -> Array:
            return project(weights, features(self.kernels, key, x, weights.shape[-1]))

        return values(rows), _whiten_columns(self.whiten, values(self.Z))


@dataclasses.dataclass(frozen=True, eq=False)
class ExactFunction:
    """An exact Gaussian process, ``dgp.gp(..., inducing=None)``: it opens no site of its own.

    Its values are drawn at all inputs at once, outside the data plate:
    ``v = numpyro.sample("v", f(X))``. Exact regression is ``numpyro.sample("y", f(X, noise=s), obs=y)``.
    """

    kernels: Kernels
    outputs: int | None
    mean: Mean

    def __call__(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> JointValues:
        """Values at the inputs ``x`` (..., N, D) jointly: event shape (N, P), or (N,).

        Args:
            x: inputs (..., N, D).
            noise: standard deviation of Gaussian process noise, a number or one per output.

        Raises:
            ValueError: NaN or infinite inputs, or noise that is not positive.
        """
        x = checked_inputs(x, None, noise)
        loc = mean_values(self.mean, x, self.outputs)
        loc = jnp.broadcast_to(loc, x.shape[:-1] + (() if self.outputs is None else (self.outputs,)))
        covariance = covariances(self.kernels, x) + noise_covariance(noise, x.shape[-2], x.dtype)
        values = JointValues(loc, covariance, event_dim=1 if self.outputs is None else 2)
        values.function, values.inputs = self, x
        return values

    joint = __call__

    def condition(self, x: ArrayLike, values: ArrayLike) -> SparseFunction:
        """The process given its values at ``x``: a function to call on new inputs.

        Args:
            x: inputs (N, D) where the values are known.
            values: (N, P), or (N,) for a scalar function, for example the draw of ``f(x)``.

        Example:
            >>> import jax.numpy as jnp
            >>> import numpyro_dgp as dgp
            >>> f = dgp.gp("f", dgp.kernels.RBF(), None)
            >>> x = jnp.array([[0.0], [1.0]])
            >>> given = f.condition(x, jnp.array([1.0, -1.0]))
            >>> print(given(x).mean.round(3))
            [ 1. -1.]
        """
        x = checked_inputs(x, None, None)
        residual = jnp.asarray(values, x.dtype) - mean_values(self.mean, x, self.outputs)
        whiten = inverse_cholesky(gram(self.kernels, x), "k(X, X) of an exact process")
        u = _whiten_columns(whiten, residual[:, None] if self.outputs is None else residual)
        return SparseFunction(self.kernels, x, whiten, u[0] if self.outputs is None else u, self.outputs, self.mean)
