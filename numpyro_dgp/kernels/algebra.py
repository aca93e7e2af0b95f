r"""S1: sums, products, multiples and restrictions of kernels, and the one walk over them, :func:`expand`.

Whatever needs the structure of a kernel (spectral densities, components of additive kernels, expectations in closed
form) looks at the sum of products that :func:`expand` returns, not at the tree that the operators built:

.. math:: k(x, x') = \sum_s c_s \prod_f k_{sf}(x_{C_{sf}}, x'_{C_{sf}})

with positive numbers c, kernels that are neither sums nor products, and the columns C that each of them sees.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import require_positive, require_scalar
from numpyro_dgp._typing import Array, Number, pytree, static
from numpyro_dgp.kernels.base import FromCallable, Kernel, no_spectral_density

__all__ = ["ActiveDims", "Constant", "Factor", "Product", "Sum", "Summand", "as_kernel", "expand"]


@pytree
class Sum(Kernel):
    r""":math:`k(x, x') = k_1(x, x') + k_2(x, x')`; written ``k1 + k2``."""

    left: Kernel
    right: Kernel

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.left.evaluate(X1, X2) + self.right.evaluate(X1, X2)

    def diagonal(self, X: Array) -> Array:
        return self.left.diagonal(X) + self.right.diagonal(X)

    def features(self, key: Array, X: Array, num: int) -> Array:
        left, right = jax.random.split(key)
        return self.left.features(left, X, num) + self.right.features(right, X, num)

    def spectral_density(self, omega: Array) -> Array:
        return _spectral_density(self, omega)


@pytree
class Product(Kernel):
    r""":math:`k(x, x') = k_1(x, x')\, k_2(x, x')`; written ``k1 * k2`` or ``2.0 * k``."""

    left: Kernel
    right: Kernel

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.left.evaluate(X1, X2) * self.right.evaluate(X1, X2)

    def diagonal(self, X: Array) -> Array:
        return self.left.diagonal(X) * self.right.diagonal(X)

    def features(self, key: Array, X: Array, num: int) -> Array:
        left, right = jax.random.split(key)
        return self.left.features(left, X, num) * self.right.features(right, X, num)

    def spectral_density(self, omega: Array) -> Array:
        return _spectral_density(self, omega)


@pytree
class ActiveDims(Kernel):
    """``kernel`` evaluated on some columns of its inputs; written ``kernel.on(0, 2)``."""

    kernel: Kernel
    dims: tuple[int, ...] = static()

    def __post_init__(self) -> None:
        if not self.dims or not all(isinstance(d, int) and d >= 0 for d in self.dims):
            raise ValueError(
                f"kernel.on(*dims): expected column numbers counted from 0, got {self.dims}: for example RBF().on(0, 2)"
            )

    def _columns(self, X: Array) -> Array:
        if X.shape[-1] <= max(self.dims):
            raise ValueError(
                f"kernel.on{self.dims}: expected inputs with at least {max(self.dims) + 1} columns, "
                f"got shape {X.shape}: columns are counted from 0"
            )
        return X[..., list(self.dims)]

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.kernel.evaluate(self._columns(X1), self._columns(X2))

    def diagonal(self, X: Array) -> Array:
        return self.kernel.diagonal(self._columns(X))

    def features(self, key: Array, X: Array, num: int) -> Array:
        return self.kernel.features(key, self._columns(X), num)


@pytree
class Constant(Kernel):
    r"""Constant: :math:`k(x, x') = \sigma^2`, a random offset.

    Raises:
        ValueError: a variance that is not positive.
    """

    variance: Number = 1.0

    def __post_init__(self) -> None:
        require_scalar("Constant", "variance", self.variance)
        require_positive("Constant", "variance", self.variance)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        batch = jnp.broadcast_shapes(X1.shape[:-2], X2.shape[:-2])
        return jnp.broadcast_to(self.variance, (*batch, X1.shape[-2], X2.shape[-2]))

    def diagonal(self, X: Array) -> Array:
        return jnp.broadcast_to(self.variance, X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        offset = jnp.sqrt(self.variance) * jax.random.normal(key, (num,), X.dtype)
        return jnp.broadcast_to(offset, (*X.shape[:-1], num))


@pytree
class Factor:
    """A kernel in a product, and the columns of the inputs that it sees; ``None`` for all.

    Args:
        kernel: neither a sum, nor a product, nor a constant, nor restricted to columns.
        columns: column numbers in the order in which the kernel sees them.
    """

    kernel: Kernel
    columns: tuple[int, ...] | None = static(default=None)

    def on(self, dims: tuple[int, ...]) -> Factor:
        """The factor where inputs are the columns ``dims`` of others: columns of columns.

        Raises:
            ValueError: fewer columns than the factor sees.
        """
        if self.columns is None:
            return Factor(self.kernel, dims)
        if max(self.columns) >= len(dims):
            raise ValueError(
                f"kernel.on{self.columns}.on{dims}: expected the outer .on(...) to give at least "
                f"{max(self.columns) + 1} columns, got {len(dims)}: the inner one counts among those that the outer "
                "one picks"
            )
        return Factor(self.kernel, tuple(dims[d] for d in self.columns))

    def __str__(self) -> str:
        return type(self.kernel).__name__ + ("" if self.columns is None else f".on{self.columns}")


@pytree
class Summand:
    """One product of an expanded kernel.

    Args:
        scales: the constants in it, whose product is its positive multiple.
        factors: the other kernels in it, in order; none for a constant.
    """

    scales: tuple[Number, ...] = ()
    factors: tuple[Factor, ...] = ()

    def __mul__(self, other: Summand) -> Summand:
        return Summand(self.scales + other.scales, self.factors + other.factors)

    def on(self, dims: tuple[int, ...]) -> Summand:
        """The summand where inputs are the columns ``dims`` of others."""
        return Summand(self.scales, tuple(factor.on(dims) for factor in self.factors))

    @property
    def scale(self) -> Number:
        """The product of the constants; 1.0 where there are none."""
        return math.prod(self.scales, start=1.0)

    @property
    def alone(self) -> Kernel | None:
        """The kernel of a summand that is a multiple of one kernel on all columns, otherwise ``None``."""
        if len(self.factors) == 1 and self.factors[0].columns is None:
            return self.factors[0].kernel
        return None

    def kernel(self, columns: tuple[int, ...] | None = None) -> Kernel:
        """The summand as a kernel of inputs that are ``columns`` already, where all factors see those."""
        kernels = [f.kernel if f.columns in (None, columns) else f.kernel.on(*f.columns) for f in self.factors]
        constants: list[Kernel] = [Constant(self.scale)] if self.scales or not kernels else []
        return reduce(Product, kernels + constants)

    def __str__(self) -> str:
        return " * ".join(map(str, self.factors)) or "Constant"


def expand(kernel: Kernel) -> tuple[Summand, ...]:
    """A kernel as a sum of products: products of sums multiplied out, constants and columns collected.

    It looks at types only, so it can be used on traced hyperparameters. A kernel of any other class, of the user's own
    too, is a factor of its own.

    Raises:
        ValueError: ``k.on(1).on(0)``, columns of fewer columns.

    Example:
        >>> from numpyro_dgp.kernels import RBF, Linear
        >>> for summand in expand(2.0 * (RBF().on(1) + 3.0).on(4, 5) * Linear()):
        ...     print(summand.scale, "*", summand)
        2.0 * RBF.on(5,) * Linear
        6.0 * Linear
    """
    if isinstance(kernel, Sum):
        return expand(kernel.left) + expand(kernel.right)
    if isinstance(kernel, Product):
        return tuple(a * b for a in expand(kernel.left) for b in expand(kernel.right))
    if isinstance(kernel, ActiveDims):
        return tuple(summand.on(kernel.dims) for summand in expand(kernel.kernel))
    if isinstance(kernel, Constant):
        return (Summand((kernel.variance,)),)
    return (Summand((), (Factor(kernel),)),)


def _spectral_density(kernel: Kernel, omega: Array) -> Array:
    total: Any = 0
    for summand in expand(kernel):
        if summand.alone is None:
            raise no_spectral_density(str(summand))
        total = total + summand.scale * summand.alone.spectral_density(omega)
    return total


def as_kernel(kernel: Any) -> Kernel:
    """``kernel`` itself, a constant kernel for a number, or any callable ``k(X1, X2)`` wrapped.

    Raises:
        ValueError: it is neither a kernel, nor a number, nor callable.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if callable(kernel):
        return FromCallable(kernel)
    if isinstance(kernel, int | float | jax.Array | np.ndarray) and np.ndim(kernel) == 0:
        return Constant(kernel)
    raise ValueError(
        f"expected a kernel, a callable k(X1, X2) or a positive number, got {type(kernel).__name__}: "
        "for example dgp.kernels.RBF()"
    )
