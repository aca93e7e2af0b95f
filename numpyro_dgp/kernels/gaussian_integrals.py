r"""Kernels as sums of tilts, for which every Gaussian expectation has a closed form.

Sums and products of RBF, linear, polynomial and constant kernels, and of any kernel with a method ``tilts``, can be
written as a sum of terms

.. math:: k(x, z) = \sum_i \alpha_i \exp\bigl(-\tfrac12 \sum_d \tau_{id} (x_d - z_d)^2\bigr) \prod_j x^\top F_{ij} z

with diagonal F. The exponential turns a Gaussian over x into a number times another Gaussian. The
rest is the expectation of a product of linear forms of x. Products of two terms are of the same kind, so one
computation gives all statistics.

Source: Chamberlin (2016), section 4.8, result 1, where natural parameters divide by the input covariance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import matmul, safe_sqrt
from numpyro_dgp.algebra.matrix_ops import Dense, Diagonal
from numpyro_dgp.kernels import Kernel, Term
from numpyro_dgp.kernels.base import Factor, expand

__all__ = ["Tilted", "terms"]


def terms(kernel: Kernel, dims: int, dtype: jnp.dtype) -> tuple[Term, ...]:
    """The terms of a kernel on inputs of ``dims`` columns, from the ``tilts`` of its factors.

    Raises:
        ValueError: a factor without ``tilts``, or on columns that the inputs do not have.

    Example:
        >>> from numpyro_dgp.kernels import RBF, Linear
        >>> len(terms(RBF() * (Linear().on(1) + 2.0), 2, jnp.dtype("float32")))
        2
    """
    found: tuple[Term, ...] = ()
    for summand in expand(kernel.cast(dtype)):
        log_scale: Any = sum((jnp.log(scale) for scale in summand.scales), start=jnp.zeros((), dtype))
        products: tuple[Term, ...] = (Term(log_scale, jnp.zeros(dims, dtype)),)
        for factor in summand.factors:
            products = tuple(a * b for a in products for b in _tilts(factor, dims))
        found += products
    return found


def _tilts(factor: Factor, dims: int) -> tuple[Term, ...]:
    columns = factor.columns
    if columns is None:
        return factor.kernel.tilts(dims)
    if max(columns) >= dims:
        raise ValueError(
            f"kernel.on{columns}: expected inputs with at least {max(columns) + 1} columns, got {dims}: columns are "
            "counted from 0"
        )
    return tuple(term.on(columns, dims) for term in factor.kernel.tilts(len(columns)))


def _tilt(loc: Array, variance: Array, precision: Array, centres: Array) -> tuple[Array, Array, Array]:
    r"""The Gaussian N(loc, variance) times :math:`\exp(-\tfrac12 \sum_d \tau_d (x_d - z_d)^2)`, for all centres z.

    Returns:
        Log of its mass (centres,), its means (centres, D), and its covariance (D,) or (D, D), which all centres share.
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
        covariance = variance - matmul(half.T, half)
        log_det = 2 * jnp.log(jnp.diagonal(L)).sum()
        square = jnp.square(jax.scipy.linalg.solve_triangular(L, (root * shift).T, lower=True)).sum(0)
    ops = Diagonal if variance.ndim == 1 else Dense
    return -0.5 * (square + log_det), loc + ops.apply(covariance, precision * shift), covariance


def _moment(forms: Sequence[Array], mean: Array, covariance: Array) -> Array:
    r""":math:`E[\prod_i e_i^\top x]` for x ~ N(mean, covariance), by Isserlis' recursion in the first form."""
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
        kernel: k, with a closed form (:func:`terms`).
        dims: D.
        dtype: of the inputs.
    """

    def __init__(self, kernel: Kernel, dims: int, dtype: jnp.dtype) -> None:
        self.terms = terms(kernel, dims, dtype)

    def diagonal(self, loc: Array, variance: Array) -> Array:
        r""":math:`\langle k(h, h) \rangle`, a number. At equal arguments all exponentials are one."""
        unit = jnp.eye(len(loc), dtype=loc.dtype)

        def squares(pending: tuple[Array, ...], forms: list[Array]) -> Array:
            if not pending:
                return _moment(forms, loc, variance)
            each = jax.vmap(lambda e: squares(pending[1:], [*forms, e, e]))(unit)
            return (pending[0] * each).sum()

        return sum(jnp.exp(t.log_scale) * squares(t.forms, []) for t in self.terms)  # type: ignore[return-value]

    def values(self, Z: Array, extra: Sequence[Array], loc: Array, variance: Array) -> Array:
        r""":math:`\langle \prod_i (e_i^\top h)\, k(h, z) \rangle` for every row of Z (M, D): (M,).

        Args:
            Z: rows.
            extra: the vectors e_i, each (D,).
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
        r""":math:`\langle \prod_i (e_i^\top h)\, k(h, z)\, k(h, z') \rangle` for pairs of rows of Z: (pairs,).

        Two exponentials are one around a centre between z and z', times a number that does not depend on h. All
        exponents are summed before the exponential is taken; none is positive.

        Args:
            Z: rows (M, D).
            pairs: the indices of z and of z', each (pairs,).
            extra: the vectors e_i, each (D,).
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
