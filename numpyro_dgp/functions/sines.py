r"""Expansion of a kernel in known functions on a box: sines, and functions that the kernel defines.

Weighted sums of sines of multiples of an angle need few sines.

With :math:`j = a + I c`, a from 1 to I, and :math:`\theta = \pi t`

.. math:: \sum_j w_j \sin(j \theta) = \sum_c \Bigl[\sum_a w_{a + I c} \sin(a \theta)\Bigr] \cos(I c\, \theta)
          + \Bigl[\sum_a w_{a + I c} \cos(a \theta)\Bigr] \sin(I c\, \theta) ,

which needs 2 I + 2 M / I sines and cosines instead of M sines, and as much memory for the derivative.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from numpyro_dgp._checks import expect, expected, require_finite, violated
from numpyro_dgp._data import own_numbers
from numpyro_dgp._typing import Array, ArrayLike, Number, pytree, static
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.terms import Summand
from numpyro_dgp.math.belief_moments import ROWS
from numpyro_dgp.math.linalg import matmul, products_in_rows, safe_sqrt

__all__ = ["SineBox", "KernelSeries", "sines", "sums_of_sines", "sums_of_sines_reference"]


def sines(turns: Array, sizes: tuple[int, ...]) -> Array:
    """Products of :math:`\\sin(\\pi j t)` for j = 1, 2, ... over the columns of ``turns`` (N, D): (N, M)."""
    multiples = [jnp.asarray(math.pi * np.arange(1, m + 1), turns.dtype) for m in sizes]
    # prod_d sin(pi j_d t_d), j_D running fastest
    return reduce(products_in_rows, [jnp.sin(turns[..., d, None] * by) for d, by in enumerate(multiples)])


def sums_of_sines_reference(turns: Array, sizes: tuple[int, ...], weights: Array) -> Array:
    """``sines(turns, sizes) @ weights.T``."""
    return matmul(checkpoint_name(sines(turns, sizes), ROWS), weights.T)


def sums_of_sines(turns: Array, sizes: tuple[int, ...], weights: Array) -> Array:
    """Values of :func:`sums_of_sines_reference`: in several columns the sums are taken over one after the other.

    Args:
        turns: angles as multiples of pi (N, D).
        sizes: how many sines there are in each column, M together.
        weights: their weights (P, M).

    Returns:
        The sums (N, P).

    Example:
        >>> import jax.numpy as jnp
        >>> print(sums_of_sines(jnp.array([[0.5], [0.25]]), (3,), jnp.array([[2.0, 5.0, 1.0]])).round())
        [[1.]
         [7.]]
    """
    N, P = len(turns), len(weights)
    if len(sizes) > 1 and sizes[0] <= P:  # sums over the first column would be more numbers than there are products
        return sums_of_sines_reference(turns, sizes, weights)
    # w (P m_2 ... m_D, m_1), then sum_{j_1} w sin(pi j_1 t_1) (N, P m_2 ... m_D).
    rest = weights.reshape(P, sizes[0], -1).swapaxes(1, 2).reshape(-1, sizes[0])
    found = _in_one_column(turns[:, 0], rest)
    for d, size in enumerate(sizes[1:], 1):
        by = sines(turns[:, d : d + 1], (size,))
        found = (found.reshape(N, P, size, -1) * by[:, None, :, None]).sum(2)  # sum over j_d
    return found.reshape(N, P)


def _in_one_column(turns: Array, weights: Array) -> Array:
    """Sums for angles (N,) and weights (P, M)."""
    P, M = weights.shape
    short = math.ceil(math.sqrt(M * (1 + P / 4)))  # with many sums, what follows the sines costs as much as they do
    groups = -(-M // short)
    if 2 * (short + groups) + 0.75 * P * groups >= M:  # sines and cosines, and products with the second ones
        return sums_of_sines_reference(turns[:, None], (M,), weights)
    # w_{a + I c} (P C, I) with I = short and C = groups, zero beyond M.
    filled = jnp.pad(weights, [(0, 0), (0, short * groups - M)]).reshape(P * groups, short)
    # a theta (N, I) and I c theta (N, C), theta = pi t
    inner = turns[:, None] * jnp.asarray(math.pi * np.arange(1, short + 1), turns.dtype)
    outer = turns[:, None] * jnp.asarray(math.pi * short * np.arange(groups), turns.dtype)
    waves = [checkpoint_name(f(angles), ROWS) for angles in (inner, outer) for f in (jnp.sin, jnp.cos)]
    # sum_a w sin(a theta) and sum_a w cos(a theta), both (N, P, C)
    sine, cosine = (matmul(a, filled.T).reshape(len(turns), P, groups) for a in waves[:2])
    # sin(a theta + I c theta) = sin(a theta) cos(I c theta) + cos(a theta) sin(I c theta)
    return (sine * waves[3][:, None] + cosine * waves[2][:, None]).sum(-1)


# Of a kernel with a spectral density: the size of its basis is a product over columns.
_MOST_COLUMNS = 3


@pytree
class SineBox:
    """A box of the inputs, and how many functions there are along each of its sides.

    Args:
        low: its lower ends; a number, or (D,).
        high: its upper ends; a number, or (D,).
        size: functions, an integer for each column, or one for all of them.

    Raises:
        ValueError: ends that are not finite or not in order; a size that is not a positive integer.
    """

    low: ArrayLike
    high: ArrayLike
    size: int | tuple[int, ...] = static()

    def __post_init__(self) -> None:
        sizes = (self.size,) if isinstance(self.size, int) else tuple(np.atleast_1d(self.size).tolist())
        expect(
            sizes and all(isinstance(m, int) and not isinstance(m, bool) and m > 0 for m in sizes),
            "size to be a positive integer, or one for each column",
            self.size,
            "dgp.Basis.around(X, lengthscale) chooses",
        )
        for name, end in (("low", self.low), ("high", self.high)):
            if not isinstance(end, int | float):
                object.__setattr__(self, name, end := own_numbers(name, end))
            require_finite(name, end, "give finite ends of the interval")
        shapes = [np.shape(self.low), np.shape(self.high), (len(sizes),) if len(sizes) > 1 else ()]
        columns = {shape[0] for shape in shapes if shape and shape != (1,)}
        if any(len(shape) > 1 for shape in shapes) or len(columns) > 1:
            raise expected(
                "low, high and size to be numbers or one for each column",
                f"shapes {shapes[0]} and {shapes[1]} and size = {self.size}",
                "they are about the same columns",
            )
        if violated(lambda low, high: low < high, self.low, self.high):
            raise expected(
                "low < high",
                f"{self.low} and {self.high}",
                "leave room for the inputs and a few lengthscales between them",
            )
        object.__setattr__(self, "size", sizes * (max(columns, default=1) if len(sizes) == 1 else 1))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Functions along each side."""
        return self.size  # type: ignore[return-value]

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.result_type(self.low, self.high, float)

    def ends(self) -> tuple[Array, Array]:
        """Lower and upper ends (D,)."""
        low, high = (jnp.asarray(end, self.dtype) for end in (self.low, self.high))
        return jnp.broadcast_to(low, (len(self.sizes),)), jnp.broadcast_to(high, (len(self.sizes),))

    def middle(self) -> Array:
        """The point in the middle (D,)."""
        low, high = self.ends()
        return low + 0.5 * (high - low)


