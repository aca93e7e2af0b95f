"""What to do about the errors that end the run of a program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from numpyro_dgp.analysis.checks import TRANSFORMED

__all__ = ["NotTraceableError", "explained"]

# Raised for ``X[i]`` where i is traced and X is no JAX array; a list raises a plain TypeError.
_CONVERTED = jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError, TypeError


_OF_LISTS = "integer scalar arrays", "'list'", "data type '"
"""Words in a ``TypeError`` of a list; the last of one of texts, which NumPy takes for names of types."""


class NotTraceableError(ValueError):
    """A program needs the values of its arguments, and so cannot be run on shapes."""


@contextmanager
def explained(arguments: Any) -> Iterator[None]:
    """Raise what goes wrong inside as an error that says what to change in a program.

    Args:
        arguments: of the program.

    Raises:
        ValueError: for arguments that are not JAX arrays, sites inside a JAX transformation, plates without rows,
            arrays that do not fit their plates. Other errors pass through.
    """
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(TRANSFORMED) from error
    except _CONVERTED as error:
        kinds = sorted({_kind(leaf) for leaf in jax.tree.leaves(arguments)} & _INDEXABLE)
        plain = not isinstance(error, jax.errors.JAXTypeError)
        if not kinds or (plain and not any(words in str(error) for words in _OF_LISTS)):
            raise
        raise NotTraceableError(
            f"expected JAX arrays as arguments of the program, got {', '.join(kinds)}: while a program is compiled, "
            "the rows of a plate cannot index anything else, and lists are no observations; pass "
            "jnp.asarray(X), of a table jnp.asarray(df.to_numpy())"
        ) from error
    except AssertionError as error:
        if "size of plate" not in str(error):
            raise
        raise ValueError("expected plates with at least one row, got one of size 0: X is empty") from error
    except ValueError as error:
        if not str(error).startswith("Incompatible shapes for broadcasting"):
            raise
        raise ValueError(
            f"expected arrays with as many rows as the plate that they are used in, got {error}: in a plate that takes "
            "some rows, with numpyro.plate(name, len(X), subsample_size=batch) as i, use X[i] and y[i]"
        ) from error


_INDEXABLE = frozenset({"a NumPy array", "a pandas DataFrame", "a pandas Series", "numbers in a list", "text"})


def _kind(leaf: Any) -> str:
    owner = type(leaf).__module__.partition(".")[0]
    if isinstance(leaf, np.ndarray) and np.ndim(leaf):
        return "a NumPy array"
    if owner == "pandas":
        return f"a pandas {type(leaf).__name__}"
    return {float: "numbers in a list", str: "text"}.get(type(leaf), "")
