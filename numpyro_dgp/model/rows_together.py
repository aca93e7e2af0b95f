"""Inputs and densities of single rows that a program computes from all rows of a call, as by ``X - X.mean(0)``.

At other rows that is another model: rows that are predicted alone are standardised by themselves, not as in the fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from numpyro_dgp.algebra.row_dependence import Several
from numpyro_dgp.model.sites import Trace, each_values_of, row_shape

__all__ = ["Together", "rows_together"]

_OF_ALL_ROWS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_or reduce_and sort".split())


class Together(NamedTuple):
    """What of a site is computed from all rows.

    Args:
        site: its name.
        what: its inputs or its density.
        source: the label of an argument, or the name of a site below.
    """

    site: str
    what: str
    source: str


def rows_together(
    sites: Trace,
    reasons: Mapping[str, Mapping[str, list[Any]]],
    shapes: Mapping[str, Sequence[int]],
    other: tuple[Trace, Mapping[str, Sequence[int]]] | None = None,
) -> list[Together]:
    """Find inputs and densities with one row per row of an argument, or of a site below, that see all its rows.

    Sums over rows that remain sums, such as totals and averages over bins, have other rows than what they sum.

    Args:
        sites: a trace of the program.
        reasons: by site and by what its density is computed from, the rows that these depend on
            (:func:`~numpyro_dgp.algebra.row_dependence.row_reasons`).
        shapes: of the arguments, by label.
        other: a trace of the program for another number of rows, and the shapes of its arguments. Rows are what differs
            there; without it, what is as many as they are.
    """
    here = _counts(sites, shapes)
    there = None if other is None else _counts(*other)
    found = []
    for name, seen in reasons.items():
        for what in ("inputs", "density"):
            for source, why in ((s, w) for fact in seen.get(what, []) for s, w in fact.items()):
                all_rows = isinstance(why, Several) and why.known and why.cause in _OF_ALL_ROWS
                ends = (name, what), (source, "density")
                counts = {here.get(end, ()) for end in ends}
                moved = there is None or all(here.get(end) != there.get(end) for end in ends)
                if all_rows and len(counts) == 1 and () not in counts and moved:
                    found.append(Together(name, what, source))
    return found


def _counts(sites: Trace, shapes: Mapping[str, Sequence[int]]) -> dict[tuple[str, str], tuple[int, ...]]:
    """How many rows arguments, densities at sites and inputs of functions have along their last axis of rows."""
    counts = {(label, "density"): tuple(shape)[:1] for label, shape in shapes.items()}
    for name, site in sites.items():
        if site["type"] == "sample":
            inputs: Any = getattr(each_values_of(site["fn"])[0], "inputs", None)
            counts[name, "density"], counts[name, "inputs"] = row_shape(site["fn"])[-1:], np.shape(inputs)[-2:-1]
    return counts