@pytree
class Sines:
    r"""Products of sines, zero on the boundary of a box and outside, with the variances :math:`\varrho(\omega)`.

    Args:
        columns: the columns that they are functions of.
        sizes: sines in each.
        low: lower ends (D,).
        length: of the sides (D,).
        root: standard deviations of the weights (M,).
    """

    columns: tuple[int, ...] = static()
    sizes: tuple[int, ...] = static()
    low: Array
    length: Array
    root: Array

    @property
    def bounded(self) -> tuple[int, ...]:
        """The columns along which they are zero outside of the box."""
        return self.columns

    @classmethod
    def of(cls, parts: list[tuple[Number, Kernel]], columns: tuple[int, ...], box: SineBox) -> Sines:
        """Of a sum of multiples of kernels with a spectral density."""
        index, sizes = np.array(columns), tuple(box.sizes[d] for d in columns)
        low, high = (end[index] for end in box.ends())
        numbers = np.stack(np.meshgrid(*[np.arange(1, m + 1) for m in sizes], indexing="ij"), -1)
        # omega_j = pi j / Delta (M, D)
        omega = math.pi * jnp.asarray(numbers.reshape(-1, len(sizes)), box.dtype) / (high - low)
        scales = [jnp.asarray(scale, omega.dtype) for scale, _ in parts]
        densities = [kernel.cast(omega.dtype).spectral_density(omega) for _, kernel in parts]
        # rho(omega_j) of the sum of kernels, sum_i alpha_i rho_i(omega_j) (M,)
        density: Any = sum(a * b for a, b in zip(scales, densities, strict=True))
        return cls(columns, sizes, low, high - low, safe_sqrt(density))

    def __call__(self, x: Array) -> Array:
        """Values at rows x (N, D), times the standard deviations: (N, M)."""
        return sines(self._turns(x), self.sizes) * self._deviations()

    def summed(self, x: Array, v: Array) -> Array:
        """``self(x) @ v.T`` for weights v (P, M): (N, P), without N times M numbers."""
        return sums_of_sines(self._turns(x), self.sizes, self._deviations() * v)

    def _turns(self, x: Array) -> Array:
        """From zero at the lower ends to one at the upper ones: (N, D)."""
        # Clipped, since all sines are zero at 0 and 1: f is its mean outside of the box.
        return jnp.clip((x[..., list(self.columns)] - self.low) / self.length, 0, 1)

    def _deviations(self) -> Array:
        return self.root * jnp.sqrt(jnp.prod(2 / self.length))  # sqrt(rho(omega_j)) prod_d sqrt(2 / Delta_d)


