r"""Random functions with inducing values: called on inputs, they return the distribution of their values there.

With :math:`L L^\top = k(Z, Z)`, :math:`A = k(x, Z) L^{-\top}` and whitened inducing values v,

.. math::
    p(f(x) \mid v) = N\bigl(m(x) + A v,\; k(x, x) - A A^\top\bigr), \qquad
    q(f(x)) = N\bigl(m(x) + A m,\; k(x, x) - A A^\top + A S A^\top\bigr)

where q(v) = N(m, S). Source: Salimbeni (2020), equations 1.28 and 1.29, whitened.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import require_finite, require_inputs, require_positive
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.belief_moments import ROWS
from numpyro_dgp.algebra.linalg import conditional_cholesky, matmul, solve_lower
from numpyro_dgp.algebra.row_blocks import in_blocks
from numpyro_dgp.algebra.tuning import KEPT_ROWS
from numpyro_dgp.kernels.per_output import Kernels
from numpyro_dgp.means import Mean
from numpyro_dgp.model.beliefs import Belief, FunctionDraw, project
from numpyro_dgp.model.function_values import FunctionValues, JointValues

__all__ = ["InducedFunction", "Moments", "checked_inputs", "mean_values", "noise_covariance", "noise_variance"]

# Mean, variance given u, what a belief adds, and the sum of these two where it was computed without them; each (N, P).
Moments = tuple[Array, Array, Array | None, Array | None]
_DATA_HINT = "drop, impute or mask the rows with missing values before building the model"


def checked_inputs(x: ArrayLike, dims: int | None, noise: ArrayLike | None) -> Array:
    """``x`` as an array, checked, with its noise."""
    require_inputs("f(x)", x, dims)
    require_finite("inputs of f(x)", x, _DATA_HINT)
    if noise is not None:
        require_positive("f(x)", "noise", noise)
    return jnp.asarray(x, jnp.result_type(x, float))


def noise_variance(noise: ArrayLike | None, dtype: jnp.dtype) -> Array:
    """Process noise as a variance."""
    return jnp.square(jnp.asarray(0.0 if noise is None else noise, dtype))


def noise_covariance(noise: ArrayLike | None, size: int, dtype: jnp.dtype) -> Array:
    """Process noise as a diagonal matrix (..., N, N)."""
    return noise_variance(noise, dtype)[..., None, None] * jnp.eye(size, dtype=dtype)


def mean_values(mean: Mean, x: Array, outputs: int | None) -> Array:
    """m(x) of shape (..., P), or (...,) for a scalar function."""
    values = mean(x)
    if values.shape[-1] not in (1, outputs or 1):
        raise ValueError(
            f"expected a mean function with {outputs or 1} output(s), got one with {values.shape[-1]}: "
            "dgp.means.pca(X, outputs) maps any number of inputs to any number of outputs"
        )
    return values[..., 0] if outputs is None else values


def _by_batch(flat: Array, x: Array) -> Array:
    """A of the flattened rows of x (..., N, D), as (..., P, N, M); P = 1 where outputs share it."""
    return jnp.moveaxis(flat.reshape(-1, *x.shape[:-1], flat.shape[-1]), 0, -3)


class InducedFunction:
    """A function represented by whitened values v; how they know the function is what the subclasses say.

    Args:
        kernels: one kernel, or one per output.
        u: what is known about the whitened values: an array, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
    """

    kernels: Kernels
    u: Array | Belief | FunctionDraw
    outputs: int | None
    mean: Mean

    @property
    def size(self) -> int:
        """M, the number of whitened values of one output."""
        raise NotImplementedError

    @property
    def dims(self) -> int:
        """D, the number of input columns."""
        raise NotImplementedError

    def _whitened(self, rows: Array) -> Array:
        """A, the covariance of f at rows (N, D) with v: shape (N, M), or (P, N, M) where outputs differ."""
        raise NotImplementedError

    def _covariances(self, x: Array, y: Array | None = None) -> Array:
        """k(x, x), or k(x, y), between rows (..., N, D): shape (..., P, N, N), P = 1 where outputs share it."""
        raise NotImplementedError

    def _fixed(self) -> Self:
        """The same function with hyperparameters that get no gradient."""
        raise NotImplementedError

    def _conditional_variance(self, rows: Array, A: Array) -> Array:
        """Variances of f at rows (N, D) given v: shape (N,), or (P, N) where outputs differ."""
        raise NotImplementedError

    def _prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        """Random functions weighted by ``weights`` (P, num): at rows (N, P), and their whitened values (P, M)."""
        raise NotImplementedError

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
        x = self._inputs(x, noise)
        loc, conditional, spread, total = self._moments(x.reshape(-1, x.shape[-1]))
        extra = noise_variance(noise, loc.dtype)
        values = FunctionValues(
            self._unflatten(loc, x) + self._mean(x),
            self._unflatten(conditional, x) + extra,
            None if spread is None else self._unflatten(spread, x),
            event_dim=0 if self.outputs is None else 1,
            total=None if total is None else self._unflatten(total, x) + extra,
        )
        values.function, values.inputs, values.noise = self, x, noise
        return values

    def joint(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> JointValues:
        """Values with their correlations over the last batch dimension of ``x`` (..., N, D).

        Returns:
            A distribution with batch shape ``x.shape[:-2]`` and event shape (N, P), or (N,).
        """
        x = self._inputs(x, noise)
        rows = x.reshape(-1, x.shape[-1])
        flat = self._whitened(rows)
        A = _by_batch(flat, x)
        loc = self._known(flat, rows)
        conditional = self._covariances(x) - A @ A.mT
        if isinstance(self.u, FunctionDraw):
            conditional = jnp.zeros_like(conditional)
        spread = None
        if isinstance(self.u, Belief):
            spread = jax.vmap(self.u.spread_covariance)(A.reshape(-1, *A.shape[-3:]))
            spread = spread.reshape(*x.shape[:-2], *spread.shape[1:])
        values = JointValues(
            self._unflatten(loc, x) + self._mean(x),
            conditional + noise_covariance(noise, x.shape[-2], loc.dtype),
            spread,
            event_dim=1 if self.outputs is None else 2,
        )
        values.function, values.inputs, values.noise = self, x, noise
        return values

    def draw(self, key: Array, x: Array) -> Array:
        r"""Draws of f(x), joint over the last batch dimension of ``x`` (..., K, D) only: shape (..., K, P).

        The inducing values are drawn once for every K inputs, :math:`m(x) + A v + c` with :math:`c = L \epsilon`,
        :math:`L L^\top = C = k(x, x) - A A^\top`: no K x K matrix depends on the belief, and none is per output where
        outputs share a kernel. The derivative by one input leaves the values at the others where they are: it is that
        of the interpolant :math:`C(x_k, x)\, C^{-1} c`. In expectation this is the derivative, because the law of the
        other values does not depend on :math:`x_k`.
        """
        belief_key, white_key = jax.random.split(key)
        stop = jax.lax.stop_gradient
        here, size, fixed = stop(x), self.outputs or 1, self._fixed()
        # The same numbers twice: derivatives of the first go to the parameters, of the second to the inputs.
        A, B = (_by_batch(f._whitened(a.reshape(-1, a.shape[-1])), a) for f, a in ((self, here), (fixed, x)))
        prior = self._covariances(here)
        C = prior - matmul(A, A.mT)
        L = conditional_cholesky(C, jnp.diagonal(prior, axis1=-2, axis2=-1))
        white = jax.random.normal(white_key, (*x.shape[:-2], size, x.shape[-2], 1), A.dtype)
        weights = solve_lower(stop(L), white, transpose=True)
        cross = fixed._covariances(x, here) - matmul(B, stop(A).mT)
        u: Any = self.u
        if isinstance(u, Belief):
            v = u.sample(belief_key, x.shape[:-2]).reshape(*x.shape[:-2], size, -1, 1)
        else:
            v = self._rows(u)[..., None]
        known = (A + B - stop(B)) @ v
        return (known + L @ white + (cross - stop(C)) @ weights)[..., 0].mT + self.mean(x)

    def _moments(self, rows: Array) -> Moments:
        """Moments at rows (N, D), the mean without the mean function."""
        if isinstance(self.u, FunctionDraw):
            loc = self._known(self._whitened(rows), rows)
            return loc, jnp.zeros_like(loc), None, None
        small = len(rows) * self.size * rows.dtype.itemsize <= KEPT_ROWS
        return in_blocks(self._row_moments(rows), rows, keep=ROWS if small else "")

    def _row_moments(self, rows: Array) -> Callable[[Array], Moments]:
        """:meth:`_moments` of one block of ``rows``; what does not depend on the rows is computed once."""
        spreading = self.u.spreading() if isinstance(self.u, Belief) else None

        def moments(rows: Array) -> Moments:
            A = self._whitened(rows)
            loc = self._known(A, rows)
            conditional = self._conditional_variance(rows, A)
            spread = None if spreading is None else spreading(A)
            return loc, jnp.broadcast_to(jnp.atleast_2d(conditional).T, loc.shape), spread, None

        return moments

    def _known(self, A: Array, rows: Array) -> Array:
        """Mean (N, P) without the mean function."""
        if isinstance(self.u, FunctionDraw):
            return self._draw(self.u, A, rows)
        return project(self._rows(self.u.loc if isinstance(self.u, Belief) else self.u), A)

    def _draw(self, draw: FunctionDraw, A: Array, rows: Array) -> Array:
        """A prior draw from random functions, corrected so that it passes through u (Matheron's rule)."""
        u = self._rows(draw.u)
        feature_key, weight_key = jax.random.split(draw.key)
        weights = jax.random.normal(weight_key, (u.shape[0], draw.num_features), u.dtype)
        at_rows, whitened = self._prior_draw(feature_key, weights / math.sqrt(draw.num_features), rows)
        return at_rows + project(u - whitened, A)

    def _inputs(self, x: ArrayLike, noise: ArrayLike | None) -> Array:
        return checked_inputs(x, self.dims, noise)

    def _rows(self, u: Array) -> Array:
        return u.reshape(-1, self.size)

    def _mean(self, x: Array) -> Array:
        return mean_values(self.mean, x, self.outputs)

    def _unflatten(self, values: Array, x: Array) -> Array:
        """(N, P) of the flattened inputs to (..., P), or (...,) for a scalar function."""
        return values.reshape(x.shape[:-1] if self.outputs is None else (*x.shape[:-1], self.outputs))
