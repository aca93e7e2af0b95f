"""The base class of acquisitions of a posterior: a fixed key, joint moments at points, and draws."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_finite, require_key
from numpyro_dgp._data import as_floats, as_numbers
from numpyro_dgp._fields import Checked, count, finite, nonnegative
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.densities import JointMixture, lower_factors
from numpyro_dgp.math.quadrature import shifted_normals, sobol_points

__all__ = [
    "PosteriorAcquisition",
    "WithDraws",
    "geometric_mean_variance",
    "require_function_of_points",
    "standard_deviation",
    "value",
    "rows_of",
]


def rows_of(name: str, value: ArrayLike) -> Array:
    """Points (R, D) as an array, checked."""
    rows = as_numbers(name, value)
    expect(
        np.ndim(rows) == 2 and 0 not in np.shape(rows),
        f"{name} of shape (R, D), one point a row",
        np.shape(rows),
        "a single column of inputs is x[:, None]",
    )
    require_finite(name, rows, "drop rows with missing values")
    return as_floats(name, rows)


def require_function_of_points(found: Any) -> Any:
    """What the acquisition of a search returns; raise unless it is a function."""
    expect(
        callable(found),
        "acquisition(posterior, seen, key) to return a function of points x (q, D)",
        type(found).__name__,
        "lambda posterior, seen, key: dgp.design.LogExpectedImprovement(posterior, key, best=seen.best)",
    )
    return found


def value(**options: Any) -> Any:
    """A field that holds one value of the function, in its units."""
    return finite(advice="a number in the units of the function, such as y.min()", **options)


def standard_deviation(default: float = 0.0, **options: Any) -> Any:
    """A field that holds a standard deviation, which may be zero."""
    return nonnegative(default, "a standard deviation in the units of the function", **options)


def geometric_mean_variance(covariance: Array) -> Array:
    """The determinant of a covariance (q, q) to the power 1/q: of one number, its variance."""
    q = len(covariance)
    if q == 1:
        return covariance[0, 0]
    L = lower_factors(covariance, jnp.zeros_like(covariance[0]))
    return jnp.exp(2 * jnp.log(jnp.diagonal(L)).mean())  # |C| = prod L_jj^2


@dataclasses.dataclass(frozen=True, eq=False)
class PosteriorAcquisition(Checked):
    """An acquisition of a posterior: a pure function of points x (q, D), larger is better.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes all random numbers.
        output: which of the P outputs of the function.
    """

    posterior: Any
    key: Array
    output: int | None = dataclasses.field(default=None, kw_only=True)

    __repr__ = brief

    def __post_init__(self) -> None:
        if not callable(getattr(self.posterior, self._method, None)):
            raise expected(
                f"a posterior with a method {self._method}",
                type(self.posterior).__name__,
                "dgp.Posterior(model, guide, params)",
            )
        require_key(self.key)
        if self.output is not None and (isinstance(self.output, bool) or not isinstance(self.output, int)):
            raise expected("output to be the number of a column", repr(self.output), "0")
        super().__post_init__()

    @property
    def _method(self) -> str:
        """The method of the posterior that it needs."""
        return "predict_jointly"

    def points(self, x: ArrayLike) -> Array:
        """Points (q, D) as an array.

        Raises:
            ValueError: another shape.
        """
        expect(
            np.ndim(x) == 2 and np.shape(x)[0],
            "points x of shape (q, D)",
            np.shape(x),
            ("a single point is x[None], and several batches of points (K, q, D) go through jax.vmap(acquisition)"),
        )
        return as_floats("points x", x)

    def jointly(self, x: ArrayLike, others: Array | None, args: Any, kwargs: Any) -> JointMixture:
        """Joint moments of one output at points x (q, D), with ``others`` (R, D) after them.

        Raises:
            ValueError: points of another shape, or an output that the function does not have.
        """
        rows = self.points(x)
        if others is not None:
            if others.shape[1] != rows.shape[1]:
                raise expected(
                    f"points x with the {others.shape[1]} columns of the points that it was made with",
                    rows.shape,
                    "one point a row, its inputs as columns",
                )
            rows = jnp.concatenate([rows, others.astype(rows.dtype)])
        found = self.posterior.predict_jointly(self.key, rows, *args, **kwargs)
        if found.means.ndim == 2 and self.output is None:
            return JointMixture(*found)
        column = self.column(found.means)
        return JointMixture(found.means[..., column], found.covariances[:, column], found.prior_covariances[:, column])

    def column(self, values: Array) -> int:
        """Which of the outputs of values (S, N, P) it is of.

        Raises:
            ValueError: several outputs and none chosen, or one that there is not.
        """
        outputs = values.shape[-1] if values.ndim == 3 else 0
        if self.output is None and outputs == 1:
            return 0
        if self.output is None or not 0 <= self.output < outputs:
            what = f"a function of {outputs} outputs" if outputs else "a scalar function"
            advice = f"output= a number from 0 to {outputs - 1}" if outputs else "leave output out"
            raise expected("one output", f"{what} and output={self.output}", advice)
        return self.output


@dataclasses.dataclass(frozen=True, eq=False)
class WithDraws(PosteriorAcquisition):
    """One that takes draws for batches of points.

    Args:
        num_draws: quasi-random draws of each of the S Gaussians, a power of two.
    """

    num_draws: int = count(128, kw_only=True)

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_draws & (self.num_draws - 1):
            raise expected(
                "num_draws, a power of two", self.num_draws, "Sobol's points cover the cube evenly at 64, 128, 256, ..."
            )

    def white(self, number: int, dims: int, dtype: Any) -> Array:
        """Standard normal numbers (number, R, dims), the same in every call and precision; R = 1 if dims is 0."""
        if not dims:
            return jnp.zeros((number, 1, 0), dtype)
        points = jnp.asarray(sobol_points(self.num_draws, 0, dims), dtype)
        # One shift for each of the Gaussians, in single precision so that both precisions have the same.
        shift = jax.random.uniform(jax.random.fold_in(self.key, 1), (number, 1, dims), jnp.float32)
        return shifted_normals(points, shift.astype(dtype))