@pytree
class OwnFunctions:
    """Functions that a kernel defines: ``Kernel.series``.

    Args:
        kernel: the kernel of the columns.
        columns: that they are functions of.
        sizes: functions in each column at most.
    """

    kernel: Kernel
    columns: tuple[int, ...] = static()
    sizes: tuple[int, ...] = static()
    bounded: ClassVar[tuple[int, ...]] = ()
    root: ClassVar[None] = None

    def __call__(self, x: Array) -> Array:
        """Values at rows x (N, D), times the standard deviations: (N, M)."""
        found = self.kernel.cast(x.dtype).series(x[..., list(self.columns)], self.sizes)
        assert found is not None
        return found


@pytree
class SineTerm:
    """A summand of a kernel: all products of one function of each of its factors.

    Args:
        scale: its positive multiple.
        factors: from rows to functions.
    """

    scale: Number
    factors: tuple[Sines | OwnFunctions, ...]

    def __call__(self, x: Array) -> Array:
        one = jnp.sqrt(jnp.asarray(self.scale, x.dtype)) * jnp.ones((len(x), 1), x.dtype)
        # sqrt(alpha_i) times all products of one function of each
        return reduce(products_in_rows, [factor(x) for factor in self.factors], one)

    def summed(self, x: Array, v: Array) -> Array:
        """``self(x) @ v.T`` for weights v (P, M): (N, P)."""
        if len(self.factors) == 1 and isinstance(self.factors[0], Sines):
            return self.factors[0].summed(x, jnp.sqrt(jnp.asarray(self.scale, x.dtype)) * v)
        return matmul(checkpoint_name(self(x), ROWS), v.T)


