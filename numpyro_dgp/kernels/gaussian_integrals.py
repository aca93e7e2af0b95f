r"""Kernels as sums of tilts, for which every Gaussian expectation has a closed form.

Sums and products of RBF, linear, polynomial and constant kernels can be written as a sum of terms

.. math:: k(x, z) = \sum_t s_t \exp\bigl(-\tfrac12 (x - z)^\top \Lambda_t (x - z)\bigr) \prod_j x^\top A_{tj} z

with diagonal :math:`\Lambda` and A. The exponential turns a Gaussian over x into a number times another Gaussian, and
what is left is the expectation of a product of linear forms of x. Products of two terms are of the same kind, so one
computation gives all statistics.

Source: Chamberlin (2016), section 4.8, result 1, where natural parameters divide by the input covariance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.algebra.linalg import safe_sqrt
from numpyro_dgp.algebra.matrix_ops import Dense, Diagonal
from numpyro_dgp.kernels import RBF, ActiveDims, Constant, Kernel, Linear, Polynomial, Product, Sum

__all__ = ["Term", "Tilted", "terms"]


@pytree
class Term:
    r"""One term :math:`s \exp(-\tfrac12 (x - z)^\top \Lambda (x - z)) \prod_j x^\top A_j z`.

    Args:
        log_scale: :math:`\log s`.
        precision: the diagonal of :math:`\Lambda` (D,), zero in columns that the exponential does not see.
        forms: the diagonals of :math:`A_j`, each (D,).
    """

    log_scale: Array
    precision: Array
    forms: tuple[Array, ...] = ()

    def __mul__(self, other: Term) -> Term:
        return Term(self.log_scale + other.log_scale, self.precision + other.precision, self.forms + other.forms)


def terms(kernel: Kernel, dims: int, dtype: jnp.dtype) -> tuple[Term, ...]:
    """The terms of a kernel on inputs of ``dims`` columns.

    Raises:
        ValueError: a kernel that is not made of RBF, Linear, Polynomial and Constant.
    """
    if isinstance(kernel, Sum):
        return terms(kernel.left, dims, dtype) + terms(kernel.right, dims, dtype)
    if isinstance(kernel, Product):
        return tuple(a * b for a in terms(kernel.left, dims, dtype) for b in terms(kernel.right, dims, dtype))
    if isinstance(kernel, ActiveDims):
        columns, inner = kernel.dims, terms(kernel.kernel, len(kernel.dims), dtype)
        return jax.tree.map(lambda leaf: _embed(leaf, columns, dims), inner)
    kernel, none = kernel._cast(dtype), jnp.zeros(dims, dtype)
    if type(kernel) is RBF:
        return (Term(jnp.log(kernel.variance), none + 1 / jnp.square(kernel.lengthscale)),)
    if type(kernel) is Constant:
        return (Term(jnp.log(kernel.variance), none),)
    if type(kernel) is Linear:
        return (Term(jnp.zeros((), dtype), none, (none + kernel.variance,)),)
    if type(kernel) is Polynomial:
        form, degree = none + kernel.variance, kernel.degree
        scales = [math.log(math.comb(degree, j)) + (degree - j) * jnp.log(kernel.offset) for j in range(degree + 1)]
        return tuple(Term(scale, none, (form,) * j) for j, scale in enumerate(scales))
    raise ValueError(
        f"expected a kernel with expectations in closed form (RBF, Linear, Polynomial, Constant, their sums, products "
        f"and .on(...)), got {type(kernel).__name__}: pass integrate=dgp.GaussHermite(20) for up to three input "
        "columns, or integrate=dgp.MonteCarlo(1000, key) for any number"
    )


def _embed(leaf: Array, columns: tuple[int, ...], dims: int) -> Array:
    return jnp.zeros(dims, leaf.dtype).at[jnp.array(columns)].set(leaf) if leaf.ndim else leaf


def _tilt(loc: Array, variance: Array, precision: Array, centres: Array) -> tuple[Array, Array, Array]:
    r"""The Gaussian N(loc, variance) times :math:`\exp(-\tfrac12 (x - c)^\top \Lambda (x - c))`, for J centres at once.

    Returns:
        Log of its mass (J,), its means (J, D), and its covariance (D,) or (D, D), which all centres share.
    """
    shift = centres - loc
    if variance.ndim == 1:
        growth = 1 + precision * variance
        rate, covariance, log_det = precision / growth, variance / growth, jnp.log(growth).sum()
        square = (rate * jnp.square(shift)).sum(-1)
    else:
        root = safe_sqrt(precision)
        L = jnp.linalg.cholesky(jnp.eye(len(loc), dtype=loc.dtype) + root[:, None] * variance * root)
        half = jax.scipy.linalg.solve_triangular(L, root[:, None] * variance, lower=True)
        covariance = variance - half.T @ half
        log_det = 2 * jnp.log(jnp.diagonal(L)).sum()
        square = jnp.square(jax.scipy.linalg.solve_triangular(L, (root * shift).T, lower=True)).sum(0)
    ops = Diagonal if variance.ndim == 1 else Dense
    return -0.5 * (square + log_det), loc + ops.apply(covariance, precision * shift), covariance


def _moment(forms: Sequence[Array], mean: Array, covariance: Array) -> Array:
    r""":math:`E[\prod_i b_i^\top x]` for x ~ N(mean, covariance), by Isserlis' recursion in the first form."""
    if not forms:
        return jnp.ones(mean.shape[:-1], mean.dtype)
    first, *rest = forms
    value = (first * mean).sum(-1) * _moment(rest, mean, covariance)
    ops = Diagonal if covariance.ndim == 1 else Dense
    for i, other in enumerate(rest):
        value = value + (first * ops.apply(covariance, other)).sum(-1) * _moment(
            rest[:i] + rest[i + 1 :], mean, covariance
        )
    return value


