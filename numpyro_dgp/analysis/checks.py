"""A table of checks: program features that would make an algorithm return wrong results silently.

An algorithm selects rows of the table: ``with require("for_mcmc", WHOLE_DATA, FIXED_PARAMETERS): model(X, y)``.
:func:`explained` translates errors of JAX and NumPy into advice about the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.primitives import Messenger

from numpyro_dgp._checks import current_trace, expected, require_finite, with_nearest
from numpyro_dgp.analysis.sites import Message, Trace, is_likelihood, unwrap

__all__ = [
    "ALL_ROWS",
    "FIXED_PARAMETERS",
    "INITIAL_VALUES",
    "LEARNED_INPUTS_APART",
    "LOG_DENSITIES",
    "NO_OBS_MASK",
    "OUTSIDE_TRANSFORMATIONS",
    "WHOLE_DATA",
    "Check",
    "NotTraceableError",
    "another_loss",
    "explained",
    "parameters_from",
    "require",
]


class Check(NamedTuple):
    """One feature that a program must not have.

    Args:
        at_site: from a message on its way in, and the handler, to the error; ``None`` for none.
        at_end: the same when the program has run, or has failed for want of a value.
    """

    at_site: Callable[[Message, require], ValueError | None] = lambda msg, run: None
    at_end: Callable[[require], ValueError | None] = lambda run: None


class require(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler under which a program that fails a check is an error. Make it where the program is run.

    Args:
        *checks: rows of the table.
        fn: the program; without it, use the handler in a ``with`` statement.

    Raises:
        ValueError: when such a program runs.

    Example:
        >>> import numpyro
        >>> def program():
        ...     with numpyro.plate("data", 100, subsample_size=10):
        ...         pass
        >>> with numpyro.handlers.seed(rng_seed=0), require(WHOLE_DATA):  # doctest: +ELLIPSIS
        ...     program()
        Traceback (most recent call last):
        ValueError: expected a program over all data, got plate 'data' that takes 10 of 100 rows: ...
    """

    def __init__(self, *checks: Check, fn: Callable[..., Any] | None = None) -> None:
        self.checks = checks
        super().__init__(fn)

    def __enter__(self) -> require:
        self.met: Trace = {}  # finished messages
        self.unset: set[str] = set()  # parameters that came without a value
        self.trace = current_trace()  # of JAX
        super().__enter__()
        return self

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "param" and msg["value"] is None:
            self.unset.add(msg["name"])
        for check in self.checks:
            if (error := check.at_site(msg, self)) is not None:
                raise error

    def postprocess_message(self, msg: Message) -> None:
        if "name" in msg:
            self.met[msg["name"]] = msg

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc, traceback)
        # A parameter without a value is None, of which arithmetic makes these errors.
        if exc is None or isinstance(exc, TypeError | ValueError | AttributeError):
            for check in self.checks:
                if (error := check.at_end(self)) is not None:
                    raise error from exc


def _subsamples(msg: Message, run: require) -> ValueError | None:
    if msg["type"] != "plate" or msg["args"][1] in (None, msg["args"][0]):
        return None
    size, subsample_size = msg["args"]
    return expected(
        "a program over all data",
        f"plate {msg['name']!r} that takes {subsample_size} of {size} rows",
        "call the model without its batch argument",
    )


def _is_learned(msg: Message, run: require) -> ValueError | None:
    if msg["type"] != "param" or msg["value"] is not None:
        return None
    return expected(
        "a value for every numpyro.param",
        f"none for {msg['name']!r}, which MCMC would freeze at its initial value",
        "pass params=svi_result.params, make it random with handlers.lift(model, prior={...}), or write it as a "
        "numpyro.sample site",
    )


def _without_initial_value(run: require) -> ValueError | None:
    missing = [name for name, msg in run.met.items() if msg["type"] == "param" and msg["value"] is None]
    if not missing:
        return None
    name = min(missing)
    return expected(
        f"an initial value of numpyro.param {name!r}",
        "none",
        f"write numpyro.param({name!r}, 1.0, ...), since programs are inspected before a fit; init_params and params "
        "take its place where they are given",
    )


def _is_likelihood(msg: Message) -> bool:
    return msg["type"] == "sample" and is_likelihood(msg["fn"])


def another_loss(msg: Message, run: require | None = None) -> ValueError | None:
    """The error at a site whose ``Likelihood`` has a loss in place of the log density, ``None`` at others."""
    fn: Any = unwrap(msg["fn"]) if _is_likelihood(msg) else None
    if fn is None or not fn.is_loss:
        return None
    return expected(
        f"the log density of the observations at {msg['name']!r}, whose integral is the evidence",
        fn,
        "leave integrate= out, or compare posterior.log_density of held-out rows",
    )


def _is_masked(msg: Message, run: require) -> ValueError | None:
    if not _is_likelihood(msg):
        return None
    name = msg["name"]
    y = name.removesuffix("_unobserved")
    before = run.met.get(f"{y}_observed")  # what NumPyro calls the two
    if y == name or before is None or not _is_likelihood(before):
        return None
    return expected(
        "a Likelihood with observed=mask",
        f"obs_mask=, which would make the other entries a latent site {name!r}",
        f"write numpyro.sample({y!r}, dgp.Likelihood(f(x), conditional, observed=mask), obs=y)",
        f"site {y!r}",
    )


def _transformed(at: str | None = None) -> ValueError:
    return expected(
        "sites outside JAX transformations",
        "one inside lax.scan, fori_loop, map, vmap, cond, checkpoint or jit, where sites are shared or lost",
        "draw all values at once in a plate or as numpyro.sample('h', f(x)), or write a Python loop",
        at,
    )


