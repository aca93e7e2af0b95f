"""Kernels of features, such as the outputs of a network (deep kernels) or of a linear map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_finite
from numpyro_dgp._data import own_numbers
from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.kernels.base import Kernel, as_kernel, of_both
from numpyro_dgp.math.linalg import matmul

__all__ = ["Transformed", "linear_map"]


def _by_matrix(W: Array, X: Array) -> Array:
    """The rows W x."""
    return matmul(X, W.T)


@pytree
class Transformed(Kernel):
    r"""A kernel of features, :math:`k(\varphi_\theta(x), \varphi_\theta(x'))`.

    With a network for :math:`\varphi` it is a deep kernel. Diagonal and draws of functions are those of k at the
    features. Give numbers that are fitted as ``parameters``: then they are part of the kernel, as its hyperparameters
    are. A Flax network: ``Transformed(RBF(), network.apply, parameters)``, where ``numpyro.param("network", lambda key:
    network.init(key, X[:1]))`` makes its parameters part of the fit. A function of one row, such as an Equinox
    module, takes all by ``jnp.vectorize(module, signature="(d)->(q)")``; its arrays are split off by ``eqx.partition``
    and put back in the function by ``eqx.combine``.

    With a matrix W for :math:`\varphi`, :math:`\varphi(x) = W x`, an RBF has the precision matrix
    :math:`\Lambda = W^\top W`, full or of low rank:

    .. math:: k(x, x') = \sigma^2 \exp\bigl(-\tfrac12 (x - x')^\top \Lambda\, (x - x')\bigr) .

    Expectations under Gaussian inputs, as in collapsed bounds, then have a closed form wherever they have one for k.
    Leave lengthscales at one, since W has them.

    Args:
        kernel: k, a kernel of the features.
        function: :math:`\varphi`, from ``(parameters, X)`` to features (..., N, Q), or from ``X`` where there are no
            parameters. Rows must not depend on each other. Or a matrix W (Q, D).
        parameters: :math:`\theta`, a pytree of arrays; those of a matrix are its entries.

    Raises:
        ValueError: something else than a kernel, or than a function or a finite matrix; a matrix with parameters; where
            it is called, features that are not one row for each input, or a matrix for other columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import RBF, Transformed
        >>> circle = Transformed(RBF(), lambda X: jnp.concatenate([jnp.cos(X), jnp.sin(X)], -1))
        >>> x = jnp.array([[0.0], [jnp.pi], [2 * jnp.pi]])
        >>> print(np.array(circle(x[:1], x)).round(3))
        [[1.    0.135 1.   ]]
        >>> direction = Transformed(RBF(), jnp.array([[0.6, 0.8]]))  # along one direction of the plane
        >>> print(np.array(direction(jnp.zeros((1, 2)), jnp.array([[0.6, 0.8], [0.8, -0.6]]))).round(3))
        [[0.607 1.   ]]

    Source: Wilson et al. (2016); Chamberlin (2016), section A.6.1, a precision of low rank.
    """

    kernel: Kernel
    function: Callable[..., Any] = static()
    parameters: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", as_kernel(self.kernel))
        if isinstance(self.function, list | tuple | np.ndarray | jax.Array):
            W = jnp.asarray(own_numbers("the matrix W", self.function))
            expect(W.ndim == 2, "a matrix W of shape (Q, D)", W.shape, "one row per feature, a column per input column")
            require_finite("entries of the matrix W", W, "Transformed(RBF(), jnp.eye(3))")
            expect(self.parameters is None, "no parameters beside a matrix W", "some", "its entries are the parameters")
            object.__setattr__(self, "function", _by_matrix)
            object.__setattr__(self, "parameters", W)
        if not callable(self.function) or isinstance(self.function, type | Kernel):
            raise expected(
                "a function from inputs (..., N, D) to features (..., N, Q), or a matrix W (Q, D)",
                getattr(self.function, "__name__", type(self.function).__name__),
                "Transformed(RBF(), jnp.sin)",
            )

    def _features(self, X: Array) -> Array:
        linear_map(self, X.shape[-1])
        found = self.function(X) if self.parameters is None else self.function(self.parameters, X)
        expect(
            np.ndim(found) == X.ndim and np.shape(found)[:-1] == X.shape[:-1],
            f"features of shape (..., N, Q) of inputs of shape {X.shape}",
            np.shape(found),
            'of a function of a single row take jnp.vectorize(function, signature="(d)->(q)")',
        )
        return jax.numpy.asarray(found, X.dtype)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.kernel.evaluate(*of_both(self._features, X1, X2))

    def diagonal(self, X: Array) -> Array:
        return self.kernel.diagonal(self._features(X))

    def features(self, key: Array, X: Array, num: int) -> Array:
        return self.kernel.features(key, self._features(X), num)


def linear_map(kernel: Transformed, columns: int) -> Array | None:
    """The matrix W (Q, D) of a linear map of so many columns D; ``None`` of other functions.

    Raises:
        ValueError: a matrix for other columns.

    Example:
        >>> from numpyro_dgp.kernels import RBF
        >>> print(linear_map(Transformed(RBF(), [[0.5, 1.0]]), 2))
        [[0.5 1. ]]
    """
    if kernel.function is not _by_matrix:
        return None
    W = kernel.parameters
    expect(W.shape[-1] == columns, f"a matrix W of shape (Q, {columns})", W.shape, "one column per input column")
    return W
