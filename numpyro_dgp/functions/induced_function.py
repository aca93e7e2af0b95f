r"""The base class of random functions with inducing values, and linear functionals of such functions: slopes and sums.

For a linear functional L, such as a derivative or an integral, :math:`L f` is a random function with the same whitened
inducing values v. Its features and covariances are functionals of those of f:

.. math:: p(L f \mid v) = N\bigl(L m + (L A)\, v,\; L L' k - (L A)(L A)^\top\bigr), \quad A = \operatorname{Cov}[f, v] .
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_finite
from numpyro_dgp._data import as_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.functions.function_inputs import checked_inputs, mean_values
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.functionals import (
    DirectionalSlope,
    LinearFunctional,
    Slope,
    WeightedSum,
    between,
    smoothness,
)
from numpyro_dgp.functions.joint_values import JointValues
from numpyro_dgp.functions.random_function import FeatureFunction
from numpyro_dgp.functions.weights import Weights
from numpyro_dgp.kernels.per_output import Kernels, every, shared
from numpyro_dgp.math.linalg import set_diagonal
from numpyro_dgp.means import Mean

__all__ = ["FunctionalOf", "InducedFunction"]


class InducedFunction(FeatureFunction):
    r"""A random function that is represented by whitened values v; subclasses define its features.

    A subclass is a frozen pytree (``_typing.pytree``) with the fields below that defines five members: ``size``,
    ``dims``, :meth:`features`, :meth:`prior_variance` and :meth:`covariance`. Importance weights also need
    :meth:`held`, draws of whole functions :meth:`prior_draw`, new data :meth:`whitened_values_of`.
    If v determines the function, set ``determined``; no :meth:`prior_draw` is needed.
    :meth:`conditional_variance` and :meth:`block_moments` can be overridden by what is more accurate or faster.
    :meth:`grad` and :meth:`linear` need features and covariances that JAX can differentiate by the inputs.

    Args:
        kernels: one kernel, or one per output.
        v: the weights: known, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of v.

    Raises:
        ValueError: where it is called, inputs of another width, NaN or infinite inputs, noise that is not positive.
    """

    __repr__ = brief

    @property
    def slopes_taken(self) -> tuple[int | None, ...]:
        """The columns of the slopes that this function already is of another one, ``None`` for other directions."""
        return ()

    def whitened_values_of(self, other: InducedFunction) -> tuple[Array, Array]:
        """The mean (P, M) and covariances (P, M, M) of the whitened values of ``other``, an earlier fit of it, given
        this function.

        Raises:
            ValueError: a representation without it.
        """
        raise ValueError(
            f"{type(self).__name__} cannot tell the whitened values of an earlier fit, which dgp.update needs: give "
            f"the layer {self.site!r} dgp.Points(Z)"
        )

    def summands(self) -> tuple[InducedFunction, ...]:
        """The functions that a function with a sum of kernels is the sum of.

        Raises:
            ValueError: a representation without them.
        """
        raise expected(
            "a layer on dgp.Points",
            f"{type(self).__name__} at site {self.site!r}",
            "open it on dgp.Points(Z), or make each part a layer of its own",
            at="f.summands",
        )

    def grad(
        self,
        x: ArrayLike,
        column: int | None = None,
        *,
        direction: ArrayLike | None = None,
        noise: ArrayLike | None = None,
        joint: bool = False,
    ) -> Any:
        r"""Slopes along a column of the inputs, :math:`\partial f(x) / \partial x_d`, or a direction.

        They go wherever values f(x) do: under a ``Likelihood``, as observations of slopes, or into a hidden layer.
        ``f.grad(x).function`` is the derivative itself, a random function of which further slopes can be taken.

        Given v, values and slopes at the same input are correlated. Likelihoods of single values and slopes do not need
        that; hidden values ``f(x)`` and ``f.grad(x)`` of one program are drawn independently given v.

        Args:
            x: inputs (..., D).
            column: d, counted from 0; may be left out where D = 1.
            direction: in place of a column, e of the slopes :math:`e^\top \nabla f(x)`, the same for all inputs (D,) or
                one for each (..., D). Its length counts: a vector of length one gives slopes per unit of the inputs.
            noise: standard deviation of Gaussian process noise, a number or one per output.
            joint: with their correlations over the last batch dimension of ``x``, as :meth:`joint`.

        Returns:
            A distribution with batch shape ``x.shape[:-1]`` and event shape (P,), or () for a scalar function.

        Raises:
            ValueError: a column that the inputs do not have, a direction of another shape, both, or a kernel whose
                functions have no slopes; otherwise as for values.

        Example:
            >>> import jax.numpy as jnp
            >>> import numpyro
            >>> import numpyro_dgp as dgp
            >>> with numpyro.handlers.seed(rng_seed=0):
            ...     f = dgp.gp("f", dgp.kernels.RBF(2.0, 0.5), dgp.Points(jnp.zeros((1, 1))))
            >>> print(f.grad(jnp.array([[0.0], [9.0]])).variance)  # variance / lengthscale^2
            [8. 8.]
            >>> with numpyro.handlers.seed(rng_seed=0):
            ...     g = dgp.gp("g", dgp.kernels.RBF(1.0, jnp.array([1.0, 0.5])), dgp.Points(jnp.zeros((1, 2))))
            >>> slope = g.grad(jnp.array([[9.0, 0.0]]), direction=jnp.array([0.6, 0.8]))
            >>> print(f"{slope.variance[0]:.2f}")  # 0.36 + 4 * 0.64
            2.92

        Source: Rasmussen and Williams (2006), section 9.4.
        """
        if direction is not None:
            return self._directional(x, column, direction, noise, joint)
        if column is None and self.dims == 1:
            column = 0
        if isinstance(column, bool) or not isinstance(column, int | np.integer) or not (0 <= column < self.dims):
            raise expected(
                f"the column of the inputs that the slopes are along, from 0 to {self.dims - 1}",
                repr(column),
                "f.grad(x, 0) is the derivative by the first column, f.grad(x, direction=e) that along e",
                at="f.grad",
            )
        self._require_slopes(int(column))
        return self._functional(Slope(int(column)), self.checked(x), noise, joint)

    def _directional(
        self, x: ArrayLike, column: int | None, direction: ArrayLike, noise: ArrayLike | None, joint: bool
    ) -> Any:
        expect(
            column is None,
            "a column or direction",
            f"column {column!r} and a direction too",
            "leave one out",
            at="f.grad",
        )
        x, e = self.checked(x), as_numbers("direction of f.grad", direction)
        if np.shape(e) not in (x.shape[-1:], x.shape):
            raise expected(
                f"a direction of shape {x.shape[-1:]}, or {x.shape} with one for each input",
                np.shape(e),
                "the gradient has one call for each column, f.grad(x, 0), f.grad(x, 1), ...",
                at="f.grad",
            )
        require_finite("direction of f.grad", e, "check how it was computed")
        self._require_slopes(None)
        rows = jnp.concatenate([x, jnp.broadcast_to(jnp.asarray(e, x.dtype), x.shape)], -1)  # (x, e) (..., 2 D)
        return self._functional(DirectionalSlope(), rows, noise, joint)

    def linear(self, x: ArrayLike, A: ArrayLike, *, noise: ArrayLike | None = None, joint: bool = False) -> Any:
        r"""Weighted sums of values, :math:`\sum_q A_{kq} f(x_q)`, as function values: averages over bins, integrals.

        They go wherever values f(x) do. One row of A is one datum: rows may be subsampled by a plate, the points stay.
        The covariances of all Q points are computed in every call, Q^2 numbers.

        Args:
            x: the points of all sums (Q, D).
            A: weights (..., Q), for a plate of K sums (K, Q).
            noise: standard deviation of Gaussian process noise, a number or one per output.
            joint: with their correlations over the last batch dimension of ``A``, as :meth:`joint`.

        Returns:
            A distribution with batch shape ``A.shape[:-1]`` and event shape (P,), or () for a scalar function.

        Raises:
            ValueError: points or weights of another shape; otherwise as for values.

        Example:
            >>> import jax.numpy as jnp
            >>> import numpyro
            >>> import numpyro_dgp as dgp
            >>> with numpyro.handlers.seed(rng_seed=0):
            ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.zeros((1, 1))))
            >>> x = jnp.array([[5.0], [5.0], [9.0]])
            >>> print(f.linear(x, jnp.array([[0.5, 0.5, 0.0], [1.0, 0.0, 1.0]])).variance.round(2))
            [1. 2.]
        """
        x = self.checked(x)
        expect(x.ndim == 2, "all points x (Q, D)", x.shape, "stack them; a row of A weights its own", at="f.linear")
        expect(
            np.ndim(A) >= 2 and np.shape(A)[-1] == len(x),
            f"weights A of shape (K, {len(x)}), one row per sum, one column per point of x",
            np.shape(A),
            "a single sum is A[None]",
            at="f.linear",
        )
        A = as_numbers("weights of f.linear", A)
        require_finite("weights of f.linear", A, "check how they were computed")
        return self._functional(WeightedSum(x), A, noise, joint)

    def _functional(
        self, functional: LinearFunctional, rows: ArrayLike, noise: ArrayLike | None, joint: bool
    ) -> FunctionValues | JointValues:
        of = FunctionalOf(dataclasses.replace(self, v=None), functional, self.v)  # type: ignore[type-var]
        return of.joint(rows, noise=noise) if joint else of(rows, noise=noise)

    def _require_slopes(self, column: int | None) -> None:
        """Raise if functions of the kernel have too few derivatives for a slope."""
        columns = (*self.slopes_taken, column)  # one derivative for each slope that is taken
        for kernel in every(self.kernels):
            least = min((smoothness(kernel, d) for d in columns), key=lambda found: found.derivatives)
            if least.derivatives < len(columns):
                raise expected(
                    f"a kernel whose functions have {len(columns)} derivative(s)",
                    f"{least.part}, whose functions have {least.derivatives}",
                    "Matern32 has one, Matern52 two, RBF any number",
                    at="f.grad",
                )


@pytree
class FunctionalOf(InducedFunction):
    """A linear functional of a random function: a random function with the same whitened values v.

    Args:
        base: the random function, without its v.
        functional: L, whose rows are the inputs of this function.
        v: the weights.
    """

    base: Any
    functional: LinearFunctional
    v: Weights

    @property
    def function(self) -> InducedFunction:
        """The random function itself."""
        return dataclasses.replace(self.base, v=self.v)

    @property
    def kernels(self) -> Kernels:  # type: ignore[override]
        """Those of the function."""
        return self.base.kernels

    @property
    def outputs(self) -> int | None:  # type: ignore[override]
        return self.base.outputs

    @property
    def mean(self) -> Mean:  # type: ignore[override]
        return MeanOf(self.base.mean, self.functional, self.outputs or 1)

    @property
    def site(self) -> str | None:  # type: ignore[override]
        return self.base.site

    @property
    def slopes_taken(self) -> tuple[int | None, ...]:
        return (*self.base.slopes_taken, *self.functional.columns)

    @property
    def of_values(self) -> FeatureFunction:
        return self.base.of_values

    def applied(self, values: Callable[[Array], Array], rows: Array) -> Array:
        return self.functional(lambda inputs: self.base.applied(values, inputs), rows)

    @property
    def size(self) -> int:
        return self.base.size

    @property
    def dims(self) -> int:
        return self.functional.width(self.base.dims)

    @property
    def outputs_differ(self) -> bool:
        return self.base.outputs_differ

    @property
    def dense(self) -> bool:
        return self.base.dense and not self.base.blocked

    @property
    def determined(self) -> bool:
        return self.base.determined

    def features(self, rows: Array) -> Array:
        return self.functional(self.base.features, rows)  # L A

    def prior_variance(self, rows: Array) -> Array:
        variances = jax.vmap(lambda row: self._between(row[None], row[None])[:, 0, 0], out_axes=1)(rows)
        return variances[0] if shared(self.kernels) else variances

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        flat = [a.reshape(-1, *a.shape[-2:]) for a in (x, x if y is None else y)]
        found = jax.vmap(self._between)(*flat)
        found = found.reshape(*x.shape[:-2], *found.shape[1:])
        if y is not None:
            return found
        variances = jnp.atleast_2d(self.prior_variance(x.reshape(-1, x.shape[-1])))
        # The diagonal has the variances of prior_variance to the last digit.
        return set_diagonal(found, jnp.moveaxis(variances.reshape(-1, *x.shape[:-1]), 0, -2))

    def _between(self, x: Array, y: Array) -> Array:
        return between(self.functional, self.base.covariance, x, y)  # L_x L_y k

    def held(self) -> FunctionalOf:
        function, functional = self.base.held(), jax.lax.stop_gradient(self.functional)
        return dataclasses.replace(self, base=function, functional=functional)

    def prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        def values(x: Array) -> Array:
            return self.base.prior_draw(key, weights, x)[0]

        # the same functions: v is that of any rows
        _, whitened = self.base.prior_draw(key, weights, self.functional.inputs(rows))
        return self.functional(values, rows), whitened

    def checked(self, x: ArrayLike, noise: ArrayLike | None = None) -> Array:
        return checked_inputs(x, self.dims, noise)


@pytree
class MeanOf(Mean):
    """A linear functional of a mean function, for all outputs."""

    mean: Mean
    functional: LinearFunctional
    outputs: int = static()

    def __call__(self, X: Array) -> Array:
        def values(x: Array) -> Array:
            return jnp.broadcast_to(mean_values(self.mean, x, self.outputs), (*x.shape[:-1], self.outputs))

        return self.functional(values, X)  # L m
