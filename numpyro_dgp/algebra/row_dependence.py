r"""Which rows of which values an array depends on, entry by entry.

Values :math:`h_n` may be drawn row by row, each from its marginal, where only functions of single rows and sums of such
functions are used. For a function of several rows together, such as :math:`(\sum_n h_n)^2`, the rows have to be drawn
from their joint distribution. This module tells the two cases apart, from the jaxpr of a program in which values are
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
from numpyro_dgp.algebra.jaxprs import ELEMENTWISE, walk

__all__ = ["Rows", "mark", "row_dependence"]

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


Fact = dict[str, Rows | None]
_CONSTANT: Fact = {}


def mark(name: str, value: Array, batch_ndim: int) -> Array:
    """Return ``value``, with its rows (over its first ``batch_ndim`` axes) marked by this name for the analysis."""
    return checkpoint_name(value, f"{_MARK}{batch_ndim} {name}")


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
    closed, shapes = jax.make_jaxpr(program, return_shape=True)(*args)
    facts = walk(closed.jaxpr, [_CONSTANT] * len(closed.jaxpr.invars), _apply, _CONSTANT)
    return jax.tree.unflatten(jax.tree.structure(shapes), facts)


def _apply(equation: Any, facts: list[Fact]) -> list[Fact]:
    if equation.primitive.name == "name" and equation.params["name"].startswith(_MARK):
        count, name = equation.params["name"].removeprefix(_MARK).split(" ", 1)
        shape = equation.outvars[0].aval.shape
        # If there is only one row, all entries depend on that row: no axis has to be tracked.
        axes = tuple(axis - len(shape) for axis in range(int(count)) if shape[axis] > 1)
        return [{**facts[0], name: Rows(axes)}]
    elsewhere = object()  # the map from entries to rows after an equation that moves rows
    return [_result(equation, facts, out.aval.shape, elsewhere) for out in equation.outvars]


def _result(equation: Any, facts: list[Fact], out: tuple[int, ...], elsewhere: Hashable) -> Fact:
    found: Fact = {}
    for i, fact in enumerate(facts):
        shape = equation.invars[i].aval.shape
        for name, rows in fact.items():
            moved = None if rows is None else _moved(equation, i, rows, shape, out, elsewhere)
            found[name] = moved if found.get(name, moved) == moved else None
    return found


def _moved(
    equation: Any, i: int, rows: Rows, shape: tuple[int, ...], out: tuple[int, ...], elsewhere: Hashable
) -> Rows | None:
    """The rows that entries of a result of shape ``out`` depend on through argument i, of shape ``shape``."""
    axes, which = [], rows.which
    for axis in rows.axes:
        place = _place(equation, i, axis + len(shape), shape, out)
        if place is None:
            return None
        if out[place.axis] > 1:
            axes.append(place.axis - len(out))
        which = (*rows.which, elsewhere) if place.moved else which
    return Rows(tuple(axes), which)


class _Place(NamedTuple):
    axis: int
    moved: bool = False


_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
_ALONG = {
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), "axis"),
    "sort": "dimension",
}
_BY_MATRIX = frozenset("cholesky triangular_solve lu qr eigh".split())


def _place(equation: Any, i: int, axis: int, shape: tuple[int, ...], out: tuple[int, ...]) -> _Place | None:
    """The axis of the result that an axis of argument i becomes; ``None`` if its entries are combined, or unknown."""
    name, params = equation.primitive.name, equation.params
    kept = _Place(axis)
    if name in ELEMENTWISE or name == "name":
        return kept if len(shape) == len(out) and shape[axis] == out[axis] else None
    if name == "broadcast_in_dim":
        return _Place(params["broadcast_dimensions"][axis])
    if name == "transpose":
        return _Place(params["permutation"].index(axis))
    if name == "squeeze":
        return _Place(axis - sum(d < axis for d in params["dimensions"]))
    if name == "reshape":
        before = math.prod(shape[:axis])
        same = [j for j, n in enumerate(out) if n == shape[axis] and math.prod(out[:j]) == before]
        return _Place(same[0]) if same and params.get("dimensions") is None else None
    if name in _REDUCTIONS:
        return None if axis in params["axes"] else _Place(axis - sum(a < axis for a in params["axes"]))
    if name in _ALONG:
        return None if axis == params[_ALONG[name]] else kept
    if name in _BY_MATRIX:
        return kept if axis < len(shape) - 2 else None
    if name == "rev":
        return _Place(axis, axis in params["dimensions"])
    if name == "concatenate":
        return _Place(axis, axis == params["dimension"])
    if name == "split":
        return _Place(axis, axis == params["axis"])
    if name == "slice":
        return _Place(axis, out[axis] != shape[axis])
    if name == "pad" and i == 0:
        return _Place(axis, tuple(params["padding_config"][axis]) != (0, 0, 0))
    if name == "dynamic_slice" and i == 0:
        return _Place(axis, out[axis] != shape[axis])
    if name == "gather" and i == 0:
        return _gathered(equation, axis, shape, out)
    if name == "dot_general":
        return _of_product(params["dimension_numbers"], i, axis, [len(v.aval.shape) for v in equation.invars])
    return None


def _gathered(equation: Any, axis: int, shape: tuple[int, ...], out: tuple[int, ...]) -> _Place | None:
    numbers = equation.params["dimension_numbers"]
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if axis in numbers.operand_batching_dims:
        return None
    if axis not in dropped:
        within = [d for d in range(len(shape)) if d not in dropped]
        whole = equation.params["slice_sizes"][axis] == shape[axis]
        return _Place(numbers.offset_dims[within.index(axis)], not whole)
    # Rows chosen by an index: they lie along the one axis of the indices.
    batch = [d for d in range(len(out)) if d not in numbers.offset_dims]
    return _Place(batch[0], True) if len(batch) == 1 else None


def _of_product(numbers: Any, i: int, axis: int, ndims: list[int]) -> _Place | None:
    """As :func:`_place` for a product: first batch axes, then the other axes of the left and of the right factor."""
    contracting, batch = numbers
    if axis in contracting[i]:
        return None
    if axis in batch[i]:
        return _Place(list(batch[i]).index(axis))
    free = [[d for d in range(n) if d not in (*contracting[j], *batch[j])] for j, n in enumerate(ndims)]
    return _Place(len(batch[0]) + (len(free[0]) if i == 1 else 0) + free[i].index(axis))
