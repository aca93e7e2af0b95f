"""Missing entries of observations: how they are marked in data, and densities of the observed entries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_dgp._checks import expect, expected, is_concrete
from numpyro_dgp._data import as_array
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.likelihoods.families import elementwise
from numpyro_dgp.likelihoods.tails import log_density
from numpyro_dgp.math.linalg import sum_event

__all__ = ["are_entries", "missing", "observed_entries", "of_entries", "of_rows", "with_entries"]


def missing(y: Any) -> tuple[Array, Array]:
    r"""Split data with missing entries, marked by NaN, ``None`` or a mask, into values and a mask of observed entries.

    .. math:: \log p(y \mid v) = \sum_{n, p :\, o_{np}} \log p(y_{np} \mid v_n)

    is the log density that ``dgp.Likelihood(f(x), conditional, observed=o)`` integrates: missing entries, o = False,
    are masked. Pass both arrays as arguments of the program, so that indices and minibatches select the same rows.

    Args:
        y: numbers of any shape with NaN where one is missing, a masked array of NumPy, or a table with missing entries.

    Returns:
        y with an observed number of the same column, or zero if there is none, in place of every missing one; and a
        boolean array of its shape, ``True`` where y has a value.

    Raises:
        ValueError: data that are no numbers.

    Example:
        >>> import numpy as np
        >>> import numpyro_dgp as dgp
        >>> y, observed = dgp.likelihoods.missing(np.array([[1.0, np.nan], [np.nan, 2.0], [3.0, 4.0]]))
        >>> print(y)
        [[1. 2.]
         [1. 2.]
         [3. 4.]]
        >>> print(observed)
        [[ True False]
         [False  True]
         [ True  True]]
    """
    mask = None
    if isinstance(y, np.ma.MaskedArray):
        y, mask = y.data, ~np.ma.getmaskarray(y)
    values = as_array("observations y", y)
    observed = ~jnp.isnan(values) if jnp.issubdtype(values.dtype, jnp.inexact) else jnp.ones(values.shape, bool)
    observed = observed if mask is None else observed & mask
    values = jnp.where(observed, values, jnp.zeros((), values.dtype))
    if values.size and values.ndim:
        # The first row that has a value, column by column; where there is none, row 0 has a zero.
        first = jnp.expand_dims(observed.argmax(0), 0)
        values = jnp.where(observed, values, jnp.take_along_axis(values, first, 0))
    return values, observed


def are_entries(mask: Any, batch_shape: tuple[int, ...], event_shape: tuple[int, ...]) -> bool:
    """Whether a mask has the shape of the entries of y, and not one number per row."""
    shape, events = np.shape(mask), len(event_shape)
    own = shape[len(shape) - events :] in (event_shape, (1,) * events)
    return events > 0 and len(shape) > events and own and _fits(shape, batch_shape + event_shape)


def observed_entries(observed: ArrayLike, example: dist.Distribution) -> Array:
    """The argument ``observed`` of a likelihood, with axes for the events of y, of size one where it has one number
    per row.

    Args:
        observed: which entries of y, or which rows, have a value.
        example: a distribution of y.

    Raises:
        ValueError: no booleans; another shape; or single entries of a distribution that has no density for each.
    """
    if not isinstance(observed, jax.Array):  # a list, or a table such as y.notna()
        observed = np.asarray(observed)
    dtype = observed.dtype
    expect(
        dtype == jnp.bool_,
        "observed as booleans, True where y has a value",
        dtype,
        "y, observed = dgp.likelihoods.missing(y) gives both, from NaN, None or a masked array",
    )
    batch, event = tuple(example.batch_shape), tuple(example.event_shape)
    shape, numbers = np.shape(observed), elementwise(example)
    if not shape or not event or are_entries(observed, batch, event):
        mask = jnp.reshape(observed, (1,) * len(event)) if not shape else jnp.asarray(observed)
        fits = _fits(mask.shape, batch + event)
    else:
        mask, fits = jnp.reshape(observed, shape + (1,) * len(event)), _fits(shape, batch)
    if not fits:
        either = f"{batch + event}, one number per entry of y" + (f", or {batch}, one per row" if event else "")
        raise expected(f"observed of shape {either}", shape, "index it as y, observed[i]; at new rows leave it out")
    own = numbers.event_dim
    expect(
        not own or mask.shape[mask.ndim - own :] == (1,) * own,
        f"observed of shape {batch}, one per row, for {type(numbers).__name__}, whose density is joint",
        shape,
        "use dist.Normal(...).to_event(1) with f(x).mix(W), or leave out whole rows, observed.all(-1)",
    )
    return mask


def with_entries(value: ArrayLike, observed: Array, conditional: dist.Distribution) -> Array:
    """Observations with a possible value of y in place of every missing one.

    Raises:
        ValueError: more rows of ``observed`` than of observations.
    """
    full = np.broadcast_shapes(np.shape(value), conditional.batch_shape + conditional.event_shape)
    expect(
        np.broadcast_shapes(observed.shape[-len(full) :], full) == full and observed.ndim <= len(full),
        f"observed to have the rows of the observations, shape {np.shape(value)}",
        observed.shape,
        "y, observed = dgp.likelihoods.missing(y)",
    )
    support: Any = conditional.support
    try:
        possible = support.feasible_like(jnp.zeros_like(value))
    except NotImplementedError:
        possible = jnp.zeros_like(value)
    # Known values stay known, so that they can be checked.
    where: Any = np.where if is_concrete(value, observed, possible) else jnp.where
    return where(observed, value, jnp.asarray(possible, jnp.result_type(value)))


def of_rows(values: Array, observed: Array | None, event_dim: int) -> Array:
    """Values per row of y, zero for missing rows; ``observed`` has one entry per row."""
    if observed is None:
        return values
    return jnp.where(observed.reshape(observed.shape[: -event_dim or None]), values, 0.0)


def of_entries(d: dist.Distribution, y: Array, observed: Array | None) -> Array:
    """Log densities of the observed entries of every row, from the distribution of y given v."""
    if observed is None:
        return log_density(d, y)
    numbers = elementwise(d)
    # sum_p o_np log p(y_np | v_n)
    values = of_rows(log_density(numbers, y), observed, numbers.event_dim)
    return sum_event(values, d.event_dim - numbers.event_dim)


def _fits(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of this shape broadcasts against ``full``, to no more than axes left of it."""
    shape = shape[len(shape) - len(full) :] if len(shape) > len(full) else shape
    try:
        return np.broadcast_shapes(shape, full) == tuple(full)
    except ValueError:
        return False
