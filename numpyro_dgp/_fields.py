"""Fields of dataclasses that carry the check of their value.

A subclass of :class:`Checked` has ``width: float = positive(1.0)``. A field with the default ``None`` may be ``None``.
Other arguments are those of ``dataclasses.field``; ``static=True`` keeps a field out of the leaves of a pytree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._checks import (
    expect,
    expected,
    require_count,
    require_finite,
    require_positive,
    require_scalar,
    violated,
)
from numpyro_dgp._data import as_numbers, own

__all__ = [
    "Checked",
    "array",
    "checked",
    "count",
    "finite",
    "flag",
    "kind_of",
    "nonnegative",
    "number",
    "one_of",
    "positive",
    "scale",
]

_MISSING: Any = dataclasses.MISSING


class Checked:
    """Base of dataclasses that check their fields where they are made, in their order; a check may convert its value.

    Raises:
        ValueError: a value that a field does not take.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class Slice(Checked):
        ...     width: float = positive(1.0)
        ...     repeat: int = count(1)
        >>> Slice(-1.0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: expected width to be positive, got -1.0: ...
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if (check := field.metadata.get("check")) is None:
                continue
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, check(field.name, value))


def checked(check: Callable[[str, Any], Any], default: Any = _MISSING, *, static: bool = False, **options: Any) -> Any:
    """A field whose value is what a check makes of its name and value."""
    return dataclasses.field(default=default, metadata={"check": check, "static": static}, **options)


def number(default: Any = _MISSING, **options: Any) -> Any:
    """A single positive number."""

    def check(name: str, value: Any) -> Any:
        require_scalar(name, value)
        require_positive(name, value)
        return value

    return checked(check, default, **options)


def positive(default: Any = _MISSING, *advice: str, **options: Any) -> Any:
    """Positive numbers. A list becomes an array, and an array of NumPy is copied, since its owner may change it."""

    def check(name: str, value: Any) -> Any:
        value = _as_array(name, value)
        require_positive(name, value, *advice)
        return value

    return checked(check, default, **options)


def finite(default: Any = _MISSING, advice: str = "", **options: Any) -> Any:
    """A single finite number."""

    def check(name: str, value: Any) -> Any:
        require_scalar(name, value)
        require_finite(name, value, advice)
        return value

    return checked(check, default, **options)


def nonnegative(default: Any = _MISSING, advice: str = "", **options: Any) -> Any:
    """A single number of at least zero."""

    def check(name: str, value: Any) -> Any:
        require_scalar(name, value)
        require_finite(name, value, advice)
        if violated(lambda v: v >= 0, value):
            raise expected(f"{name} of at least zero", value, advice)
        return value

    return checked(check, default, **options)


def array(default: Any = _MISSING, advice: str = "", **options: Any) -> Any:
    """Finite numbers. A list becomes an array, and an array of NumPy is copied."""

    def check(name: str, value: Any) -> Any:
        value = _as_array(name, value)
        require_finite(name, value, advice)
        return value

    return checked(check, default, **options)


def count(default: Any = _MISSING, hint: str | None = None, **options: Any) -> Any:
    """A positive integer; the hint is the default where there is none."""

    def check(name: str, value: Any) -> Any:
        require_count(name, value, repr(default) if hint is None else hint)
        return value

    return checked(check, default, **options)


def flag(default: bool = False, hint: str | None = None, **options: Any) -> Any:
    """True or False."""

    def check(name: str, value: Any) -> Any:
        expect(isinstance(value, bool), f"{name} to be True or False", repr(value), hint or f"{default} is the default")
        return value

    return checked(check, default, **options)


def one_of(*choices: Any, default: Any = _MISSING, hint: str = "", **options: Any) -> Any:
    """One of some values, the first by default."""
    default = choices[0] if default is _MISSING else default

    def check(name: str, value: Any) -> Any:
        names = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        expect(value in choices, f"{name} to be {names}", repr(value), hint or f"{default!r} is the default")
        return value

    return checked(check, default, **options)


def kind_of(*kinds: type, **options: Any) -> Any:
    """An instance of one of some classes, by default of the first, made without arguments."""

    def check(name: str, value: Any) -> Any:
        names = " or ".join(f"{kind.__name__}()" for kind in kinds)
        expect(isinstance(value, kinds), f"{name} to be {names}", repr(value), f"{name}={kinds[0].__name__}()")
        return value

    return dataclasses.field(default_factory=kinds[0], metadata={"check": check}, **options)


def scale(default: float | None = None, **options: Any) -> Any:
    """The initial standard deviation of a guide's rule."""

    def check(name: str, value: Any) -> Any:
        given = type(value).__name__
        expect(not callable(value), f"{name} to be a positive number", given, "try 0.1; a program goes to a guide")
        require_positive(name, value)
        return value

    return checked(check, default, **options)


def _as_array(name: str, value: Any) -> Any:
    return jnp.asarray(as_numbers(name, value)) if isinstance(value, list | tuple) else own(value)
