"""What a call of a program at new inputs means: what is predicted there, and what depends on the inputs.

A prediction takes from a fit what all data share. A function whose inducing inputs or hyperparameters are computed from
the rows of the call is not shared: at other rows it is another function. This module finds such functions, and the
latents that an observation of the call says something about, by tracing the program with shapes only.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_dgp._checks import with_nearest
from numpyro_dgp.algebra.row_dependence import known_rows, mark
from numpyro_dgp.model.coupling import coupling
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.model.outcomes import Range, value_range
from numpyro_dgp.model.program import Program, run_on_shapes, structure
from numpyro_dgp.model.row_values import MarkEntries, exact_at_rows, values_by_row
from numpyro_dgp.model.rows_together import Together, rows_together
from numpyro_dgp.model.sites import Message, Trace, each_values_of, site_kind, unwrap

__all__ = ["Call", "inspect_call"]

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
    program: Program
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
            raise ValueError(
                f"Posterior: expected one observed site, found {self.candidates}: name it, Posterior(..., site=...); "
                f"the program has {samples}"
            )
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
        return {site for each in every if (site := getattr(getattr(each, "function", None), "site", None)) is not None}

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


class _Given(Messenger):
    """Placeholders for what a fit gives, since values that all data share do not depend on the arguments of a call, and
    for what is predicted. Notes the ranges of all values, while they can be computed."""

    def __init__(self) -> None:
        self.ranges: dict[str, Range] = {}
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample":
            return
        self.ranges[msg["name"]] = value_range(msg["fn"])
        if msg["value"] is None and site_kind(msg) in ("other", "inducing", "observed"):
            draw = jax.eval_shape(msg["fn"].sample, jax.random.key(0))
            msg["value"] = jnp.ones(draw.shape, draw.dtype)


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
    given = _Given()

    def marked(leaves: list[Any]) -> Any:
        values = [mark(_ARGUMENT + str(i), leaf, 1) if np.ndim(leaf) else leaf for i, leaf in enumerate(leaves)]
        again, options = jax.tree.unflatten(treedef, values)
        with given, MarkEntries():
            return model(*again, **options)

    try:
        sites, facts, reasons = run_on_shapes(marked, (leaves,), {})
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        raise ValueError(
            "Posterior: expected a model of JAX operations on its arguments, got one that turns them into NumPy arrays "
            "or Python numbers: compute inducing inputs and settings from the data once, outside the model"
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
            layers = [getattr(values.function, "site", None) for values in each_values_of(sites[name]["fn"])]
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
        given.ranges,
        program,
        together,
        values_by_row(found[0], known_rows(found[1]), below, rows),
        exact_at_rows(sites, facts, below, rows),
        [name for name in below if any(labels.keys() & fact.keys() for fact in facts[name].get("observed", []))],
    )


def _candidates(site: str | None, sites: Trace, ends: frozenset[str], program: Program) -> list[str]:
    samples = [name for name, found in sites.items() if found["type"] == "sample"]
    likelihoods = [name for name in samples if isinstance(unwrap(sites[name]["fn"]), Likelihood)]
    observed = likelihoods or [name for name in samples if name in ends]
    if site is None:
        return observed
    if site not in samples:
        raise ValueError(
            f"Posterior: expected site= to be the name of a site, got {with_nearest([site], samples)}: the program has "
            f"{samples}"
        )
    kind = site_kind(sites[site])
    if kind == "inducing" or (kind in ("latent", "other") and program.is_shared(sites[site]) and site not in ends):
        what = "inducing values of layer" if kind == "inducing" else "latent site"
        raise ValueError(
            f"Posterior: expected site= to be the name of an observed site, got the {what} {site!r}: the program "
            f"observes {observed}; draws of latent sites are guide.sample_posterior(key, params, X, y), or of MCMC"
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
        inputs: Any = getattr(each_values_of(sites[site]["fn"])[0], "inputs", None)
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
