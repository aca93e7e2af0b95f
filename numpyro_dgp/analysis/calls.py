"""Analysis of a call of a program at new inputs: the predicted sites, and the values that depend on the inputs.

A prediction takes from a fit the values that all data share. A function whose inducing inputs or hyperparameters are
computed from the rows of the call is not shared: at other rows it is another function. This module finds such
functions, and the latents that the observations of the call are informative about, by tracing the program on shapes.

**Values used row by row.** A latent in another plate, whose entry n is used at row n of the data, is not shared:
its values belong to the rows of the fit.

**Rows used together.** Inputs or densities of single rows that are computed from all rows, as by ``X - X.mean(0)``,
define another model at other rows: rows that are predicted alone are standardised alone.

The checks raise where a fit lacks values that a prediction needs.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expected, with_nearest
from numpyro_dgp._numpyro import each_message
from numpyro_dgp.analysis.coupling import coupling, ones_of
from numpyro_dgp.analysis.program import ProgramFacts, run_on_shapes, structure
from numpyro_dgp.analysis.sites import Message, Trace, each_values_of, is_likelihood, row_shape, site_kind, values_of
from numpyro_dgp.jaxprs.row_dependence import Elsewhere, Rows, Several, known_rows, mark
from numpyro_dgp.likelihoods.outcomes import Range, value_range

__all__ = [
    "Call",
    "mark_entries",
    "Together",
    "exact_at_rows",
    "inspect_call",
    "require_conditionals",
    "require_new_rows",
    "require_own_functions",
    "require_unobserved",
    "rows_together",
    "values_by_row",
    "warn_rows_together",
]

_ENTRIES = "entries of "


def mark_entries(msg: Message) -> None:
    """Mark the value of a site that is no function value along all its axes, those of events too."""
    if msg["type"] == "sample" and not msg["is_observed"] and site_kind(msg) in ("latent", "other"):
        msg["value"] = mark(_ENTRIES + msg["name"], msg["value"], len(msg["fn"].shape()))


def values_by_row(
    sites: Trace, facts: Mapping[str, Mapping[str, list[Any]]], names: Collection[str], arguments: set[str]
) -> dict[str, str]:
    """By name of a site whose values are used row by row, the site that uses them.

    Args:
        sites: a trace of the program whose values are marked (:func:`mark_entries`).
        facts: by site, what its inputs, density and so on depend on (``coupling.seen_by_site``).
        names: the sites to look at, in the order of the program.
        arguments: the labels of the arguments that have the rows.
    """
    found: dict[str, str] = {}
    of_rows: dict[str, set[int]] = {}  # by site, the axes along which the rows of the call lie
    for name in names:
        fn, plates = sites[name]["fn"], {frame.name for frame in sites[name]["cond_indep_stack"]}
        right = {"density": 0, "inputs": 2 if values_of(fn).all_rows_together else 1}
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
    """The sites with values of exact processes at inputs which come from the rows of a call, directly or through
    layers below. Arguments as of :func:`values_by_row`."""
    moved = set(arguments)
    for name in names:
        moved |= {name} if any(moved & fact.keys() for fact in facts[name].get("inputs", [])) else set()
    return [name for name in names if name in moved and site_kind(sites[name]) == "exact"]


def _in_order(rows: Rows, plates: set[str]) -> bool:
    """Whether row n is used at row n: as it is, or picked by an index that comes from a plate alone."""
    return all(isinstance(step, Elsewhere) and bool(step.by) and step.by <= plates for step in rows.which)


_OF_ALL_ROWS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_or reduce_and sort".split())


class Together(NamedTuple):
    """The parts of a site that are computed from all rows.

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
    """Find inputs and densities with one row per row of an argument, or of a site below, that depend on all its rows.

    Sums over rows that remain sums, such as totals and averages over bins, have other rows than what they sum.

    Args:
        sites: a trace of the program.
        reasons: by site and by what its density is computed from, the rows that these depend on
            (:func:`~numpyro_dgp.jaxprs.row_dependence.row_reasons`).
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
            inputs = each_values_of(site["fn"])[0].inputs
            counts[name, "density"], counts[name, "inputs"] = row_shape(site["fn"])[-1:], np.shape(inputs)[-2:-1]
    return counts


_ARGUMENT = "argument "


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a program at new inputs, from a run on shapes.

    Args:
        sites: its trace.
        candidates: the observed site: the one named, likelihoods, or what nothing else depends on. One, if it is clear.
        from_rows: by the name of a function, the arguments with one row per datum that it depends on.
        below: the sites that a site depends on, directly or through others.
        ranges: of the values of sites.
        program: its structure.
        together: what is computed from all rows of the call together.
        by_row: by the name of a site whose values are used row by row, the site that uses them.
        exact: sites with values of exact processes at the rows of the call.
        from_arguments: sites that arguments of the call observe.
    """

    sites: Trace
    candidates: list[str]
    from_rows: dict[str, list[str]]
    below: dict[str, set[str]]
    ranges: dict[str, Range]
    program: ProgramFacts
    together: list[Together]
    by_row: dict[str, str]
    exact: list[str]
    from_arguments: list[str]

    @property
    def predicted(self) -> list[str]:
        """The candidates that the call does not observe."""
        return [name for name in self.candidates if not self.sites[name]["is_observed"]]

    @property
    def plates(self) -> tuple[frozenset[str], ...]:
        """The plates of the predicted sites."""
        return tuple(frozenset(f.name for f in self.sites[name]["cond_indep_stack"]) for name in self.predicted)

    @property
    def observed(self) -> str:
        """The observed site.

        Raises:
            ValueError: there are several, or none.
        """
        if len(self.candidates) != 1:
            samples = [name for name, site in self.sites.items() if site["type"] == "sample"]
            advice = f"name it, Posterior(..., site=...); the program has {samples}"
            raise expected("one observed site", self.candidates, advice)
        return self.candidates[0]

    def ignored(self) -> tuple[list[str], list[str]]:
        """Sites that are observed here and depend on latents of the predicted rows, and these latents.

        They would inform the latents, but latents of a prediction are drawn given the fit alone.
        """
        observed: set[str] = set()
        latents: set[str] = set()
        for y, plates in zip(self.predicted, self.plates, strict=True):
            for name in self.below[y] if plates else ():
                site = self.sites[name]
                if site_kind(site) in ("latent", "hidden") and plates <= {f.name for f in site["cond_indep_stack"]}:
                    beside = {n for n, below in self.below.items() if name in below and self.sites[n]["is_observed"]}
                    observed |= beside
                    latents |= {name} if beside else set()
        return sorted(observed), sorted(latents)

    def known_functions(self) -> tuple[list[str], list[str]]:
        """Sites that the arguments of this call observe, and functions that these and the predicted sites see.

        They would inform the functions, whose posterior in a prediction is that of the fit. Data of other rows count
        where nothing else needs them.
        """
        observed: set[str] = set()
        functions: set[str] = set()
        predicted: set[str] = set().union(*map(self._functions, self.predicted))
        for name in self.from_arguments:
            plates = {f.name for f in self.sites[name]["cond_indep_stack"]}
            here = any(plates <= these or these <= plates for these in self.plates)
            needed = any(
                plates & {f.name for f in site["cond_indep_stack"]} and self.program.is_given(site, self.plates)
                for site in self.sites.values()
                if site["type"] == "sample" and site_kind(site) == "latent" and not self.program.is_shared(site)
            )
            if (here or not needed) and (shared := predicted & self._functions(name)):
                observed |= {name}
                functions |= shared
        return sorted(observed), sorted(functions)

    def _functions(self, name: str) -> set[str]:
        """The inducing sites of the functions that a site depends on."""
        every = [each for n in (name, *self.below.get(name, ())) for each in each_values_of(self.sites[n]["fn"])]
        return {site for each in every if (site := each.layer) is not None}

    def fixed_rows(self) -> dict[str, str]:
        """Sites that a fit gives, with values of its own rows, and the sites with a value per predicted row that use
        them."""
        above = {name for y in self.predicted for name in (y, *self.below[y])}
        return {
            name: user
            for name, user in self.by_row.items()
            if user in above and self.program.is_given(self.sites[name], self.plates)
        }

    def unobserved(self) -> list[str]:
        """Latents of rows of other data that predicted sites depend on, where the call does not observe these data."""
        above = {name for y in self.predicted for name in self.below[y] if site_kind(self.sites[name]) == "latent"}
        others = [name for name in above if self.program.is_per_datum(self.sites[name])]
        return sorted(
            name
            for name in others
            if not self.program.is_predicted(self.sites[name], self.plates)
            and not self.program.is_conditioned(self.sites[name])
        )


