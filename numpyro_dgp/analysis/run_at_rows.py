"""A run of a program at other rows of its inputs than those of a call, in which nothing is random."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_dgp._checks import expected
from numpyro_dgp._data import as_numbers
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, each_values_of, site_kind, unwrap

__all__ = ["OtherRows", "at_mean", "with_rows"]


def at_mean(msg: Message) -> Array | None:
    """Zero for inducing values, the mean for values of a layer; ``None`` for other sites."""
    kind, fn = site_kind(msg), unwrap(msg["fn"])
    if kind == "inducing":
        return jnp.zeros(fn.event_shape, fn.dtype)  # type: ignore[attr-defined]
    return fn.loc if kind in ("hidden", "exact") else None  # type: ignore[attr-defined]


class OtherRows(Messenger):
    """Gives every site a value, and notes the values of functions that the program meets. Handlers outside see its
    parameters only.

    Args:
        given: values of sites that all data share. Other inducing values are zero, values of layers their means.
        latent: gives the value of a latent.
        ends: sites whose value no other site depends on.
        before: the number of rows of the call.
        now: the number of rows in this run.

    Raises:
        ValueError: inducing values of another shape than in the call.
    """

    def __init__(
        self,
        given: Mapping[str, Array],
        latent: Callable[[Message], Array],
        ends: frozenset[str],
        before: int,
        now: int,
    ) -> None:
        self.given, self.latent, self.ends, self.before, self.now = given, latent, ends, before, now
        self.values: list[Any] = []
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            are_data = size != self.now and (subsample_size == self.now or size == self.before)
            rows = self.now if are_data else size
            msg["args"], msg["value"] = (size, rows), jnp.arange(rows)
        elif msg["type"] == "sample" and msg["value"] is None:
            msg["value"] = self._value(msg)
        msg["stop"] = msg["type"] not in ("param", "mutable")

    def postprocess_message(self, msg: Message) -> None:
        for values in each_values_of(msg["fn"]) if msg["type"] == "sample" else ():
            if values.function is not None:
                self.values.append(values)

    def _value(self, msg: Message) -> Array | None:
        """A value for a site; ``None`` where one from the prior will do."""
        name, kind, mean = msg["name"], site_kind(msg), at_mean(msg)
        if kind in ("hidden", "exact"):
            return mean
        if kind == "latent" and name not in self.ends:
            return self.latent(msg)
        value: Any = self.given.get(name, mean)
        if kind == "inducing" and jnp.shape(value) != (shape := msg["fn"].event_shape):
            raise expected(
                f"layer {name!r} with inducing values of shape {jnp.shape(value)} at any rows",
                f"{shape} at {self.now} rows",
                "arguments with as many rows as the inputs are taken for data; compute inducing inputs outside",
            )
        return value


def with_rows(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None,
    rows: Callable[[Array], Array],
) -> tuple[tuple[Any, ...], dict[str, Any], int, int]:
    """The arguments of a call with other rows of inputs. Other arguments with one row per datum are repeated or cut.

    Args:
        model: the program.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
        name: of the argument that holds the inputs; ``None`` for the first.
        rows: from the inputs of the call to those in their place.

    Returns:
        Positional arguments, keyword arguments, and the number of rows before and now.

    Raises:
        ValueError: no such argument, or one that does not hold rows of numbers.
    """
    bound = inspect.signature(model).bind(*args, **kwargs)
    named = {**bound.arguments, **bound.kwargs}
    inputs: Any = next(iter((*bound.args, *bound.kwargs.values())), None) if name is None else named.get(name)
    if not np.ndim(inputs) or isinstance(inputs, list | tuple):
        raise expected(
            f"one row per datum in {('the first argument' if name is None else f'argument {name!r}')} of the model",
            type(inputs).__name__,
            f"the arguments are {list(named)}; name the inputs, inputs='X'",
        )
    now = rows(jnp.asarray(as_numbers("inputs", inputs)))
    before, index = len(inputs), np.arange(len(now)) % len(inputs)

    def moved(leaf: Any) -> Any:
        if leaf is inputs:
            return now
        if not np.ndim(leaf) or len(leaf) != before:
            return leaf
        return (leaf if isinstance(leaf, jax.Array) else np.asarray(leaf))[index]

    args, kwargs = jax.tree.map(moved, (bound.args, bound.kwargs))
    return args, kwargs, before, len(now)
