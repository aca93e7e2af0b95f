r"""Expectations of kernels under Gaussian inputs, the "psi statistics" and their relatives.

For independent Gaussian inputs :math:`h_n`, given by their means and variances, and fixed rows z of Z:

.. math::
    \psi_0 = \langle k(h, h) \rangle, \quad \psi_1 = \langle k(h, z) \rangle, \quad
    \psi_2 = \sum_n \beta_n \langle k(z, h_n)\, k(h_n, z') \rangle,

and the same with factors h inside the expectations. They are computed in closed form,
or by quadrature nodes or draws. Columns of labels, those of
``Categorical`` and ``Embedding`` kernels in sums and products with others, have variance zero.

**Closed forms** exist for kernels that are sums of tilts.

Sums and products of RBF, linear, polynomial and constant kernels, and of any kernel with a method ``tilts``, can be
written as a sum of terms

.. math:: k(x, z) = \sum_i \alpha_i \exp\bigl(-\tfrac12 \sum_d \tau_{id} (x_d - z_d)^2\bigr) \prod_j x^\top F_{ij} z

with diagonal F. The exponential turns a Gaussian over x into a number times another Gaussian. The
rest is the expectation of a product of linear forms of x. Products of two terms are of the same kind, so one
computation gives all statistics. Kernels of labels (:class:`~numpyro_dgp.kernels.Categorical`) are factors of terms,
too: labels have no variance, so that they are numbers.

**A linear map**, ``Transformed(kernel, W)``, puts the terms on coordinates :math:`s = A x` instead of the columns of x.
All terms of a kernel share the rows A, the matrices W of its factors and unit vectors for columns that others look at.
Only matrices of the size of s are factorised: with R rows, one datum costs O(D R^2 + R^3), and its covariances are
never formed.

Source: Chamberlin (2016), sections 2.5, 4.6 and 4.8; Chamberlin (2016), section 4.8, result 1, where natural
parameters divide by the input covariance; Chamberlin (2016), section A.6.1, the shared rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_inputs, violated
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.base import Factor
from numpyro_dgp.kernels.terms import Term
from numpyro_dgp.kernels.transformed import Transformed, linear_map
from numpyro_dgp.math.linalg import matmul, safe_sqrt
from numpyro_dgp.math.quadrature import GaussHermite, MonteCarlo, white_nodes
from numpyro_dgp.math.row_blocks import each_row, sum_symmetric

__all__ = [
    "Summed",
    "Tilted",
    "psi0",
    "psi1",
    "psi1_times_h",
    "psi1_times_hh",
    "psi2",
    "psi2_times_h",
    "require_exact_labels",
    "terms",
]


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
        variances = variance if variance.ndim == 1 else jnp.diagonal(variance)
        columns = sorted({c for f in self.labels for c in _columns_of(f, len(variances))})
        return jnp.where((variances[np.array(columns, int)] == 0).all(), jnp.ones((), variances.dtype), jnp.nan)


def terms(kernel: Kernel, dims: int, dtype: jnp.dtype) -> tuple[tuple[Summed, ...], Array | None]:
    """The terms of a kernel on inputs of ``dims`` columns, from the ``tilts`` of its factors, and their coordinates.

    Returns:
        Terms of S coordinates, and the rows A (S, D) of these; ``None`` where they are the columns.

    Raises:
        ValueError: a factor without ``tilts`` that is no kernel of labels, or on columns that the inputs do not have.

    Example:
        >>> from numpyro_dgp.kernels import RBF, Linear
        >>> found, rows = terms(RBF() * (Linear().on(1) + 2.0), 2, jnp.dtype("float32"))
        >>> len(found), rows
        (2, None)
    """
    summands = kernel.cast(dtype).expanded()
    factors = [f for summand in summands for f in summand.factors if not f.kernel.of_labels]
    maps = {f: found for f in factors if (found := _mapped(f, dims, dtype)) is not None}
    # Coordinates: the columns, if any factor looks at them, then the rows of one map after the other.
    size = 0 if maps and len(maps) == len(factors) else dims
    rows, places = [jnp.eye(dims, dtype=dtype)[:size]], {}
    for f, (_, of_map) in maps.items():
        places[f], size = tuple(range(size, size + len(of_map))), size + len(of_map)
        rows.append(of_map)

    def of(factor: Factor) -> list[Term]:
        if factor in maps:
            return [term.on(places[factor], size) for term in maps[factor][0]]
        columns = _columns_of(factor, dims)
        return [term.on(columns, size) for term in factor.kernel.tilts(len(columns))]

    summed: tuple[Summed, ...] = ()
    for summand in summands:
        log_scale: Any = sum((jnp.log(scale) for scale in summand.scales), start=jnp.zeros((), dtype))  # log α
        products: tuple[Term, ...] = (Term(log_scale, jnp.zeros(size, dtype)),)
        for factor in summand.factors:
            if not factor.kernel.of_labels:
                # A product of sums of terms is a sum of products of terms.
                products = tuple(a * b for a in products for b in of(factor))
        labels = tuple(factor for factor in summand.factors if factor.kernel.of_labels)
        summed += tuple(Summed(term, labels) for term in products)
    return summed, jnp.concatenate(rows) if maps else None


def _mapped(factor: Factor, dims: int, dtype: jnp.dtype) -> tuple[list[Term], Array] | None:
    """The terms of a kernel behind a linear map, and the rows (S, D) of that map; ``None`` for other factors."""
    columns = _columns_of(factor, dims)
    if type(factor.kernel) is not Transformed or (W := linear_map(factor.kernel, len(columns))) is None:
        return None
    summed, inner = terms(factor.kernel.kernel, len(W), dtype)
    if any(s.labels for s in summed):
        raise expected(
            "a kernel of numbers behind a linear map",
            "one of labels",
            "multiply the two: Transformed(RBF(), W).on(0, 1) * Categorical(3).on(2)",
        )
    rows = W if inner is None else matmul(inner, W)
    return [s.term for s in summed], jnp.zeros((len(rows), dims), dtype).at[:, jnp.array(columns)].add(rows)


def require_exact_labels(kernel: Kernel, dims: int, variance: Array) -> None:
    """Raise where known variances (N, D), or covariances (N, D, D), of labels are not zero."""
    found = {c for s in kernel.expanded() for f in s.factors if f.kernel.of_labels for c in _columns_of(f, dims)}
    columns = np.array(sorted(found), int)

    def is_exact(v: Any) -> Any:
        return (v if v.ndim == 2 else v[..., np.arange(dims), np.arange(dims)])[:, columns] == 0

    if violated(is_exact, variance):
        raise expected(
            "labels that are known exactly",
            f"a variance in one of the columns {columns.tolist()}, which a kernel of labels looks at",
            "their variance is 0; average over uncertain ones",
        )


def _columns_of(factor: Factor, dims: int) -> tuple[int, ...]:
    columns = tuple(range(dims)) if factor.columns is None else factor.columns
    if max(columns) >= dims:
        raise expected(
            f"at least {max(columns) + 1} input columns", dims, "columns are counted from 0", at=f"kernel.on{columns}"
        )
    return columns


_Apply = Callable[[Array], Array]


def _tilt(
    loc: Array, variance: Array, rows: Array | None, precision: Array, centres: Array
) -> tuple[Array, Array, _Apply]:
    r"""The Gaussian N(loc, variance) of h times :math:`\exp(-\tfrac12 \sum_s \tau_s (a_s^\top h - c_s)^2)`, for all c.

    The rows a_s of A are those of the unit matrix where ``rows`` is ``None``; c are rows of ``centres``.

    Returns:
        Log of its mass (centres,), its means (centres, D), and the product of vectors (..., D) with its covariance,
        which all centres share.
    """
    if rows is None and variance.ndim == 1:
        growth, shift = 1 + precision * variance, centres - loc  # 1 + τ V
        covariance = variance / growth
        log_mass = -0.5 * ((precision / growth * jnp.square(shift)).sum(-1) + jnp.log(growth).sum())
        return log_mass, loc + covariance * precision * shift, lambda e: covariance * e
    times: _Apply = (lambda e: e * variance) if variance.ndim == 1 else lambda e: matmul(e, variance)
    root = safe_sqrt(precision)
    # With T = diag(τ), L L' = I + T^1/2 A V A' T^1/2; no inverse of V or T, both of which may be singular
    cross = root[:, None] * (variance if rows is None else times(rows))  # T^1/2 A V
    outer = cross if rows is None else matmul(cross, rows.T)
    L = jnp.linalg.cholesky(jnp.eye(len(root), dtype=loc.dtype) + outer * root)
    half = jax.scipy.linalg.solve_triangular(L, cross, lower=True)
    shift = centres - (loc if rows is None else matmul(rows, loc))
    white = jax.scipy.linalg.solve_triangular(L, (root * shift).T, lower=True).T
    log_det = 2 * jnp.log(jnp.diagonal(L)).sum()  # log|I + A' T A V|
    # (c - A m)' T^1/2 (L L')^-1 T^1/2 (c - A m)
    log_mass = -0.5 * (jnp.square(white).sum(-1) + log_det)
    # (V^-1 + A' T A)^-1 = V - V A' T^1/2 (L L')^-1 T^1/2 A V
    return log_mass, loc + matmul(white, half), lambda e: times(e) - matmul(matmul(e, half.T), half)


def _moment(forms: Sequence[Array], mean: Array, times: _Apply) -> Array:
    r""":math:`E[\prod_i e_i^\top x]` for x ~ N(mean, V), V e = ``times(e)``, by Isserlis' recursion."""
    if not forms:
        return jnp.ones(mean.shape[:-1], mean.dtype)
    first, *rest = forms
    # E[prod_i e_i' x] = e_1' m E[prod_{i>1} e_i' x] + sum_{i>1} e_1' V e_i E[the others]
    value = (first * mean).sum(-1) * _moment(rest, mean, times)
    for i, other in enumerate(rest):
        value = value + (first * times(other)).sum(-1) * _moment(rest[:i] + rest[i + 1 :], mean, times)
    return value


