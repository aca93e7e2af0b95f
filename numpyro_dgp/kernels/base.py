"""S1: what a kernel is. An author writes ``evaluate`` and ``diagonal``; the checks come free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import require_inputs
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.kernels.terms import Term
from numpyro_dgp.linalg import set_diagonal

if TYPE_CHECKING:
    from numpyro_dgp.kernels.algebra import ActiveDims, Product, Sum

__all__ = ["FromCallable", "Kernel", "no_spectral_density"]


def no_spectral_density(name: str) -> ValueError:
    """What to raise for the kernel ``name``."""
    return ValueError(
        f"{name} has no spectral density: expected a stationary kernel with one "
        "(RBF, Matern12, Matern32, Matern52, or sums and positive multiples of them)"
    )


class Kernel:
    r"""A positive semi-definite function :math:`k(x, x')`: a frozen pytree of plain arrays.

    Calling it gives the Gram matrix between two sets of inputs. Kernels add, multiply (also by a
    positive number) and restrict to columns: ``RBF() + 0.1 * Linear()``, ``RBF().on(0, 2)``.

    A new kernel subclasses this, is decorated with ``@pytree``, lists its hyperparameters as fields
    and defines ``evaluate(X1, X2)`` and ``diagonal(X)``. Hyperparameters take the dtype of the inputs
    before ``evaluate`` sees them. The other methods are optional; where one is missing, what it unlocks
    raises a ``ValueError``:

    ============================ ========================================================================
    method                       unlocks
    ============================ ========================================================================
    ``features(key, X, num)``    draws of functions, as ``Posterior.functions`` makes them
    ``spectral_density(omega)``  rings: layers on ``dgp.Grid``, exact regression by ``rings.RingNormal``
    ``frequencies(key, ...)``    draws of functions on a ``dgp.Grid``; for subclasses of ``Stationary``,
                                 which have ``features`` from it
    ``tilts(dims)``              psi statistics in closed form: collapsed bounds and guides without nodes
    ============================ ========================================================================

    Sums, products, positive multiples and ``.on(...)`` have what their parts have; there is no spectral density
    of a product of two kernels, nor of a kernel on some of its columns outside of a ``dgp.Grid``.
    A subclass of a kernel that computes something else must define these methods anew.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import RBF
        >>> RBF(variance=2.0)(jnp.zeros((3, 1)), jnp.zeros((5, 1))).shape
        (3, 5)
    """

    def evaluate(self, X1: Array, X2: Array) -> Array:
        """Gram matrix (..., N1, N2) of inputs (..., N1, D) and (..., N2, D)."""
        raise NotImplementedError

    def diagonal(self, X: Array) -> Array:
        """Variances k(x, x), shape (..., N)."""
        raise NotImplementedError

    def features(self, key: Array, X: Array, num: int) -> Array:
        r"""``num`` random functions with covariance k, evaluated at ``X``: shape (..., N, num).

        Each column is an independent random function :math:`r` with :math:`E[r(x)] = 0` and
        :math:`E[r(x) r(x')] = k(x, x')`, fixed by ``key``; a Gaussian mixture of many is a draw
        from the process (random Fourier features where the kernel is stationary).
        """
        raise ValueError(
            f"{type(self).__name__} has no features, which function draws need: define "
            "features(key, X, num) on the kernel, or draw at fixed inputs with f.joint(x)"
        )

    def spectral_density(self, omega: Array) -> Array:
        r"""Spectral density :math:`S(\omega) = \int k(r)\, e^{-i \omega \cdot r}\, dr`.

        Args:
            omega: angular frequencies (..., D), in radians per unit of input.

        Returns:
            Densities (...,), so that :math:`k(r) = (2\pi)^{-D} \int S(\omega) e^{i\omega r} d\omega`.
        """
        raise no_spectral_density(type(self).__name__)

    def tilts(self, dims: int) -> tuple[Term, ...]:
        r"""The kernel as a sum of :class:`Term`, for which Gaussian expectations have a closed form.

        Args:
            dims: columns of the inputs.

        Returns:
            Terms whose diagonals have shape (dims,), and the dtype of the hyperparameters.

        Not inherited: a subclass may compute another kernel. One with the same closed form says so:
        ``def tilts(self, dims): return RBF(self.variance, self.lengthscale).tilts(dims)``.
        """
        raise ValueError(
            "expected a kernel with expectations in closed form (RBF, Linear, Polynomial, Constant, their sums, "
            f"products and .on(...)), got {type(self).__name__}: pass integrate=dgp.GaussHermite(20) for up to three "
            "input columns, or integrate=dgp.MonteCarlo(1000, key) for any number; or define tilts(dims) on the kernel"
        )

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        """Gram matrix (..., N1, N2) between inputs (..., N1, D) and (..., N2, D)."""
        X1, X2 = self._inputs(X1, X2)
        # One compiled program even when called outside of one; inside one it leaves no trace.
        return jax.jit(type(self).evaluate, inline=True)(self._cast(X1.dtype), X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        """Variances k(x, x) of inputs (..., N, D): shape (..., N), without an N x N matrix."""
        (X,) = self._inputs(X)
        return self._cast(X.dtype).diagonal(X)

    def gram(self, X: ArrayLike) -> Array:
        """``k(X, X)`` with the diagonal from :meth:`diag`, free of the rounding of distances."""
        return set_diagonal(self(X, X), self.diag(X))

    def on(self, *dims: int) -> ActiveDims:
        """The same kernel on the columns ``dims`` of its inputs only; ``k.on(0).on(2)`` is ``k.on(2)``."""
        from numpyro_dgp.kernels.algebra import ActiveDims

        return ActiveDims(self, dims)

    def __add__(self, other: Any) -> Sum:
        from numpyro_dgp.kernels.algebra import Sum, as_kernel

        return Sum(self, as_kernel(other))

    def __mul__(self, other: Any) -> Product:
        from numpyro_dgp.kernels.algebra import Product, as_kernel

        return Product(self, as_kernel(other))

    __radd__ = __add__
    __rmul__ = __mul__

    def _inputs(self, *arrays: ArrayLike) -> tuple[Array, ...]:
        owner = f"kernel {type(self).__name__}"
        for array in arrays:
            require_inputs(owner, array)
        columns = {np.shape(array)[-1] for array in arrays}
        if len(columns) > 1:
            raise ValueError(
                f"{owner}: expected two sets of inputs with the same number of columns, got "
                f"{' and '.join(str(np.shape(a)) for a in arrays)}: rows are data, columns dimensions"
            )
        dtype = jnp.result_type(*arrays, float)
        return tuple(jnp.asarray(array, dtype) for array in arrays)

    def _cast(self, dtype: jnp.dtype) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), self)


class FromCallable(Kernel):
    """A kernel of another library, or any function ``k(X1, X2)``, in place of ours.

    The diagonal is ``function.diag`` where there is one, otherwise ``k(x, x)`` row by row.
    """

    def __init__(self, function: Callable[[Array, Array], Array]) -> None:
        self.function = function

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return jnp.asarray(self.function(X1, X2), X1.dtype)

    def diagonal(self, X: Array) -> Array:
        if hasattr(self.function, "diag"):
            return jnp.asarray(self.function.diag(X), X.dtype)
        rows = X.reshape(-1, X.shape[-1])
        variances = jax.vmap(lambda x: self.function(x[None], x[None])[0, 0])(rows)
        return jnp.asarray(variances, X.dtype).reshape(X.shape[:-1])

    def _cast(self, dtype: jnp.dtype) -> FromCallable:
        return self


def _flatten_callable(kernel: FromCallable) -> tuple[tuple[Any, ...], Any]:
    # A module of another library is a pytree itself; a plain function is part of the structure.
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(kernel.function)):
        return (), kernel.function
    return (kernel.function,), None


jax.tree_util.register_pytree_node(
    FromCallable,
    _flatten_callable,
    lambda function, leaves: FromCallable(leaves[0] if leaves else function),
)
