"""Exact processes: values at all inputs at once, no inducing values."""

from __future__ import annotations

from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_finite
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import ArrayLike, pytree, static
from numpyro_dgp.functions.function_inputs import checked_inputs, mean_values, noise_covariance, require_noise
from numpyro_dgp.functions.function_values import Origin
from numpyro_dgp.functions.joint_values import JointValues
from numpyro_dgp.functions.points import SparseFunction, whiten_columns
from numpyro_dgp.functions.weights import KnownWeights
from numpyro_dgp.kernels.per_output import Kernels, covariances, every, gram, shared
from numpyro_dgp.math.whitening import inverse_cholesky
from numpyro_dgp.means import Mean

__all__ = ["Exact", "ExactFunction"]


class Exact:
    """The representation behind ``dgp.gp(..., inducing=None)``: an exact process."""

    __repr__ = brief

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> ExactFunction:
        """The random function of layer ``name``; no site is opened."""
        return ExactFunction(kernels, outputs, mean)


@pytree
class ExactFunction:
    """An exact Gaussian process, ``dgp.gp(..., inducing=None)``: it opens no site.

    Its values are drawn at all inputs at once, outside the data plate:
    ``v = numpyro.sample("v", f(X))``. Exact regression is ``numpyro.sample("y", f(X, noise=s), obs=y)``.
    """

    kernels: Kernels
    outputs: int | None = static()
    mean: Mean

    @property
    def site(self) -> None:
        """Always ``None``: an exact process opens no site."""
        return None

    def __call__(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> JointValues:
        """Values at the inputs ``x`` (..., N, D) jointly: event shape (N, P), or (N,).

        Args:
            x: inputs (..., N, D).
            noise: standard deviation of Gaussian process noise, a number or one per output.

        Raises:
            ValueError: NaN or infinite inputs, or noise that is not positive.
        """
        x = checked_inputs(x, None, noise)
        require_noise(noise, self.outputs)
        loc = mean_values(self.mean, x, self.outputs)
        loc = jnp.broadcast_to(loc, x.shape[:-1] + (() if self.outputs is None else (self.outputs,)))
        covariance = covariances(self.kernels, x) + noise_covariance(noise, x.shape[-2], x.dtype)  # k(x, x) + s^2 I
        event_dim = 1 if self.outputs is None else 2
        return JointValues(loc, covariance, event_dim=event_dim, origin=Origin(self, x, noise))

    joint = __call__

    def grad(self, x: ArrayLike, column: int | None = None, **options: Any) -> NoReturn:
        """Not available: slopes of an exact process depend on all of its values.

        Raises:
            ValueError: always.
        """
        _refuse("grad", "grad(x)")

    def linear(self, x: ArrayLike, A: ArrayLike, **options: Any) -> NoReturn:
        """Not available: sums of an exact process depend on all of its values.

        Raises:
            ValueError: always.
        """
        _refuse("linear", "linear(x, A)")

    def given(self, x: ArrayLike, values: ArrayLike, noise: ArrayLike | None = None) -> SparseFunction:
        """The process conditioned on ``values`` at ``x``, as :meth:`condition`."""
        return self.condition(x, values, noise=noise)

    def condition(self, x: ArrayLike, values: ArrayLike, *, noise: ArrayLike | None = None) -> SparseFunction:
        r"""The process given its values at ``x``: a function to call on new inputs.

        With ``noise=`` the values are :math:`y = f(x) + \epsilon`, as those of ``f(x, noise=s)`` are, and the function
        that is returned is f without noise, :math:`f \mid y`. Noise of new values is that of the call,
        ``f.condition(x, y, noise=s)(x_new, noise=s)``.

        Args:
            x: inputs (N, D) where the values are known.
            values: (N, P), or (N,) for a scalar function, for example the draw of ``f(x)``.
            noise: standard deviation of the noise in the values, a number or one per output; ``None`` for none.

        Raises:
            ValueError: values of another shape, NaN or infinite inputs or values, or noise that is not positive.

        Example:
            >>> import jax.numpy as jnp
            >>> import numpyro_dgp as dgp
            >>> f = dgp.gp("f", dgp.kernels.RBF(), None)
            >>> x = jnp.array([[0.0], [1.0]])
            >>> given = f.condition(x, jnp.array([1.0, -1.0]))
            >>> print(given(x).mean.round(3))
            [ 1. -1.]
        """
        x = checked_inputs(x, None, noise)
        require_noise(noise, self.outputs)
        expected = x.shape[:-1] + (() if self.outputs is None else (self.outputs,))
        expect(
            np.shape(values) == expected,
            f"values of shape {expected} at inputs {x.shape}",
            np.shape(values),
            "a scalar function has values (N,), one with outputs=P values (N, P)",
        )
        require_finite("values given to condition", values, "leave out the rows where they are not known")
        residual = jnp.asarray(values, x.dtype) - mean_values(self.mean, x, self.outputs)
        kernels = self.kernels
        if noise is not None and np.size(noise) == 1:
            noise = jnp.reshape(noise, ())
        if noise is not None and np.ndim(noise) and shared(kernels):  # a matrix for every output
            kernels = every(kernels) * (self.outputs or 1)
        K = gram(kernels, x) + noise_covariance(noise, len(x), x.dtype)
        whiten = inverse_cholesky(K, "k(X, X) of an exact process")
        # f | y is f with inducing inputs X: v = L^-1 (y - m(X)), L L' = k(X, X) + s^2 I.
        v = whiten_columns(whiten, residual[:, None] if self.outputs is None else residual)
        known = KnownWeights(v[0] if self.outputs is None else v)
        return SparseFunction(kernels, x, whiten, known, self.outputs, self.mean)


def _refuse(name: str, call: str) -> NoReturn:
    raise expected(
        "a layer with inducing values",
        "an exact process, inducing=None",
        f"open it on dgp.Points(Z), or write f.condition(X, values).{call} where its values at X are known",
        at=f"f.{name}",
    )