class Tilted:
    """Expectations for one h ~ N(loc, variance), where variance is (D,) or a covariance (D, D).

    Args:
        kernel: k, with a closed form (:func:`terms`).
        dims: the number of columns, D.
        dtype: of the inputs.
    """

    def __init__(self, kernel: Kernel, dims: int, dtype: jnp.dtype) -> None:
        self.terms, self.rows = terms(kernel, dims, dtype)

    def _coordinates(self, Z: Array) -> Array:
        """Of rows Z (M, D): (M, S)."""
        return Z if self.rows is None else matmul(Z, self.rows.T)

    def _form(self, e: Array) -> Array:
        """A linear form e of the coordinates as one of h, A' e."""
        return e if self.rows is None else matmul(e, self.rows)

    def diagonal(self, loc: Array, variance: Array) -> Array:
        r""":math:`\langle k(h, h) \rangle`, a number. At equal arguments all exponentials are one."""
        unit = jnp.eye(len(loc), dtype=loc.dtype) if self.rows is None else self.rows
        times: _Apply = (lambda e: e * variance) if variance.ndim == 1 else lambda e: matmul(e, variance)

        def squares(pending: tuple[Array, ...], forms: list[Array]) -> Array:
            if not pending:
                return _moment(forms, loc, times)
            # h' F_j h = sum_s F_js (a_s' h)^2, one form after the other
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
        total, C = jnp.zeros(len(Z), loc.dtype), self._coordinates(Z)
        for summed in self.terms:
            t = summed.term
            log_mass, mean, times = _tilt(loc, variance, self.rows, t.precision, C)
            forms = [*extra, *(self._form(a * C) for a in t.forms)]  # (A h)' F_j A z = (A' F_j A z)' h
            moment = jnp.exp(t.log_scale + log_mass) * _moment(forms, mean, times)
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
        C = self._coordinates(Z)
        C1, C2 = (C[index] for index in pairs)
        total = jnp.zeros(len(C1), loc.dtype)
        between = [s.between(loc, variance, Z) if s.labels else None for s in self.terms]
        for (s, _), of_s in zip(self.terms, between, strict=True):
            for (t, _), of_t in zip(self.terms, between, strict=True):
                precision = s.precision + t.precision
                # s (h - z)^2 + t (h - z')^2 = (s + t) (h - c)^2 + s t / (s + t) (z - z')^2,
                # c = z' + s / (s + t) (z - z'), in every coordinate
                share = s.precision / jnp.where(precision > 0, precision, jnp.inf)
                apart = (share * t.precision * jnp.square(C1 - C2)).sum(-1)
                log_mass, mean, times = _tilt(loc, variance, self.rows, precision, C2 + share * (C1 - C2))
                forms = [*extra, *(self._form(a * C1) for a in s.forms), *(self._form(a * C2) for a in t.forms)]
                log_scale = s.log_scale + t.log_scale + log_mass - 0.5 * apart
                moment = jnp.exp(log_scale) * _moment(forms, mean, times)
                moment = moment if of_s is None else moment * of_s[pairs[0]]
                total = total + (moment if of_t is None else moment * of_t[pairs[1]])
        return total


