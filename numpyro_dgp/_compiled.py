"""Compiled programs, each shared by all functions that perform the same operations.

A function closes over arrays, such as the parameters of a fit. JAX caches by function, so the function of the next fit
would be compiled again although only numbers differ. Here only the operations are compiled, and all arrays that a
function closes over are passed as arguments. Operations are identified by the text that JAX passes to the compiler: a
new function costs its tracing, and everything that it reads while it is traced is included.

Compiled code stays in JAX's cache until newer programs replace it or ``jax.clear_caches()`` is called. Functions, and
arrays that they close over, are freed with their last reference.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import cached_property, partial
from typing import Any

import jax
import jax.export
from jax.extend import core

from numpyro_dgp._checks import inside_transformation, is_concrete
from numpyro_dgp._typing import Array

__all__ = ["Compiled", "one_thread"]


class _OneThread(ContextDecorator):
    """Held while a program is run or traced, by one thread at a time; a thread that holds it may take it again.

    NumPyro keeps its handlers in one list for the whole process, so that a program that runs in one thread would meet
    those of another. What is compiled runs without it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


one_thread = _OneThread()


class _Operations:
    """Those of a jaxpr; equal to any others that make the same text.

    Only what has as many operations of every kind, on arrays of the same shapes, is compared by its text: where a
    program is the first of its kind, nobody waits for the text.
    """

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.jaxpr = jaxpr
        shapes = tuple(str(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
        counts: dict[str, int] = {}
        _count(jaxpr, counts)
        self.kind = hash((shapes, frozenset(counts.items())))

    def __hash__(self) -> int:
        return self.kind

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Operations) and self.kind == other.kind and self.text == other.text

    @cached_property
    def text(self) -> str:
        """A digest of what is handed to the compiler; inputs that are spread over devices name their mesh only."""
        inputs = [[v.aval for v in group] for group in (self.jaxpr.constvars, self.jaxpr.invars)]
        traced = jax.jit(partial(_evaluate, self.jaxpr)).trace(*inputs)
        lowered = traced.lower(lowering_platforms=(jax.export.default_export_platform(),))
        return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def _count(jaxpr: core.Jaxpr, counts: dict[str, int]) -> None:
    """Add the number of equations of every primitive, those of inner programs included, to ``counts``."""
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] = counts.get(equation.primitive.name, 0) + 1
        for inner in jax.tree.leaves(list(equation.params.values())):  # branches of a condition are in a tuple
            if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                _count(inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner, counts)


def _evaluate(jaxpr: core.Jaxpr, constants: list[Array], leaves: list[Array]) -> list[Array]:
    return jax.core.eval_jaxpr(jaxpr, constants, *leaves)


@partial(jax.jit, static_argnums=0)
def _perform(operations: _Operations, constants: list[Array], leaves: list[Array]) -> list[Array]:
    return _evaluate(operations.jaxpr, constants, leaves)


class Compiled:
    """A function of pytrees of arrays, compiled as ``jax.jit`` does, but once for all that perform the same operations.

    Args:
        function: the function.

    Example:
        >>> import jax.numpy as jnp
        >>> double, triple = (Compiled(lambda x, a=jnp.array(a): a * x) for a in (2.0, 3.0))
        >>> float(double(jnp.array(1.0))), float(triple(jnp.array(1.0)))  # the second one compiles nothing
        (2.0, 3.0)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._jitted = jax.jit(function)
        self._operations: dict[core.Jaxpr, _Operations] = {}

    @one_thread
    def trace(self, *args: Any) -> core.ClosedJaxpr:
        """The operations of a call."""
        return self._jitted.trace(*args).jaxpr

    def __call__(self, *args: Any) -> Any:
        # Inside another compiled function, or a derivative, which has rules to go by. The function may hold tracers.
        # ``jax.disable_jit()`` is heard by what is not traced.
        if not is_concrete(args) or inside_transformation() or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            with one_thread:
                return self._jitted(*args)
        return self.at(*args)(*args)

    @one_thread
    def at(self, *args: Any) -> Callable[..., Any]:
        """The program for arguments of these shapes, for many calls: the function is not looked at again.

        Args:
            *args: arguments of the function, with values.
        """
        traced = self._jitted.trace(*args)
        closed = traced.jaxpr
        if closed.jaxpr not in self._operations:
            self._operations[closed.jaxpr] = _Operations(closed.jaxpr)
        operations, results = self._operations[closed.jaxpr], jax.tree.structure(traced.out_info)
        return lambda *args: jax.tree.unflatten(results, _perform(operations, closed.consts, jax.tree.leaves(args)))
