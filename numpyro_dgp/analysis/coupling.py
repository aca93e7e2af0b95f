r"""Which inducing values a bound may integrate out, and which must be sampled.

In marginal mode every row of a layer is drawn from its own marginal :math:`q(f(x_n))`, and a likelihood uses that
marginal too. This gives the bound if each term depends on one row of a function: on one datum and its hidden values. A
term that depends on several rows of one function, because they are summed or because a function is used twice, needs
them from one draw of the inducing values. Then these are drawn, once for all data, and the rows given them, as in
NumPyro's own objectives.

The terms, and the rows that they depend on, are found by tracing the program with shapes only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._numpyro import each_message
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import (
    Message,
    Trace,
    each_values_of,
    is_likelihood,
    row_shape,
    site_kind,
    unwrap,
    values_of,
)
from numpyro_dgp.functions.site_distribution import SiteDistribution
from numpyro_dgp.jaxprs.row_dependence import Rows, mark

__all__ = ["Coupling", "coupling", "mark_rows", "ones_of", "seen_by_site"]

Fact = dict[str, Rows | None]


def mark_rows() -> each_message:
    """Handler that gives every site of function values a placeholder, and marks all values but those of inducing sites,
    so that their rows can be followed through the program."""

    def place(msg: Message) -> None:
        if msg["type"] == "sample" and msg["value"] is None and site_kind(msg) in ("hidden", "exact"):
            msg["value"] = jnp.zeros(msg["fn"].shape(), unwrap(msg["fn"]).loc.dtype)  # type: ignore[attr-defined]

    def follow(msg: Message) -> None:
        if msg["type"] == "sample" and not msg["is_observed"] and site_kind(msg) != "inducing":
            msg["value"] = mark(msg["name"], msg["value"], len(row_shape(msg["fn"])))

    return each_message(place, follow)


def ones_of(fn: Any) -> Array:
    """Ones in the shape of a draw."""
    draw = jax.eval_shape(fn.sample, jax.random.key(0))
    return jnp.ones(draw.shape, draw.dtype)


def seen_by_site(sites: Trace) -> dict[str, dict[str, list[Array]]]:
    """The arrays that the density at each site is computed from: inputs, noise and hyperparameters of a function, the
    points of weighted sums, all of which each row sees, and observations."""
    seen: dict[str, dict[str, list[Array]]] = {}
    for name, site in sites.items():
        kind = site_kind(site) if site["type"] == "sample" else "inducing"
        if kind == "inducing":
            continue
        seen[name] = {}
        for values in each_values_of(site["fn"]):
            for key, value in _given(values).items():
                seen[name].setdefault(key, []).extend(_arrays(value))
        if kind not in ("hidden", "exact"):
            seen[name]["density"] = [_density(site)]
        if site["is_observed"]:
            seen[name]["observed"] = _arrays(site["value"])
    return seen


def _given(values: SiteDistribution) -> dict[str, Any]:
    """What function values are computed from."""
    given: dict[str, Any] = {"inputs": values.inputs, "noise": values.noise, "function": values.function}
    if (functional := getattr(values.function, "functional", None)) is not None:  # of weighted sums of another function
        given |= {"function": values.function.base, "points": functional}
    return {key: value for key, value in given.items() if value is not None}


def _arrays(tree: Any) -> list[Array]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array | np.ndarray | float)]


def _density(site: Message) -> Array:
    fn: Any = unwrap(site["fn"])
    if is_likelihood(fn):  # its function is integrated: the rest is what the conditional closes over
        fn = fn.conditional(jnp.zeros_like(fn.f_x.loc))
    return fn.log_prob(site["value"])


class Coupling(NamedTuple):
    """Which densities of a program depend on several rows.

    Args:
        coupled: inducing sites that have to be drawn.
        aggregates: sites whose density depends on several rows of a hidden layer.
        ends: sites whose value no other site depends on.
        lower: by inducing site, those of the layers whose values the inputs of its function depend on.
    """

    coupled: frozenset[str]
    aggregates: frozenset[str]
    ends: frozenset[str]
    lower: dict[str, frozenset[str]]


def coupling(sites: Trace, facts: dict[str, dict[str, list[Fact]]]) -> Coupling:
    """Find the inducing values that have to be drawn, from the rows that each site depends on.

    Args:
        sites: a trace of the program under :func:`mark_rows`.
        facts: by site, what :func:`seen_by_site` depends on.
    """
    owners = {n: [values.layer for values in each_values_of(sites[n]["fn"])] for n in facts}
    values = {n for n in facts if site_kind(sites[n]) in ("hidden", "exact")}
    above: dict[str, Fact] = {}
    coupled: set[str] = set()
    aggregates: set[str] = set()
    used: set[str] = set()
    lower: dict[str, frozenset[str]] = {}
    for name, site in sites.items():  # in the order of the program: lower layers come first
        if name not in facts:
            continue
        direct = _direct(site, {what: several for what, several in facts[name].items() if what != "observed"})
        used |= direct.keys() - {name}
        seen = _all_rows(sites, {below: rows for below, rows in direct.items() if below in values}, above)
        above[name] = seen
        uses = {(owners[below][0], below, rows) for below, rows in seen.items()}
        functions = [function for function, _, _ in uses]
        functions += _seen_together(site["fn"], owners[name])
        coupled |= {f for f, _, rows in uses if f is not None and rows is None}
        coupled |= {f for f in functions if f is not None and functions.count(f) > 1}
        aggregates |= {name} if None in seen.values() else set()
        for mine in [site for site in owners[name] if site is not None]:
            inputs = _direct(site, {key: facts[name].get(key, []) for key in ("inputs", "points")}).keys() & values
            roots = {owners[below][0] for below in inputs.union(*(above[below] for below in inputs))}
            lower[mine] = lower.get(mine, frozenset()).union(n for n in roots if n not in (mine, None))
    ends = frozenset(facts.keys() - used - values)
    return Coupling(frozenset(coupled), frozenset(aggregates), ends, lower)


def _seen_together(fn: Any, owners: list[str | None]) -> list[str | None]:
    """The sites of the functions that a likelihood integrates, once where it knows how several values are correlated.

    With the logarithm outside of the expectation over f given v, the inducing values have to be known.
    """
    inside: Any = unwrap(fn)
    if not is_likelihood(fn):
        return []
    known = frozenset() if inside.collapse == "marginal" else inside.f_x.correlated_parts
    return [owner for n, owner in enumerate(owners) if n not in known]


def _direct(site: Message, facts: dict[str, list[Fact]]) -> Fact:
    """Rows that a site depends on directly; their axes are counted from the end of its batch dimensions."""
    values = values_of(site["fn"])
    # The number of axes to the right of the batch dimensions. Joint values depend on all inputs along the last batch
    # dimension. All rows of a function depend on its hyperparameters.
    right = {"inputs": 2 if values.all_rows_together else 1, "noise": values.event_dim, "density": 0}
    found: Fact = {}
    for what, several in facts.items():
        for fact in several:
            for below, rows in fact.items():
                moved = None
                if rows is not None and all(what in right and axis < -right[what] for axis in rows.axes):
                    moved = Rows(tuple(axis + right[what] for axis in rows.axes), rows.which) if rows.axes else rows
                found[below] = moved if found.get(below, moved) == moved else None
    return found


def _all_rows(sites: Trace, direct: Fact, above: dict[str, Fact]) -> Fact:
    """Rows that a site depends on, directly or through other sites."""
    found = dict(direct)
    for below, rows in direct.items():
        own = _own_axes(sites[below])
        for root, theirs in above[below].items():
            through = None
            if rows is not None and theirs is not None:
                straight = theirs == Rows(own)
                through = rows if straight else Rows(rows.axes, (*rows.which, (below, theirs)))
            found[root] = through if found.get(root, through) == through else None
    return found


def _own_axes(site: Message) -> tuple[int, ...]:
    """The axes over which the rows of a site differ, counted from the end of its rows."""
    shape = row_shape(site["fn"])
    return tuple(axis - len(shape) for axis in range(len(shape)) if shape[axis] > 1)
