"""Finds indices, computed by a program from its arguments, that are out of bounds.

JAX clamps them to the last row, so that an unseen group would get the effect of the last one. The index arithmetic of a
jaxpr is repeated for known arguments; values that depend on anything else are unknown. Entries that ``where`` replaces
by a condition on arguments, as for rows without a group, are ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.extend import core
from jax.lax import GatherScatterMode

from numpyro_dgp._checks import expected, is_concrete
from numpyro_dgp.jaxprs.walk import called_jaxpr

__all__ = ["ArgumentIndices", "Outside", "require_inside"]

_SAME_VALUES = frozenset("convert_element_type broadcast_in_dim reshape squeeze copy transpose".split())
_ARITHMETIC = _SAME_VALUES | frozenset(
    "slice concatenate iota add sub mul div rem neg sign floor ceil round lt le gt ge eq ne and or not select_n min "
    "max clamp gather dynamic_slice".split()
)
_PASSED_ON = _SAME_VALUES | {"add", "sub", "mul", "neg", "exp"}


# Indices are a few operations after arguments; what is computed by more is something else.
_DEPTH = 40


class Outside(NamedTuple):
    """Indices outside of an array.

    Args:
        worst: one of them.
        shape: of the array.
        axis: that they index.
    """

    worst: int
    shape: tuple[int, ...]
    axis: int


def require_inside(found: Sequence[Outside]) -> None:
    """Raise if indices are outside.

    Args:
        found: by :meth:`ArgumentIndices.outside`.
    """
    for worst, shape, axis in found:
        rows = shape[axis]
        raise expected(
            f"indices from 0 to {rows - 1} for an array of shape {shape} along axis {axis}",
            f"{worst} among the arguments",
            f"JAX would take the last row; for a group without data write numpyro.plate('groups', {rows + 1})",
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """An array that is known once arguments are.

    Args:
        evaluate: from the arguments, and what is known of them already, to it.
        given: whether it depends on arguments, and not on constants only.
        any_of: whether only the set of its values is known: an array picks entries from it by unknown indices.
        unwrapped: the same before JAX has replaced negative indices by those from the end.
        compared: what ``lt`` has compared with zero.
        depth: how many operations after the arguments.
    """

    evaluate: Callable[[Sequence[Any], dict[Any, np.ndarray]], np.ndarray]
    given: bool
    any_of: bool = False
    unwrapped: _Known | None = None
    compared: _Known | None = None
    depth: int = 0

    def value(self, inputs: Sequence[Any], memo: dict[Any, np.ndarray]) -> np.ndarray:
        """The array, computed once in one look at the arguments."""
        if self not in memo:
            memo[self] = self.evaluate(inputs, memo)
        return memo[self]


class _Check(NamedTuple):
    known: _Known
    column: int | None
    limit: int
    shape: tuple[int, ...]
    axis: int


class ArgumentIndices:
    """The indices of a jaxpr that its inputs determine.

    Args:
        closed: the program.
        known: for every input, whether it is an argument.

    Example:
        >>> import jax.numpy as jnp
        >>> program = lambda offsets, group: offsets[group]
        >>> offsets, group = jnp.ones(3), jnp.array([0, 2, 5])
        >>> indices = ArgumentIndices(jax.make_jaxpr(program)(offsets, group), [False, True])
        >>> indices.outside([offsets, group])
        [Outside(worst=5, shape=(3,), axis=0)]
    """

    def __init__(self, closed: core.ClosedJaxpr, known: Sequence[bool]) -> None:
        self._checks: dict[int, _Check] = {}
        self._numbers = itertools.count()
        facts: list[Any] = [
            _Known(partial(_input, i), given=True) if is_known else None for i, is_known in enumerate(known)
        ]
        constants = [_constant(c) if is_concrete(c) and _is_plain(c) else None for c in closed.consts]
        self._walk(closed.jaxpr, constants, facts, [frozenset()] * len(facts))

    def outside(self, inputs: Sequence[Any]) -> list[Outside]:
        """What is outside where the inputs of the program are these."""
        found: list[Outside] = []
        memo: dict[Any, np.ndarray] = {}
        for check in self._checks.values():
            known = check.known.unwrapped or check.known
            try:
                values = known.value(inputs, memo)
            except (TypeError, ValueError):  # entries of a set beside an array of other entries
                continue
            values = values if check.column is None else values[..., check.column]
            low = 0 if known.given else -check.shape[check.axis]
            bad = (values < low) | (values > check.limit)
            if bad.any():
                found.append(Outside(int(values[bad].ravel()[0]), check.shape, int(check.axis)))
        return found

    def _walk(
        self, jaxpr: core.Jaxpr, constants: Sequence[Any], inputs: Sequence[Any], picked: Sequence[frozenset[int]]
    ) -> tuple[list[Any], list[frozenset[int]]]:
        facts: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))
        rows: dict[Any, frozenset[int]] = dict(zip(jaxpr.invars, picked, strict=True))

        def read(atom: Any) -> Any:
            return _constant(atom.val) if isinstance(atom, core.Literal) else facts.get(atom)

        def rows_of(atom: Any) -> frozenset[int]:
            return frozenset() if isinstance(atom, core.Literal) else rows.get(atom, frozenset())

        for equation in jaxpr.eqns:
            arguments, taken = [read(a) for a in equation.invars], [rows_of(a) for a in equation.invars]
            name, outputs = equation.primitive.name, equation.outvars
            inner, closed = called_jaxpr(equation), cast(Any, equation.params.get("jaxpr"))
            if inner is not None:
                held = getattr(closed, "consts", ())
                known = [_constant(c) if _is_plain(c) else None for c in held]
                results, passed = self._walk(inner, known, arguments, taken)
                facts.update(zip(outputs, results, strict=True))
                rows.update(zip(outputs, passed, strict=True))
                continue
            if name == "scan":
                count = equation.params["num_consts"]
                same = [fact if i < count else None for i, fact in enumerate(arguments)]
                held = [_constant(c) if _is_plain(c) else None for c in closed.consts]
                self._walk(closed.jaxpr, held, same, [frozenset()] * len(same))
                continue
            if name == "select_n" and arguments[0] is not None and arguments[0].given:
                for number in frozenset().union(*taken[1:]):
                    self._checks.pop(number, None)
            elif name in _PASSED_ON:
                rows[outputs[0]] = frozenset().union(*taken)
            if (result := _result(equation, arguments)) is not None:
                facts[outputs[0]] = result
            if numbers := self._check(equation, arguments):
                rows[outputs[0]] = numbers
        return [read(atom) for atom in jaxpr.outvars], [rows_of(atom) for atom in jaxpr.outvars]

    def _check(self, equation: Any, arguments: list[Any]) -> frozenset[int]:
        """Record the indices that an equation uses; returns the numbers of its checks."""
        name, params = equation.primitive.name, equation.params
        checks = []
        if name == "gather" and arguments[1] is not None:
            shape, filled = equation.invars[0].aval.shape, params["fill_value"]
            chosen = params["mode"] == GatherScatterMode.CLIP or (filled is not None and not np.isnan(filled))
            for column, axis in enumerate(() if chosen else params["dimension_numbers"].start_index_map):
                several = None if arguments[1].any_of else column
                if several is not None or len(params["dimension_numbers"].start_index_map) == 1:
                    limit = shape[axis] - params["slice_sizes"][axis]
                    checks.append(_Check(arguments[1], several, limit, shape, axis))
        if name == "dynamic_slice":
            shape = equation.invars[0].aval.shape
            for axis, start in enumerate(arguments[1:]):
                if start is not None:
                    checks.append(_Check(start, None, shape[axis] - params["slice_sizes"][axis], shape, axis))
        numbered = {next(self._numbers): check for check in checks}
        self._checks |= numbered
        return frozenset(numbered)


def _input(i: int, inputs: Sequence[Any], memo: dict[Any, np.ndarray]) -> np.ndarray:
    return np.asarray(inputs[i])


def _is_plain(constant: Any) -> bool:
    return isinstance(constant, jax.Array | np.ndarray | np.generic | int | float | bool)


def _constant(value: Any) -> _Known:
    return _Known(lambda inputs, memo: np.asarray(value), given=False)


def _result(equation: Any, arguments: list[Any]) -> _Known | None:
    """What an equation of the arithmetic of indices makes of what is known."""
    name = equation.primitive.name
    if (
        name == "gather"
        and arguments[0] is not None
        and arguments[1] is None
        and len(equation.invars[0].aval.shape) == 1
    ):
        return dataclasses.replace(arguments[0], any_of=True)
    if name not in _ARITHMETIC or (not arguments and name != "iota") or any(a is None for a in arguments):
        return None
    depth = 1 + max((a.depth for a in arguments), default=0)
    if len(equation.outvars) != 1 or depth > _DEPTH:
        return None
    some = [a for a in arguments if a.any_of]
    if some and name in _SAME_VALUES and name != "convert_element_type":
        return some[0]
    if some and (name in ("slice", "concatenate", "gather", "dynamic_slice", "iota") or not _of_one(arguments)):
        return None

    def evaluate(inputs: Sequence[Any], memo: dict[Any, np.ndarray]) -> np.ndarray:
        values = [a.value(inputs, memo) for a in arguments]
        with jax.ensure_compile_time_eval():
            return np.asarray(equation.primitive.bind(*values, **equation.params))

    unwrapped = compared = None
    if name == "lt":
        compared = arguments[0]
    elif name == "concatenate" and any(a.unwrapped and a.given for a in arguments):
        unwrapped = _result(equation, [_once(a.unwrapped) if a.unwrapped and a.given else a for a in arguments])
    elif name in _SAME_VALUES and (before := arguments[0].unwrapped) is not None:
        unwrapped = _result(equation, [_once(before)])
    elif name == "select_n" and len(arguments) == 3 and arguments[0].compared is arguments[1]:
        unwrapped = arguments[1]
    return _Known(evaluate, any(a.given for a in arguments), bool(some), unwrapped, compared, depth)


def _once(known: _Known) -> _Known:
    """Indices whose negative ones are replaced once more are not unwrapped further."""
    return dataclasses.replace(known, unwrapped=None, compared=None)


def _of_one(arguments: list[Any]) -> bool:
    """Whether values of sets are of one and the same, beside constants: entries belong together."""
    return all(a.any_of or not a.given for a in arguments)
