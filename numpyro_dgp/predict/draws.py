"""Runs of a program once per posterior sample: blocks of samples, random numbers per row, draws of whole functions, and
the values of sites in a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_dgp._checks import expected, with_nearest
from numpyro_dgp._numpyro import Everywhere, active
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import WHOLE_DATA, require
from numpyro_dgp.analysis.program import ProgramFacts
from numpyro_dgp.analysis.sites import Message, Trace, site_kind
from numpyro_dgp.functions.weights import FunctionDraw
from numpyro_dgp.jaxprs.row_by_row import rows_apart
from numpyro_dgp.math.row_blocks import rows_in_cache

__all__ = [
    "BatchKeys",
    "DrawFunctions",
    "DrawnSite",
    "IndependentDraws",
    "Target",
    "given_draw",
    "hidden_values",
    "over_all_rows",
    "over_draws",
    "trace_over_all_rows",
    "without_value",
]


def over_draws(function: Callable[..., Any], draws: Any, rows: int, dtype: Any, *, every: bool = True) -> Any:
    """``function(*draw)`` for every draw, in blocks small enough that intermediate results stay in the cache.

    Where the results do not depend on the draws, as those of one layer whose posterior is integrated, they are computed
    once.

    Args:
        function: of one draw.
        draws: its arguments, with draws along the first axis.
        rows: how many rows it computes.
        dtype: in which precision.
        every: keep what is the same in all draws for each of them; otherwise as of one draw.
    """
    total = len(jax.tree.leaves(draws)[0])
    one = jax.eval_shape(lambda: jax.tree.map(lambda a: a[0], draws))
    traced, results = jax.make_jaxpr(function, return_shape=True)(*one)
    leaves, structure = jax.tree.flatten(results)

    def of_draw(draw: Any) -> Any:
        return jax.tree.unflatten(structure, jaxpr_as_fun(traced)(*jax.tree.leaves(draw)))

    # No result reads the key or the draw: all draws are the same.
    if not any(dce_jaxpr(traced.jaxpr, [True] * len(leaves))[1]):
        once = of_draw(jax.tree.map(lambda a: a[0], draws))
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (total if every else 1, *a.shape)), once)
    least = -(-total // max(1, rows_in_cache(dtype) // rows))  # blocks whose draws times rows fit the cache
    # Blocks of one size make one loop: what is left over would be compiled once more.
    count = next((c for c in range(least, 2 * least) if total % c == 0), least)
    return jax.lax.map(of_draw, draws, batch_size=-(-total // count))


def hidden_values(sites: Trace) -> dict[str, Array]:
    """Values of the hidden layers of a run, by site."""
    return {n: s["value"] for n, s in sites.items() if s["type"] == "sample" and site_kind(s) == "hidden"}


class BatchKeys(Messenger):
    """Random numbers of one batch of rows: different ones for every batch inside the plates of the rows, the same ones
    elsewhere, so that all batches share one draw of the shared sites.

    Args:
        fn: the program, seeded with one key for all batches.
        plates: the plates of the rows, a set for every predicted site.
        batch: the number of the batch.
    """

    def __init__(self, fn: Callable[..., Any], plates: tuple[frozenset[str], ...], batch: Array) -> None:
        self.plates, self.batch = plates, batch
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        key = msg["kwargs"].get("rng_key")
        inside = {handler.name for handler in active() if isinstance(handler, numpyro.plate)}
        if key is not None and any(plates <= inside for plates in self.plates):
            msg["kwargs"]["rng_key"] = jax.random.fold_in(key, self.batch)


class DrawnSite(NamedTuple):
    """A site that a program draws.

    Args:
        name: its name.
        batch_shape: of its distribution.
        event_shape: of its distribution.
        plates: the plates that it is in.
    """

    name: str
    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    plates: frozenset[str]


class IndependentDraws(Everywhere):
    """Marks every draw for :func:`~numpyro_dgp.jaxprs.row_by_row.row_axes`, outside all other handlers; collects the
    sites."""

    def __init__(self) -> None:
        self.sites: list[DrawnSite] = []
        super().__init__()

    def __enter__(self) -> IndependentDraws:
        super().__enter__()
        return self

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        fn, kwargs = msg["fn"], msg["kwargs"]
        plates = frozenset(frame.name for frame in msg["cond_indep_stack"])
        self.sites.append(DrawnSite(msg["name"], fn.batch_shape, fn.event_shape, plates))
        if msg["value"] is None and kwargs["rng_key"] is not None:
            msg["value"] = rows_apart(lambda key: fn(rng_key=key, sample_shape=()))(kwargs["rng_key"])


def over_all_rows(program: Callable[..., Any], _: Trace | None = None) -> Callable[..., Any]:
    """``program`` without subsampling: predictions are for all rows of the inputs."""
    return require(WHOLE_DATA, fn=program)


def trace_over_all_rows(program: Callable[..., Any], args: Any, kwargs: Any) -> Trace:
    """A trace of it."""
    return handlers.trace(over_all_rows(program)).get_trace(*args, **kwargs)


class DrawFunctions(Messenger):
    """Turns draws of inducing values into draws of whole functions, each with a separate key.

    Args:
        fn: the program, given draws of its inducing values.
        key: PRNG key of the functions between them.
        num_features: random functions in each prior draw.
        kept: by site, values of functions that stay distributions: a draw of the inducing values, or a ``Belief``.
    """

    def __init__(
        self, fn: Callable[..., Any], key: Array, num_features: int, kept: Mapping[str, Any] | None = None
    ) -> None:
        self.key, self.num_features, self.kept, self.count = key, num_features, kept or {}, 0
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and site_kind(msg) == "inducing":
            self.count += 1
            key = jax.random.fold_in(self.key, self.count)
            whole = msg["name"] not in self.kept
            msg["value"] = FunctionDraw(msg["value"], key, self.num_features) if whole else self.kept[msg["name"]]


class Target(NamedTuple):
    """The site that is predicted, and its plates.

    Args:
        site: the observed site; ``None`` where no single one is asked for.
        plates: the plates of each predicted site.
        batch: the number of the batch of rows; ``None`` for all rows at once.
        of_fit: whether the rows are those of the fit, in their order, so that its values of single rows are theirs.
    """

    site: str | None
    plates: tuple[frozenset[str], ...]
    batch: Array | None = None
    of_fit: bool = False


def given_draw(
    sample: Mapping[str, Any], source: str, structure: ProgramFacts, target: Target
) -> Callable[[Message], Any]:
    """The value of a site in a draw; ``None`` for sites that the program draws at these rows.

    Args:
        sample: values by site.
        source: where they come from, for messages.
        structure: of the program in this call.
        target: what is predicted. Without plates, and at other rows than those of the fit, all sites of single data are
            left to the program.

    Raises:
        ValueError: when the program meets a shared site that has no value, or one of another shape.
    """

    def value(msg: Message) -> Any:
        name = msg["name"]
        if msg["type"] != "sample" or msg["is_observed"]:
            return None
        if not structure.is_given(msg, target.plates) and not (target.of_fit and name in sample):
            return None
        if name not in sample:
            if name in structure.ends:
                return None
            raise without_value(source, {name}, sample)
        if jnp.shape(sample[name]) != msg["fn"].shape():
            raise expected(
                f"each draw of {name!r} to have shape {msg['fn'].shape()}",
                jnp.shape(sample[name]),
                "join chains along one axis, mcmc.get_samples(); values per datum need the data of the fit",
            )
        return sample[name]

    return value


def without_value(source: str, missing: set[str], given: Iterable[str]) -> ValueError:
    """The error where parameters or draws lack the value of a shared site."""
    return ValueError(
        f"Posterior: expected {source} with a value for every site that all data share, got none for "
        f"{with_nearest(missing, given)}: without one it would be drawn from its prior; is it the model of the fit?"
    )
