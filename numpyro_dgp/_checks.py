"""Checks of user input. Each raises ``ValueError``: what was expected, what came, what to try.

A check looks at values only when they are concrete. Under ``jit``, ``grad`` or ``vmap`` the values
are tracers and only shapes are checked, so checking costs nothing in a compiled step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import ArrayLike

__all__ = [
    "as_numbers",
    "is_concrete",
    "require_count",
    "require_finite",
    "require_finite_leaves",
    "require_inputs",
    "require_key",
    "require_positive",
    "require_scalar",
]


def is_concrete(*values: Any) -> bool:
    """Whether no leaf of ``values`` is a tracer or a shape placeholder."""
    leaves = jax.tree.leaves(values)
    return not any(isinstance(v, jax.core.Tracer | jax.ShapeDtypeStruct) for v in leaves)


def as_numbers(owner: str, what: str, value: Any) -> Any:
    """``value`` as an array of numbers: arrays as they are, tables and lists converted.

    Raises:
        ValueError: what holds something else than real numbers, or has masked entries.
    """
    if callable(getattr(value, "log_prob", None)):
        raise ValueError(
            f"{owner}: expected {what} as an array, got the distribution {type(value).__name__}: draw it first, "
            "h = sample(name, f(x))"
        )
    array = value
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            raise ValueError(
                f"{owner}: expected {what} without masked entries, got {np.ma.count_masked(value)} of them: drop or "
                "impute these rows"
            )
        array = value.data
    elif not isinstance(value, jax.Array | np.ndarray):
        array = _converted(owner, what, value)
    if array.dtype == object:
        array = _from_objects(array)
    if not jnp.issubdtype(array.dtype, jnp.number) and array.dtype != bool:
        raise _not_numbers(owner, what, value, array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise ValueError(
            f"{owner}: expected {what} to be real, got {array.dtype}: pass real and imaginary parts as columns"
        )
    return array


def _converted(owner: str, what: str, value: Any) -> Any:
    if hasattr(value, "__jax_array__") or any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        return jnp.asarray(value)
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{owner}: expected {what} as an array, got a {type(value).__name__} with rows of several lengths: "
            "each row needs the same number of columns"
        ) from error


def _from_objects(array: np.ndarray) -> np.ndarray:
    """Objects that are numbers as numbers; others as they are."""
    if any(isinstance(entry, str | bytes) for entry in array.flat):
        return array
    try:
        return array.astype(float)
    except (TypeError, ValueError):
        return array


def _not_numbers(owner: str, what: str, value: Any, array: Any) -> ValueError:
    dates = array.dtype.kind in "mM"
    return ValueError(
        f"{owner}: expected {what} to be numbers, got a {type(value).__name__} of dtype {array.dtype}: "
        + (
            "count time from a start, (t - t.min()) / np.timedelta64(1, 'D') for days"
            if dates
            else "encode categories and text as numbers, fill in or drop missing values, and convert by "
            ".to_numpy(dtype=float)"
        )
    )


def require_count(owner: str, name: str, value: Any, hint: str) -> None:
    """Raise unless ``value`` is a positive integer."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{owner}: expected {name} to be a positive integer, got {value!r}: try {hint}")


def require_finite(what: str, value: ArrayLike, hint: str) -> None:
    """Raise unless every entry of ``value`` is finite."""
    if not is_concrete(value):
        return
    array = np.asarray(value)
    if array.dtype.kind in "OUSmM":
        raise ValueError(f"expected {what} to be numbers, got dtype {array.dtype}: {hint}")
    bad = ~np.isfinite(array)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"expected finite {what}, got {int(bad.sum())} NaN or infinite value(s), the first at index {where}: {hint}"
        )


def require_finite_leaves(what: str, leaves: list[Any]) -> None:
    """Raise unless every floating array among ``leaves`` is finite."""
    for leaf in leaves:
        if np.ndim(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            require_finite(what, leaf, "drop, impute or mask the rows with missing values")


def require_positive(owner: str, name: str, value: ArrayLike) -> None:
    """Raise unless every entry of ``value`` is positive."""
    if not is_concrete(value):
        return
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" and not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(f"expected the {name} of {owner} to be a positive number, got {type(value).__name__}: try 0.1")
    if not (array > 0).all():
        raise ValueError(
            f"expected the {name} of {owner} to be positive, got {_short(array)}: give it a prior with "
            "positive support (LogNormal, HalfNormal, Gamma) or constraint=constraints.positive"
        )


def require_key(owner: str, key: Any) -> None:
    """Raise unless ``key`` is an array, as PRNG keys are."""
    if not hasattr(key, "dtype") or (np.ndim(key) == 0 and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise ValueError(
            f"{owner}: expected a PRNG key, got {type(key).__name__}: jax.random.key(0)"
            if not isinstance(key, int)
            else f"{owner}: expected a PRNG key, got the integer {key}: write jax.random.key({key})"
        )


def _short(array: np.ndarray) -> str:
    """An array, or its smallest entry where it has many."""
    return str(array) if array.size <= 8 else f"an array of shape {array.shape} with the smallest entry {array.min()}"


def require_scalar(owner: str, name: str, value: ArrayLike) -> None:
    """Raise unless ``value`` is a single number."""
    if np.ndim(value):
        raise ValueError(
            f"expected the {name} of {owner} to be a single number, got shape {np.shape(value)}: "
            "one value per input column belongs in lengthscale, one per output in a list of kernels"
        )


def require_inputs(owner: str, x: Any, dims: int | None = None) -> None:
    """Raise unless ``x`` has shape ``(..., N, D)``, with ``D == dims`` when ``dims`` is given."""
    shape = np.shape(x)
    if len(shape) < 2:
        raise ValueError(
            f"{owner}: expected inputs of shape (..., N, D), got shape {shape}: "
            "a single input column is x[:, None], a single input row is x[None, :]"
        )
    if dims is not None and shape[-1] != dims:
        raise ValueError(
            f"{owner}: expected inputs with D = {dims} columns (as in its inducing inputs), "
            f"got shape {shape}: check the number of outputs of the layer below"
        )
