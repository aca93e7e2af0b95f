"""Compiled programs, each shared by all functions that perform the same operations.

A function closes over arrays, such as the parameters of a fit. JAX's own cache goes by the function, so that a function
for the next fit would be compiled again although only these numbers differ. Here the operations alone are compiled, and
all arrays that a function closes over are arguments. Which operations these are is read off the text that JAX hands to
the compiler: a new function costs the time to trace it, and nothing that it reads while it is traced is missed.

What is compiled stays in JAX's cache, as of every jitted function, until newer programs take its place or
``jax.clear_caches()`` empties it. It is code: functions, and arrays that they close over, go with their last reference.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend import core

from numpyro_dgp._checks import is_concrete
from numpyro_dgp._typing import Array

__all__ = ["Compiled"]


@dataclasses.dataclass(frozen=True)
class _Operations:
    """Those of a jaxpr; equal to any others that make the same text."""

    text: str
    jaxpr: core.Jaxpr = dataclasses.field(compare=False, repr=False)


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

    def __call__(self, *args: Any) -> Any:
        if not is_concrete(args):  # inside another compiled function, or a derivative, which has rules to go by
            return self._jitted(*args)
        traced = self._jitted.trace(*args)
        closed, leaves = traced.jaxpr, jax.tree.leaves(args)
        if closed.jaxpr not in self._operations:
            lowered = jax.jit(partial(_evaluate, closed.jaxpr)).lower(closed.consts, leaves)
            text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            self._operations[closed.jaxpr] = _Operations(text, closed.jaxpr)
        results = _perform(self._operations[closed.jaxpr], closed.consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)
