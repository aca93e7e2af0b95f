"""A program at a few numbers of rows: arrays longer than the data, in which the rest does not count.

A compiled program is for one number of rows. A search that adds rows one by one would be compiled in every round;
filled up to 64, 128, 256, ... rows it is compiled as often as the number of rows doubles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_dgp._checks import expected
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.program import run_on_shapes
from numpyro_dgp.analysis.sites import Message, mask_rows
from numpyro_dgp.design.input_space import Box

__all__ = ["KnownRows", "filled_rows", "plates_of_rows", "takes_runs", "with_known_rows"]

_FEWEST = 64


class KnownRows(handlers.mask):
    """Masks sites in the plates of the rows.

    Args:
        plates: their names.
        known: which rows count (N,).
    """

    def __init__(self, plates: frozenset[str], known: Array) -> None:
        self.plates = plates
        super().__init__(mask=known)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample":
            return
        for frame in msg["cond_indep_stack"]:
            if frame.name in self.plates:
                mask_rows(msg, self.mask, frame.dim)


def takes_runs(model: Callable[..., Any]) -> bool:
    """Whether a program has the argument ``runs``, the inputs of all evaluations."""
    return "runs" in inspect.signature(model).parameters


def with_known_rows(model: Callable[..., Any], plates: frozenset[str], runs: Array | None = None) -> Callable[..., Any]:
    """``model(X, y)`` as a program ``(X, y, known)``, in which rows that are not ``known`` (N,) do not count.

    Args:
        model: the program.
        plates: those of the rows.
        runs: the inputs (R, D) that a program with the argument ``runs`` gets, whatever rows it is called with.
    """
    more = {"runs": runs} if takes_runs(model) else {}

    def program(X: Any, y: Any = None, known: Any = None) -> Any:
        if known is None:
            return model(X, y, **more)
        with KnownRows(plates, known):
            return model(X, y, **more)

    return program


def filled_rows(X: np.ndarray, y: np.ndarray) -> tuple[Array, Array, Array]:
    """Rows with copies of the last one behind them, and which of them are known: (R, D), (R,), (R,)."""
    size = max(_FEWEST, 1 << (len(y) - 1).bit_length())
    rows = np.minimum(np.arange(size), len(y) - 1)
    dtype = jnp.result_type(float)
    return jnp.asarray(X[rows], dtype), jnp.asarray(y[rows], dtype), jnp.arange(size) < len(y)


def plates_of_rows(model: Callable[..., Any], box: Box) -> frozenset[str]:
    """The plates that have as many rows as X, found by two runs of ``model(X)`` on shapes.

    Raises:
        ValueError: no such plate, or a site outside of them that grows with the rows.
    """
    few, more = (_shapes(model, box, count) for count in (5, 7))
    plates = frozenset(name for name, size in few.plates.items() if (size, more.plates.get(name)) == (5, 7))
    outside = [name for name, (shape, frames) in few.sites.items()
               if name in more.sites and more.sites[name][0] != shape and not frames & plates]  # fmt: skip
    if outside or not plates:
        got = f"{outside[0]!r} outside of it" if plates else "none"
        raise expected(
            "a model(X, y) whose values of rows are all in a numpyro.plate of the rows",
            got,
            'rows that are not known yet are masked there, with numpyro.plate("data", len(X)): ...',
        )
    return plates


class _Shapes(NamedTuple):
    """Sizes of plates by name, and of every site the shape and the names of its plates."""

    plates: dict[str, int]
    sites: dict[str, tuple[tuple[int, ...], frozenset[str]]]


def _shapes(model: Callable[..., Any], box: Box, count: int) -> _Shapes:
    X = jnp.asarray(np.broadcast_to(box.low, (count, box.dims)), jnp.result_type(float))
    more = {"runs": X[:3]} if takes_runs(model) else {}
    sites = {name: site for name, site in run_on_shapes(model, (X,), more)[0].items() if site["type"] == "sample"}
    frames = {frame.name: frame.size for site in sites.values() for frame in site["cond_indep_stack"]}
    shapes = {
        name: (tuple(site["fn"].shape()), frozenset(frame.name for frame in site["cond_indep_stack"]))
        for name, site in sites.items()
    }
    return _Shapes(frames, shapes)
