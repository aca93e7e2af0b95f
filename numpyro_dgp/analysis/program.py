"""The structure of a program, from a trace of it: layers, data plates, coupled rows, initial values.

A program is inspected by running it: once abstractly (``inspect_program``: shapes and structure, no arithmetic),
and, when parameters are created, once for real (``initial_values``).

Shape checks that every row counts once: sites against their plates, arrays against indices.

JAX broadcasts arrays of shapes (N, 1) and (N,) to (N, N), and clamps indices beyond the end of an array. Both give a
loss without an error, in which rows count several times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers

from numpyro_dgp._checks import expected, without_checks
from numpyro_dgp._compiled import one_thread
from numpyro_dgp._data import indexable
from numpyro_dgp._numpyro import each_message
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import (
    INITIAL_VALUES,
    LEARNED_INPUTS_APART,
    NO_OBS_MASK,
    OUTSIDE_TRANSFORMATIONS,
    NotTraceableError,
    explained,
    require,
)
from numpyro_dgp.analysis.coupling import coupling, mark_rows, seen_by_site
from numpyro_dgp.analysis.sites import Message, Trace, each_values_of, is_likelihood, site_kind, unwrap
from numpyro_dgp.functions.site_distribution import declared
from numpyro_dgp.jaxprs.index_bounds import ShortArray, short_arrays
from numpyro_dgp.jaxprs.row_dependence import Rows, known_rows, mark, result_reasons

__all__ = [
    "ProgramFacts",
    "full_plates",
    "initial_values",
    "inspect_program",
    "observations",
    "plate_sizes",
    "require_indexed",
    "require_long_enough",
    "require_rows_once",
    "require_sound",
    "run_on_shapes",
    "structure",
    "with_traceable",
]

Fact = dict[str, Rows | None]

_SOUND = OUTSIDE_TRANSFORMATIONS, INITIAL_VALUES, NO_OBS_MASK, LEARNED_INPUTS_APART


_COLUMNS = (
    "shapes (N, 1) and (N,) broadcast to (N, N); for a layer with outputs= write .to_event(1) behind the distribution "
    "and give y of shape (N, P), for a scalar function give y, noise, masks and weights of shape (N,); rows that are "
    "meant to count several times belong in a separate plate"
)
_INDEX = 'with numpyro.plate("data", len(X), subsample_size=batch) as i, use X[i] and y[i]'


def plate_sizes(sites: Trace) -> dict[str, int]:
    """The full size of every plate of a trace."""
    return {name: site["args"][0] for name, site in sites.items() if site["type"] == "plate"}


def require_rows_once(sites: Trace) -> None:
    """Raise for sites with another number of rows than their plates, and observations that broadcasting would repeat.

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
                raise expected(
                    f"{frame.size} row(s), as in plate {frame.name!r}", rows, _INDEX, at=f"site {site['name']!r}"
                )
        if site["is_observed"] and np.shape(site["value"]):  # a single number is meant for all rows
            _require_counted_once(site)


