"""Which programs of a family are fitted: by their number of layers, or by it and the columns of their hidden layers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from numpyro_dgp._checks import is_count
from numpyro_dgp._typing import Array

__all__ = ["Depth", "arguments_of", "as_depths", "key_of"]

Depth = int | tuple[int, int]
"""A number of layers, or a pair: it, and the columns of hidden layers."""


def as_depths(owner: str, depths: Any) -> tuple[Depth, ...]:
    """Depths in a tuple, the shallowest first.

    Args:
        owner: whose argument it is.
        depths: numbers of layers, pairs of these with columns, or one number.

    Raises:
        ValueError: none, something else among them, one with fewer layers than the one before, or one twice.
    """
    given = tuple(depths) if np.iterable(depths) else (depths,)
    numbers = [tuple(d) if np.iterable(d) else (d,) for d in given]
    known = all(len(d) in (1, 2) and all(is_count(n) for n in d) for d in numbers)
    if not given or not known or len(set(numbers)) < len(numbers) or numbers != sorted(numbers, key=lambda d: d[0]):
        raise ValueError(
            f"{owner}: expected depths as ascending numbers of layers, or pairs of such a number and the columns of "
            f"hidden layers among them, got {given!r}: depths=(1, 2, 3), or depths=(1, (2, 1), 2)"
        )
    return tuple(int(d[0]) if len(d) == 1 else (int(d[0]), int(d[1])) for d in numbers)


def arguments_of(depth: Depth) -> tuple[int, ...]:
    """What the family is called with: layers, and columns if these are given.

    Args:
        depth: of a program.
    """
    return depth if isinstance(depth, tuple) else (depth,)


def key_of(key: Array, depth: Depth) -> Array:
    """A key for each program.

    Args:
        key: for all.
        depth: of the program.
    """
    layers, *columns = arguments_of(depth)
    return jax.random.fold_in(key, layers + 1000 * sum(columns))
