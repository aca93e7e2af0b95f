"""How objects are shown, and which names modules show."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["brief", "described", "public_dir"]

_MOST = 6
"""Entries of a container that are shown, at most."""

_NUMBERS = 8
"""Numbers of an array that are shown; of one with more, type and shape."""

_LONGEST = 60
"""Letters of a string that are shown, at most."""

_REQUIRED = inspect.Parameter.empty
"""The default of an argument that has none."""


def public_dir(namespace: Mapping[str, Any]) -> Callable[[], list[str]]:
    """``__dir__ = public_dir(globals())`` in a module: its ``__all__``, and the names that Python reads."""
    return lambda: sorted({*namespace["__all__"], *(name for name in namespace if name.startswith("__"))})


def brief(self: Any) -> str:
    """``Class(name=value, ...)`` of the values that are not defaults; to be the ``__repr__`` of a class.

    Nothing is computed and no large array is printed: of an array of up to eight known numbers there are these, of
    others type and shape, of a function its name.

    Args:
        self: a dataclass, a named tuple, a distribution, or an object that keeps the arguments of its constructor as
            attributes of the same names, or of these names behind an underscore.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> dgp.kernels.RBF(lengthscale=jnp.array(0.5)), dgp.Points(jnp.zeros((50, 1)))
        (RBF(lengthscale=0.5), Points(Z=float32[50,1]))
        >>> dgp.Basis(-5.0, [5.0], 20)
        Basis(low=-5.0, high=[5], size=(20,))
    """
    if hasattr(self, "batch_shape") and hasattr(self, "event_shape"):
        return described(self, {"batch_shape": self.batch_shape, "event_shape": self.event_shape})
    held = {name: getattr(self, f"_{name}", None) for name in _defaults(self) if hasattr(self, f"_{name}")}
    return described(self, held | {name: getattr(self, name) for name in _defaults(self) if hasattr(self, name)})


def described(
    self: Any, values: Mapping[str, Any], always: Collection[str] = (), of: Callable[..., Any] | None = None
) -> str:
    """As :func:`brief`, of values that the object holds elsewhere.

    Args:
        self: the object.
        values: by the names of the arguments of its constructor.
        always: names that are shown even where the value is the default.
        of: the function that makes the object, where users do not call its class.
    """
    defaults = _defaults(self) if of is None else _arguments(of)
    order = sorted(values, key=lambda name: list(defaults).index(name) if name in defaults else -1)
    shown = [n for n in order if n in always or not _same(values[n], defaults.get(n, _REQUIRED))]
    name = type(self).__name__ if of is None else of.__name__
    return f"{name}({', '.join(f'{n}={_shown(values[n])}' for n in shown)})"


def _defaults(value: Any) -> dict[str, Any]:
    """The names of the arguments of the constructor of an object, with their defaults."""
    if isinstance(value, tuple):
        return {name: value._field_defaults.get(name, _REQUIRED) for name in value._fields}  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(value):
        return {
            f.name: f.default_factory() if callable(f.default_factory) else f.default  # type: ignore[misc]
            for f in dataclasses.fields(value)
            if f.repr
        }
    return _arguments(type(value))


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


def _same(value: Any, default: Any) -> bool:
    """Whether a value is the default, as far as that is known without computing anything."""
    if value is default:
        return True
    if isinstance(value, Mapping | tuple | list) and not value:
        return default is None or (isinstance(default, Mapping | tuple | list) and not default)
    if isinstance(value, tuple | list) and isinstance(default, tuple | list):
        return len(value) == len(default) and all(map(_same, value, default))
    if type(value) is not type(default):
        return False
    if isinstance(value, bool | int | float | str):
        return value == default
    if isinstance(value, dict):
        return value.keys() == default.keys() and all(_same(value[name], default[name]) for name in value)
    if isinstance(value, partial):
        return all(map(_same, (value.func, value.args, value.keywords), (default.func, default.args, default.keywords)))
    if dataclasses.is_dataclass(value):
        return all(_same(getattr(value, f.name), getattr(default, f.name)) for f in dataclasses.fields(value))
    return False


def _shown(value: Any) -> str:
    """The text of one value."""
    if isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return _shown_array(value)
    if isinstance(value, str):
        return repr(value if len(value) <= _LONGEST else value[:_LONGEST] + "...")
    if isinstance(value, Mapping):
        return f"{{{_listed((f'{name!r}: {_shown(found)}' for name, found in value.items()), len(value))}}}"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({_listed(map(_shown, value), len(value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{_listed(map(_shown, value), len(value))}]"
    if isinstance(value, partial):
        arguments = [*map(_shown, value.args), *(f"{name}={_shown(v)}" for name, v in value.keywords.items())]
        return f"partial({', '.join([_shown(value.func), *arguments])})"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return value.__name__
    own = type(value).__module__.startswith("numpyro_dgp.")
    if not own and (dataclasses.is_dataclass(value) or hasattr(value, "_fields") or hasattr(value, "batch_shape")):
        return brief(value)
    text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text or "\n" in text else text


def _shown_array(value: Any) -> str:
    """An array of few numbers by these, where they are known, and another one by type and shape."""
    known = not isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct) and 0 < value.size <= _NUMBERS
    numbers = known and (jnp.issubdtype(value.dtype, np.number) or value.dtype == bool)
    if numbers and not (isinstance(value, jax.Array) and (value.is_deleted() or not value.is_fully_addressable)):
        return _shown_numbers(np.asarray(value).tolist())
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _shown_numbers(numbers: Any) -> str:
    if isinstance(numbers, list):
        return f"[{', '.join(map(_shown_numbers, numbers))}]"
    return f"{numbers:.6g}" if isinstance(numbers, float) else repr(numbers)


def _listed(entries: Iterable[str], count: int) -> str:
    """Entries behind each other, of many the first ones and the number of the others."""
    return ", ".join([*islice(entries, _MOST), *([f"... {count - _MOST} more"] if count > _MOST else [])])
