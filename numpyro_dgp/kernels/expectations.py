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

Source: Chamberlin (2016), sections 2.5, 4.6 and 4.8; Chamberlin (2016), section 4.8, result 1, where natural
parameters divide by the input covariance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from numpyro_dgp.math.linalg import matmul, safe_sqrt
from numpyro_dgp.math.matrix_ops import DenseOperations, DiagonalOperations
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
    for summand in kernel.cast(dtype).expanded():
        log_scale: Any = sum((jnp.log(scale) for scale in summand.scales), start=jnp.zeros((), dtype))  # log α
        products: tuple[Term, ...] = (Term(log_scale, jnp.zeros(dims, dtype)),)
        for factor in summand.factors:
            columns = _columns_of(factor, dims)
            if not factor.kernel.of_labels:
                tilts = [term.on(columns, dims) for term in factor.kernel.tilts(len(columns))]
                # A product of sums of terms is a sum of products of terms.
                products = tuple(a * b for a in products for b in tilts)
        labels = tuple(factor for factor in summand.factors if factor.kernel.of_labels)
        found += tuple(Summed(term, labels) for term in products)
    return found


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


def _tilt(loc: Array, variance: Array, precision: Array, centres: Array) -> tuple[Array, Array, Array]:
    r"""The Gaussian N(loc, variance) times :math:`\exp(-\tfrac12 \sum_d \tau_d (x_d - z_d)^2)`, for all centres z.

    Returns:
        Log of its mass (centres,), its means (centres, D), and its covariance (D,) or (D, D), which all centres share.
    """
    shift = centres - loc
    if variance.ndim == 1:
        growth = 1 + precision * variance  # 1 + τ V
        # τ / (1 + τ V), V / (1 + τ V)
        rate, covariance, log_det = precision / growth, variance / growth, jnp.log(growth).sum()
        square = (rate * jnp.square(shift)).sum(-1)
    else:
        root = safe_sqrt(precision)
        # L L' = I + T^1/2 V T^1/2 with T = diag(τ); no inverse of V or T, both of which may be singular
        L = jnp.linalg.cholesky(jnp.eye(len(loc), dtype=loc.dtype) + root[:, None] * variance * root)
        half = jax.scipy.linalg.solve_triangular(L, root[:, None] * variance, lower=True)
        covariance = variance - matmul(half.T, half)  # (V^-1 + T)^-1 = V - V T^1/2 (L L')^-1 T^1/2 V
        log_det = 2 * jnp.log(jnp.diagonal(L)).sum()  # log|I + T V|
        # (z - m)' T^1/2 (L L')^-1 T^1/2 (z - m)
        square = jnp.square(jax.scipy.linalg.solve_triangular(L, (root * shift).T, lower=True)).sum(0)
    ops = DiagonalOperations if variance.ndim == 1 else DenseOperations
    return -0.5 * (square + log_det), loc + ops.apply(covariance, precision * shift), covariance


def _moment(forms: Sequence[Array], mean: Array, covariance: Array) -> Array:
    r""":math:`E[\prod_i e_i^\top x]` for x ~ N(mean, covariance), by Isserlis' recursion in the first form."""
    if not forms:
        return jnp.ones(mean.shape[:-1], mean.dtype)
    first, *rest = forms
    # E[prod_i e_i' x] = e_1' m E[prod_{i>1} e_i' x] + sum_{i>1} e_1' V e_i E[the others]
    value = (first * mean).sum(-1) * _moment(rest, mean, covariance)
    ops = DiagonalOperations if covariance.ndim == 1 else DenseOperations
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
            # h' F_j h = sum_d F_jd h_d^2, one form after the other
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
            forms = [*extra, *(a * Z for a in t.forms)]  # h' F_j z = (F_j z)' h
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
                # s (h - z)^2 + t (h - z')^2 = (s + t) (h - c)^2 + s t / (s + t) (z - z')^2,
                # c = z' + s / (s + t) (z - z')
                share = s.precision / jnp.where(precision > 0, precision, jnp.inf)
                apart = (share * t.precision * jnp.square(Z1 - Z2)).sum(-1)
                log_mass, mean, covariance = _tilt(loc, variance, precision, Z2 + share * (Z1 - Z2))
                forms = [*extra, *(a * Z1 for a in s.forms), *(a * Z2 for a in t.forms)]
                log_scale = s.log_scale + t.log_scale + log_mass - 0.5 * apart
                moment = jnp.exp(log_scale) * _moment(forms, mean, covariance)
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