Integrate = GaussHermite | MonteCarlo | None


def psi0(kernel: Kernel, loc: ArrayLike, variance: ArrayLike, *, integrate: Integrate = None) -> Array:
    r""":math:`\psi_{0n} = \langle k(h_n, h_n) \rangle`, shape (N,).

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: their variances (N, D), zeros allowed, or covariances (N, D, D).
        integrate: ``None`` for the closed form, ``GaussHermite(n)`` for n nodes per input column, or
            ``MonteCarlo(n, key)``. The last two need covariances (N, D, D) to be positive definite, except for columns
            without variance.

    Raises:
        ValueError: inputs that do not fit together, negative variances, covariances that are not symmetric, a kernel
            without a closed form, or too many nodes.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Linear
        >>> print(psi0(Linear(), jnp.array([[1.0]]), jnp.array([[3.0]])))  # 1 + 3
        [4.]
    """
    m, v = _inputs(loc, variance)
    return each_row(m, v, 1, _statistics(kernel, m, v, integrate).diagonal)


def psi1(kernel: Kernel, loc: ArrayLike, variance: ArrayLike, Z: ArrayLike, *, integrate: Integrate = None) -> Array:
    r""":math:`\psi_{1nm} = \langle k(h_n, z_m) \rangle`, shape (N, M).

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: (N, D) or (N, D, D), as in :func:`psi0`.
        Z: inducing inputs (M, D).
        integrate: as in :func:`psi0`.

    Raises:
        ValueError: as :func:`psi0`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import RBF
        >>> print(psi1(RBF(), jnp.zeros((1, 1)), jnp.full((1, 1), 3.0), jnp.zeros((1, 1))))  # (1 + 3)^(-1/2)
        [[0.5]]

    Source: Chamberlin (2016), section 4.8.2.
    """
    m, v, z = _inputs(loc, variance, Z)
    return each_row(m, v, z.size, partial(_statistics(kernel, m, v, integrate).values, z, ()))


