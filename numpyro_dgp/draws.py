"""Running a program once per draw, in blocks of draws; draws of whole functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.row_blocks import rows_in_cache
from numpyro_dgp.model.beliefs import FunctionDraw
from numpyro_dgp.model.refusals import whole_data
from numpyro_dgp.model.sites import Message, Trace, site_kind

__all__ = ["DrawFunctions", "Whole", "hidden_values", "over_draws", "sample_values"]


def over_draws(
    function: Callable[..., Any],
    num_samples: int,
    treedef: Any,
    constants: tuple[Any, ...],
    key: Array,
    samples: dict[str, Array],
    arrays: list[Array | None],
) -> Any:
    """Call ``function`` for every draw, in blocks of draws so small that intermediate results stay in cache."""
    leaves = [c if a is None else a for a, c in zip(arrays, constants, strict=True)]
    args, kwargs = jax.tree.unflatten(treedef, leaves)
    data = [a for a in arrays if a is not None]
    most = rows_in_cache(jnp.result_type(jnp.float32, *data)) // max([len(a) for a in data], default=1)
    draws = jax.random.split(key, num_samples), samples
    return jax.lax.map(lambda draw: function(*draw, args, kwargs), draws, batch_size=max(1, most))


def hidden_values(sites: Trace) -> dict[str, Array]:
    """Values of the hidden layers of a run, by site."""
    return {n: s["value"] for n, s in sites.items() if s["type"] == "sample" and site_kind(s) == "hidden"}


def sample_values(sites: Trace) -> dict[str, Any]:
    """Values of the sample sites of a run."""
    return {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}


class Whole(whole_data):
    """Raises an error for a program that predicts for a random part of the inputs (a plate that subsamples)."""

    def __init__(self, fn: Callable[..., Any] | None = None) -> None:
        super().__init__(fn, owner="Posterior")


class DrawFunctions(Whole):
    """Turns draws of inducing values into draws of whole functions, each with a separate key."""

    def __init__(self, fn: Callable[..., Any], key: Array, num_features: int) -> None:
        self.key, self.num_features, self.count = key, num_features, 0
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        super().process_message(msg)
        if msg["type"] == "sample" and site_kind(msg) == "inducing":
            self.count += 1
            msg["value"] = FunctionDraw(msg["value"], jax.random.fold_in(self.key, self.count), self.num_features)
