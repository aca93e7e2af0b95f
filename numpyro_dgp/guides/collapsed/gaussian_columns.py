"""Which input columns of a layer are Gaussian (hidden values or latents), and what depends on integrated values: found
in the jaxpr of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.jaxprs import walk

__all__ = ["Column", "input_columns", "moved_by"]

# A column of the values of a site, (site, output), or None for a column of data.
Column = tuple[str, int] | None
# The columns of an array, the name of the primitive that computed it, or None where it holds numbers only.
_Origin = tuple[Column, ...] | str | None
_COPIES = frozenset(["copy", "convert_element_type"])
_SAME_SHAPE = frozenset(["broadcast_in_dim", "reshape"])


def input_columns(
    program: Callable[[dict[str, Array]], tuple[dict[str, Array], Any]], values: dict[str, Array]
) -> dict[str, tuple[Column, ...]]:
    """For every layer, which site and output each of its input columns is; ``None`` for columns of data.

    Args:
        program: from the values (..., N, P) of Gaussian sites to the inputs (..., N, D) of every layer, by name, and to
            everything else that must not depend on these values.
        values: examples; those of scalar layers are (..., N).

    Raises:
        ValueError: inputs computed from Gaussian values, or something else that depends on them.

    Example:
        >>> import jax.numpy as jnp
        >>> def program(values):
        ...     return {"y": jnp.concatenate([jnp.zeros((3, 1)), values["h"]], -1)}, None
        >>> input_columns(program, {"h": jnp.ones((3, 2))})
        {'y': (None, ('h', 0), ('h', 1))}
    """
    closed, shapes = jax.make_jaxpr(program, return_shape=True)(values)
    starts: list[_Origin] = [
        tuple((name, i) for i in range(v.shape[-1] if v.ndim > 1 else 1)) for name, v in sorted(values.items())
    ]
    found = walk(closed.jaxpr, starts, _apply, None)
    names = sorted(shapes[0])
    for name, columns in zip(names, found, strict=False):
        if isinstance(columns, str):
            raise ValueError(
                f"Collapsed: expected the inputs of the layer at {name!r} to be columns of data, latents and hidden "
                f"layers side by side, got the result of `{columns}` on Gaussian values: use dgp.latent or "
                "jnp.concatenate([X, h], -1), or guides.InducingPoint(), which draws them"
            )
    if any(columns is not None for columns in found[len(names) :]):
        raise ValueError(
            "Collapsed: expected Gaussian latents and hidden layers to be inputs of layers only, got a program that "
            "uses one in a scale, a kernel, an observation or another site: use guides.MeanField() for it"
        )
    width = {name: shapes[0][name].shape[-1] for name in names}
    return {n: (None,) * width[n] if c is None else c for n, c in zip(names, found, strict=False)}  # type: ignore[misc]


def moved_by(program: Callable[[Any], dict[str, Any]], values: Any) -> list[str]:
    """Which results of a program depend on its argument.

    Args:
        program: from arrays to arrays by name.
        values: examples of the arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> moved_by(lambda v: {"a": jnp.ones(3), "b": jnp.sin(v)}, jnp.ones(2))
        ['b']
    """
    closed, shapes = jax.make_jaxpr(program, return_shape=True)(values)
    starts = [True] * len(closed.jaxpr.invars)
    found = walk(closed.jaxpr, starts, lambda equation, moved: [any(moved)] * len(equation.outvars), False)
    names = [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    return sorted({name for name, moved in zip(names, found, strict=True) if moved})


def _apply(equation: Any, origins: list[_Origin]) -> list[_Origin]:
    name, params = equation.primitive.name, equation.params
    shapes = [atom.aval.shape for atom in equation.invars]
    out = equation.outvars[0].aval.shape
    computed: list[_Origin] = [name] * len(equation.outvars)
    if all(origin is None for origin in origins):
        return [None] * len(equation.outvars)
    for origin in origins:
        if isinstance(origin, str):
            return [origin] * len(equation.outvars)
    widths = [s[-1] if s else 0 for s in shapes]
    parts: list[Any] = [(None,) * w if o is None else o for o, w in zip(origins, widths, strict=True)]
    is_column = len(parts[0]) == 1 and out == (*shapes[0], 1)  # the one column of a scalar layer
    if name in _COPIES or (name in _SAME_SHAPE and (out == shapes[0] or is_column)):
        return [origins[0]]
    if [len(part) for part in parts] != widths:
        return computed
    if name == "concatenate" and params["dimension"] == len(out) - 1:
        return [tuple(column for part in parts for column in part)]
    if name == "slice" and out[:-1] == shapes[0][:-1]:
        stride = (params["strides"] or (1,))[-1]
        return [parts[0][params["start_indices"][-1] : params["limit_indices"][-1] : stride]]
    return computed
