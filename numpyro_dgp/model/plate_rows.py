"""Checks on shapes that every row of a program counts once: sites against their plates, arrays against indices.

JAX broadcasts arrays of shapes (N, 1) and (N,) to (N, N), and clamps indices beyond the end of an array. Both give a
loss without an error, in which rows count several times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from numpyro_dgp.algebra.index_bounds import ShortArray
from numpyro_dgp.algebra.row_dependence import Rows
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.model.sites import Message, Trace, each_values_of, unwrap

Fact = dict[str, Rows | None]

__all__ = ["plate_sizes", "require_indexed", "require_long_enough", "require_rows_once"]

_COLUMNS = (
    "shapes (N, 1) and (N,) broadcast to (N, N); for a layer with outputs= write .to_event(1) behind the distribution "
    "and give y of shape (N, P), for a scalar function give y, noise, masks and weights of shape (N,); rows that are "
    "meant to count several times belong in a plate of their own"
)
_INDEX = 'with numpyro.plate("data", len(X), subsample_size=batch) as i, use X[i] and y[i]'


def plate_sizes(sites: Trace) -> dict[str, int]:
    """The full size of every plate of a trace."""
    return {name: site["args"][0] for name, site in sites.items() if site["type"] == "plate"}


def require_rows_once(sites: Trace) -> None:
    """Refuse sites with another number of rows than their plates, and observations that broadcasting repeats.

    Args:
        sites: a trace of the program in which no latent has several values per datum.

    Raises:
        ValueError: such a site.
    """
    for site in sites.values():
        if site["type"] != "sample":
            continue
        for frame in site["cond_indep_stack"]:
            rows = site["fn"].batch_shape[frame.dim]
            if rows != frame.size:
                raise ValueError(
                    f"site {site['name']!r}: expected {frame.size} row(s), as many as plate {frame.name!r} has, got "
                    f"{rows}: {_INDEX}"
                )
        if site["is_observed"] and np.shape(site["value"]):  # a single number is meant for all rows
            _require_counted_once(site)


def _require_counted_once(site: Message) -> None:
    fn, shape = site["fn"], np.shape(site["value"])
    if isinstance(unwrap(fn), Likelihood):
        unwrap(fn).require_shape(shape)  # type: ignore[attr-defined]
    event = shape[len(shape) - min(len(shape), fn.event_dim) :]
    if event != fn.event_shape and _broadcast(event, fn.event_shape) is not None:
        raise ValueError(
            f"site {site['name']!r}: expected observations whose last axes have the event shape {fn.event_shape} "
            f"of the distribution, got shape {shape}: an array (N,) beside a column (N, 1) is repeated N times; give y "
            "of shape (N, P) for a layer with outputs=P, of shape (N,) for a scalar function"
        )
    batch = shape[: len(shape) - len(event)]
    for frame in site["cond_indep_stack"] if event and not batch else ():
        if frame.size == event[0] > 1:
            raise ValueError(
                f"site {site['name']!r}: expected a distribution of all {frame.size} rows together in front of plate "
                f"{frame.name!r} of these rows, got it in the plate, where they would count {frame.size} times: write "
                "the site in front of the plate, or give y a row for every entry of the plate"
            )
    weights = () if site["scale"] is None else np.shape(site["scale"])
    total = _broadcast(fn.batch_shape, batch)
    if not batch or total is None:
        return
    plates = {frame.dim: frame for frame in site["cond_indep_stack"]}
    own = (1,) * (len(total) - len(batch)) + batch
    repeated = [axis for axis in range(-len(total), 0) if own[axis] < total[axis]]
    elsewhere = any(own[axis] > 1 for axis in range(-len(total), 0) if axis not in plates)
    where = ", ".join(f"plate {p.name!r} of {p.size} rows" for p in plates.values()) or "no plate"
    if any(axis not in plates for axis in repeated) or (repeated and elsewhere):
        raise ValueError(
            f"site {site['name']!r}: expected one log density for every observation, got {total} log densities for "
            f"observations of shape {shape} in {where}: {_COLUMNS}"
        )
    if repeated and set(own) == {1}:
        raise ValueError(
            f"site {site['name']!r}: expected observations for {total} rows, got one row, shape {shape}, in {where}: "
            "give y as many rows as X; a single number stands for all rows"
        )
    if _broadcast(total, weights) != total:
        raise ValueError(
            f"site {site['name']!r}: expected weights (handlers.scale) for {total} log densities, got "
            f"shape {weights} in {where}: {_COLUMNS}"
        )


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that arrays of these shapes broadcast to; ``None`` if they do not."""
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        return None


def require_long_enough(found: list[ShortArray]) -> None:
    """Refuse arrays with fewer rows than the plate whose indices pick them.

    Raises:
        ValueError: such an array.
    """
    for plate, size, shape, axis in found:
        raise ValueError(
            f"plate {plate!r}: expected arrays with a row for every index below its size {size}, got one of shape "
            f"{shape} indexed along axis {axis}: JAX would repeat its last row; give the plate the number of rows, "
            f"numpyro.plate({plate!r}, len(X), ...), and X and y equally many"
        )


def require_indexed(sites: Trace, facts: Mapping[str, Mapping[str, list[Fact]]], arguments: Any) -> None:
    """Refuse rows that a plate does not pick beside rows that it does: inputs and observations would not match.

    Args:
        sites: a trace of the program.
        facts: by site, what its inputs, observations and so on depend on (``coupling.seen_by_site``).
        arguments: of the program.

    Raises:
        ValueError: inputs or observations in a plate that takes some of its rows, without the index of the plate.
    """
    frames = {frame for name in facts for frame in sites[name]["cond_indep_stack"]}
    partial = [f for f in frames if 1 < f.size < sites[f.name]["args"][0]]
    leaves = [leaf for leaf in jax.tree.leaves(arguments) if np.ndim(leaf)] if partial else []
    for frame in partial:
        inside = {name: fact for name, fact in facts.items() if frame in sites[name]["cond_indep_stack"]}
        if not any(frame.name in one for fact in inside.values() for several in fact.values() for one in several):
            continue
        size = sites[frame.name]["args"][0]
        for name, fact in inside.items():
            site = sites[name]
            inputs = [getattr(values, "inputs", None) for values in each_values_of(site["fn"])]
            rows = [each for each in inputs if each is not None and _has_rows(each, 1, frame)]
            if rows and not any(fact.get("inputs", [])):
                _refuse_unindexed(name, "inputs", frame, size)
            given = any(site["value"] is leaf for leaf in leaves)
            if site["is_observed"] and given and _has_rows(site["value"], site["fn"].event_dim, frame):
                _refuse_unindexed(name, "observations", frame, size)


def _has_rows(array: Any, event_dim: int, frame: Any) -> bool:
    batch = np.shape(array)[: np.ndim(array) - event_dim]
    return len(batch) >= -frame.dim and batch[frame.dim] == frame.size


def _refuse_unindexed(name: str, what: str, frame: Any, size: int) -> None:
    raise ValueError(
        f"site {name!r}: expected inputs and observations of the same rows in plate {frame.name!r}, which takes "
        f"{frame.size} of {size}, got {what} that are not indexed: {_INDEX}"
    )
