r"""Kernels as sums of tilts, for which every Gaussian expectation has a closed form.

Sums and products of RBF, linear, polynomial and constant kernels, and of any kernel with a method ``tilts``, can be
written as a sum of terms

.. math:: k(x, z) = \sum_i \alpha_i \exp\bigl(-\tfrac12 \sum_d \tau_{id} (x_d - z_d)^2\bigr) \prod_j x^\top F_{ij} z

with diagonal F. The exponential turns a Gaussian over x into a number times another Gaussian. The
rest is the expectation of a product of linear forms of x. Products of two terms are of the same kind, so one
computation gives all statistics. Kernels of labels (:class:`~numpyro_dgp.kernels.Categorical`) are factors of terms,
too: labels have no variance, so that they are numbers.

Source: Chamberlin (2016), section 4.8, result 1, where natural parameters divide by the input covariance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import violated
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import matmul, safe_sqrt
from numpyro_dgp.algebra.matrix_ops import Dense, Diagonal
from numpyro_dgp.kernels import Kernel, Term
from numpyro_dgp.kernels.base import Factor, expand

__all__ = ["Summed", "Tilted", "require_exact_labels", "terms"]


class Summed(NamedTuple):
    """A term and the kernels of labels that it is multiplied by."""

    term: Term
    labels: tuple[Factor, ...]

    def between(self, loc: Array, variance: Array, Z: Array) -> Array:
        """The kernels of labels between an input (D,) and rows of Z (M, D): (M,), NaN where a label has variance."""
        found = [f.kernel(loc[None, c], Z[:, c])[0] for f, c in self._columns(len(loc))]
        return math.prod(found, start=self._exact(variance))

    def at(self, loc: Array, variance: Array) -> Array:
        """The variances of the kernels of labels at an input."""
        found = [f.kernel.diag(loc[None, c])[0] for f, c in self._columns(len(loc))]
        return math.prod(found, start=self._exact(variance))

    def _columns(self, dims: int) -> list[tuple[Factor, np.ndarray]]:
        return [(f, np.array(_columns_of(f, dims))) for f in self.labels]

    def _exact(self, variance: Array) -> Array:
        spread = variance if variance.ndim == 1 else jnp.diagonal(variance)
        columns = sorted({c for f in self.labels for c in _columns_of(f, len(spread))})
        return jnp.where((spread[np.array(columns, int)] == 0).all(), jnp.ones((), spread.dtype), jnp.nan)


def terms(kernel: Kernel, dims: int, dtype: jnp.dtype) -> tuple[Summed, ...]:
    """The terms of a kernel on inputs of ``dims`` columns, from the ``tilts`` of its factors.

    Raises:
        ValueError: a factor without ``tilts`` that is no kernel of labels, or on columns that the inputs do not have.

    Example:
        >>> from numpyro_dgp.kernels import RBF, Linear
        >>> len(terms(RBF() * (Linear().on(1) + 2.0), 2, jnp.dtype("float32")))
        2
    """
    found: tuple[Summed, ...] = ()
    for summand in expand(kernel.cast(dtype)):
        log_scale: Any = sum((jnp.log(scale) for scale in summand.scales), start=jnp.zeros((), dtype))
        products: tuple[Term, ...] = (Term(log_scale, jnp.zeros(dims, dtype)),)
        for factor in summand.factors:
            columns = _columns_of(factor, dims)
            if not factor.kernel.of_labels:
                tilts = [term.on(columns, dims) for term in factor.kernel.tilts(len(columns))]
                products = tuple(a * b for a in products for b in tilts)
        labels = tuple(factor for factor in summand.factors if factor.kernel.of_labels)
        found += tuple(Summed(term, labels) for term in products)
    return found


def require_exact_labels(owner: str, kernel: Kernel, dims: int, variance: Array) -> None:
    """Raise where known variances (N, D), or covariances (N, D, D), of labels are not zero."""
    found = {c for s in expand(kernel) for f in s.factors if f.kernel.of_labels for c in _columns_of(f, dims)}
    columns = np.array(sorted(found), int)

    def is_exact(v: Any) -> Any:
        return (v if v.ndim == 2 else v[..., np.arange(dims), np.arange(dims)])[:, columns] == 0

    if violated(is_exact, variance):
        raise ValueError(
            f"{owner}: expected labels that are known exactly, got a variance in one of the columns "
            f"{columns.tolist()}, which a kernel of labels looks at: their variance is 0; average over "
            "uncertain ones"
        )


def _columns_of(factor: Factor, dims: int) -> tuple[int, ...]:
    columns = tuple(range(dims)) if factor.columns is None else factor.columns
    if max(columns) >= dims:
        raise ValueError(
            f"kernel.on{columns}: expected inputs with at least {max(columns) + 1} columns, got {dims}: columns are "
            "counted from 0"
        )
    return columns


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
        dims: the number of columns, D.
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

        found = [s.at(loc, variance) * jnp.exp(s.term.log_scale) * squares(s.term.forms, []) for s in self.terms]
        return sum(found)  # type: ignore[return-value]

    def values(self, Z: Array, extra: Sequence[Array], loc: Array, variance: Array) -> Array:
        r""":math:`\langle \prod_i (e_i^\top h)\, k(h, z) \rangle` for every row of Z (M, D): (M,).

        Args:
            Z: rows.
            extra: the vectors e_i, each (D,).
            loc: mean of h.
            variance: of h.
        """
        total = jnp.zeros(len(Z), loc.dtype)
        for summed in self.terms:
            t = summed.term
            log_mass, mean, covariance = _tilt(loc, variance, t.precision, Z)
            forms = [*extra, *(a * Z for a in t.forms)]
            moment = jnp.exp(t.log_scale + log_mass) * _moment(forms, mean, covariance)
            total = total + (moment * summed.between(loc, variance, Z) if summed.labels else moment)
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
        between = [s.between(loc, variance, Z) if s.labels else None for s in self.terms]
        for (s, _), of_s in zip(self.terms, between, strict=True):
            for (t, _), of_t in zip(self.terms, between, strict=True):
                precision = s.precision + t.precision
                share = s.precision / jnp.where(precision > 0, precision, jnp.inf)
                apart = (share * t.precision * jnp.square(Z1 - Z2)).sum(-1)
                log_mass, mean, covariance = _tilt(loc, variance, precision, Z2 + share * (Z1 - Z2))
                forms = [*extra, *(a * Z1 for a in s.forms), *(a * Z2 for a in t.forms)]
                log_scale = s.log_scale + t.log_scale + log_mass - 0.5 * apart
                moment = jnp.exp(log_scale) * _moment(forms, mean, covariance)
                moment = moment if of_s is None else moment * of_s[pairs[0]]
                total = total + (moment if of_t is None else moment * of_t[pairs[1]])
        return total
