"""The shape alphabet, and the one decorator that makes a class a frozen pytree.

One letter, one meaning, in every docstring, equation and test of the package:

====== ======================================================================
letter meaning
====== ======================================================================
``N``  data (rows of ``X``)
``B``  rows of a minibatch
``D``  input dimensions of a layer (columns of ``X``)
``P``  outputs of a layer
``M``  inducing points of a layer
``L``  categories, or groups of a plate
``J``  rank of weights that are tied
``G``  pseudo-inputs of a guide, shared by all layers
``Q``  functions that are mixed to P outputs
``C``  neighbours that a value is conditioned on
``K``  importance samples of one datum, or nodes of a quadrature
``S``  particles, or posterior draws
====== ======================================================================

``...`` in a shape stands for any leading batch dimensions, which broadcast.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
from jax import Array
from jax.typing import ArrayLike

from numpyro_dgp._repr import brief

__all__ = ["Array", "ArrayLike", "Number", "pytree", "static"]

T = TypeVar("T")
# A hyperparameter: a float, or an array, which takes the dtype of the inputs it meets.
Number = Any


def static(*, default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that is part of a pytree's structure, not of its leaves.

    Args:
        default: its default value.
        default_factory: what makes the default value.
    """
    return dataclasses.field(default=default, default_factory=default_factory, metadata={"static": True})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static,))
def pytree(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass that JAX can flatten.

    ``__post_init__`` validates what a *user* builds. JAX rebuilds the object from its leaves
    without calling it, because under a transformation the leaves are tracers or placeholders,
    which nothing should validate.

    Example:
        >>> import jax
        >>> from numpyro_dgp.extend import pytree, static
        >>> @pytree
        ... class Line:
        ...     slope: float
        ...     label: str = static(default="y")
        >>> jax.tree.map(lambda leaf: 2 * leaf, Line(1.5, label="z"))
        Line(slope=3.0, label='z')
    """
    if "__repr__" not in vars(cls):
        cls.__repr__ = brief  # type: ignore[assignment]
    dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    data = tuple(f.name for f in fields if not f.metadata.get("static"))
    meta = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(obj: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(obj, n) for n in data), tuple(getattr(obj, n) for n in meta)

    def flatten_with_keys(obj: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        leaves, aux = flatten(obj)
        keys = (jax.tree_util.GetAttrKey(name) for name in data)
        return tuple(zip(keys, leaves, strict=True)), aux

    def unflatten(aux: tuple[Any, ...], leaves: Any) -> T:
        obj = object.__new__(cls)
        for name, value in zip(data + meta, (*leaves, *aux), strict=True):
            object.__setattr__(obj, name, value)
        return obj

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
