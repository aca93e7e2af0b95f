"""Observations that count nothing: NaN in the data of a tree, and no log density."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.model.sites import Message, masks_around, unwrap

__all__ = ["counted", "with_gaps", "without_empty_rows"]


def counted(site: Message) -> Array | None:
    """Which entries of an observed site count, in the shape of its value; ``None`` where all do."""
    shape, inner = jnp.shape(site["value"]), unwrap(site["fn"])
    masks = [jnp.reshape(fn._mask, jnp.shape(fn._mask) + (1,) * fn.event_dim) for fn in masks_around(site["fn"])]
    if isinstance(inner, Likelihood) and inner.observed is not None:
        masks.append(inner.observed)
    total = jnp.ones(shape, bool)
    for mask in masks:
        total = total & mask
    return jnp.broadcast_to(total, shape) if masks else None


def with_gaps(value: Array, mask: Array) -> Array:
    """Observations with NaN where they count nothing; labels and counts as they are."""
    floating = jnp.issubdtype(jnp.result_type(value), jnp.floating)
    return jnp.where(mask, value, jnp.nan) if floating else value


def without_empty_rows(group: Any, name: str, dim: str, mask: Array) -> Any:
    """A dataset of log densities without the rows of a site of which nothing is observed.

    Args:
        group: the dataset.
        name: of the site.
        dim: of its rows, the only plate that it has.
        mask: which of its entries count (N, ...).
    """
    rows = np.asarray(mask).reshape(len(mask), -1).any(1)
    return group if name not in group or rows.all() else group.isel({dim: np.flatnonzero(rows)})
