"""Conversion of data, tables, masked arrays or lists to arrays of numbers.

Packages such as pandas are not imported: any object with a method ``to_numpy`` is a table or a column.
"""

from __future__ import annotations

import datetime
import numbers
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import caller, expect, expected, is_concrete
from numpyro_dgp._typing import Array

__all__ = [
    "as_array",
    "as_floats",
    "as_numbers",
    "indexable",
    "known_numbers",
    "own",
    "own_numbers",
    "require_apart",
    "warn_of_units",
]

# Rows of a column that are looked at, evenly spaced, to see whether its values stay apart.
_ROWS = 100_000
# Columns with a mean or a standard deviation beyond this are not in standard units.
_LARGE = 1e3
_UNIT = "(t - t.min()) / np.timedelta64(1, 'D') counts days"


def as_numbers(what: str, value: Any) -> Any:
    """``value`` as a NumPy array of real numbers; arrays of JAX, tracers among them, are returned as they are.

    Tables (pandas, polars) become matrices with one column each, missing entries NaN. Whole numbers stay whole, and
    nothing is rounded: what comes from a table has the precision that it has there.

    Args:
        what: name of the data in messages, such as ``"inputs X"``.
        value: numbers, an array, a list, a table or one of its columns.

    Raises:
        ValueError: categories, times, text or other objects, masked entries, lists of unequal length.

    Example:
        >>> as_numbers("targets", [1, None, 2.5])
        array([1. , nan, 2.5])
    """
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        expect(
            not jnp.issubdtype(value.dtype, jnp.complexfloating), f"{what} to be real", value.dtype, "use two columns"
        )
        return value
    expect(
        not callable(getattr(value, "log_prob", None)),
        f"{what} to be numbers",
        f"the distribution {type(value).__name__}",
        "draw it first, h = sample(name, f(x))",
    )
    if not is_concrete(value):
        return jnp.asarray(value)
    if not (hasattr(value, "to_numpy") and hasattr(value, "columns")):
        return _numbers(what, "", value)
    named = value.items() if hasattr(value, "items") else ((name, value[name]) for name in value.columns)
    columns = [_numbers(what, f" in column {name!r}", column) for name, column in named]
    expect(columns, f"{what} to have columns", f"a {type(value).__name__} with none")
    return np.stack(columns, -1)


def own_numbers(what: str, value: Any) -> Any:
    """:func:`as_numbers` of data that an object stores: a copy, unaffected by changes of the caller's array.

    Raises:
        ValueError: as there.
    """
    return own(as_numbers(what, value))


def known_numbers(what: str, value: Any) -> np.ndarray:
    """:func:`as_numbers` of values that must be known, as a NumPy array.

    Raises:
        ValueError: as there, or traced values.
    """
    found = as_numbers(what, value)
    expect(is_concrete(found), f"{what} with known values", "traced ones", "compute it once, outside of model and jit")
    return np.asarray(found)


def as_array(what: str, value: Any) -> Array:
    """``value`` as an array of JAX in its default precision, with an error where that would change the data.

    Args:
        what: name of the data in messages.
        value: as :func:`as_numbers`.

    Raises:
        ValueError: as there; whole numbers or floats out of the range of the default precision; columns most of whose
            distinct values become equal in it.

    Warns:
        UserWarning: a column of an array of JAX whose values are so far from zero that little is left between them.

    Example:
        >>> as_array("inputs", [[1, 2], [3, 4]]).shape
        (2, 2)
    """
    found = as_numbers(what, value)
    if not isinstance(found, np.ndarray):
        _warn_if_rounded(what, found)
        return found
    held = jax.dtypes.canonicalize_dtype(found.dtype)
    if found.size and found.dtype.kind in "iu" and not np.can_cast(found.dtype, held):
        limits = np.iinfo(held)
        if found.min() < limits.min or found.max() > limits.max:
            raise expected(
                f"{what} within the whole numbers of {held}",
                f"{found.min()} to {found.max()}",
                "subtract the first value, or standardise by dgp.initial.Standardizer; JAX would wrap them around",
            )
    with np.errstate(over="ignore"):
        cast = found.astype(held)
    require_apart(what, found, cast)
    return jnp.asarray(cast)


