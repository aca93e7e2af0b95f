"""Running a program once per draw, in blocks of draws; random numbers of single rows; draws of whole functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.row_blocks import rows_in_cache
from numpyro_dgp.algebra.row_by_row import independent_draw
from numpyro_dgp.model.beliefs import FunctionDraw
from numpyro_dgp.model.refusals import whole_data
from numpyro_dgp.model.sites import Message, Trace, site_kind

__all__ = [
    "BatchKeys",
    "DrawFunctions",
    "DrawnSite",
    "IndependentDraws",
    "Whole",
    "hidden_values",
    "over_draws",
    "sample_values",
]


def over_draws(function: Callable[..., Any], draws: Any, rows: int, dtype: Any, *, every: bool = True) -> Any:
    """``function(*draw)`` for every draw, in blocks of draws so small that intermediate results stay in cache.

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

    if not any(dce_jaxpr(traced.jaxpr, [True] * len(leaves))[1]):
        once = of_draw(jax.tree.map(lambda a: a[0], draws))
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (total if every else 1, *a.shape)), once)
    least = -(-total // max(1, rows_in_cache(dtype) // rows))
    # Blocks of one size make one loop: what is left over would be compiled once more.
    count = next((c for c in range(least, 2 * least) if total % c == 0), least)
    return jax.lax.map(of_draw, draws, batch_size=-(-total // count))


def hidden_values(sites: Trace) -> dict[str, Array]:
    """Values of the hidden layers of a run, by site."""
    return {n: s["value"] for n, s in sites.items() if s["type"] == "sample" and site_kind(s) == "hidden"}


def sample_values(sites: Trace) -> dict[str, Any]:
    """Values of the sample sites of a run."""
    return {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}


class BatchKeys(Messenger):
    """Gives a seeded program the random numbers of one batch of rows: in the plates of the rows others for every batch,
    and elsewhere the same ones, so that all batches share one draw of what their rows share.

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
        inside = {handler.name for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)}
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


class IndependentDraws(Messenger):
    """Marks every draw for :func:`~numpyro_dgp.algebra.row_by_row.row_axes`, outside all other handlers; collects the
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
            msg["value"] = independent_draw(lambda key: fn(rng_key=key, sample_shape=()), kwargs["rng_key"])


class Whole(whole_data):
    """Raises an error for a program that predicts for a random part of the inputs (a plate that subsamples)."""

    def __init__(self, fn: Callable[..., Any] | None = None) -> None:
        super().__init__(fn, owner="Posterior")


class DrawFunctions(Whole):
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
        super().process_message(msg)
        if msg["type"] == "sample" and site_kind(msg) == "inducing":
            self.count += 1
            key = jax.random.fold_in(self.key, self.count)
            whole = msg["name"] not in self.kept
            msg["value"] = FunctionDraw(msg["value"], key, self.num_features) if whole else self.kept[msg["name"]]
