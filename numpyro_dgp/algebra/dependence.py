"""What a function does to its argument, read off its jaxpr.

``dgp.Likelihood`` integrates ``v -> log p(y | v)`` for whatever conditional a user writes. How depends on
how the parameters of that conditional depend on ``v``: a mean that is affine in ``v`` or a rate that is the
exponential of an affine function has a closed form, a function of each element on its own needs a
one-dimensional rule, and everything else needs draws. Instead of asking the user, this module looks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import jax

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.jaxprs import ELEMENTWISE, walk

__all__ = ["Dependence", "dependence"]


class Dependence(IntEnum):
    """How an array depends on ``v``, from the most special to the most general."""

    CONSTANT = 0
    AFFINE = 1  # a v + b, element by element
    LOG_AFFINE = 2  # exp(a v + b), element by element
    ELEMENTWISE = 3  # the entry [i, ...] depends on the element v[i] only
    MIXED = 4


C, A, X, E, M = Dependence

_UNARY: dict[str, dict[Dependence, Dependence]] = {
    "neg": {A: A},
    "copy": {A: A, X: X},
    "convert_element_type": {A: A, X: X},
    "exp": {A: X},
    "log": {X: A},
    "integer_pow": {X: X},
    "square": {X: X},
    "sqrt": {X: X},
    "rsqrt": {X: X},
}
_BINARY: dict[str, dict[tuple[Dependence, Dependence], Dependence]] = {
    "add": {(A, A): A, (A, C): A, (C, A): A},
    "sub": {(A, A): A, (A, C): A, (C, A): A},
    "mul": {(A, C): A, (C, A): A, (X, C): X, (C, X): X, (X, X): X},
    "div": {(A, C): A, (X, C): X, (C, X): X, (X, X): X},
}
_AXIS_PARAMETER = {
    **dict.fromkeys("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split(), "axes"),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp stack".split(), "axis"),
    "concatenate": "dimension",
    "squeeze": "dimensions",
}


def dependence(function: Callable[[Array], Any], v: Array) -> list[Dependence]:
    """How each leaf of ``function(v)`` depends on ``v``.

    The answer is conservative: a leaf called AFFINE is affine, a leaf called MIXED may be anything.

    Args:
        function: pure function of one array; it may close over arrays and tracers.
        v: an example argument; only its shape and dtype matter.

    Returns:
        One :class:`Dependence` per leaf of the pytree ``function(v)``.

    Example:
        >>> import jax.numpy as jnp
        >>> dependence(lambda v: (2 * v + 1, jnp.exp(-v), jnp.tanh(v), v.sum()), jnp.ones(3))
        [<Dependence.AFFINE: 1>, <Dependence.LOG_AFFINE: 2>, <Dependence.ELEMENTWISE: 3>, <Dependence.MIXED: 4>]
    """
    closed = jax.make_jaxpr(function)(v)
    return walk(closed.jaxpr, [Dependence.AFFINE], lambda equation, kinds: _apply(equation, kinds, v.shape), C)


def _apply(equation: Any, kinds: list[Dependence], shape: tuple[int, ...]) -> list[Dependence]:
    name, outputs = equation.primitive.name, equation.outvars
    if all(kind is C for kind in kinds):
        return [C] * len(outputs)
    if M in kinds or not _keeps_elements(equation, kinds, shape):
        return [M] * len(outputs)
    if name in ("broadcast_in_dim", "reshape") and outputs[0].aval.shape == shape:
        return [kinds[0]]
    if len(kinds) == 1:
        return [_UNARY.get(name, {}).get(kinds[0], E)]
    if len(kinds) == 2:
        return [_BINARY.get(name, {}).get((kinds[0], kinds[1]), E)]
    return [E] * len(outputs)


def _keeps_elements(equation: Any, kinds: list[Dependence], shape: tuple[int, ...]) -> bool:
    """Whether the leading axes, those of ``v``, pass through the equation untouched."""
    name, params, n = equation.primitive.name, equation.params, len(shape)
    varying = [atom.aval for atom, kind in zip(equation.invars, kinds, strict=True) if kind is not C]
    avals = varying + [var.aval for var in equation.outvars]
    if any(aval.shape[:n] != shape for aval in avals):
        return False
    if name in ELEMENTWISE or name == "reshape":
        return True
    if name == "broadcast_in_dim":
        return tuple(params["broadcast_dimensions"][:n]) == tuple(range(n))
    if name in _AXIS_PARAMETER:
        axes = params[_AXIS_PARAMETER[name]]
        return all(axis >= n for axis in (axes if isinstance(axes, tuple) else (axes,)))
    if name == "slice":
        return params["strides"] is None or all(stride == 1 for stride in params["strides"][:n])
    return False
