r"""The structure of a kernel as a sum of products, which :func:`~numpyro_dgp.kernels.base.expand` returns.

Whatever needs the structure of a kernel (spectral densities, components of additive kernels, expectations in closed
form) uses the sum of products that ``expand(kernel)`` returns, not the tree of operators that built the kernel:

.. math:: k(x, x') = \sum_i \alpha_i \prod_j k_{ij}\bigl(x_{\mathcal D_{ij}}, x'_{\mathcal D_{ij}}\bigr)

with positive numbers :math:`\alpha`, kernels that are neither sums nor products, and the input columns
:math:`\mathcal D` of each of them.
"""

from __future__ import annotations

import math
from typing import Any

from numpyro_dgp._typing import Number, pytree, static

__all__ = ["Factor", "Summand"]


@pytree
class Factor:
    """A kernel in a product, and the columns of the inputs that it acts on; ``None`` for all.

    Args:
        kernel: neither a sum, nor a product, nor a constant, nor restricted to columns.
        columns: column numbers, in the order of the kernel's inputs.
    """

    kernel: Any  # a ``Kernel``; this file cannot import the class
    columns: tuple[int, ...] | None = static(default=None)

    def on(self, dims: tuple[int, ...]) -> Factor:
        """The factor where inputs are the columns ``dims`` of others: columns of columns.

        Raises:
            ValueError: fewer columns than the factor acts on.
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
    def alone(self) -> Any:
        """The kernel of a summand that is a multiple of one kernel on all columns, otherwise ``None``."""
        if len(self.factors) == 1 and self.factors[0].columns is None:
            return self.factors[0].kernel
        return None

    def __str__(self) -> str:
        return " * ".join(map(str, self.factors)) or "Constant"
