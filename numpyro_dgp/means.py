"""Mean functions m(x) of a layer: frozen pytrees called on inputs (..., N, D).

Inner layers should have the identity (or a projection) as their mean: a deep GP with zero mean functions maps distant
inputs to the same values, which is the usual reason why "deep is worse than shallow" (Salimbeni, 2020, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_finite, require_inputs
from numpyro_dgp._data import as_floats, as_numbers, known_numbers
from numpyro_dgp._repr import brief, public_dir
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.math.linalg import matmul

__all__ = [
    "ConstantMean",
    "CallableMean",
    "IdentityMean",
    "LinearMean",
    "Mean",
    "ZeroMean",
    "as_mean",
    "pca",
    "principal_directions",
]
__dir__ = public_dir(globals())


class Mean:
    """A mean function: called on inputs (..., N, D), it returns values (..., N, P).

    Example:
        >>> import dataclasses
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.means import Mean
        >>> @dataclasses.dataclass(frozen=True)
        ... class Slope(Mean):
        ...     slope: float
        ...     def __call__(self, X):
        ...         return self.slope * X[..., :1]
        >>> print(Slope(2.0)(jnp.array([[1.0, 5.0], [3.0, 5.0]])).T)
        [[2. 6.]]
    """

    __repr__ = brief

    def __call__(self, X: Array) -> Array:
        raise NotImplementedError


@pytree
class ZeroMean(Mean):
    """:math:`m(x) = 0`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.means import ZeroMean
        >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> print(ZeroMean()(x))  # one column: it broadcasts against all outputs
        [[0.]
         [0.]]
    """

    def __call__(self, X: Array) -> Array:
        return jnp.zeros((*X.shape[:-1], 1), X.dtype)


@pytree
class ConstantMean(Mean):
    """:math:`m(x) = c`, a number or one per output (P,).

    Args:
        value: c, a number or (P,), units of the output.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.means import ConstantMean
        >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> print(ConstantMean(jnp.array([0.5, 1.0]))(x))
        [[0.5 1. ]
         [0.5 1. ]]
    """

    value: ArrayLike = 0.0

    def __call__(self, X: Array) -> Array:
        value = jnp.atleast_1d(jnp.asarray(self.value, X.dtype))
        return jnp.broadcast_to(value, X.shape[:-1] + value.shape)


@pytree
class IdentityMean(Mean):
    """:math:`m(x) = x`; the layer has as many outputs as inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.means import IdentityMean
        >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> print(IdentityMean()(x))
        [[1. 2.]
         [3. 4.]]
    """

    def __call__(self, X: Array) -> Array:
        return X


@pytree
class LinearMean(Mean):
    r""":math:`m(x) = W^\top x + b`.

    Args:
        W: weights (D, P).
        b: offsets, a number or (P,).

    Raises:
        ValueError: weights that are not a finite matrix, or do not match the inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.means import LinearMean
        >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> print(LinearMean(jnp.array([[1.0], [-1.0]]), b=0.5)(x))
        [[-0.5]
         [-0.5]]
    """

    W: ArrayLike
    b: ArrayLike = 0.0

    def __post_init__(self) -> None:
        expect(np.ndim(self.W) == 2, "W of shape (D, P)", np.shape(self.W), "W has one row per input")
        require_finite("weights W", self.W, "check the data the directions came from")
        if np.shape(self.b) not in ((), (1,), np.shape(self.W)[1:]):
            raise expected(
                f"offsets b to be a number or one per output, {np.shape(self.W)[1:]}",
                np.shape(self.b),
                "W has one column per output",
            )

    def __call__(self, X: Array) -> Array:
        require_inputs(X, np.shape(self.W)[0])
        X = as_floats("inputs of the mean", X)
        W = jnp.asarray(self.W, X.dtype)
        return matmul(X, W) + jnp.asarray(self.b, X.dtype)


@pytree
class CallableMean(Mean):
    """Any function from inputs (..., N, D) to values (..., N, P), as a mean function; static in a pytree.

    Args:
        function: from inputs (..., N, D) to values (..., N, P), or to one number for all rows and outputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.means import CallableMean
        >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> print(CallableMean(lambda x: x.sum(-1, keepdims=True))(x))
        [[3.]
         [7.]]
    """

    function: Callable[[Array], Array] = static()

    def __call__(self, X: Array) -> Array:
        return self.function(X)


def as_mean(mean: Any) -> Mean:
    """``mean`` itself, zero for ``None``, a constant for a number or one per output, or any callable wrapped.

    Args:
        mean: a mean function, ``None``, a number, an array (P,), or any callable from (..., N, D) to (..., N, P).

    Returns:
        The mean function.

    Raises:
        ValueError: it is neither a mean function nor numbers nor callable.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.means import as_mean
        >>> as_mean(None), as_mean(0.5), as_mean(jnp.sin)(jnp.zeros((2, 1))).shape
        (ZeroMean(), ConstantMean(value=0.5), (2, 1))
    """
    if mean is None:
        return ZeroMean()
    if isinstance(mean, Mean):
        return mean
    if isinstance(mean, list | tuple | int | float | np.number | np.ndarray | jax.Array) and not isinstance(mean, bool):
        value = as_numbers("mean", mean)
        require_finite("mean", value, "a number, or one per output")
        expect(
            np.ndim(value) <= 1,
            "a mean to be a number or one per output",
            f"an array of shape {np.shape(value)}",
            "of values that differ between rows give the function of their inputs, mean=lambda x: ...",
        )
        return ConstantMean(value)
    if not callable(mean) or isinstance(mean, type):
        raise expected(
            "a mean function, any callable from (..., D) to (..., P), or a number",
            getattr(mean, "__name__", type(mean).__name__),
            "for example dgp.means.IdentityMean()",
        )
    return CallableMean(mean)


def pca(X: ArrayLike, outputs: int) -> Mean:
    r"""The mean function of an inner layer from D inputs to P outputs that keeps most of ``X``.

    P = D gives the identity. P < D projects on the first P principal directions of the columns of
    ``X`` (eigenvectors of its covariance, largest first, signs so that each sums to a non-negative
    number). P > D copies the inputs and pads with zeros.

    Args:
        X: inputs (N, D) to the whole model.
        outputs: the number of outputs, P.

    Returns:
        The mean function, from (..., N, D) to (..., N, P).

    Raises:
        ValueError: ``X`` is not a finite matrix, or ``outputs`` is not a positive integer.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.means import pca
        >>> pca(np.random.default_rng(0).normal(size=(50, 3)), 2).W.shape
        (3, 2)

    Source: Salimbeni (2020), sections 2.2 and 5.1.6.
    """
    X = known_numbers("inputs X", X)
    require_inputs(X)
    require_finite("inputs X", X, "drop or impute the rows with missing values")
    if not isinstance(outputs, int) or outputs < 1:
        raise expected("a positive integer number of outputs", repr(outputs), f"try {X.shape[-1]}")
    if outputs == X.shape[-1]:
        return IdentityMean()
    if outputs > X.shape[-1]:
        return LinearMean(np.eye(X.shape[-1], outputs, dtype=X.dtype))
    return LinearMean(principal_directions(X, outputs))


def principal_directions(X: ArrayLike, number: int) -> np.ndarray:
    r"""The first principal directions of the columns of ``X``, as the columns of a matrix (D, number).

    Eigenvectors of the covariance, largest first, signs so that each sums to a non-negative number. As the fixed
    weights of a layer of Q shared functions, they move its inputs along the Q directions in which the data vary most:
    ``h = x + g @ principal_directions(X, Q).T``. (The code published with Salimbeni (2020) takes columns of
    the factor whose rows are the directions.)

    Args:
        X: inputs (N, D).
        number: of directions, at most the smaller of N and D.

    Returns:
        Orthonormal columns (D, number).

    Raises:
        ValueError: ``X`` is not a finite matrix, or has fewer directions.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.means import principal_directions
        >>> X = np.random.default_rng(0).normal(size=(50, 3)) * [1.0, 10.0, 1.0]
        >>> print(abs(principal_directions(X, 1).T).round(1))
        [[0. 1. 0.]]

    Source: Salimbeni (2020), section 5.1.5.
    """
    X = known_numbers("inputs X", X)
    require_inputs(X)
    require_finite("inputs X", X, "drop or impute the rows with missing values")
    if not isinstance(number, int) or not 1 <= number <= min(X.shape):
        raise expected(
            f"between 1 and {min(X.shape)} directions", repr(number), f"inputs of shape {X.shape} have no more"
        )
    # X - mean = U S V': the columns of V are the eigenvectors of the covariance, largest first.
    directions = np.linalg.svd(X - X.mean(0), full_matrices=False)[2][:number].T
    return directions * np.where(directions.sum(0) < 0, -1, 1).astype(X.dtype)
