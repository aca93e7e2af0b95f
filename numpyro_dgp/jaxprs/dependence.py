"""How the results of a function depend on its argument, from its jaxpr.

``dgp.Likelihood`` integrates ``v -> log p(y | v)`` for any conditional that a user writes. The method depends on
how the parameters of that conditional depend on ``v``: a mean that is affine in ``v`` or a rate that is the
exponential of an affine function has a closed form, an elementwise function needs a one-dimensional quadrature rule,
and everything else needs Monte Carlo. This module finds the type of dependence
automatically.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.jaxprs.walk import ELEMENTWISE, walk

__all__ = ["Dependence", "Explained", "dependence", "explained"]


class Dependence(IntEnum):
    """How an array depends on ``v``, from the most special to the most general."""

    CONSTANT = 0
    AFFINE = 1  # a v + b, element by element
    LOG_AFFINE = 2  # exp(a v + b), element by element
    ELEMENTWISE = 3  # the entry [i, ...] depends on the element v[i] only; one column may serve several, v[i, 0]
    MIXED = 4


class Explained(NamedTuple):
    """How an array depends on ``v`` and, where it is MIXED, the name of the first primitive that made it so.

    That primitive mixes elements (``reduce_sum``, ``dot_general``), or this module does not know it (``while``).
    """

    kind: Dependence
    cause: str | None = None


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
    return [leaf.kind for leaf in jax.tree.leaves(explained(function, v), is_leaf=_is_explained)]


def explained(function: Callable[[Array], Any], v: Array) -> Any:
    """The same as :func:`dependence`, with reasons, in the structure that ``function`` returns. Traces it once.

    Args:
        function: pure function of one array; it may close over arrays and tracers.
        v: an example argument; only its shape and dtype matter.

    Returns:
        The pytree ``function(v)`` with an :class:`Explained` in the place of each leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> facts = explained(lambda v: {"mean": 2 * v, "scale": jnp.exp(v - v.max())}, jnp.ones(3))
        >>> facts["mean"].kind.name, facts["mean"].cause, facts["scale"].kind.name, facts["scale"].cause
        ('AFFINE', None, 'MIXED', 'reduce_max')
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(v)
    facts = walk(closed.jaxpr, [Explained(A)], lambda equation, facts: _apply(equation, facts, v.shape), Explained(C))
    return jax.tree.unflatten(jax.tree.structure(shapes), facts)


def _is_explained(node: Any) -> bool:
    return isinstance(node, Explained)


def _apply(equation: Any, facts: list[Explained], shape: tuple[int, ...]) -> list[Explained]:
    outputs = len(equation.outvars)
    before = next((fact for fact in facts if fact.kind is M), None)
    if before is not None:
        return [before] * outputs
    kind = _kind(equation, [fact.kind for fact in facts], shape)
    return [Explained(kind, equation.primitive.name if kind is M else None)] * outputs


def _kind(equation: Any, kinds: list[Dependence], shape: tuple[int, ...]) -> Dependence:
    """How the results of an equation depend on ``v``, given how its arguments do, none of them MIXED."""
    name = equation.primitive.name
    if all(kind is C for kind in kinds):
        return C
    if not _keeps_elements(equation, kinds, shape):
        return M
    if name in ("broadcast_in_dim", "reshape") and _fits(equation.outvars[0].aval.shape, shape, len(shape)):
        return kinds[0]
    if name == "convert_element_type" and not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.inexact):
        return E  # it rounds
    if len(kinds) == 1:
        return _UNARY.get(name, {}).get(kinds[0], E)
    if len(kinds) == 2:
        return _BINARY.get(name, {}).get((kinds[0], kinds[1]), E)
    return E


def _keeps_elements(equation: Any, kinds: list[Dependence], shape: tuple[int, ...]) -> bool:
    """Whether the leading axes, those of ``v``, pass through the equation untouched."""
    name, params, n = equation.primitive.name, equation.params, len(shape)
    varying = [atom.aval for atom, kind in zip(equation.invars, kinds, strict=True) if kind is not C]
    avals = varying + [var.aval for var in equation.outvars]
    if not all(_fits(aval.shape[:n], shape, n) for aval in avals):
        return False
    if name in ELEMENTWISE or name == "reshape":
        return True
    if name == "broadcast_in_dim":
        return tuple(params["broadcast_dimensions"][:n]) == tuple(range(n))
    if name in _AXIS_PARAMETER:
        axes = params[_AXIS_PARAMETER[name]]
        return all(axis >= n for axis in (axes if isinstance(axes, tuple) else (axes,)))
    if name == "pad":
        return all(tuple(added) == (0, 0, 0) for added in params["padding_config"][:n])
    if name == "slice":
        return params["strides"] is None or all(stride == 1 for stride in params["strides"][:n])
    return False


def _fits(found: tuple[int, ...], shape: tuple[int, ...], n: int) -> bool:
    """Whether an array has the shape of ``v``, or that of ``v`` with its single last column repeated."""
    return found == shape or (n > 1 and shape[-1] == 1 and len(found) == n and found[:-1] == shape[:-1])