@pytree
class KernelSeries:
    """A kernel as a sum of products of known functions.

    Args:
        terms: the functions of each summand; summands with a spectral density and the same columns are one.
        size: M, how many functions there are.
    """

    terms: tuple[SineTerm, ...]
    size: int = static()

    @classmethod
    def of(cls, kernel: Kernel, box: SineBox) -> KernelSeries:
        """The functions of a kernel on a box.

        Args:
            kernel: made of kernels with a spectral density, or with basis functions.
            box: where they live.

        Raises:
            ValueError: kernels with neither, on columns that the box does not have, or of more than three together.
        """
        densities: dict[tuple[int, ...], list[tuple[Number, Kernel]]] = {}
        terms = []
        for summand in kernel.expanded():
            columns = [_columns(factor.columns, box) for factor in summand.factors]
            own = [_own(factor.kernel, c, box) for factor, c in zip(summand.factors, columns, strict=True)]
            wide = [c for c, found in zip(columns, own, strict=True) if found is None and len(c) > _MOST_COLUMNS]
            if wide:
                raise expected(
                    f"kernels on up to {_MOST_COLUMNS} columns of a Basis",
                    f"{summand} on {len(wide[0])}",
                    "more need an additive kernel, k.on(0) + k.on(1) + ..., or dgp.Points",
                )
            if len(own) == 1 and own[0] is None:
                densities.setdefault(columns[0], []).append((summand.scale, summand.factors[0].kernel))
            else:
                terms.append(_product(summand, columns, own, box))
        terms += [SineTerm(1.0, (Sines.of(parts, columns, box),)) for columns, parts in densities.items()]
        rows = jax.ShapeDtypeStruct((1, len(box.sizes)), box.dtype)
        sizes = [jax.eval_shape(term, rows).shape[-1] for term in terms]
        return cls(tuple(terms), sum(sizes))

    def __call__(self, x: Array) -> Array:
        """Values of all functions at rows x (N, D), times the standard deviations of their weights: (N, M)."""
        return jnp.concatenate([term(x) for term in self.terms], -1)

    def summed(self, x: Array, v: Array) -> Array:
        """``self(x) @ v.T`` for weights v (P, M): (N, P), term by term."""
        ends = np.cumsum([jax.eval_shape(term, x[:1]).shape[-1] for term in self.terms])[:-1]
        parts = zip(self.terms, jnp.split(v, ends, axis=-1), strict=True)
        return sum((term.summed(x, part) for term, part in parts), jnp.zeros((len(x), len(v)), v.dtype))

    def deviations(self, layer: str | None) -> Array:
        """Standard deviations of the weights of the functions at unit scale, bounded from zero: (M,).

        Raises:
            ValueError: functions that are not sines, whose shape depends on hyperparameters.
        """

        def of_term(term: SineTerm) -> Array:
            roots = [f.root for f in term.factors if f.root is not None]
            expect(
                roots and len(roots) >= len(term.factors),
                "a kernel with a spectral density on the Basis, for dgp.update",
                "basis functions of its own",
                "give the layer dgp.Points(Z)",
                at=f"gp {layer!r}",
            )
            return jnp.sqrt(term.scale) * reduce(products_in_rows, roots)  # sqrt(alpha prod rho(omega_j))

        found = jnp.concatenate([of_term(term) for term in self.terms])
        return jnp.maximum(found, jnp.finfo(found.dtype).tiny)

    @property
    def bounded(self) -> tuple[int, ...]:
        """The columns whose functions are zero outside of the box."""
        return tuple(sorted({column for term in self.terms for f in term.factors for column in f.bounded}))


def _columns(columns: tuple[int, ...] | None, box: SineBox) -> tuple[int, ...]:
    D = len(box.sizes)
    found = tuple(range(D)) if columns is None else columns
    if max(found) >= D:
        raise expected(
            f"a kernel on columns 0 to {D - 1} of a Basis with {D} column(s)",
            f".on{found}",
            "columns are counted from 0, and size has one number for each",
        )
    return found


def _own(kernel: Kernel, columns: tuple[int, ...], box: SineBox) -> OwnFunctions | None:
    """The functions that a kernel defines, if any."""
    sizes = tuple(box.sizes[d] for d in columns)
    rows = jax.ShapeDtypeStruct((1, len(columns)), box.dtype)
    found = jax.eval_shape(lambda rows: kernel.cast(box.dtype).series(rows, sizes), rows)
    return None if found is None else OwnFunctions(kernel, columns, sizes)


def _product(
    summand: Summand, columns: list[tuple[int, ...]], own: list[OwnFunctions | None], box: SineBox
) -> SineTerm:
    factors = zip(summand.factors, columns, own, strict=True)
    found = tuple(
        Sines.of([(1.0, f.kernel)], c, box) if functions is None else functions for f, c, functions in factors
    )
    return SineTerm(summand.scale, found)
