r"""Random functions with inducing values: called on inputs, they return the distribution of their values there.

With :math:`L L^\top = k(Z, Z)`, :math:`A = k(x, Z) L^{-\top}` and whitened inducing values v,

.. math::
    p(f(x) \mid v) = N\bigl(m(x) + A v,\; k(x, x) - A A^\top\bigr), \qquad
    q(f(x)) = N\bigl(m(x) + A m,\; k(x, x) - A A^\top + A \Sigma A^\top\bigr)

where :math:`q(v) = N(m, \Sigma)`. Source: Salimbeni (2020), equations 1.28 and 1.29, whitened.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp

from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.functions.function_inputs import (
    checked_inputs,
    mean_values,
    noise_covariance,
    noise_variance,
    require_noise,
)
from numpyro_dgp.functions.function_values import FunctionValues, Origin, ProcessValues
from numpyro_dgp.functions.joint_values import Determined, DeterminedJoint, JointValues, KnownValues
from numpyro_dgp.functions.weights import FunctionDraw, Weights, matvec
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.per_output import Kernels, every, shared
from numpyro_dgp.math.belief_moments import ROWS
from numpyro_dgp.math.linalg import conditional_cholesky, matmul, rounding_scale, solve_lower
from numpyro_dgp.math.row_blocks import in_blocks
from numpyro_dgp.math.tuning import tuned
from numpyro_dgp.math.whitening import residual_variance
from numpyro_dgp.means import Mean

__all__ = ["FeatureFunction", "Moments", "PointValues", "RandomFunction", "Representation"]

# Mean, variance given u, variance that a belief adds, and the sum of the two if computed directly; each (N, P).
Moments = tuple[Array, Array, Array | None, Array | None]


def _by_batch(flat: Array, x: Array) -> Array:
    """A of the flattened rows of x (..., N, D), as (..., P, N, M); P = 1 where outputs share it."""
    return jnp.moveaxis(flat.reshape(-1, *x.shape[:-1], flat.shape[-1]), 0, -3)


@runtime_checkable
class RandomFunction(Protocol):
    r"""A Gaussian process :math:`f \sim GP(m, k)`, returned by ``dgp.gp`` and called on inputs.

    The distribution that it returns is :math:`p(f(x) \mid v)` where the value at its site is a draw of v,
    :math:`q(f(x)) = \int p(f(x) \mid v)\, q(v)\, dv` where it is a ``Belief`` q(v), and a single number where it is a
    ``FunctionDraw``. Guides, predictions and diagnostics use functions through these members only, and through those of
    :class:`~numpyro_dgp.extend.InducedFunction` where there is a v.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> f = dgp.gp("f", dgp.kernels.RBF(), None, outputs=2)
        >>> isinstance(f, dgp.extend.RandomFunction), f.site, f.joint(jnp.zeros((5, 1))).event_shape
        (True, None, (5, 2))
    """

    @property
    def site(self) -> str | None:
        """Name of the sample site that holds v; ``None`` for a process without v, which is drawn at all inputs."""

    @property
    def outputs(self) -> int | None:
        """P, or ``None`` for a scalar function."""

    def __call__(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> Any:
        """Values at inputs x (..., D): of an exact process jointly, otherwise each on its own."""

    def joint(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> ProcessValues:
        """Values with their correlations over the last batch dimension of x (..., N, D)."""

    def given(self, x: ArrayLike, values: ArrayLike, noise: ArrayLike | None = None) -> RandomFunction:
        """The function conditioned on ``values`` at ``x``, which have ``noise`` of this standard deviation; the
        function itself where v already determines it."""


class Representation(Protocol):
    r"""How a function is represented: the argument ``inducing`` of ``dgp.gp(name, kernel, inducing)``.

    It opens the site ``name`` of whitened values :math:`v \sim N(0, I)`, M for each output, by
    :func:`~numpyro_dgp.extend.whitened_values`, and returns a function that depends on v through features
    :math:`A(x) = \operatorname{Cov}[f(x), v]`:

    .. math:: p(f(x) \mid v) = N\bigl(m(x) + A(x)\, v,\; k(x, x) - A(x) A(x)^\top\bigr) .

    ``dgp.Points`` and ``dgp.Grid`` are representations; ``None`` gives an exact process, which opens no site. A
    new representation is a class with this method and a subclass of
    :class:`~numpyro_dgp.extend.InducedFunction` (``docs/extending.md``).

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro_dgp as dgp
        >>> points = dgp.Points(jnp.linspace(0, 1, 4)[:, None])
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = points.open("f", dgp.kernels.RBF(), None, dgp.means.ZeroMean())
        >>> isinstance(f, dgp.extend.RandomFunction), f.site
        (True, 'f')
    """

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> RandomFunction:
        """Open the site of layer ``name`` and return its random function.

        Args:
            name: of the layer.
            kernels: k, one for all outputs or one for each.
            outputs: P, or ``None`` for a scalar function.
            mean: the mean function m.
        """


class PointValues(NamedTuple):
    """One output that is represented by whitened values at points: its kernel, the points (M, D), and the inverse
    Cholesky factor of the kernel between them (M, M)."""

    kernel: Kernel
    Z: Array
    whiten: Array

    def __repr__(self) -> str:
        return brief(self)


class FeatureFunction:
    """A random function that is represented by whitened values v through its features.

    Here is what follows from the features: values at inputs, each on its own or jointly, under any belief about v, and
    draws. :class:`~numpyro_dgp.extend.InducedFunction` lists what a subclass defines.
    """

    kernels: Kernels
    v: Weights
    outputs: int | None
    mean: Mean
    site: str | None

    @property
    def size(self) -> int:
        """M, the number of whitened values of one output."""
        raise NotImplementedError

    @property
    def dims(self) -> int:
        """D, the number of input columns."""
        raise NotImplementedError

    @property
    def inducing_inputs(self) -> Array | None:
        """The inducing inputs (M, D), or (P, M, D), for figures; ``None`` where v are not values at inputs."""
        return None

    @property
    def outputs_differ(self) -> bool:
        """Whether outputs have different features."""
        return not shared(self.kernels)

    @property
    def of_values(self) -> FeatureFunction:
        """The function that this is a functional of, such as a slope; the function itself."""
        return self

    def applied(self, values: Callable[[Array], Array], rows: Array) -> Array:
        """The functionals, at these rows, of ``values``, which treats the inputs of :attr:`of_values` one by one."""
        return values(rows)

    def at_points(self, output: int | None) -> PointValues | None:
        """An output as a function represented by its values at points; ``None`` for other representations.

        Bounds that integrate uncertain inputs in closed form need it.

        Args:
            output: its index, or ``None`` where all have the same.
        """
        return None

    @property
    def dense(self) -> bool:
        """Whether closed forms at known inputs may build matrices (M, M) from its features: it is on ``dgp.Points``."""
        return self.at_points(None) is not None

    @property
    def determined(self) -> bool:
        """Whether v determines the function: it is a finite basis expansion with weights v, and k = A A^T."""
        return False

    @property
    def blocked(self) -> bool:
        """Whether v falls into blocks, one for each of ``groups``, such that every row depends on one."""
        return False

    def blocks(self, rows: Array) -> tuple[Array, Array]:
        """Where v is ``blocked``, the features of rows (N, D) on the block that they depend on (N, M), and its number
        (N,)."""
        raise NotImplementedError

    def features(self, rows: Array) -> Array:
        """A, the covariance of f at rows (N, D) with v: shape (N, M), or (P, N, M) where outputs differ."""
        raise NotImplementedError

    def prior_variance(self, rows: Array) -> Array:
        """k(x, x) at rows (N, D): shape (N,), or (P, N) where outputs differ."""
        raise NotImplementedError

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        """k(x, x), or k(x, y), between rows (..., N, D): shape (..., P, N, N), P = 1 where outputs share it."""
        raise NotImplementedError

    def conditional_variance(self, rows: Array, A: Array) -> Array:
        """Diagonal of k(x, x) - A A^T, variances of f at rows (N, D) given v: (N,), or (P, N) where outputs differ."""
        if self.determined:
            return jnp.zeros_like(A[..., 0])
        return residual_variance(self.prior_variance(rows), jnp.square(A).sum(-1), self.size)

    def held(self) -> Self:
        """The same function with ``stop_gradient`` applied to its hyperparameters."""
        raise NotImplementedError

    def prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        """Random functions weighted by ``weights`` (P, num): at rows (N, P), and their whitened values (P, M).

        Raises:
            ValueError: a representation without it.
        """
        raise ValueError(
            f"{type(self).__name__} has no prior_draw, which draws of whole functions need: define it, or draw at "
            "fixed inputs with f.joint(x)"
        )

    def given(self, x: ArrayLike, values: ArrayLike, noise: ArrayLike | None = None) -> Self:
        """The function itself: given v, it is independent of other values of it."""
        return self

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
        x = self.checked(x, noise)
        require_noise(noise, self.outputs, x.shape[:-1])
        loc, conditional, belief_variance, total = self.moments(x.reshape(-1, x.shape[-1]))
        extra = noise_variance(noise, loc.dtype)
        return (Determined if self.determined and noise is None else FunctionValues)(
            self._unflatten(loc, x) + self.mean_at(x),
            self._unflatten(conditional, x) + extra,
            None if belief_variance is None else self._unflatten(belief_variance, x),
            event_dim=0 if self.outputs is None else 1,
            total=None if total is None else self._unflatten(total, x) + extra,
            origin=Origin(self, x, noise),
        )

    def joint(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> JointValues:
        """Values with their correlations over the last batch dimension of ``x`` (..., N, D).

        Returns:
            A distribution with batch shape ``x.shape[:-2]`` and event shape (N, P), or (N,).
        """
        x = self.checked(x, noise)
        require_noise(noise, self.outputs)
        rows = x.reshape(-1, x.shape[-1])
        flat = self.features(rows)
        A = _by_batch(flat, x)
        loc = self._known(flat, rows)  # A m
        prior = self.covariance(x)
        whole = self.v.whole is not None
        conditional = jnp.zeros_like(prior) if whole or self.determined else prior - matmul(A, A.mT)  # k(x, x) - A A'
        # Rounding of that difference is relative to k(x, x), not to the difference.
        scale = rounding_scale(jnp.diagonal(prior, axis1=-2, axis2=-1), noise_variance(noise, loc.dtype))
        belief_covariance = jax.vmap(self.v.feature_covariance)(A.reshape(-1, *A.shape[-3:]))  # A Sigma A'
        if belief_covariance is not None:
            belief_covariance = belief_covariance.reshape(*x.shape[:-2], *belief_covariance.shape[1:])
        determined = DeterminedJoint if self.determined and noise is None else JointValues
        return (KnownValues if whole else determined)(
            self._unflatten(loc, x) + self.mean_at(x),
            conditional + noise_covariance(noise, x.shape[-2], loc.dtype),
            belief_covariance,
            event_dim=1 if self.outputs is None else 2,
            scale=scale,
            origin=Origin(self, x, noise),
        )

    def draw(self, key: Array, x: Array) -> Array:
        r"""Draws of f(x), joint over the last batch dimension of ``x`` (..., K, D) only: shape (..., K, P).

        The inducing values are drawn once for every K inputs, :math:`m(x) + A v + F \epsilon` with
        :math:`F F^\top = k(x, x) - A A^\top`: no K x K matrix depends on the belief, and none is per output where
        outputs share a kernel. The derivative by one input leaves the values at the others where they are: it is that
        of the interpolant :math:`[k(x_k, x) - A(x_k) A(x)^\top] (F F^\top)^{-1} F \epsilon`. In expectation this is
        the derivative, because the law of the other values does not depend on :math:`x_k`.
        """
        belief_key, white_key = jax.random.split(key)
        stop = jax.lax.stop_gradient
        here, size, fixed = stop(x), self.outputs or 1, self.held()
        v = self.v.sample(belief_key, x.shape[:-2]).reshape(*x.shape[:-2], size, -1, 1)  # (..., P, M, 1)
        if self.determined:
            known = matmul(_by_batch(self.features(x.reshape(-1, x.shape[-1])), x), v)  # A v
            return known[..., 0].mT + self.mean(x)
        # The same numbers twice: the first is differentiated by the parameters, the second by the inputs.
        A, B = (_by_batch(f.features(a.reshape(-1, a.shape[-1])), a) for f, a in ((self, here), (fixed, x)))
        prior = self.covariance(here)
        conditional = prior - matmul(A, A.mT)
        F = conditional_cholesky(conditional, jnp.diagonal(prior, axis1=-2, axis2=-1))  # F F' = k(x, x) - A A'
        white = jax.random.normal(white_key, (*x.shape[:-2], size, x.shape[-2], 1), A.dtype)
        weights = solve_lower(stop(F), white, transpose=True)  # (F F')^-1 F eps = F^-T eps
        # C(x_k, x) by its first input alone: its term below is zero, with the slope by x_k.
        cross = fixed.covariance(x, here) - matmul(B, stop(A).mT)
        known = matmul(A + B - stop(B), v)  # the value A v, with both slopes
        return (known + matmul(F, white) + matmul(cross - stop(conditional), weights))[..., 0].mT + self.mean(x)

    def moments(self, rows: Array) -> Moments:
        """Moments at rows (N, D), the mean without the mean function."""
        if self.v.whole is not None:
            loc = self._known(self.features(rows), rows)
            return loc, jnp.zeros_like(loc), None, None
        keep = ROWS if tuned().keeps_rows(len(rows), self.size, rows.dtype) else ""
        return in_blocks(self.block_moments(rows), rows, keep=keep, outputs=self.outputs or 1, size=self.size)

    def block_moments(self, rows: Array) -> Callable[[Array], Moments]:
        """:meth:`moments` of one block of ``rows``; what does not depend on the rows is computed once."""
        feature_variance = self.v.feature_variances()

        def moments(rows: Array) -> Moments:
            A = self.features(rows)
            loc = self._known(A, rows)
            conditional = self.conditional_variance(rows, A)
            belief_variance = None if feature_variance is None else feature_variance(A)
            return loc, jnp.broadcast_to(jnp.atleast_2d(conditional).T, loc.shape), belief_variance, None

        return moments

    def _known(self, A: Array, rows: Array) -> Array:
        """Mean (N, P) without the mean function."""
        if self.v.whole is not None:
            return self._draw(self.v.whole, lambda v: matvec(v, A), rows)
        return matvec(self.by_output(self.v.loc), A)  # A m

    def _draw(self, draw: FunctionDraw, through: Callable[[Array], Array], rows: Array) -> Array:
        """A prior draw from random functions, corrected so that it passes through v (Matheron's rule).

        Args:
            draw: the draw.
            through: the linear map from whitened values (P, M) to the function at the rows (N, P).
            rows: (N, D).
        """
        v = self.by_output(draw.loc)
        if self.determined:
            return through(v)
        feature_key, weight_key = jax.random.split(draw.key)
        weights = jax.random.normal(weight_key, (v.shape[0], draw.num_features), v.dtype)
        # g = sum_i w_i phi_i / sqrt(num), w_i ~ N(0, 1)
        at_rows, whitened = self.prior_draw(feature_key, weights / math.sqrt(draw.num_features), rows)
        # f(x) = g(x) + A (v - v_g), where v_g are the whitened values of the prior draw g.
        return at_rows + through(v - whitened)

    def checked(self, x: ArrayLike, noise: ArrayLike | None = None) -> Array:
        """Inputs as an array, checked, with their noise."""
        found = checked_inputs(x, self.dims, noise)
        for kernel in every(self.kernels):
            kernel.check_inputs(found)
        return found

    def by_output(self, v: Array) -> Array:
        """Whitened values as (P, M), P = 1 for a scalar function."""
        return v.reshape(-1, self.size)

    def mean_at(self, x: Array) -> Array:
        """m(x) of shape (..., P), or (...,) for a scalar function."""
        return mean_values(self.mean, x, self.outputs)

    def _unflatten(self, values: Array, x: Array) -> Array:
        """(N, P) of the flattened inputs to (..., P), or (...,) for a scalar function."""
        return values.reshape(x.shape[:-1] if self.outputs is None else (*x.shape[:-1], self.outputs))
