"""The base class of kernels and their algebra. A new kernel defines ``evaluate`` and ``diagonal``.

Covariance functions are called with checked inputs of one dtype, by one compiled program.

Functions ``k(X1, X2)`` of users are wrapped as kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_inputs
from numpyro_dgp._data import as_floats, as_numbers
from numpyro_dgp._fields import Checked, number
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike, Number, pytree, static
from numpyro_dgp.kernels.hyperparameters import column_number
from numpyro_dgp.kernels.state_space_forms import (
    ConstantState,
    ProductState,
    StateSpaceForm,
    SumState,
    no_state_space,
)
from numpyro_dgp.kernels.terms import Factor, Summand, Term
from numpyro_dgp.math.linalg import set_diagonal

__all__ = [
    "ActiveDims",
    "ColumnError",
    "Constant",
    "Covariance",
    "FromCallable",
    "Kernel",
    "Product",
    "Sum",
    "as_kernel",
    "matrix",
    "no_spectral_density",
    "of_both",
    "variances",
]


def no_spectral_density(name: str) -> ValueError:
    """The error of the kernel ``name`` without a spectral density."""
    return ValueError(
        f"{name} has no spectral density: expected a stationary kernel with one "
        "(RBF, Matern12, Matern32, Matern52, SpectralMixture, or sums and positive multiples of them)"
    )


def of_both(function: Callable[[Array], Array], X1: Array, X2: Array) -> tuple[Array, Array]:
    """A function of both inputs of a kernel, evaluated once where both are the same array.

    A kernel that maps its inputs then passes one array twice, by which kernels below recognise a Gram matrix.
    """
    first = function(X1)
    return first, first if X1 is X2 else function(X2)


class Covariance:
    """The methods that a kernel defines, and those derived from them; :class:`~numpyro_dgp.kernels.Kernel` adds the
    algebra."""

    # Whether all of its columns are labels, which are known exactly wherever inputs are uncertain.
    of_labels: ClassVar[bool] = False

    def evaluate(self, X1: Array, X2: Array) -> Array:
        """Gram matrix (..., N1, N2) of inputs (..., N1, D) and (..., N2, D), which may be one and the same array."""
        raise NotImplementedError

    def diagonal(self, X: Array) -> Array:
        """Variances k(x, x), shape (..., N)."""
        raise NotImplementedError

    def check_inputs(self, X: Any) -> None:
        """Raise a ``ValueError`` for known inputs (..., N, D) outside the domain of the kernel; nothing by default."""

    def features(self, key: Array, X: Array, num: int) -> Array:
        r"""``num`` random functions with covariance k, evaluated at ``X``: shape (..., N, num).

        Each column is an independent random function :math:`f` with :math:`E[f(x)] = 0` and
        :math:`E[f(x) f(x')] = k(x, x')`, fixed by ``key``; a Gaussian mixture of many is a draw
        from the process (random Fourier features where the kernel is stationary).
        """
        raise ValueError(
            f"{type(self).__name__} has no features, which function draws need: define "
            "features(key, X, num) on the kernel, or draw at fixed inputs with f.joint(x)"
        )

    def spectral_density(self, omega: Array) -> Array:
        r"""Spectral density :math:`\varrho(\omega) = \int k(r)\, e^{-i \omega \cdot r}\, dr`.

        Args:
            omega: angular frequencies (..., D), in radians per unit of input.

        Returns:
            Densities (...,), so that :math:`k(r) = (2\pi)^{-D} \int \varrho(\omega) e^{i\omega r} d\omega`.
        """
        raise no_spectral_density(type(self).__name__)

    def series(self, X: Array, sizes: tuple[int, ...]) -> Array | None:
        r"""Features (N, M) of a basis expansion with independent weights N(0, 1), possibly truncated: their products
        are k(X, X). ``None`` where there is none.

        Args:
            X: inputs (N, D).
            sizes: of a series, how many functions of each column at most.
        """
        return None

    def state_space(self, order: int = 8) -> StateSpaceForm:
        """The kernel of one input column as a linear stochastic differential equation.

        Args:
            order: number of waves of a ``Periodic`` kernel, in addition to a constant.
        """
        raise no_state_space(type(self).__name__)

    def tilts(self, dims: int) -> tuple[Term, ...]:
        r"""The kernel as a sum of :class:`Term`, for which Gaussian expectations have a closed form.

        Args:
            dims: columns of the inputs.

        Returns:
            Terms whose diagonals have shape (dims,), and the dtype of the hyperparameters.

        Not inherited: a subclass may compute another kernel. One with the same closed form declares it:
        ``def tilts(self, dims): return RBF(self.variance, self.lengthscale).tilts(dims)``.
        """
        raise expected(
            "a kernel with expectations in closed form (RBF, Linear, Polynomial, sums, products, .on(...), W x)",
            type(self).__name__,
            "pass integrate=dgp.likelihoods.GaussHermite(20) or MonteCarlo(1000, key), or define tilts(dims)",
        )

    @property
    def num_derivatives(self) -> float:
        """How many derivatives its random functions have, in mean square."""
        return math.inf

    def summands(self) -> tuple[Any, ...]:
        """The kernels that it is written as a sum of, ``k1 + k2``; itself where it is none.

        Example:
            >>> from numpyro_dgp.kernels import RBF
            >>> len((RBF() + 2.0 * RBF() + RBF() * RBF()).summands())
            3
        """
        return (self,)

    def expanded(self) -> tuple[Summand, ...]:
        """As a sum of products: products of sums multiplied out, constants and columns collected.

        It looks at types only, so that it can be used with traced hyperparameters. A kernel of any other class,
        user-defined classes included, is one factor.

        Raises:
            ValueError: ``k.on(1).on(0)``, columns of fewer columns.

        Example:
            >>> from numpyro_dgp.kernels import RBF, Linear
            >>> for summand in (2.0 * (RBF().on(1) + 3.0).on(4, 5) * Linear()).expanded():
            ...     print(summand.scale, "*", summand)
            2.0 * RBF.on(5,) * Linear
            6.0 * Linear
        """
        return (Summand((), (Factor(self),)),)

    def inside(self, column: int | None) -> list[tuple[Any, int | None]]:
        """The kernels that it is made of and that see a column of its inputs, with the number that the column has for
        each of them; ``None`` where that is not known."""
        nodes = jax.tree.leaves(self, is_leaf=lambda node: isinstance(node, Covariance) and node is not self)
        return [(node, None) for node in nodes if isinstance(node, Covariance)]

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        """Gram matrix (..., N1, N2) between inputs (..., N1, D) and (..., N2, D)."""
        X1, X2 = self._inputs(X1, X2)
        # Outside of a compiled program this call is compiled as a whole; inside of one it is inlined.
        return jax.jit(type(self).evaluate, inline=True)(self.cast(X1.dtype), X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        """Variances k(x, x) of inputs (..., N, D): shape (..., N), without an N x N matrix."""
        (X,) = self._inputs(X)
        return self.cast(X.dtype).diagonal(X)

    def gram(self, X: ArrayLike) -> Array:
        """``k(X, X)`` with the diagonal from :meth:`diag`, free of the rounding of distances."""
        (X,) = self._inputs(X)
        k = self.cast(X.dtype)
        return set_diagonal(jax.jit(Covariance._within, inline=True)(k, X), k.diagonal(X))

    def _within(self, X: Array) -> Array:
        return self.evaluate(X, X)

    def _inputs(self, *arrays: ArrayLike) -> tuple[Array, ...]:
        arrays = tuple(as_numbers("inputs", array) for array in arrays)
        for array in arrays:
            require_inputs(array)
        columns = {np.shape(array)[-1] for array in arrays}
        if len(columns) > 1:
            raise expected(
                "two sets of inputs with the same number of columns",
                " and ".join(str(np.shape(a)) for a in arrays),
                "rows are data, columns dimensions",
            )
        for array in arrays:
            self.check_inputs(array)
        dtype = jnp.result_type(*arrays, float)
        return tuple(as_floats("inputs", array).astype(dtype) for array in arrays)

    def cast(self, dtype: jnp.dtype) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), self)


def matrix(function: Callable[[Array, Array], Any], X1: Array, X2: Array) -> Any:
    """``function(X1, X2)``, the Gram matrix (..., N1, N2) of inputs (..., N1, D) and (..., N2, D).

    Raises:
        ValueError: it is no such matrix.
    """
    found, expected = function(X1, X2), (X1.shape[-2], X2.shape[-2])
    expect(
        np.shape(found)[-2:] == expected,
        f"a function from inputs {X1.shape} and {X2.shape} to a matrix {expected}",
        f"shape {np.shape(found)}",
        "write it for arrays: jax.vmap(lambda x: jax.vmap(lambda y: k(x, y))(X2))(X1)",
        at="kernel",
    )
    return found


def variances(function: Any, X: Array) -> Any:
    """k(x, x) at inputs (..., N, D): ``function.diag`` where there is one, otherwise row by row."""
    if hasattr(function, "diag"):
        return function.diag(X)
    rows = X.reshape(-1, X.shape[-1])
    return jax.vmap(lambda x: matrix(function, x[None], x[None])[0, 0])(rows).reshape(X.shape[:-1])


class Kernel(Checked, Covariance):
    r"""A positive semi-definite function :math:`k(x, x')`: a frozen pytree of plain arrays.

    Calling it gives the Gram matrix between two sets of inputs. Kernels add, multiply (also by a
    positive number) and restrict to columns: ``RBF() + 0.1 * Linear()``, ``RBF().on(0, 2)``; ``sum(kernels)``
    adds all of a list.

    A new kernel subclasses this, is decorated with ``@pytree``, lists its hyperparameters as fields
    and defines ``evaluate(X1, X2)`` and ``diagonal(X)``. Hyperparameters take the dtype of the inputs
    before ``evaluate`` is called. The other methods are optional; where one is missing, the features that
    need it raise a ``ValueError``:

    ============================ ========================================================================
    method                       needed for
    ============================ ========================================================================
    ``features(key, X, num)``    draws of functions, as ``Posterior.functions`` makes them
    ``spectral_density(omega)``  rings: layers on ``dgp.Grid``, exact regression by ``rings.RingNormal``
    ``frequencies(key, ...)``    draws of functions on a ``dgp.Grid``; for subclasses of ``Stationary``,
                                 which have ``features`` from it
    ``series(X, sizes)``         ``dgp.Basis`` by functions of the kernel's own, where they are known
    ``state_space(order)``       long series: layers on ``dgp.StateSpace``, exact regression by
                                 ``dgp.functions.StateSpaceNormal``
    ``tilts(dims)``              psi statistics in closed form: collapsed bounds and guides without nodes
    ``check_inputs(X)``          an error for known inputs outside the kernel's domain, such as labels out of range
    ============================ ========================================================================

    Sums, products, positive multiples and ``.on(...)`` have the methods that their parts have; there is no spectral
    density of a product of two kernels, nor of a kernel on some of its columns outside of a ``dgp.Grid``. A subclass of
    a kernel that computes something else must define these methods anew.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import RBF
        >>> RBF(variance=2.0)(jnp.zeros((3, 1)), jnp.zeros((5, 1))).shape
        (3, 5)
    """

    __repr__ = brief
    __array_ufunc__ = None  # arrays of NumPy leave ``array * kernel`` to the kernel

    def on(self, *dims: int) -> ActiveDims:
        """The same kernel on the columns ``dims`` of its inputs only; ``k.on(0).on(2)`` is ``k.on(2)``."""
        return ActiveDims(self, dims)

    def __add__(self, other: Any) -> Sum:
        return Sum(self, as_kernel(other))

    def __mul__(self, other: Any) -> Product:
        return Product(self, as_kernel(other))

    def __radd__(self, other: Any) -> Kernel:
        # The built-in ``sum`` begins with 0.
        return self if type(other) is int and other == 0 else self + other

    __rmul__ = __mul__


@pytree
class Sum(Kernel):
    r""":math:`k(x, x') = k_1(x, x') + k_2(x, x')`; written ``k1 + k2``.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Constant, RBF
        >>> print(np.array((RBF() + Constant(0.5))(jnp.zeros((1, 1)), jnp.array([[0.0], [1.0]]))).round(3))
        [[1.5   1.107]]
    """

    left: Kernel
    right: Kernel

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.left.evaluate(X1, X2) + self.right.evaluate(X1, X2)

    def diagonal(self, X: Array) -> Array:
        return self.left.diagonal(X) + self.right.diagonal(X)

    def check_inputs(self, X: Any) -> None:
        self.left.check_inputs(X)
        self.right.check_inputs(X)

    def features(self, key: Array, X: Array, num: int) -> Array:
        left, right = jax.random.split(key)
        return self.left.features(left, X, num) + self.right.features(right, X, num)

    def spectral_density(self, omega: Array) -> Array:
        return _spectral_density(self, omega)

    def state_space(self, order: int = 8) -> StateSpaceForm:
        return SumState(self.left.state_space(order), self.right.state_space(order))

    def summands(self) -> tuple[Kernel, ...]:
        return (*self.left.summands(), *self.right.summands())

    def expanded(self) -> tuple[Summand, ...]:
        return self.left.expanded() + self.right.expanded()

    def inside(self, column: int | None) -> list[tuple[Kernel, int | None]]:
        return [(self.left, column), (self.right, column)]


@pytree
class Product(Kernel):
    r""":math:`k(x, x') = k_1(x, x')\, k_2(x, x')`; written ``k1 * k2`` or ``2.0 * k``.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import RBF
        >>> print(np.array((2.0 * RBF() * RBF())(jnp.zeros((1, 1)), jnp.array([[0.0], [1.0]]))).round(3))
        [[2.    0.736]]
    """

    left: Kernel
    right: Kernel

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.left.evaluate(X1, X2) * self.right.evaluate(X1, X2)

    def diagonal(self, X: Array) -> Array:
        return self.left.diagonal(X) * self.right.diagonal(X)

    def check_inputs(self, X: Any) -> None:
        self.left.check_inputs(X)
        self.right.check_inputs(X)

    def features(self, key: Array, X: Array, num: int) -> Array:
        left, right = jax.random.split(key)
        # E[f_1 f_2 f_1' f_2'] = k_1 k_2 for independent f_1 and f_2
        return self.left.features(left, X, num) * self.right.features(right, X, num)

    def spectral_density(self, omega: Array) -> Array:
        return _spectral_density(self, omega)

    def state_space(self, order: int = 8) -> StateSpaceForm:
        return ProductState(self.left.state_space(order), self.right.state_space(order))

    def expanded(self) -> tuple[Summand, ...]:
        # (a + b) (c + d) = a c + a d + b c + b d
        return tuple(a * b for a in self.left.expanded() for b in self.right.expanded())

    def inside(self, column: int | None) -> list[tuple[Kernel, int | None]]:
        return [(self.left, column), (self.right, column)]


class ColumnError(ValueError):
    """The error for a column of inputs outside the domain of a kernel.

    Args:
        before: the message up to the name of the column.
        column: its number.
        after: the rest of the message.
    """

    def __init__(self, before: str, column: int, after: str) -> None:
        self.parts = before, column, after
        super().__init__(f"{before} column {column} of its inputs{after}")

    def among(self, dims: tuple[int, ...]) -> ColumnError:
        """The same error for a kernel on the columns ``dims`` of wider inputs."""
        before, column, after = self.parts
        return ColumnError(before, dims[column], after)


@pytree
class ActiveDims(Kernel):
    """``kernel`` evaluated on some columns of its inputs; written ``kernel.on(0, 2)``.

    Args:
        kernel: k, a kernel of as many columns as ``dims`` has numbers.
        dims: column numbers, counted from 0.

    Raises:
        ValueError: no columns, or column numbers that are not integers from 0 on or that the inputs do not have.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Linear
        >>> print(Linear().on(0, 2)(jnp.array([[1.0, 2.0, 3.0]]), jnp.ones((1, 3))))  # 1 + 3
        [[4.]]
    """

    kernel: Kernel
    dims: tuple[int, ...] = static()

    def __post_init__(self) -> None:
        dims = tuple(found for d in self.dims if (found := column_number(d)) is not None)
        expect(
            dims and len(dims) >= len(self.dims),
            "columns counted from 0",
            self.dims,
            "RBF().on(0, 2)",
            at="kernel.on(*dims)",
        )
        object.__setattr__(self, "dims", dims)

    def _columns(self, X: Array) -> Array:
        if X.shape[-1] <= max(self.dims):
            raise expected(
                f"at least {max(self.dims) + 1} input columns",
                f"shape {X.shape}",
                "count columns from 0",
                at=f"kernel.on{self.dims}",
            )
        return X[..., list(self.dims)]

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.kernel.evaluate(*of_both(self._columns, X1, X2))

    def diagonal(self, X: Array) -> Array:
        return self.kernel.diagonal(self._columns(X))

    def check_inputs(self, X: Any) -> None:
        try:
            self.kernel.check_inputs(self._columns(X))
        except ColumnError as error:
            raise error.among(self.dims) from None

    def features(self, key: Array, X: Array, num: int) -> Array:
        return self.kernel.features(key, self._columns(X), num)

    def state_space(self, order: int = 8) -> StateSpaceForm:
        if self.dims != (0,):
            raise no_state_space(f"kernel.on{self.dims}", ", for its times are not the only column")
        return self.kernel.state_space(order)

    def summands(self) -> tuple[Kernel, ...]:
        return tuple(ActiveDims(part, self.dims) for part in self.kernel.summands())

    def expanded(self) -> tuple[Summand, ...]:
        return tuple(summand.on(self.dims) for summand in self.kernel.expanded())

    def inside(self, column: int | None) -> list[tuple[Kernel, int | None]]:
        if column is not None and column not in self.dims:
            return []
        return [(self.kernel, None if column is None else self.dims.index(column))]


@pytree
class Constant(Kernel):
    r"""Constant: :math:`k(x, x') = \sigma^2`, a random offset.

    Args:
        variance: :math:`\sigma^2`, squared units of the output.

    Raises:
        ValueError: a variance that is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Constant
        >>> print(Constant(0.5)(jnp.zeros((1, 3)), jnp.ones((2, 3))))
        [[0.5 0.5]]
    """

    variance: Number = number(1.0)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        batch = jnp.broadcast_shapes(X1.shape[:-2], X2.shape[:-2])
        return jnp.broadcast_to(self.variance, (*batch, X1.shape[-2], X2.shape[-2]))

    def diagonal(self, X: Array) -> Array:
        return jnp.broadcast_to(self.variance, X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        offset = jnp.sqrt(self.variance) * jax.random.normal(key, (num,), X.dtype)
        return jnp.broadcast_to(offset, (*X.shape[:-1], num))

    def series(self, X: Array, sizes: tuple[int, ...]) -> Array:
        return jnp.sqrt(self.variance) * jnp.ones_like(X[..., :1])

    def state_space(self, order: int = 8) -> StateSpaceForm:
        return ConstantState(jnp.asarray(self.variance))

    def expanded(self) -> tuple[Summand, ...]:
        return (Summand((self.variance,)),)


class FromCallable(Kernel):
    """A kernel of another library, or any function ``k(X1, X2)``, as a :class:`Kernel`.

    The diagonal is ``function.diag`` where there is one, otherwise ``k(x, x)`` row by row.

    Args:
        function: from inputs (N1, D) and (N2, D) to the Gram matrix (N1, N2).

    Raises:
        ValueError: where it is called, a function that does not return a matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels.base import FromCallable
        >>> minimum = FromCallable(lambda X1, X2: jnp.minimum(X1, X2.T))  # Brownian motion
        >>> print(minimum(jnp.array([[1.0]]), jnp.array([[0.5], [2.0]])))
        [[0.5 1. ]]
    """

    def __init__(self, function: Callable[[Array, Array], Array]) -> None:
        self.function = function

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return jnp.asarray(matrix(self.function, X1, X2), X1.dtype)

    def diagonal(self, X: Array) -> Array:
        return jnp.asarray(variances(self.function, X), X.dtype)

    def cast(self, dtype: jnp.dtype) -> FromCallable:
        return self


def _flatten_callable(kernel: FromCallable) -> tuple[tuple[Any, ...], Any]:
    # A module of another library is a pytree itself; a plain function is static.
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(kernel.function)):
        return (), kernel.function
    return (kernel.function,), None


jax.tree_util.register_pytree_node(
    FromCallable,
    _flatten_callable,
    lambda function, leaves: FromCallable(leaves[0] if leaves else function),
)


def _spectral_density(kernel: Kernel, omega: Array) -> Array:
    total: Any = 0
    for summand in kernel.expanded():
        if summand.alone is None:
            raise no_spectral_density(str(summand))
        # Linear in the kernel: ϱ of sum_i α_i k_i is sum_i α_i ϱ_i.
        total = total + summand.scale * summand.alone.spectral_density(omega)
    return total


def as_kernel(kernel: Any) -> Kernel:
    """``kernel`` itself, a constant kernel for a number, or any callable ``k(X1, X2)`` wrapped.

    Args:
        kernel: a kernel, a number or a callable ``k(X1, X2)``.

    Raises:
        ValueError: it is neither a kernel, nor a number, nor callable.

    Example:
        >>> from numpyro_dgp.kernels import as_kernel
        >>> as_kernel(0.5)
        Constant(variance=0.5)
    """
    if isinstance(kernel, Kernel):
        return kernel
    if callable(kernel) and not isinstance(kernel, type):
        return FromCallable(kernel)
    if isinstance(kernel, int | float | np.number | jax.Array | np.ndarray) and np.ndim(kernel) == 0:
        return Constant(kernel)
    raise expected(
        "a kernel, a callable k(X1, X2) or a number",
        getattr(kernel, "__name__", type(kernel).__name__),
        "dgp.kernels.RBF()",
    )
