r"""S2: random functions. Called on inputs, they return the distribution of their values there.

With :math:`L L^\top = k(Z, Z)`, :math:`A = k(x, Z) L^{-\top}` and whitened inducing values v,

.. math::
    p(f(x) \mid v) = N\bigl(m(x) + A v,\; k(x, x) - A A^\top\bigr), \qquad
    q(f(x)) = N\bigl(m(x) + A m,\; k(x, x) - A A^\top + A S A^\top\bigr)

where q(v) = N(m, S). Source: seed 002, equations 1.28 and 1.29, whitened.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import require_finite, require_inputs, require_positive
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.beliefs import Belief, FunctionDraw, project
from numpyro_dgp.inducing import Kernels, covariances, cross_covariance, features, gram, variances
from numpyro_dgp.linalg import inverse_cholesky, jitter, matmul
from numpyro_dgp.means import Mean
from numpyro_dgp.values import FunctionValues, JointValues

__all__ = ["ExactFunction", "SparseFunction"]

_DATA_HINT = "drop, impute or mask the rows with missing values before building the model"


def _inputs(x: ArrayLike, dims: int | None, noise: ArrayLike | None) -> Array:
    require_inputs("f(x)", x, dims)
    require_finite("inputs of f(x)", x, _DATA_HINT)
    if noise is not None:
        require_positive("f(x)", "noise", noise)
    return jnp.asarray(x, jnp.result_type(x, float))


def _noise_variance(noise: ArrayLike | None, dtype: jnp.dtype) -> Array:
    return jnp.square(jnp.asarray(0.0 if noise is None else noise, dtype))


def _noise_covariance(noise: ArrayLike | None, size: int, dtype: jnp.dtype) -> Array:
    return _noise_variance(noise, dtype)[..., None, None] * jnp.eye(size, dtype=dtype)


def _whiten_columns(whiten: Array, values: Array) -> Array:
    """Whitened values (P, M) of values (M, P) at the inducing inputs."""
    return (whiten @ values.T[..., None])[..., 0]


def mean_values(mean: Mean, x: Array, outputs: int | None) -> Array:
    """m(x) of shape (..., P), or (...,) for a scalar function."""
    values = mean(x)
    if values.shape[-1] not in (1, outputs or 1):
        raise ValueError(
            f"expected a mean function with {outputs or 1} output(s), got one with {values.shape[-1]}: "
            "dgp.means.pca(X, outputs) maps any number of inputs to any number of outputs"
        )
    return values[..., 0] if outputs is None else values


@dataclasses.dataclass(frozen=True, eq=False)
class SparseFunction:
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

    def __call__(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> FunctionValues:
        """Values at each input on its own.

        Args:
            x: inputs (..., D); every leading dimension is a batch dimension.
            noise: standard deviation of Gaussian process noise, a number or one per output.

        Returns:
            A distribution with batch shape ``x.shape[:-1]`` and event shape (P,), or () for a scalar function.

        Raises:
            ValueError: inputs of another width, NaN or infinite inputs, noise that is not positive.
        """
        x = _inputs(x, self.Z.shape[-1], noise)
        loc, conditional, spread = self._moments(x.reshape(-1, x.shape[-1]))
        values = FunctionValues(
            self._unflatten(loc, x) + self._mean(x),
            self._unflatten(conditional, x) + _noise_variance(noise, loc.dtype),
            None if spread is None else self._unflatten(spread, x),
            event_dim=0 if self.outputs is None else 1,
        )
        values.function, values.inputs, values.noise = self, x, noise
        return values

    def joint(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> JointValues:
        """Values with their correlations over the last batch dimension of ``x`` (..., N, D).

        Returns:
            A distribution with batch shape ``x.shape[:-2]`` and event shape (N, P), or (N,).
        """
        x = _inputs(x, self.Z.shape[-1], noise)
        rows = x.reshape(-1, x.shape[-1])
        flat = self._whitened(rows)
        A = jnp.moveaxis(flat.reshape(-1, *x.shape[:-1], flat.shape[-1]), 0, -3)
        loc, _ = self._known(flat, rows)
        conditional = covariances(self.kernels, x) - A @ A.mT
        if isinstance(self.u, FunctionDraw):
            conditional = jnp.zeros_like(conditional)
        spread = None
        if isinstance(self.u, Belief):
            spread = jax.vmap(self.u.spread_covariance)(A.reshape(-1, *A.shape[-3:]))
            spread = spread.reshape(*x.shape[:-2], *spread.shape[1:])
        values = JointValues(
            self._unflatten(loc, x) + self._mean(x),
            conditional + _noise_covariance(noise, x.shape[-2], loc.dtype),
            spread,
            event_dim=1 if self.outputs is None else 2,
        )
        values.function, values.inputs, values.noise = self, x, noise
        return values

    def _moments(self, rows: Array) -> tuple[Array, Array, Array | None]:
        """Mean without the mean function, conditional variance and spread at rows (N, D), each (N, P)."""
        A = self._whitened(rows)
        loc, spread = self._known(A, rows)
        if isinstance(self.u, FunctionDraw):
            return loc, jnp.zeros_like(loc), spread
        k = variances(self.kernels, rows)
        # Rounding can push the difference below zero; what is left there is the jitter.
        conditional = jnp.maximum(k - jnp.square(A).sum(-1), jitter(A.dtype, self.Z.shape[-2]) * k)
        return loc, jnp.broadcast_to(jnp.atleast_2d(conditional).T, loc.shape), spread

    def _whitened(self, rows: Array) -> Array:
        """A = k(x, Z) L^{-T}, shape (N, M), or (P, N, M) where outputs differ."""
        dtype = jnp.result_type(rows, self.whiten)
        cross = cross_covariance(self.kernels, rows, self.Z).astype(dtype)
        return matmul(cross, self.whiten.astype(dtype).mT)

    def _known(self, A: Array, rows: Array) -> tuple[Array, Array | None]:
        """Mean (N, P) without the mean function, and the spread (N, P) of a belief."""
        if isinstance(self.u, Belief):
            return project(self._rows(self.u.loc), A), self.u.spread(A)
        if isinstance(self.u, FunctionDraw):
            return self._draw(self.u, A, rows), None
        return project(self._rows(self.u), A), None

    def _draw(self, draw: FunctionDraw, A: Array, rows: Array) -> Array:
        """A prior draw from random functions, corrected so that it passes through u (Matheron's rule)."""
        u = self._rows(draw.u)
        feature_key, weight_key = jax.random.split(draw.key)
        weights = jax.random.normal(weight_key, (u.shape[0], draw.num_features), u.dtype)
        weights = weights / math.sqrt(draw.num_features)

        def prior_draw(x: Array) -> Array:
            return project(weights, features(self.kernels, feature_key, x, draw.num_features))

        at_inducing = _whiten_columns(self.whiten, prior_draw(self.Z))
        return prior_draw(rows) + project(u - at_inducing, A)

    def _rows(self, u: Array) -> Array:
        return u.reshape(-1, self.Z.shape[-2])

    def _mean(self, x: Array) -> Array:
        return mean_values(self.mean, x, self.outputs)

    def _unflatten(self, values: Array, x: Array) -> Array:
        """(N, P) of the flattened inputs to (..., P), or (...,) for a scalar function."""
        return values.reshape(x.shape[:-1] if self.outputs is None else (*x.shape[:-1], self.outputs))


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
        x = _inputs(x, None, noise)
        loc = mean_values(self.mean, x, self.outputs)
        loc = jnp.broadcast_to(loc, x.shape[:-1] + (() if self.outputs is None else (self.outputs,)))
        covariance = covariances(self.kernels, x) + _noise_covariance(noise, x.shape[-2], x.dtype)
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
        x = _inputs(x, None, None)
        residual = jnp.asarray(values, x.dtype) - mean_values(self.mean, x, self.outputs)
        whiten = inverse_cholesky(gram(self.kernels, x), "k(X, X) of an exact process")
        u = _whiten_columns(whiten, residual[:, None] if self.outputs is None else residual)
        return SparseFunction(self.kernels, x, whiten, u[0] if self.outputs is None else u, self.outputs, self.mean)