def psi1_times_h(
    kernel: Kernel, loc: ArrayLike, variance: ArrayLike, Z: ArrayLike, *, integrate: Integrate = None
) -> Array:
    r""":math:`\langle h_{nd}\, k(h_n, z_m) \rangle`, shape (N, M, D).

    It is needed for a linear mean function, and for a posterior :math:`q(h \mid h^-)` that is linear in the layer
    below.

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: (N, D) or (N, D, D), as in :func:`psi0`.
        Z: inducing inputs (M, D).
        integrate: as in :func:`psi0`.

    Raises:
        ValueError: as :func:`psi0`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Constant
        >>> print(psi1_times_h(Constant(2.0), jnp.array([[1.0, 3.0]]), jnp.ones((1, 2)), jnp.zeros((1, 2))))
        [[[2. 6.]]]

    Source: Chamberlin (2016), sections 4.6.3 and 4.8.3.
    """
    m, v, z = _inputs(loc, variance, Z)
    statistics, unit = _statistics(kernel, m, v, integrate), jnp.eye(m.shape[-1], dtype=m.dtype)

    def row(*datum: Array) -> Array:
        return jax.vmap(lambda e: statistics.values(z, (e,), *datum), out_axes=-1)(unit)

    return each_row(m, v, z.size * len(unit), row)


