"""Finds arrays of a program that are shorter than the range of their indices, from its jaxpr. JAX clamps such indices
to the last row. Only unmodified indices are checked: after arithmetic such as ``i // 2`` their range is unknown, and
nothing is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from numpyro_dgp.jaxprs.row_dependence import marked_name
from numpyro_dgp.jaxprs.walk import walk

__all__ = ["ShortArray", "short_arrays"]


class ShortArray(NamedTuple):
    """An array that is shorter than the range of its indices.

    Args:
        name: of the marked indices.
        size: they are below this number.
        shape: of the array.
        axis: that they index.
    """

    name: str
    size: int
    shape: tuple[int, ...]
    axis: int


class _Form(Enum):
    """What has been done to indices i. JAX replaces negative ones: ``select_n(i < 0, i, i + length)`` is i again."""

    ITSELF = 0
    NEGATIVE = 1
    SHIFTED = 2


class _Index(NamedTuple):
    name: str
    form: _Form


# About an array of indices: what they are; a tuple for each column where columns are put together; ``None`` if unknown.
Fact = _Index | tuple[_Index | None, ...] | None

_UNCHANGED = frozenset("name convert_element_type broadcast_in_dim reshape squeeze copy".split())
_CHANGED = {"lt": _Form.NEGATIVE, "add": _Form.SHIFTED}


def short_arrays(jaxpr: Any, sizes: Mapping[str, int]) -> list[ShortArray]:
    """Arrays whose rows are picked by marked indices and that have fewer rows than these need.

    Args:
        jaxpr: a program in which indices are marked (``row_dependence.mark``).
        sizes: by name of the mark, the number that indices are below.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.jaxprs.row_dependence import mark
        >>> def program(x, y):
        ...     i = mark("data", jnp.arange(3), 1)  # three of eight rows
        ...     return x[i], y[i], y[i // 2]
        >>> short_arrays(jax.make_jaxpr(program)(jnp.ones((8, 1)), jnp.ones(5)).jaxpr, {"data": 8})
        [ShortArray(name='data', size=8, shape=(5,), axis=0)]
    """
    found: list[ShortArray] = []

    def apply(equation: Any, facts: list[Fact]) -> list[Fact]:
        if equation.primitive.name == "gather":
            shape = equation.invars[0].aval.shape
            for column, axis in zip(
                _columns(facts[1]), equation.params["dimension_numbers"].start_index_map, strict=False
            ):
                if column is not None and column.form is _Form.ITSELF and shape[axis] < sizes[column.name]:
                    found.append(ShortArray(column.name, sizes[column.name], shape, axis))
        return [_fact(equation, facts, sizes)] * len(equation.outvars)

    walk(jaxpr, [None] * len(jaxpr.invars), apply, None)
    return found


def _columns(fact: Fact) -> tuple[_Index | None, ...]:
    return (fact,) if isinstance(fact, _Index) else fact or ()


def _fact(equation: Any, facts: list[Fact], sizes: Mapping[str, int]) -> Fact:
    name = equation.primitive.name
    marked = marked_name(equation)
    if marked is not None and marked in sizes:
        return _Index(marked, _Form.ITSELF)
    if all(fact is None for fact in facts):
        return None
    first = facts[0]
    if name == "concatenate":
        columns = all(atom.aval.shape[-1] == 1 for atom in equation.invars)
        last = equation.params["dimension"] == len(equation.invars[0].aval.shape) - 1
        return tuple(f if isinstance(f, _Index) else None for f in facts) if columns and last else None
    if not isinstance(first, _Index):
        return None
    if name in _UNCHANGED:
        return first
    if name in _CHANGED and first.form is _Form.ITSELF and facts[1] is None:
        return _Index(first.name, _CHANGED[name])
    if name == "select_n":
        wrapped = [_Index(first.name, form) for form in (_Form.NEGATIVE, _Form.ITSELF, _Form.SHIFTED)]
        return wrapped[1] if facts == wrapped else None
    return None
