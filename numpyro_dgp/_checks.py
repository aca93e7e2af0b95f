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
    "is_concrete",
    "require_count",
    "require_finite",
    "require_finite_leaves",
    "require_inputs",
    "require_positive",
    "require_scalar",
]


def is_concrete(*values: Any) -> bool:
    """Whether no leaf of ``values`` is a tracer or a shape placeholder."""
    leaves = jax.tree.leaves(values)
    return not any(isinstance(v, jax.core.Tracer | jax.ShapeDtypeStruct) for v in leaves)


def require_count(owner: str, name: str, value: Any, hint: str) -> None:
    """Raise unless ``value`` is a positive integer."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{owner}: expected {name} to be a positive integer, got {value!r}: try {hint}")


def require_finite(what: str, value: ArrayLike, hint: str) -> None:
    """Raise unless every entry of ``value`` is finite."""
    if not is_concrete(value):
        return
    bad = ~np.isfinite(np.asarray(value))
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
    if not (array > 0).all():
        raise ValueError(
            f"expected the {name} of {owner} to be positive, got {array}: give it a prior with "
            "positive support (LogNormal, HalfNormal, Gamma) or constraint=constraints.positive"
        )


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
