"""Propagation of facts from the inputs to the outputs of a jaxpr, the program that JAX makes of a function.

What a fact is, and what an equation does to it, is up to the caller: :mod:`~numpyro_dgp.jaxprs.dependence` follows how
an array depends on another, element by element, :mod:`~numpyro_dgp.jaxprs.row_dependence` row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend import core

__all__ = ["ELEMENTWISE", "called_jaxpr", "walk"]

Fact = TypeVar("Fact")

# Primitives whose outputs have the shape of their arguments, entry by entry.
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj convert_element_type copy cos "
    "cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p "
    "logistic lt max min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin sinh "
    "sqrt square stop_gradient sub tan tanh xor "
    "bitcast_convert_type shift_left shift_right_arithmetic shift_right_logical".split()
)
_CALLS = frozenset("jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat remat2 checkpoint".split())


def called_jaxpr(equation: Any) -> Any:
    """The jaxpr that an equation calls with its own arguments, or ``None``."""
    if equation.primitive.name not in _CALLS:
        return None
    inner = next((v for k, v in equation.params.items() if k in ("jaxpr", "call_jaxpr")), None)
    inner = getattr(inner, "jaxpr", inner)
    return inner if inner is not None and len(inner.invars) == len(equation.invars) else None


def walk(
    jaxpr: Any, inputs: Sequence[Fact], apply: Callable[[Any, list[Fact]], Sequence[Fact]], constant: Fact
) -> list[Fact]:
    """Facts about the outputs of a jaxpr; functions that it calls are walked through.

    Args:
        jaxpr: the program.
        inputs: a fact about every input.
        apply: from an equation and the facts about its arguments to facts about its results.
        constant: the fact about everything else.
    """
    facts: dict[Any, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Fact:
        return constant if isinstance(atom, core.Literal) else facts.get(atom, constant)

    for equation in jaxpr.eqns:
        arguments = [read(atom) for atom in equation.invars]
        inner = called_jaxpr(equation)
        results = apply(equation, arguments) if inner is None else walk(inner, arguments, apply, constant)
        facts.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
