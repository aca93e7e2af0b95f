"""Values that count as shared by all data and that a program uses row by row: those of the rows of one call.

A fit gives a prediction what all data share. A latent in a plate of its own, of which row n is used at row n of the
data, is not shared: at other rows its values are those of the rows of the fit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from numpyro.primitives import Messenger

from numpyro_dgp.algebra.row_dependence import Elsewhere, Rows, mark
from numpyro_dgp.model.function_values import FunctionValues
from numpyro_dgp.model.sites import Message, Trace, site_kind, values_of

__all__ = ["MarkEntries", "exact_at_rows", "values_by_row"]

_ENTRIES = "entries of "


class MarkEntries(Messenger):
    """Marks the values of sites that are not function values along all their axes, those of events too."""

    def postprocess_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and not msg["is_observed"] and site_kind(msg) in ("latent", "other"):
            msg["value"] = mark(_ENTRIES + msg["name"], msg["value"], len(msg["fn"].shape()))


def values_by_row(
    sites: Trace, facts: Mapping[str, Mapping[str, list[Any]]], names: Collection[str], arguments: set[str]
) -> dict[str, str]:
    """By name of a site whose values are used row by row, the site that uses them.

    Args:
        sites: a trace of the program under :class:`MarkEntries`.
        facts: by site, what its inputs, density and so on depend on (``coupling.seen_by_site``).
        names: the sites to look at, in the order of the program.
        arguments: the labels of the arguments that have the rows.
    """
    found: dict[str, str] = {}
    of_rows: dict[str, set[int]] = {}  # by site, the axes along which the rows of the call lie
    for name in names:
        fn, plates = sites[name]["fn"], {frame.name for frame in sites[name]["cond_indep_stack"]}
        right = {"density": 0, "inputs": 1 if isinstance(values_of(fn), FunctionValues) else 2}
        uses = [
            (below, rows, {axis + right[what] for axis in rows.axes})
            for what in right.keys() & facts[name].keys()
            for fact in facts[name][what]
            for below, rows in fact.items()
            if rows is not None
        ]
        of_rows[name] = {a for n, _, axes in uses if n in arguments for a in axes if a < 0}
        of_rows[name] |= {a for n, rows, axes in uses if rows.which == () for a in axes & of_rows.get(n, set())}
        for below, rows, axes in uses:
            if below.startswith(_ENTRIES) and axes & of_rows[name] and _in_order(rows, plates):
                found.setdefault(below.removeprefix(_ENTRIES), name)
    return found


def exact_at_rows(
    sites: Trace, facts: Mapping[str, Mapping[str, list[Any]]], names: Collection[str], arguments: set[str]
) -> list[str]:
    """The sites that hold values of exact processes at inputs which come from the rows of a call, directly or through
    layers below. Arguments as of :func:`values_by_row`."""
    moved = set(arguments)
    for name in names:
        moved |= {name} if any(moved & fact.keys() for fact in facts[name].get("inputs", [])) else set()
    return [name for name in names if name in moved and site_kind(sites[name]) == "exact"]


def _in_order(rows: Rows, plates: set[str]) -> bool:
    """Whether row n is used at row n: as it is, or picked by an index that comes from a plate alone."""
    return all(isinstance(step, Elsewhere) and bool(step.by) and step.by <= plates for step in rows.which)