class Tilted:
    """Expectations for one h ~ N(loc, variance), where variance is (D,) or a covariance (D, D).

    Args:
        kernel: k, made of kernels that :func:`terms` knows.
        dims: D.
        dtype: of the inputs.
    """

    def __init__(self, kernel: Kernel, dims: int, dtype: jnp.dtype) -> None:
        self.terms = terms(kernel, dims, dtype)

    def diagonal(self, loc: Array, variance: Array) -> Array:
        r""":math:`\langle k(h, h) \rangle`, a number. The exponentials are one there."""
        unit = jnp.eye(len(loc), dtype=loc.dtype)

        def squares(pending: tuple[Array, ...], forms: list[Array]) -> Array:
            if not pending:
                return _moment(forms, loc, variance)
            each = jax.vmap(lambda e: squares(pending[1:], [*forms, e, e]))(unit)
            return (pending[0] * each).sum()

        return sum(jnp.exp(t.log_scale) * squares(t.forms, []) for t in self.terms)  # type: ignore[return-value]

    def values(self, Z: Array, extra: Sequence[Array], loc: Array, variance: Array) -> Array:
        r""":math:`\langle \prod_i (b_i^\top h)\, k(h, z) \rangle` for every row of Z (M, D): (M,).

        Args:
            Z: rows.
            extra: the vectors b_i, each (D,).
            loc: mean of h.
            variance: of h.
        """
        total = jnp.zeros(len(Z), loc.dtype)
        for t in self.terms:
            log_mass, mean, covariance = _tilt(loc, variance, t.precision, Z)
            forms = [*extra, *(a * Z for a in t.forms)]
            total = total + jnp.exp(t.log_scale + log_mass) * _moment(forms, mean, covariance)
        return total

    def pairs(self, Z: Array, pairs: tuple[Array, Array], extra: Sequence[Array], loc: Array, variance: Array) -> Array:
        r""":math:`\langle \prod_i (b_i^\top h)\, k(h, z)\, k(h, z') \rangle` for J pairs of rows of Z: (J,).

        Two exponentials are one around a centre between z and z', times a number that does not depend on h. All
        exponents are summed before the exponential is taken; none is positive.

        Args:
            Z: rows (M, D).
            pairs: the indices of z and of z', each (J,).
            extra: the vectors b_i, each (D,).
            loc: mean of h.
            variance: of h.
        """
        Z1, Z2 = (Z[index] for index in pairs)
        total = jnp.zeros(len(Z1), loc.dtype)
        for s in self.terms:
            for t in self.terms:
                precision = s.precision + t.precision
                share = s.precision / jnp.where(precision > 0, precision, 1)
                apart = (share * t.precision * jnp.square(Z1 - Z2)).sum(-1)
                log_mass, mean, covariance = _tilt(loc, variance, precision, Z2 + share * (Z1 - Z2))
                forms = [*extra, *(a * Z1 for a in s.forms), *(a * Z2 for a in t.forms)]
                log_scale = s.log_scale + t.log_scale + log_mass - 0.5 * apart
                total = total + jnp.exp(log_scale) * _moment(forms, mean, covariance)
        return total