def own(value: Any) -> Any:
    """``value`` with NumPy arrays in it copied, unaffected by changes of the caller's arrays."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)


class _Indexable(np.ndarray):
    """A NumPy array that can be indexed by traced values, such as the rows of a plate in a compiled program."""

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            return jnp.asarray(self)[index]
        return super().__getitem__(index)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if np.ndim(array) == 0 else array.view(type(self))


def indexable(arguments: Any) -> Any:
    """Arguments of a program with NumPy arrays that can be indexed by the rows of a plate under compilation.

    They stay arrays of NumPy with known values, which a program may need as settings. Every place of the package that
    runs a program on arguments of the user's passes these.

    Example:
        >>> (X,) = indexable((np.arange(3.0),))
        >>> jax.jit(lambda rows: X[rows])(jnp.array([2, 0])).tolist()
        [2.0, 0.0]
    """
    return jax.tree.map(lambda leaf: leaf.view(_Indexable) if type(leaf) is np.ndarray else leaf, arguments)


def as_floats(what: str, value: Any) -> Array:
    """``value`` as floating-point numbers of JAX, with an error where known distinct values would become equal.

    Args:
        what: name of the data in messages.
        value: as :func:`as_numbers`.

    Raises:
        ValueError: as there; numbers out of the range of the default precision; columns most of whose distinct values
            become equal in it.

    Example:
        >>> as_floats("inputs", [[1, 2], [3, 4]]).dtype
        dtype('float32')
    """
    found = as_numbers(what, value)
    dtype = jnp.result_type(found, float)
    if is_concrete(found) and found.dtype != dtype:
        before = np.asarray(found)
        with np.errstate(over="ignore"):
            require_apart(what, before, before.astype(dtype))
    return jnp.asarray(found, dtype)


def require_apart(what: str, before: np.ndarray, after: np.ndarray) -> None:
    """Raise if most of the distinct values of a column are equal, or finite ones infinite, in ``after``.

    Values that differ by rounding errors of double precision count as equal, and so a few may fall together: among
    many values in no particular places some always do.
    """
    if after.dtype == before.dtype or not before.size:
        return
    if before.dtype.kind == "f" and not np.isfinite(after[np.isfinite(before)]).all():
        raise expected(
            f"{what} within the range of {after.dtype}", f"{np.nanmax(np.abs(before)):.3g}", "change the unit"
        )
    rows = len(before) if before.ndim else 1
    old, new = (x.reshape(rows, -1)[:: max(1, rows // _ROWS)] for x in (before, after))
    for d, (wide, narrow) in enumerate(zip(old.T, new.T, strict=True)):
        known = np.isfinite(wide)
        exact = before.dtype.kind in "iub" or not known.any()
        tolerance = 0 if exact else 8 * np.finfo(float).eps * np.abs(wide[known]).max()
        distinct, left = _count(wide[known], tolerance), _count(narrow[known], 0)
        if 2 * left < distinct:
            where = f" in column {d}" if new.shape[1] > 1 else ""
            raise expected(
                f"distinct values of {what} to stay distinct in {after.dtype}",
                f"{distinct}{where} of which {left} are left",
                'subtract the offset (dgp.initial.Standardizer), or jax.config.update("jax_enable_x64", True)',
            )


def _warn_if_rounded(what: str, found: Array) -> None:
    """Warn of columns of a known array of JAX that were far from zero when they were made one, such as Unix seconds."""
    if not is_concrete(found) or not jnp.issubdtype(found.dtype, jnp.floating) or not found.ndim:
        return
    rows = np.asarray(found, float).reshape(len(found), -1) if found.size else np.zeros((0, 1))
    if len(rows) < 2 or not np.isfinite(rows).all():
        return
    extent, step = np.ptp(rows, 0), float(jnp.finfo(found.dtype).eps) * np.abs(rows).max(0)
    wrong = np.flatnonzero(np.where(extent > 0, 100 * step > extent, step > 0.1))
    if len(wrong):
        d = wrong[0]
        where = f"column {d} has" if rows.shape[1] > 1 else "they have"
        warnings.warn(
            f"expected {what} whose differences {found.dtype} holds, got an array of JAX of which {where} values "
            f"near {rows[0, d]:.6g} in steps of {step[d]:.2g}, over a range of {extent[d]:.2g}: subtract the offset "
            "in double precision before it becomes one (dgp.initial.Standardizer does)",
            stacklevel=4,
        )


def _count(values: np.ndarray, tolerance: float) -> int:
    """How many of ``values`` differ, by more than ``tolerance``."""
    return int((np.diff(np.sort(values)) > tolerance).sum()) + 1


def warn_of_units(what: str, value: Any, beyond: float = _LARGE, stacklevel: int = 3) -> None:
    """Warn if a column of known floating-point numbers has a mean or a standard deviation beyond 1000.

    Args:
        what: the numbers, for the message.
        value: the numbers.
        beyond: another limit than 1000.
        stacklevel: of the warning, as ``warnings.warn`` counts here.
    """
    found = as_numbers(what, value)
    if not is_concrete(found) or not found.size or not jnp.issubdtype(found.dtype, jnp.floating):
        return
    rows = np.asarray(found, float).reshape(found.shape[0] if found.ndim else 1, -1)
    mean, sd = np.abs(rows.mean(0)), rows.std(0)
    d = int(np.argmax(np.maximum(mean, sd)))
    if max(mean[d], sd[d]) > beyond:
        where = f"column {d} has" if rows.shape[1] > 1 else "they have"
        warnings.warn(
            f"{caller()}: {what} are not in standard units: {where} mean {rows[:, d].mean():.3g} and standard "
            f"deviation {sd[d]:.3g}, and lengthscales, variances and noise usually begin near one: units = "
            "dgp.initial.Standardizer.fit(values); values = units(values)",
            stacklevel=stacklevel,
        )


def _numbers(what: str, where: str, value: Any) -> np.ndarray:
    """A column, an array or a list as numbers; the message appends ``where`` to what came."""

    def refuse(got: str, advice: str) -> ValueError:
        return expected(f"{what} to be numbers", f"{got}{where}", advice)

    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        count = int(np.ma.getmaskarray(value).sum())
        raise refuse(
            f"{count} masked value(s)",
            "drop these rows, or fill them with values.filled(number); of y, dgp.likelihoods.missing(y) makes "
            "numbers and a mask",
        )
    if str(getattr(value, "dtype", "")).startswith(("category", "Categorical", "Enum")):
        raise refuse("categories", "pandas.get_dummies makes a column of 0 and 1 of each, .cat.codes whole numbers")
    try:
        found = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    except ValueError as error:
        raise refuse("lists of unequal length", "give every row as many numbers") from error
    if found.dtype.kind == "O":
        found = _from_objects(found, refuse)
    if found.dtype.kind == "M":
        raise refuse(f"times ({found.dtype})", f"choose a unit, {_UNIT}")
    if found.dtype.kind == "m":
        raise refuse(f"durations ({found.dtype})", "choose a unit, t / np.timedelta64(1, 'D') counts days")
    if found.dtype.kind == "V" and found.dtype.names:
        raise refuse("records", "put their fields side by side, np.stack([a['x'], a['t']], 1)")
    if found.dtype.kind in "USTc":
        raise refuse("complex numbers" if found.dtype.kind == "c" else "text", "convert them, values.astype(float)")
    return found.astype(float) if found.dtype == np.longdouble else found


def _from_objects(values: np.ndarray, refuse: Any) -> np.ndarray:
    """Floating-point numbers from an array of Python objects, ``None`` and the like as NaN."""
    if not values.ndim:
        advice = (
            "make it dense, .toarray()" if hasattr(values.item(), "toarray") else "give an array, a list or a table"
        )
        raise refuse(f"a {type(values.item()).__name__}", advice)
    missing = [entry is None or type(entry).__name__ in ("NAType", "NaTType") for entry in values.flat]
    known = [entry for entry, absent in zip(values.flat, missing, strict=True) if not absent]
    for entry in known:
        if isinstance(entry, datetime.date):
            raise refuse(f"times ({type(entry).__name__})", f"choose a unit, {_UNIT}")
        if isinstance(entry, str):
            raise refuse("text", "convert it, values.astype(float)")
        if not isinstance(entry, numbers.Number | np.bool_) or isinstance(entry, complex):
            raise refuse(f"a {type(entry).__name__}", "give an array, a list or a table of numbers")
    found = np.full(values.size, np.nan)
    found[~np.array(missing, bool)] = np.array(known, float)
    return found.reshape(values.shape)
