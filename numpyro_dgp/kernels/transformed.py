"""Kernels of features, such as the outputs of a network (deep kernels)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.kernels.base import Kernel, as_kernel, of_both

__all__ = ["Transformed"]


@pytree
class Transformed(Kernel):
    r"""A kernel of features, :math:`k(\varphi_\theta(x), \varphi_\theta(x'))`.

    With a network for :math:`\varphi` it is a deep kernel. Diagonal and draws of functions are those of k at the
    features. Give numbers that are fitted as ``parameters``: then they are part of the kernel, as its hyperparameters
    are. A Flax network: ``Transformed(RBF(), network.apply, parameters)``, where ``numpyro.param("network", lambda key:
    network.init(key, X[:1]))`` makes its parameters part of the fit. A function of one row, such as an Equinox
    module, takes all by ``jnp.vectorize(module, signature="(d)->(q)")``; its arrays are split off by ``eqx.partition``
    and put back in the function by ``eqx.combine``.

    Args:
        kernel: k, a kernel of the features.
        function: :math:`\varphi`, from ``(parameters, X)`` to features (..., N, Q), or from ``X`` where there are no
            parameters. Rows must not depend on each other.
        parameters: :math:`\theta`, a pytree of arrays.

    Raises:
        ValueError: something else than a kernel or a function; where it is called, features that are not one row for
            each input.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import RBF, Transformed
        >>> circle = Transformed(RBF(), lambda X: jnp.concatenate([jnp.cos(X), jnp.sin(X)], -1))
        >>> x = jnp.array([[0.0], [jnp.pi], [2 * jnp.pi]])
        >>> print(np.array(circle(x[:1], x)).round(3))
        [[1.    0.135 1.   ]]

    Source: Wilson et al. (2016).
    """

    kernel: Kernel
    function: Callable[..., Any] = static()
    parameters: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", as_kernel(self.kernel))
        if not callable(self.function) or isinstance(self.function, type | Kernel):
            raise expected(
                "a function from inputs (..., N, D) to features (..., N, Q)",
                getattr(self.function, "__name__", type(self.function).__name__),
                "Transformed(RBF(), jnp.sin)",
            )

    def _features(self, X: Array) -> Array:
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