def _is_transformed(msg: Message, run: require) -> ValueError | None:
    inside = msg["type"] == "sample" and current_trace() != run.trace
    return _transformed(f"site {msg['name']!r}") if inside else None


def _shares_a_name(msg: Message, run: require) -> ValueError | None:
    pair = msg, run.met.get(msg.get("name", ""), msg)
    if any(site["type"] not in ("param", "sample", "deterministic") for site in pair):
        return None
    name = msg["name"]
    layer, other = (site["kwargs"].get("of_layer") if site["type"] == "param" else None for site in pair)
    if layer == other:
        return None
    return expected(
        "no other site of the program with the name of its learned inducing inputs",
        f"{name!r} for both, which would have one value",
        "rename the site of the program, or the layer",
        f"gp {layer or other!r}",
    )


WHOLE_DATA = Check(_subsamples)
"""No plate takes a random part of its rows."""

ALL_ROWS = Check()
"""No :class:`~numpyro_dgp.minibatch` has fewer rows than it counts: no other batch follows, and each of these rows
would count several times. The minibatch looks for this row."""

FIXED_PARAMETERS = Check(_is_learned)
"""Every ``numpyro.param`` has a value, which handlers inside may give: a sampler would freeze it where it starts."""

INITIAL_VALUES = Check(at_end=_without_initial_value)
"""Every ``numpyro.param`` has an initial value, which it may get further down, as those of ``numpyro.contrib.module``
do: a program would compute with None."""

NO_OBS_MASK = Check(_is_masked)
"""No ``obs_mask=`` with a ``Likelihood``: NumPyro would make unobserved rows of y latent variables, and
exp(``log_prob``) of a ``Likelihood`` is no density of y."""

OUTSIDE_TRANSFORMATIONS = Check(_is_transformed)
"""No sample site is inside a JAX transformation (``lax.scan``, ``vmap``, ``jit``, ...), whose body is run once, however
often it is computed. Handlers see one site, which has one value where a program means several, or a value that is lost
when the transformation ends. ``scan`` and ``cond`` of ``numpyro.contrib.control_flow`` send messages to
handlers."""

LEARNED_INPUTS_APART = Check(_shares_a_name)
"""No site has the name of the learned inducing inputs of a layer: NumPyro gives all ``numpyro.param`` of one name the
same value, whoever opens them."""


LOG_DENSITIES = Check(another_loss)
"""Observations have their log density, and no other loss, which bounds no evidence."""


def parameters_from(params: Mapping[str, Any]) -> Check:
    """Every ``numpyro.param`` has a value without NaN in ``params``, which a handler inside gives."""

    def finite(msg: Message, run: require) -> None:
        if msg["type"] == "param":
            for leaf in jax.tree.leaves(params.get(msg["name"])):  # of a network, several arrays
                require_finite(f"parameter {msg['name']!r}", leaf, "the fit diverged: take smaller steps")

    def missing(run: require) -> ValueError | None:
        if not run.unset:
            return None
        given = {name for name, msg in run.met.items() if msg["type"] == "param"} - run.unset
        return expected(
            "params with a value for every numpyro.param",
            f"none for {with_nearest(run.unset, params.keys() - given)}",
            "pass svi_result.params of the fit of this guide and model",
        )

    return Check(finite, missing)


# Raised for ``X[i]`` where i is traced and X is no JAX array; a list raises a plain TypeError.
_CONVERTED = jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError, TypeError


_OF_LISTS = "integer scalar arrays", "'list'", "data type '"
"""Words in a ``TypeError`` of a list; the last of one of texts, which NumPy takes for names of types."""


class NotTraceableError(ValueError):
    """A program needs the values of its arguments, and so cannot be run on shapes."""


@contextmanager
def explained(arguments: Any) -> Iterator[None]:
    """Translate errors of JAX and NumPy into errors with advice on the program.

    Args:
        arguments: of the program.

    Raises:
        ValueError: for arguments that are not JAX arrays, sites inside a JAX transformation, plates without rows,
            arrays that do not fit their plates. Other errors pass through.
    """
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise _transformed() from error
    except _CONVERTED as error:
        kinds = sorted({_kind(leaf) for leaf in jax.tree.leaves(arguments)} & _INDEXABLE)
        plain = not isinstance(error, jax.errors.JAXTypeError)
        if not kinds or (plain and not any(words in str(error) for words in _OF_LISTS)):
            raise
        raise NotTraceableError(
            f"expected JAX arrays as arguments of the program, got {', '.join(kinds)}: while a program is compiled, "
            "the rows of a plate cannot index anything else, and lists are no observations; pass "
            "jnp.asarray(X), of a table jnp.asarray(df.to_numpy())"
        ) from error
    except AssertionError as error:
        if "size of plate" not in str(error):
            raise
        raise expected("plates with at least one row", "one of size 0", "X is empty") from error
    except ValueError as error:
        if not str(error).startswith("Incompatible shapes for broadcasting"):
            raise
        raise expected(
            "arrays with as many rows as the plate that they are used in",
            error,
            "in a subsampled plate, with numpyro.plate(name, len(X), subsample_size=batch) as i, use X[i] and y[i]",
        ) from error


_INDEXABLE = frozenset({"a NumPy array", "a pandas DataFrame", "a pandas Series", "numbers in a list", "text"})


def _kind(leaf: Any) -> str:
    owner = type(leaf).__module__.partition(".")[0]
    if isinstance(leaf, np.ndarray) and np.ndim(leaf):
        return "a NumPy array"
    if owner == "pandas":
        return f"a pandas {type(leaf).__name__}"
    return {float: "numbers in a list", str: "text"}.get(type(leaf), "")
