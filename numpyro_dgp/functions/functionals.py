r"""Linear functionals of functions: slopes along columns or directions, and weighted sums.

A functional L takes a function of rows, such as the covariances of f with something else, to an array of the same rows:
it acts on their axis, the last but one, and carries the other axes along. Where f has the covariance k,

.. math:: \operatorname{Cov}[(L f)_n, (L f)_{n'}] = (L_x L_{x'}\, k)_{nn'} .

``smoothness`` gives the number of mean-square derivatives of a process along an input column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.math.linalg import matmul

__all__ = ["DirectionalSlope", "LinearFunctional", "Slope", "Smoothness", "WeightedSum", "between", "smoothness"]


@pytree
class Slope:
    r"""Partial derivatives at rows (N, D), :math:`\partial f(x) / \partial x_d`.

    Args:
        column: d, counted from 0.
    """

    column: int = static()

    @property
    def columns(self) -> tuple[int | None, ...]:
        """The columns of the slopes that it takes, ``None`` for another direction."""
        return (self.column,)

    def width(self, dims: int) -> int:
        """Columns of the rows, where the function has ``dims``."""
        return dims

    def inputs(self, rows: Array) -> Array:
        """Inputs of the function that the functionals look at."""
        return rows

    def __call__(self, values: Callable[[Array], Array], rows: Array) -> Array:
        """The functionals of ``values``, a function that treats rows one by one."""
        along = jnp.asarray(jnp.arange(rows.shape[-1]) == self.column, rows.dtype)
        # d/dt values(x + t e_d) at t = 0: rows are treated one by one, so that one jvp serves all.
        return jax.jvp(values, (rows,), (jnp.broadcast_to(along, rows.shape),))[1]


@pytree
class DirectionalSlope:
    r"""Slopes :math:`e^\top \nabla f(x)` at rows (N, 2 D), each an input x and the direction e of its slope."""

    columns: ClassVar[tuple[int | None, ...]] = (None,)

    def width(self, dims: int) -> int:
        """Columns of the rows, where the function has ``dims``."""
        return 2 * dims

    def inputs(self, rows: Array) -> Array:
        """Inputs of the function that the functionals look at."""
        return rows[..., : rows.shape[-1] // 2]

    def __call__(self, values: Callable[[Array], Array], rows: Array) -> Array:
        """The functionals of ``values``, a function that treats rows one by one."""
        x, direction = jnp.split(rows, 2, -1)
        return jax.jvp(values, (x,), (direction,))[1]  # d/dt values(x + t e) at t = 0


@pytree
class WeightedSum:
    r"""Weighted sums over the same points, :math:`\sum_q a_{nq} f(x_q)` for rows of weights (N, Q).

    Args:
        points: :math:`x_q` (Q, D).
    """

    points: Array
    columns: ClassVar[tuple[int | None, ...]] = ()

    def width(self, dims: int) -> int:
        """Columns of the rows, where the function has ``dims``."""
        return len(self.points)

    def inputs(self, rows: Array) -> Array:
        """Inputs of the function that the functionals look at."""
        return self.points

    def __call__(self, values: Callable[[Array], Array], rows: Array) -> Array:
        """The functionals of ``values``."""
        return matmul(rows, values(self.points))


LinearFunctional = Slope | DirectionalSlope | WeightedSum


def between(functional: LinearFunctional, covariance: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """Covariances of functionals at rows x (N, C) with those at rows y (N', C): (..., N, N').

    Args:
        functional: L.
        covariance: from inputs (n, D) and (n', D) to the covariances of the function (..., n, n').
        x: rows.
        y: rows.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[0.0], [1.0]])
        >>> print(between(Slope(0), lambda s, t: (s * t.T) ** 2, x, x))  # of x^2 with a random factor
        [[0. 0.]
         [0. 4.]]
    """

    def with_functionals(inputs: Array) -> Array:
        # (L_x' k(s, .))(y), shape (..., n, N'): functionals act on the last axis but one.
        return functional(lambda others: covariance(inputs, others).mT, y).mT

    return functional(with_functionals, x)  # L_x L_x' k


class Smoothness(NamedTuple):
    """The smoothness of the random functions of a kernel.

    Args:
        derivatives: how many they have.
        part: the name of the part of the kernel with the fewest.
    """

    derivatives: float
    part: str


def smoothness(kernel: Kernel, column: int | None) -> Smoothness:
    """The number of mean-square derivatives along a column: infinite, unless a part of the kernel has few.

    A kernel declares it by an attribute ``num_derivatives``. Of sums and products each part counts that sees the
    column, of
    other kernels made of kernels each part. Of kernels of other libraries nothing is known: they count as smooth.

    Args:
        kernel: k; only its structure matters.
        column: number of the column, counted from 0; ``None`` for the roughest one.

    Example:
        >>> from numpyro_dgp.kernels import RBF, Matern12, Matern52
        >>> kernel = RBF() * Matern52().on(0) + Matern12().on(1)
        >>> smoothness(kernel, 0), smoothness(RBF(), 0).derivatives
        (Smoothness(derivatives=2, part='Matern52'), inf)
    """
    parts = [smoothness(*part) for part in kernel.inside(column)]
    own = Smoothness(kernel.num_derivatives, type(kernel).__name__)
    return min([own, *parts], key=lambda found: found.derivatives)
