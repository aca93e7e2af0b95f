r"""Which rows of marked values each entry of an array depends on.

Values :math:`h_n` may be drawn row by row, each from its marginal, where only functions of single rows and sums of such
functions are used. For a function of several rows together, such as :math:`(\sum_n h_n)^2`, the rows have to be drawn
from their joint distribution. This module distinguishes the two cases, from the jaxpr of a program in which values are
marked by :func:`mark`.

A fact about an array maps the name of every marked value that it depends on to :class:`Rows` where each entry of the
array depends on at most one row of that value, and to ``None`` where an entry may depend on several. The answer is
conservative: it may be ``None`` although every entry depends on one row only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from numpyro_dgp._typing import Array
from numpyro_dgp.jaxprs.walk import ELEMENTWISE, walk

__all__ = [
    "Elsewhere",
    "Place",
    "Rows",
    "Several",
    "known_rows",
    "mark",
    "marked_name",
    "place",
    "result_reasons",
    "row_dependence",
    "row_reasons",
]

_MARK = "rows of "


class Rows(NamedTuple):
    """One row for each entry of an array.

    Args:
        axes: the axes of the array along which rows differ, counted from the last (-1, -2, ...).
        which: the row that an entry depends on: ``()`` for the row at the same index; otherwise one object for every
            operation that has moved rows, so that equal values mean equal rows.
    """

    axes: tuple[int, ...]
    which: tuple[Hashable, ...] = ()


class Several(NamedTuple):
    """Several rows for an entry of an array, or rows that are not known.

    Args:
        cause: the name of the primitive that combines rows, or that this module does not know.
        known: whether it combines rows for certain.
    """

    cause: str
    known: bool


class Elsewhere:
    """The rows after one equation that moves rows: equal to no other.

    Args:
        by: the names of the marked values that the indices of a gather are computed from.
    """

    def __init__(self, by: frozenset[str]) -> None:
        self.by = by


Fact = dict[str, Rows | Several]
_CONSTANT: Fact = {}


def mark(name: str, value: Array, batch_ndim: int) -> Array:
    """Return ``value``, with its rows (over its first ``batch_ndim`` axes) marked by this name for the analysis."""
    return checkpoint_name(value, f"{_MARK}{batch_ndim} {name}")


def marked_name(equation: Any) -> str | None:
    """The name that an equation marks values by (:func:`mark`), or ``None``."""
    label = equation.params["name"] if equation.primitive.name == "name" else ""
    return label.removeprefix(_MARK).split(" ", 1)[1] if label.startswith(_MARK) else None


def row_dependence(program: Callable[..., Any], *args: Any) -> Any:
    """Which rows of marked values the arrays that ``program(*args)`` returns depend on, a fact in place of each.

    Args:
        program: a function that marks values and returns a pytree of arrays.
        *args: its arguments; only their shapes matter.

    Example:
        >>> import jax.numpy as jnp
        >>> def program(h):
        ...     h = mark("h", h, 1)
        ...     return {"each": jnp.sin(h @ jnp.ones((2, 3))), "sum": h.sum(), "pairs": h @ h.T}
        >>> facts = row_dependence(program, jnp.ones((5, 2)))
        >>> facts["each"], facts["sum"], facts["pairs"]
        ({'h': Rows(axes=(-2,), which=())}, {'h': None}, {'h': None})
    """
    return known_rows(row_reasons(program, *args))


def known_rows(reasons: Any) -> Any:
    """The facts of :func:`row_dependence`, from those of :func:`row_reasons`."""
    return jax.tree.map(lambda rows: rows if isinstance(rows, Rows) else None, reasons, is_leaf=_is_rows)


def result_reasons(jaxpr: Any, results: Any) -> Any:
    """The same as :func:`row_reasons` for a program that is traced already.

    Args:
        jaxpr: of the program.
        results: a pytree of the structure that the program returns.
    """
    facts = walk(jaxpr, [_CONSTANT] * len(jaxpr.invars), _apply, _CONSTANT)
    return jax.tree.unflatten(jax.tree.structure(results), facts)


def _is_rows(value: Any) -> bool:
    return isinstance(value, Rows | Several)


def row_reasons(program: Callable[..., Any], *args: Any) -> Any:
    """The same as :func:`row_dependence`, with a :class:`Several` in the place of every ``None``.

    Example:
        >>> import jax.numpy as jnp
        >>> row_reasons(lambda h: mark("h", h, 1).sum(), jnp.ones(5))
        {'h': Several(cause='reduce_sum', known=True)}
    """
    closed, shapes = jax.make_jaxpr(program, return_shape=True)(*args)
    return result_reasons(closed.jaxpr, shapes)


def _apply(equation: Any, facts: list[Fact]) -> list[Fact]:
    name = marked_name(equation)
    if name is not None:
        count = equation.params["name"].removeprefix(_MARK).split(" ", 1)[0]
        shape = equation.outvars[0].aval.shape
        # If there is only one row, all entries depend on that row: no axis has to be tracked.
        axes = tuple(axis - len(shape) for axis in range(int(count)) if shape[axis] > 1)
        return [{**facts[0], name: Rows(axes)}]
    elsewhere = Elsewhere(frozenset(facts[1] if equation.primitive.name == "gather" else ()))
    return [_result(equation, facts, out.aval.shape, elsewhere) for out in equation.outvars]


def _result(equation: Any, facts: list[Fact], out: tuple[int, ...], elsewhere: Hashable) -> Fact:
    found: Fact = {}
    for i, fact in enumerate(facts):
        shape = equation.invars[i].aval.shape
        for name, rows in fact.items():
            moved = _moved(equation, i, rows, shape, out, elsewhere) if isinstance(rows, Rows) else rows
            found[name] = together(found.get(name, moved), moved, equation.primitive.name)
    return found


def together(a: Rows | Several, b: Rows | Several, cause: str) -> Rows | Several:
    """What an entry depends on that is computed from two numbers.

    Args:
        a: what the one depends on.
        b: what the other depends on.
        cause: the name of what combines them.
    """
    if isinstance(a, Several) or isinstance(b, Several):
        return a if isinstance(a, Several) else b
    if a == b:
        return a
    # Rows that fixed slices move are other rows for certain; gathered ones may be the same.
    return Several(cause, all(isinstance(step, _Step) for step in (*a.which, *b.which)))


def _moved(
    equation: Any, i: int, rows: Rows, shape: tuple[int, ...], out: tuple[int, ...], elsewhere: Hashable
) -> Rows | Several:
    """The rows that entries of a result of shape ``out`` depend on through argument i, of shape ``shape``."""
    axes, which, name = [], rows.which, equation.primitive.name
    for axis in rows.axes:
        there = place(equation, i, axis + len(shape), shape, out)
        if there is None:
            return Several(name, name in _COMBINING)
        if out[there.axis] > 1:
            axes.append(there.axis - len(out))
        which = (*which, _step(equation, axis + len(shape)) or elsewhere) if there.moved else which
    return Rows(tuple(axes), which)


class _Step(NamedTuple):
    """A move of rows that is known from the equation: equal steps are equal moves."""

    name: str
    first: int = 0
    stride: int = 1


def _step(equation: Any, axis: int) -> _Step | None:
    name, params = equation.primitive.name, equation.params
    if name == "slice":
        return _Step(name, params["start_indices"][axis], (params["strides"] or {axis: 1})[axis])
    return _Step(name) if name == "rev" else None


class Place(NamedTuple):
    """Where an axis of an argument lies in a result, and whether its entries have changed their order or number."""

    axis: int
    moved: bool = False


_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
_ALONG = {
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), "axis"),
    "sort": "dimension",
}
_BY_MATRIX = frozenset("cholesky triangular_solve lu qr eigh".split())
_COMBINING = _REDUCTIONS | _ALONG.keys() | _BY_MATRIX | {"dot_general"}


def place(equation: Any, i: int, axis: int, shape: tuple[int, ...], out: tuple[int, ...]) -> Place | None:
    """The axis of the result that an axis of argument i becomes; ``None`` if its entries are combined, or unknown."""
    name, params = equation.primitive.name, equation.params
    kept = Place(axis)
    if name in ELEMENTWISE or name == "name":
        return kept if len(shape) == len(out) and shape[axis] == out[axis] else None
    if name == "broadcast_in_dim":
        return Place(params["broadcast_dimensions"][axis])
    if name == "transpose":
        return Place(params["permutation"].index(axis))
    if name == "squeeze":
        return Place(axis - sum(d < axis for d in params["dimensions"]))
    if name == "reshape":
        before = math.prod(shape[:axis])
        same = [j for j, n in enumerate(out) if n == shape[axis] and math.prod(out[:j]) == before]
        return Place(same[0]) if same and params.get("dimensions") is None else None
    if name in _REDUCTIONS:
        return None if axis in params["axes"] else Place(axis - sum(a < axis for a in params["axes"]))
    if name in _ALONG:
        return None if axis == params[_ALONG[name]] else kept
    if name in _BY_MATRIX:
        return kept if axis < len(shape) - 2 else None
    if name == "top_k":
        return kept if axis < len(shape) - 1 else None
    if name == "rev":
        return Place(axis, axis in params["dimensions"])
    if name == "concatenate":
        return Place(axis, axis == params["dimension"])
    if name == "stack":  # from JAX 0.12 on
        return Place(axis + (axis >= params["axis"]))
    if name == "unstack" and axis != params["axis"]:
        return Place(axis - (axis > params["axis"]))
    if name == "split":
        return Place(axis, axis == params["axis"])
    if name == "slice":
        return Place(axis, out[axis] != shape[axis])
    if name == "pad" and i == 0:
        return Place(axis, tuple(params["padding_config"][axis]) != (0, 0, 0))
    if name == "dynamic_slice" and i == 0:
        return Place(axis, out[axis] != shape[axis])
    if name == "gather" and i == 0:
        return _gathered(equation, axis, shape, out)
    if name == "dot_general":
        return _of_product(params["dimension_numbers"], i, axis, [len(v.aval.shape) for v in equation.invars])
    return None


def _gathered(equation: Any, axis: int, shape: tuple[int, ...], out: tuple[int, ...]) -> Place | None:
    numbers = equation.params["dimension_numbers"]
    batch = [d for d in range(len(out)) if d not in numbers.offset_dims]  # axes of the indices
    if axis in numbers.operand_batching_dims:  # row by row, one index each
        return Place(batch[numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]])
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if axis not in dropped:
        within = [d for d in range(len(shape)) if d not in dropped]
        whole = equation.params["slice_sizes"][axis] == shape[axis]
        return Place(numbers.offset_dims[within.index(axis)], not whole)
    # Rows chosen by an index: they lie along the one axis of the indices.
    return Place(batch[0], True) if len(batch) == 1 else None


def _of_product(numbers: Any, i: int, axis: int, ndims: list[int]) -> Place | None:
    """As :func:`place` for a product: first batch axes, then the other axes of the left and of the right factor."""
    contracting, batch = numbers
    if axis in contracting[i]:
        return None
    if axis in batch[i]:
        return Place(list(batch[i]).index(axis))
    free = [[d for d in range(n) if d not in (*contracting[j], *batch[j])] for j, n in enumerate(ndims)]
    return Place(len(batch[0]) + (len(free[0]) if i == 1 else 0) + free[i].index(axis))