def psi1_times_hh(
    kernel: Kernel, loc: ArrayLike, variance: ArrayLike, Z: ArrayLike, *, integrate: Integrate = None
) -> Array:
    r""":math:`\langle h_{nd}\, h_{nd'}\, k(h_n, z_m) \rangle`, shape (N, M, D, D).

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: (N, D) or (N, D, D), as in :func:`psi0`.
        Z: inducing inputs (M, D).
        integrate: as in :func:`psi0`.

    Raises:
        ValueError: as :func:`psi0`.

    Source: Chamberlin (2016), section 4.8.3.1, which subtracts the product of the means where it must be added.
    """
    m, v, z = _inputs(loc, variance, Z)
    statistics, unit = _statistics(kernel, m, v, integrate), jnp.eye(m.shape[-1], dtype=m.dtype)

    def row(*datum: Array) -> Array:
        inner = jax.vmap(lambda e, f: statistics.values(z, (e, f), *datum), (None, 0), -1)
        return jax.vmap(inner, (0, None), -2)(unit, unit)

    return each_row(m, v, z.size * len(unit) ** 2, row)


def psi2(
    kernel: Kernel,
    loc: ArrayLike,
    variance: ArrayLike,
    Z: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    integrate: Integrate = None,
) -> Array:
    r""":math:`\psi_2 = \sum_n \beta_n \langle k(Z, h_n)\, k(h_n, Z) \rangle`, shape (M, M).

    The sum and its derivative are taken over blocks of data, so that N matrices are never in memory together.

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: (N, D) or (N, D, D), as in :func:`psi0`.
        Z: inducing inputs (M, D).
        weights: :math:`\beta` (N,); ones by default.
        integrate: as in :func:`psi0`.

    Raises:
        ValueError: as :func:`psi0`, or weights of another shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import RBF
        >>> Z, exact = jnp.array([[0.0], [1.0]]), jnp.zeros((5, 1))
        >>> bool(jnp.allclose(psi2(RBF(), exact, exact, Z), RBF()(Z, exact) @ RBF()(exact, Z)))
        True

    Source: Chamberlin (2016), sections 2.5 and 4.8.4.
    """
    m, v, z = _inputs(loc, variance, Z)
    w = jnp.ones(len(m), m.dtype) if weights is None else jnp.asarray(weights, m.dtype)
    if w.shape != m.shape[:1]:
        raise expected(f"weights of shape {m.shape[:1]}", w.shape, "one number per row of m")
    statistics = _statistics(kernel, m, v, integrate)
    row = lambda pairs, *datum: statistics.pairs(z, pairs, (), *datum)  # noqa: E731
    return sum_symmetric(len(z), w, m.shape[-1], row, m, v)


def psi2_times_h(
    kernel: Kernel,
    loc: ArrayLike,
    variance: ArrayLike,
    Z: ArrayLike,
    directions: ArrayLike,
    *,
    integrate: Integrate = None,
) -> Array:
    r""":math:`\sum_n \langle (e_n^\top h_n)\, k(Z, h_n)\, k(h_n, Z) \rangle`, shape (M, M).

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: (N, D) or (N, D, D), as in :func:`psi0`.
        Z: inducing inputs (M, D).
        directions: :math:`e_n` (N, D); unit vectors give single columns of h.
        integrate: as in :func:`psi0`.

    Raises:
        ValueError: as :func:`psi0`, or directions of another shape.

    Source: Chamberlin (2016), section 4.8.4.
    """
    m, v, z = _inputs(loc, variance, Z)
    b = jnp.asarray(directions, m.dtype)
    expect(b.shape == m.shape, f"directions of shape {m.shape}", b.shape, "one vector per row")
    statistics, ones = _statistics(kernel, m, v, integrate), jnp.ones(len(m), m.dtype)
    row = lambda pairs, *datum: statistics.pairs(z, pairs, datum[2:], *datum[:2])  # noqa: E731
    return sum_symmetric(len(z), ones, m.shape[-1], row, m, v, b)