def inspect_call(model: Callable[..., Any], site: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Run ``model`` on shapes only, and follow its array arguments to the functions that depend on them.

    Args:
        model: the program.
        site: the observed site, if it is named.
        args: arguments of the program.
        kwargs: its keyword arguments.

    Raises:
        ValueError: a model that computes with NumPy from its arguments and cannot be compiled, or a site that it does
            not have or that holds latents which all data share.
    """
    names = _argument_names(model, args, kwargs)
    labels = {_ARGUMENT + str(i): name for i, name in enumerate(names)}
    leaves, treedef = jax.tree.flatten((args, kwargs))
    ranges: dict[str, Range] = {}

    def give(msg: Message) -> None:
        """Placeholders for what a fit gives, since values that all data share do not depend on the arguments of a call,
        and for what is predicted; the ranges of all values, while they can be computed."""
        if msg["type"] == "sample":
            ranges[msg["name"]] = value_range(msg["fn"])
            if msg["value"] is None and site_kind(msg) in ("other", "inducing", "observed"):
                msg["value"] = ones_of(msg["fn"])

    def marked(leaves: list[Any]) -> Any:
        values = [mark(_ARGUMENT + str(i), leaf, 1) if np.ndim(leaf) else leaf for i, leaf in enumerate(leaves)]
        again, options = jax.tree.unflatten(treedef, values)
        with each_message(give, mark_entries):
            return model(*again, **options)

    try:
        sites, facts, reasons = run_on_shapes(marked, (leaves,), {})
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        raise expected(
            "a model of JAX operations on its arguments",
            "one that turns them into NumPy arrays or Python numbers",
            "compute inducing inputs and settings from the data once, outside the model",
        ) from error
    rows = _row_arguments(sites, facts, [np.shape(leaf) for leaf in leaves])
    pairs = [jnp.repeat(leaf, 2, 0) if np.ndim(leaf) > 1 and len(leaf) == 1 else leaf for leaf in leaves]
    found, shapes = (sites, reasons), _shapes(labels, leaves)
    if any(a is not b for a, b in zip(pairs, leaves, strict=True)):  # how single rows are combined does not show
        with suppress(ValueError, TypeError):
            doubled, _, again = run_on_shapes(marked, (pairs,), {})
            found, shapes = (doubled, again), _shapes(labels, pairs)
            leaves = pairs
    together = rows_together(*found, shapes)
    for more in _more_rows(labels, leaves, rows) if together else ():
        with suppress(ValueError, TypeError):
            other = run_on_shapes(marked, (more,), {})[0], _shapes(labels, more)
            together = rows_together(*found, shapes, other)
            break
    together = [w._replace(source=labels.get(w.source, w.source)) for w in together]
    from_rows = {}
    for name, several in facts.items():
        used = {label for fact in several.get("function", []) for label in fact if label in rows}
        if used:
            layers = [values.layer for values in each_values_of(sites[name]["fn"])]
            from_rows[layers[0] if layers[0] and len(layers) == 1 else name] = sorted(labels[label] for label in used)
    below: dict[str, set[str]] = {}
    for name in [name for name in sites if name in facts]:  # in the order of the program: lower layers come first
        direct = {n for several in facts[name].values() for fact in several for n in fact if n in facts} - {name}
        below[name] = direct.union(*(below.get(other, set()) for other in direct))
    program = structure(sites)
    return Call(
        sites,
        _candidates(site, sites, coupling(sites, facts).ends, program),
        from_rows,
        below,
        ranges,
        program,
        together,
        values_by_row(found[0], known_rows(found[1]), below, rows),
        exact_at_rows(sites, facts, below, rows),
        [name for name in below if any(labels.keys() & fact.keys() for fact in facts[name].get("observed", []))],
    )


def _candidates(site: str | None, sites: Trace, ends: frozenset[str], program: ProgramFacts) -> list[str]:
    samples = [name for name, found in sites.items() if found["type"] == "sample"]
    likelihoods = [name for name in samples if is_likelihood(sites[name]["fn"])]
    observed = likelihoods or [name for name in samples if name in ends]
    if site is None:
        return observed
    if site not in samples:
        raise expected("site= to be the name of a site", with_nearest([site], samples), f"the program has {samples}")
    kind = site_kind(sites[site])
    if kind == "inducing" or (kind in ("latent", "other") and program.is_shared(sites[site]) and site not in ends):
        what = "inducing values of layer" if kind == "inducing" else "latent site"
        raise expected(
            "site= to be the name of an observed site",
            f"the {what} {site!r}",
            f"the program observes {observed}; for latent sites use guide.sample_posterior(key, params, X, y)",
        )
    return [site]


def _argument_names(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The name of the argument of ``model`` that each leaf of ``(args, kwargs)`` belongs to."""
    positional: list[str] = []
    for parameter in inspect.signature(model).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(parameter.name)
    positional += [f"argument {i}" for i in range(len(positional), len(args))]
    sizes = [(positional[i], len(jax.tree.leaves(value))) for i, value in enumerate(args)]
    sizes += [(name, len(jax.tree.leaves(kwargs[name]))) for name in sorted(kwargs)]
    return [name for name, size in sizes for _ in range(size)]


def _shapes(labels: Iterable[str], leaves: list[Any]) -> dict[str, tuple[int, ...]]:
    return {label: np.shape(leaf) for label, leaf in zip(labels, leaves, strict=True)}


def _more_rows(labels: Iterable[str], leaves: list[Any], rows: set[str]) -> Iterator[list[Any]]:
    """The arguments with more rows: those of ``rows``, or all that are as long as these."""
    lengths = {np.shape(leaf)[0] for label, leaf in zip(labels, leaves, strict=True) if label in rows}
    for known in (True, False):
        yield [
            jnp.concatenate([leaf, leaf, leaf[:1]])
            if (label in rows if known else np.ndim(leaf) and len(leaf) in lengths)
            else leaf
            for label, leaf in zip(labels, leaves, strict=True)
        ]


def _row_arguments(sites: Trace, facts: Any, shapes: list[tuple[int, ...]]) -> set[str]:
    """The labels of the arguments that have one row per row of the inputs of some function."""
    found = set()
    for site, several in facts.items():
        inputs = each_values_of(sites[site]["fn"])[0].inputs
        for fact in several.get("inputs", []):
            for label, rows in fact.items():
                if not label.startswith(_ARGUMENT):
                    continue
                shape = shapes[int(label.removeprefix(_ARGUMENT))]
                if rows is None:
                    by_row = shape[0] in np.shape(inputs)[:-1]
                else:  # of a single row no axis is tracked
                    by_row = any(axis < -1 for axis in rows.axes) or (shape[0] == 1 and len(shape) > 1)
                found |= {label} if by_row else set()
    return found


def require_unobserved(call: Call) -> None:
    """Raise if a call observes the sites to predict; warn if its observations do not change the prediction."""
    if call.candidates and not call.predicted:
        raise expected(
            "a call without the observations to predict",
            f"those of {', '.join(map(repr, call.candidates))}",
            "posterior.predict(key, X) leaves them out; posterior.log_density(key, y, X) takes them after the key",
        )
    observed, latents = call.ignored()
    if observed:
        warnings.warn(
            f"Posterior: {', '.join(map(repr, observed))} is observed in this call, which does not change the "
            f"prediction: {', '.join(map(repr, latents))} at new rows is drawn given the fit alone; leave the "
            "observations out",
            stacklevel=2,
        )
    known, functions = call.known_functions()
    if known:
        warnings.warn(
            f"Posterior: {', '.join(map(repr, known))} is observed in this call, which does not change the prediction: "
            f"{', '.join(map(repr, functions))} is that of the fit; leave the observations out, or give them to the "
            "fit first, posterior = dgp.condition(posterior, key, X, y)",
            stacklevel=2,
        )
    if call.unobserved():
        warnings.warn(
            f"Posterior: {', '.join(map(repr, call.unobserved()))} belongs to rows of other data, which this call does "
            "not observe, so that it is drawn from its prior: pass the observations of these rows as in the fit",
            stacklevel=2,
        )


def require_own_functions(call: Call) -> None:
    """Raise if a function of the program is computed from the rows of the call."""
    for layer, arguments in call.from_rows.items():
        raise expected(
            f"inducing inputs and hyperparameters of {layer!r} that do not depend on the rows of the call",
            f"some computed from {', '.join(arguments)}",
            "at other rows it is another function. Compute them once, outside the model: Z = X[::10]",
        )


def require_new_rows(call: Call) -> None:
    """Raise if values that belong to the rows of the fit would be used at the rows of the call."""
    for name, user in call.fixed_rows().items():
        plates = sorted(frame.name for frame in call.sites[user]["cond_indep_stack"])
        where = f"in plate(s) {', '.join(map(repr, plates))}, as {user!r} is" if plates else "in a plate of the data"
        raise expected(
            "sites with a value per row in the plates of the rows",
            f"{name!r}, of which {user!r} uses row n at row n of the call",
            f"the fit has values for its own rows only. Open it {where}; index values of groups, {name}[group]",
        )


def require_conditionals(call: Call, below: bool) -> None:
    """Raise if y is an exact process, whose values at new rows depend on the data of the fit.

    Args:
        call: of the program.
        below: raise for exact processes that y depends on too.
    """
    above = {name for y in call.predicted for name in call.below[y]}
    for name in call.exact:
        of_data = name in call.predicted or not call.candidates
        if of_data or (below and name in above):
            raise expected(
                "functions with inducing points",
                f"values without (inducing=None or dgp.Neighbours) at {name!r}, which need the data of the fit",
                "give the data, posterior.on(X, y), or the layer dgp.Points(X) and y a dgp.Likelihood",
            )


def warn_rows_together(call: Call) -> None:
    """Warn if inputs or densities of single rows are computed from all rows of the call."""
    for site, seen, source in call.together[:1]:
        what = "a density" if seen == "density" else seen
        warnings.warn(
            f"Posterior: expected every row to be predicted by itself, got {what} at {site!r} computed from all rows "
            f"of {source!r} in this call: a prediction changes with the rows that are asked for together, and at new "
            "rows is not that of the fit. Compute what all rows share, such as a mean, once, outside the model: "
            "units = dgp.initial.Standardizer.fit(X); X = units(X)",
            stacklevel=2,
        )
