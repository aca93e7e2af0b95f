"""How many derivatives the random functions of a kernel have, in mean square, along an input column."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from numpyro_dgp.kernels.base import ActiveDims, Kernel, Product, Sum

__all__ = ["Smoothness", "smoothness"]


class Smoothness(NamedTuple):
    """How smooth the random functions of a kernel are.

    Args:
        derivatives: how many they have.
        part: the name of the part of the kernel with the fewest.
    """

    derivatives: float
    part: str


def smoothness(kernel: Kernel, column: int | None) -> Smoothness:
    """Derivatives in mean square along a column: infinitely many, unless a kernel inside says how few it has.

    A kernel says so by an attribute ``num_derivatives``. Of sums and products each part counts that sees the column, of
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
    if isinstance(kernel, ActiveDims):
        if column is not None and column not in kernel.dims:
            return Smoothness(math.inf, type(kernel).__name__)
        return smoothness(kernel.kernel, None if column is None else kernel.dims.index(column))
    nodes = jax.tree.leaves(kernel, is_leaf=lambda node: isinstance(node, Kernel) and node is not kernel)
    inside = column if isinstance(kernel, Sum | Product) else None  # others may give their parts other columns
    parts = [smoothness(node, inside) for node in nodes if isinstance(node, Kernel)]
    own = Smoothness(getattr(kernel, "num_derivatives", math.inf), type(kernel).__name__)
    return min([own, *parts], key=lambda found: found.derivatives)