def _require_counted_once(site: Message) -> None:
    fn, shape = site["fn"], np.shape(site["value"])
    if is_likelihood(fn):
        unwrap(fn).require_shape(shape)  # type: ignore[attr-defined]
    event = shape[len(shape) - min(len(shape), fn.event_dim) :]
    if event != fn.event_shape and _broadcast(event, fn.event_shape) is not None:
        raise expected(
            f"observations whose last axes are the event shape {fn.event_shape} of the distribution",
            f"shape {shape}",
            "give y of shape (N, P) for a layer with outputs=P, of shape (N,) for a scalar function",
            at=f"site {site['name']!r}",
        )
    batch = shape[: len(shape) - len(event)]
    for frame in site["cond_indep_stack"] if event and not batch else ():
        if frame.size == event[0] > 1:
            raise expected(
                f"a distribution of all {frame.size} rows together in front of plate {frame.name!r} of these rows",
                f"it in the plate, where they would count {frame.size} times",
                "write the site in front of the plate, or give y a row for every entry of the plate",
                at=f"site {site['name']!r}",
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
        raise expected(
            "one log density for every observation",
            f"{total} log densities for observations of shape {shape} in {where}",
            _COLUMNS,
            at=f"site {site['name']!r}",
        )
    if repeated and set(own) == {1}:
        raise expected(
            f"observations for {total} rows",
            f"one row, shape {shape}, in {where}",
            "give y as many rows as X; a single number stands for all rows",
            at=f"site {site['name']!r}",
        )
    if _broadcast(total, weights) != total:
        raise expected(
            f"weights (handlers.scale) for {total} densities",
            f"{weights} in {where}",
            _COLUMNS,
            at=f"site {site['name']!r}",
        )


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that arrays of these shapes broadcast to; ``None`` if they do not."""
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        return None


def require_long_enough(found: list[ShortArray]) -> None:
    """Raise for arrays with fewer rows than the plate whose indices select them.

    Raises:
        ValueError: such an array.
    """
    for plate, size, shape, axis in found:
        raise expected(
            f"arrays with a row for every index below its size {size}",
            f"one of shape {shape} indexed along axis {axis}",
            f"JAX would repeat its last row; write numpyro.plate({plate!r}, len(X), ...), with as many y as X",
            at=f"plate {plate!r}",
        )


def require_indexed(sites: Trace, facts: Mapping[str, Mapping[str, list[Fact]]], arguments: Any) -> None:
    """Raise if a subsampling plate indexes some arrays but not others: inputs and observations would not match.

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
            inputs = [values.inputs for values in each_values_of(site["fn"])]
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
    raise expected(
        (f"inputs and observations of the same rows in plate {frame.name!r}, which takes {frame.size} of {size}"),
        f"{what} that are not indexed",
        _INDEX,
        at=f"site {name!r}",
    )


Result = TypeVar("Result")


def _plates(msg: Message) -> frozenset[str]:
    return frozenset(frame.name for frame in msg["cond_indep_stack"])


@dataclasses.dataclass(frozen=True)
class ProgramFacts:
    """The structure of a program for given arguments.

    Args:
        inducing: inducing sites, in the order of the program.
        inner: the inducing sites of functions whose values are inputs of another layer.
        data_plates: the plate sets of function values, likelihoods and observations.
        observed_plates: the plate sets of sites observed in this call.
        nesting: how many batch dimensions the plates take.
        coupled: inducing sites of functions with a density that depends on several rows or several uses.
        aggregates: sites whose density depends on several rows of a hidden layer together.
        ends: sites whose value no other site depends on.
        lower: by inducing site, those of the layers whose values the inputs of its function depend on.
        hidden: inducing sites of functions with values at hidden sites.
    """

    inducing: tuple[str, ...]
    inner: frozenset[str]
    data_plates: tuple[frozenset[str], ...]
    observed_plates: tuple[frozenset[str], ...]
    nesting: int
    coupled: frozenset[str] = frozenset()
    aggregates: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()
    lower: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    hidden: frozenset[str] = frozenset()

    def is_per_datum(self, msg: Message) -> bool:
        """Whether a site has one value per datum: it lies in all plates of some function value or observation."""
        return any(plates <= _plates(msg) for plates in self.data_plates)

    def is_shared(self, msg: Message) -> bool:
        """Whether a value of a site is shared by all data, so that it can be used at other inputs."""
        kind = site_kind(msg)
        if kind in ("hidden", "observed"):
            return False
        # If values or observations are outside plates, other sites outside plates are shared unless they are latents.
        is_latent = declared(unwrap(msg["fn"])).of_latents
        return not self.is_per_datum(msg) or not (_plates(msg) or is_latent)

    def shared_values(self, sites: Trace) -> dict[str, Array]:
        """The values of a run of it that all data share: those of latent sites, also in plates that are not of the
        data, and of deterministic sites outside of plates."""

        def shared(site: Message) -> bool:
            latent = site["type"] == "sample" and not site["is_observed"]
            return self.is_shared(site) if latent else site["type"] == "deterministic" and not _plates(site)

        return {name: site["value"] for name, site in sites.items() if shared(site)}

    def is_predicted(self, msg: Message, plates: Sequence[frozenset[str]]) -> bool:
        """Whether a site has one value per row of a predicted site, given the plates of these."""
        return any(these <= _plates(msg) for these in plates)

    def is_given(self, msg: Message, plates: Sequence[frozenset[str]]) -> bool:
        """Whether a fit gives a value of a site in a prediction of sites in these plates: it is shared by all data, or
        it is a latent of other rows, which this call observes. Without plates, only what is shared."""
        if self.is_shared(msg) or not plates:
            return self.is_shared(msg)
        return site_kind(msg) == "latent" and not self.is_predicted(msg, plates) and self.is_conditioned(msg)

    def is_conditioned(self, msg: Message) -> bool:
        """Whether this call observes anything in the plates of a per-datum site, or outside of all plates."""
        mine = _plates(msg)
        return any(not mine or not plates or mine & plates for plates in self.observed_plates)


def inspect_program(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProgramFacts:
    """Run ``model`` on shapes only and report its structure. Costs tracing, no arithmetic.

    Raises:
        ValueError: as :func:`run_on_shapes`.
    """
    sites, facts, _ = run_on_shapes(model, args, kwargs)
    return dataclasses.replace(structure(sites), **coupling(sites, facts)._asdict())


@one_thread
def run_on_shapes(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Trace, Any, Any]:
    """A trace of ``model`` with shapes only, by site the rows that values of :func:`seen_by_site` depend on, and the
    same with the operations that combine rows.

    Raises:
        ValueError: rows that would count several times or not at all (:mod:`numpyro_dgp.analysis.program`); a program
            that cannot be traced (:mod:`numpyro_dgp.analysis.checks`).
    """
    found: list[Trace] = []
    args, kwargs = indexable((args, kwargs))

    def first_rows(msg: Message) -> Array | None:
        if msg["type"] != "plate":
            return None
        size, subsample_size = msg["args"]
        return mark(msg["name"], jnp.arange(subsample_size or size), 1)

    def run(key: Array) -> dict[str, Any]:
        minibatch = handlers.substitute(substitute_fn=first_rows)
        seeded = handlers.seed(rng_seed=key)
        with (
            handlers.block(),
            handlers.trace() as sites,
            minibatch,
            mark_rows(),
            seeded,
            require(*_SOUND),
        ):
            model(*args, **kwargs)
        require_rows_once(sites)
        found.append(sites)
        return seen_by_site(sites)

    with explained((args, kwargs)), without_checks():
        closed, seen = jax.make_jaxpr(run, return_shape=True)(jax.random.key(0))
    (sites,) = found
    require_long_enough(short_arrays(closed.jaxpr, plate_sizes(sites)))
    reasons = result_reasons(closed.jaxpr, seen)
    facts = known_rows(reasons)
    require_indexed(sites, facts, (args, kwargs))
    return sites, facts, reasons


def require_sound(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProgramFacts | None:
    """The checks of :func:`inspect_program`, for callers that can do without the structure of the program.

    A program that needs the values of its arguments is not checked, and has no result.

    Raises:
        ValueError: as :func:`inspect_program`, except for programs that need the values of their arguments.
    """
    return with_traceable(lambda args, kwargs: inspect_program(model, args, kwargs), args, kwargs)


def with_traceable(
    inspect: Callable[[tuple[Any, ...], dict[str, Any]], Result], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Result | None:
    """What ``inspect(args, kwargs)`` returns, which runs a program on shapes only; ``None`` where it needs values."""
    unknown = NotTraceableError, jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError
    with suppress(*unknown):
        return inspect(*indexable((args, kwargs)))
    return None


def structure(sites: Trace) -> ProgramFacts:
    """The structure of a program from a trace of it, without the fields that need its jaxpr (``coupling``)."""
    samples = [site for site in sites.values() if site["type"] == "sample"]
    values = {"hidden": [], "observed": []}  # type: dict[str, list[Any]]
    data, observed = [], []
    for site in samples:
        kind = site_kind(site)
        fn = unwrap(site["fn"])
        if kind in values:
            data.append(_plates(site))
            values[kind] += [each.function for each in each_values_of(fn)]
        if site["is_observed"]:
            observed.append(_plates(site))
    # The last layer is the one under a likelihood; if all layers are drawn explicitly, it is the last one drawn.
    outputs = [f for f in values["observed"] if f is not None] or values["hidden"][-1:]
    last = {f.site for f in outputs if f is not None}
    names = tuple(site["name"] for site in samples if site_kind(site) == "inducing")
    inner = frozenset(names) - last
    nesting = max([-frame.dim for site in samples for frame in site["cond_indep_stack"]], default=0)
    hidden = frozenset(f.site for f in values["hidden"] if f is not None and f.site is not None)
    return ProgramFacts(names, inner, tuple(data), tuple(observed), nesting, hidden=hidden)


def observations(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], indices: dict[str, Array]
) -> list[Message]:
    """The observed sites of a run of ``model`` whose plates take the rows ``indices``."""

    def rows(msg: Message) -> Array | None:
        return indices.get(msg["name"]) if msg["type"] == "plate" else None

    key = numpyro.prng_key()
    minibatch = handlers.substitute(substitute_fn=rows)
    with handlers.block(), handlers.trace() as sites, minibatch, handlers.seed(rng_seed=key):
        model(*args, **kwargs)
    return [site for site in sites.values() if site["type"] == "sample" and site["is_observed"]]


def full_plates(fn: Callable[..., Any] | None = None) -> each_message:
    """Handler under which no plate subsamples."""

    def whole(msg: Message) -> None:
        if msg["type"] == "plate":
            size = msg["args"][0]
            msg["args"], msg["value"] = (size, size), jnp.arange(size)

    return each_message(whole, fn=fn)


def initial_values(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    strategy: Callable[[Message], Array],
) -> dict[str, Array]:
    """A value for every latent site of ``model``, over the whole data set even where it subsamples: zero inducing
    values, layers at their means, the rest by the init strategy."""

    def start(msg: Message) -> None:
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        fn: Any = unwrap(msg["fn"])
        kind = site_kind(msg)
        if kind == "inducing":
            msg["value"] = jnp.zeros(fn.shape(), fn.dtype)
        elif kind in ("hidden", "exact"):
            msg["value"] = fn.loc
        elif kind != "observed":
            msg["value"] = strategy(msg)

    key = numpyro.prng_key()
    with handlers.block(), handlers.trace() as sites, each_message(start), full_plates(), handlers.seed(rng_seed=key):
        model(*args, **kwargs)
    return {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}
