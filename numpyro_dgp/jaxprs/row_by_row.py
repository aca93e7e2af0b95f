"""Whether a program computes every row of its results from that row of its arguments alone, for any number of rows.
Such a program may be run with padded rows, or in batches. It is traced at two numbers of rows,
and the two jaxprs are compared equation by equation: the axes whose sizes differ are those of rows, they must stay
apart from argument to result, and nothing else may differ, so that no number is computed from the number of rows.

The answer is conservative: it is no for a program with an operation that this module does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from numpyro_dgp._typing import Array
from numpyro_dgp.jaxprs.row_dependence import place
from numpyro_dgp.jaxprs.walk import called_jaxpr

__all__ = ["row_axes", "rows_apart"]

_SIZES = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes"})  # settings that follow from shapes
_MAKERS = frozenset({"iota", "broadcast_in_dim", "random_bits"})  # they fill any number of rows in the same way
_APART = "rows_apart"

# Facts about an array in addition to its shape: that it holds the index of each row, that index plus the number of
# rows, or whether the index is negative.
_INDEX, _FROM_END, _IS_NEGATIVE = "index", "index from the end", "is negative"


class _RowsMeetError(Exception):
    """A row of a result may depend on other rows, or on how many there are."""


def rows_apart(function: Callable[..., Array]) -> Callable[..., Array]:
    """``function``, compiled and declared to compute rows independently, so that it is not analysed.

    Args:
        function: of arrays, such as the draw of a distribution given a key.
    """

    def rows_apart(*args: Array) -> Array:
        return function(*args)

    return jax.jit(rows_apart)


def row_axes(first: core.ClosedJaxpr, second: core.ClosedJaxpr) -> list[int | None] | None:
    """The axis of rows of every result, ``None`` for results without; or ``None`` if rows are not known to be apart.

    Args:
        first: the program, traced at some number of rows.
        second: traced at another one.

    Example:
        >>> import jax.numpy as jnp
        >>> few, many = jnp.ones((3, 2)), jnp.ones((5, 2))
        >>> def axes(program):
        ...     return row_axes(jax.make_jaxpr(program)(few), jax.make_jaxpr(program)(many))
        >>> axes(lambda X: (jnp.sin(X).sum(1), jnp.ones(4))), axes(lambda X: X - X.mean(0)), axes(lambda X: X / len(X))
        ([0, None], None, None)
    """
    try:
        _require_constants(first.consts, second.consts)
        facts = _compare(first.jaxpr, second.jaxpr, [None] * len(first.jaxpr.invars))
        _require(_FROM_END not in facts)
        return [_axis(a.aval, b.aval) for a, b in zip(first.jaxpr.outvars, second.jaxpr.outvars, strict=True)]
    except _RowsMeetError:
        return None


def _require(condition: Any) -> None:
    if not condition:
        raise _RowsMeetError


def _axis(a: Any, b: Any) -> int | None:
    """The axis along which two shapes differ."""
    _require(a.dtype == b.dtype and len(a.shape) == len(b.shape))
    axes = [i for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m]
    _require(len(axes) <= 1)
    return axes[0] if axes else None


def _require_constants(first: Any, second: Any) -> None:
    """Constants must be the same; of an array with rows, the first ones."""
    _require(len(first) == len(second))
    for a, b in zip(first, second, strict=True):
        if a is not b:
            axis = _axis(a, b)
            if axis is not None:
                count = min(a.shape[axis], b.shape[axis])
                a, b = (jax.lax.slice_in_dim(c, 0, count, axis=axis) for c in (a, b))
            _require(_same(a, b))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | np.generic | jax.Array) and isinstance(b, np.ndarray | np.generic | jax.Array):
        if any(jax.dtypes.issubdtype(c.dtype, jax.dtypes.extended) for c in (a, b)):
            return a is b
        return a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _compare(first: Any, second: Any, facts: list[str | None]) -> list[str | None]:
    """Facts about the results of a jaxpr, given those about its arguments."""
    ours, theirs = _needed(first), _needed(second)
    _require(len(ours) == len(theirs))
    numbers = {v: i for i, v in enumerate((*first.constvars, *first.invars))}
    others = {v: i for i, v in enumerate((*second.constvars, *second.invars))}
    known = dict(zip(first.invars, facts, strict=True))

    def fact(a: Any, b: Any) -> str | None:
        if isinstance(a, core.Literal) or isinstance(b, core.Literal):
            return None
        _require(numbers[a] == others[b])
        return known.get(a)

    for one, two in zip(ours, theirs, strict=True):
        _require(one.primitive is two.primitive and len(one.invars) == len(two.invars))
        found = [fact(a, b) for a, b in zip(one.invars, two.invars, strict=True)]
        results = _of_equation(one, two, found)
        for a, b, result in zip(one.outvars, two.outvars, results, strict=True):
            numbers[a] = others[b] = len(numbers)
            known[a] = result
    return [fact(a, b) for a, b in zip(first.outvars, second.outvars, strict=True)]


def _needed(jaxpr: Any) -> list[Any]:
    """The equations that results depend on: others, such as those of checks on shapes, may mix rows."""
    needed, found = _variables(jaxpr.outvars), []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            found.append(equation)
            needed |= _variables(equation.invars)
    return found[::-1]


def _variables(atoms: Any) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, core.Literal)}


def _of_equation(one: Any, two: Any, facts: list[str | None]) -> list[str | None]:
    name = one.primitive.name
    nothing: list[str | None] = [None] * len(one.outvars)
    inner, same = called_jaxpr(one), called_jaxpr(two)
    equal = _literals_are_equal(one, two)
    _require(equal or (name == "add" and _INDEX in facts))
    if inner is not None and one.params.get("name") != _APART:
        _require_constants(_constants(one), _constants(two))
        return _compare(inner, same, facts)
    _require(_FROM_END not in facts or (name == "select_n" and facts[0] == _IS_NEGATIVE))
    axes = [_axis(a.aval, b.aval) for a, b in zip(one.invars, two.invars, strict=True)]
    results = [_axis(a.aval, b.aval) for a, b in zip(one.outvars, two.outvars, strict=True)]
    if inner is not None:
        return nothing
    if name in ("scan", "while", "cond"):
        _of_loop(one, two, axes)
        return nothing
    _require_settings(one.params, two.params)
    if axes == [None] * len(axes):
        _require(results == [None] * len(results) or name in _MAKERS)
        return [_INDEX] if name == "iota" and one.outvars[0].aval.ndim == 1 and results[0] == 0 else nothing
    if name == "gather":
        _require(results == [_gathered(one, two, axes, facts)])
        return nothing
    for i, axis in enumerate(axes):
        if axis is not None:
            _require(results == [_kept_axis(one, i, axis)] * len(results))
    return [_of_index(one, facts) if equal else _FROM_END] * len(one.outvars)


def _kept_axis(equation: Any, i: int, axis: int) -> int:
    """The axis of the results that an axis of argument i becomes, with its entries in the same order."""
    there = place(equation, i, axis, equation.invars[i].aval.shape, equation.outvars[0].aval.shape)
    if there is None or there.moved:
        raise _RowsMeetError
    return there.axis


def _literals_are_equal(one: Any, two: Any) -> bool:
    equal = True
    for a, b in zip(one.invars, two.invars, strict=True):
        kinds = isinstance(a, core.Literal), isinstance(b, core.Literal)
        _require(kinds[0] == kinds[1])
        equal &= not kinds[0] or _same(a.val, b.val)
    return equal


def _of_index(equation: Any, facts: list[str | None]) -> str | None:
    """What is known of a result that is computed from the index of each row."""
    name = equation.primitive.name
    if name in ("broadcast_in_dim", "reshape", "copy") or (
        name == "convert_element_type" and np.issubdtype(equation.params["new_dtype"], np.integer)
    ):
        return facts[0]
    if name == "select_n" and facts[0] == _IS_NEGATIVE:
        return facts[1]
    below_zero = name == "lt" and getattr(equation.invars[1], "val", None) == 0
    return _IS_NEGATIVE if below_zero and facts[0] == _INDEX else None


def _gathered(one: Any, two: Any, axes: list[int | None], facts: list[str | None]) -> int | None:
    """The axis of rows of what an index picks from an array."""
    numbers, sizes = one.params["dimension_numbers"], one.params["slice_sizes"]
    array, index = axes
    batch = [d for d in range(one.outvars[0].aval.ndim) if d not in numbers.offset_dims]
    if numbers.operand_batching_dims:
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        _require((array, index) in pairs)
        return batch[index or 0]
    if index is None:
        return _kept_axis(one, 0, array or 0)
    if array is not None:  # rows of an array with rows: each its own
        _require(facts[1] == _INDEX and numbers.start_index_map == (array,) and array in numbers.collapsed_slice_dims)
    else:
        _require(sizes == two.params["slice_sizes"])
    return batch[index]


def _of_loop(one: Any, two: Any, axes: list[int | None]) -> None:
    """Loops and branches, whose jaxprs are compared as those of any function; a loop over rows differs in length."""
    scanned = range(one.params["num_consts"] + one.params["num_carry"], len(axes)) if "num_carry" in one.params else ()
    _require(all(axes[i] != 0 for i in scanned))
    _require_settings(one.params, two.params)
    pairs = zip(
        jax.tree.leaves(list(one.params.values()), is_leaf=_is_closed),
        jax.tree.leaves(list(two.params.values()), is_leaf=_is_closed),
        strict=True,
    )
    for a, b in pairs:
        if _is_closed(a):
            _require_constants(a.consts, b.consts)
            _compare(a.jaxpr, b.jaxpr, [None] * len(a.jaxpr.invars))
            for c, d in zip((*a.jaxpr.invars, *a.jaxpr.outvars), (*b.jaxpr.invars, *b.jaxpr.outvars), strict=True):
                _axis(c.aval, d.aval)


def _is_closed(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr)


def _constants(equation: Any) -> Any:
    return next((v.consts for v in equation.params.values() if _is_closed(v)), [])


def _require_settings(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name, a in first.items():
        b = second[name]
        jaxprs = _is_closed(a) or (isinstance(a, tuple) and any(map(_is_closed, a)))
        _require(jaxprs or name in _SIZES or a is b or _same(a, b))
