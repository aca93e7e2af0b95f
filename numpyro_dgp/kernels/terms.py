r"""A term of a kernel whose Gaussian expectations have a closed form; sums of terms are in ``gaussian_integrals``."""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_dgp._typing import Array, pytree

__all__ = ["Term"]


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
        >>> from numpyro_dgp.kernels import Term
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
