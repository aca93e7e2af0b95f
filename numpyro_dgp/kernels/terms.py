r"""A term of a kernel whose Gaussian expectations have a closed form; sums of terms are in ``kernels.expectations``.

Whatever needs the structure of a kernel (spectral densities, components of additive kernels, expectations in closed
form) uses the sum of products that ``kernel.expanded()`` returns, not the tree of operators that built the kernel:

.. math:: k(x, x') = \sum_i \alpha_i \prod_j k_{ij}\bigl(x_{\mathcal D_{ij}}, x'_{\mathcal D_{ij}}\bigr)

with positive numbers :math:`\alpha`, kernels that are neither sums nor products, and the input columns
:math:`\mathcal D` of each of them.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._checks import expected
from numpyro_dgp._typing import Array, Number, pytree, static

__all__ = ["Factor", "Summand", "Term"]


@pytree
class Term:
    r"""One term :math:`\alpha \exp(-\tfrac12 \sum_d \tau_d (x_d - z_d)^2) \prod_j x^\top F_j z`.

    A kernel that is a sum of such terms returns them from ``tilts(dims)``, D = ``dims``, and then has psi statistics
    in closed form.

    Args:
        log_scale: :math:`\log \alpha`.
        precision: :math:`\tau` (D,), zero in columns that the exponential does not contain.
        forms: the diagonals of :math:`F_j`, each (D,).

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.extend import Term
        >>> a = Term(jnp.log(2.0), jnp.ones(1))  # 2 exp(-(x - z)^2 / 2)
        >>> b = Term(jnp.log(3.0), jnp.zeros(1), (jnp.ones(1),))  # 3 x z
        >>> c = a * b
        >>> round(float(jnp.exp(c.log_scale)), 3), c.precision.tolist(), len(c.forms)
        (6.0, [1.0], 1)
    """

    log_scale: Array
    precision: Array
    forms: tuple[Array, ...] = ()

    def __mul__(self, other: Term) -> Term:
        return Term(self.log_scale + other.log_scale, self.precision + other.precision, self.forms + other.forms)

    def on(self, columns: tuple[int, ...], dims: int) -> Term:
        """The same term of the columns ``columns`` of inputs with ``dims`` columns; a column may come twice."""

        def embed(diagonal: Array) -> Array:
            return jnp.zeros(dims, diagonal.dtype).at[jnp.array(columns)].add(diagonal)

        return Term(self.log_scale, embed(self.precision), tuple(embed(form) for form in self.forms))


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
            raise expected(
                f"the outer .on(...) to give at least {max(self.columns) + 1} columns",
                len(dims),
                "the inner one counts among those that the outer one picks",
                at=f"kernel.on{self.columns}.on{dims}",
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