class _Nodes:
    """Statistics of one datum by quadrature; all data share the same nodes of a standard normal."""

    def __init__(self, kernel: Kernel, loc: Array, rule: GaussHermite | MonteCarlo) -> None:
        self.kernel = kernel
        self.white, log_weights = white_nodes(rule, loc.shape[-1], loc.dtype)
        self.weights = jnp.exp(log_weights)

    def _points(self, extra: Sequence[Array], loc: Array, variance: Array) -> tuple[Array, Array]:
        if variance.ndim == 1:
            points = loc + safe_sqrt(variance) * self.white
        else:
            known = jnp.diagonal(variance) == 0  # columns without variance are rows of zeros in the root
            points = loc + matmul(self.white, jnp.linalg.cholesky(variance + jnp.diag(known)).T) * ~known
        return points, math.prod([matmul(points, b) for b in extra], start=self.weights)  # weights β_k prod_i e_i' h_k

    def diagonal(self, loc: Array, variance: Array) -> Array:
        points, weights = self._points((), loc, variance)
        return matmul(weights, self.kernel.diag(points))  # sum_k β_k k(h_k, h_k)

    def values(self, Z: Array, extra: Sequence[Array], loc: Array, variance: Array) -> Array:
        points, weights = self._points(extra, loc, variance)
        return matmul(weights, self.kernel(points, Z))  # sum_k β_k k(h_k, Z)

    def pairs(self, Z: Array, pairs: Any, extra: Sequence[Array], loc: Array, variance: Array) -> Array:
        points, weights = self._points(extra, loc, variance)
        K = self.kernel(points, Z)
        return matmul(K.T * weights, K)[pairs]  # sum_k β_k k(Z, h_k) k(h_k, Z)


def _statistics(kernel: Kernel, loc: Array, variance: Array, integrate: Integrate) -> Any:
    require_exact_labels(kernel, loc.shape[-1], variance)
    return Tilted(kernel, loc.shape[-1], loc.dtype) if integrate is None else _Nodes(kernel, loc, integrate)


def _is_covariance(V: Any) -> Any:
    """Whether matrices (N, D, D) are symmetric, up to rounding, and their variances at least zero."""
    index = np.arange(V.shape[-1])
    # By this much of the largest entry the two triangles may differ.
    apart = abs(V - V.swapaxes(-1, -2)) > 1e-3 * abs(V).max((-1, -2), keepdims=True)
    return ~apart & ~(V[..., index, index] < 0)[..., None]


def _inputs(loc: ArrayLike, variance: ArrayLike, *Z: ArrayLike) -> list[Array]:
    require_inputs(loc)
    shape = np.shape(loc)
    expect(
        len(shape) == 2 and np.shape(variance) in (shape, (*shape, shape[-1])),
        "means of shape (N, D) with variances (N, D) or covariances (N, D, D)",
        f"{shape} and {np.shape(variance)}",
        "inputs known exactly have variance zero, jnp.zeros_like(loc)",
    )
    if np.ndim(variance) == 2 and violated(lambda v: ~(v < 0), variance):
        raise expected("variances of at least zero", np.min(variance), "pass variances")
    expect(
        np.ndim(variance) != 3 or not violated(_is_covariance, variance),
        "covariances (N, D, D) that are symmetric, with variances of at least zero",
        "others",
        "of factors L they are L @ L.mT",
    )
    for z in Z:
        require_inputs(z, shape[-1])
    arrays = [loc, variance, *Z]
    dtype = jnp.result_type(*arrays, float)
    return [jnp.asarray(a, dtype) for a in arrays]
