"""Handlers that raise an error for programs for which an algorithm would give a wrong result in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro.primitives import Messenger

from numpyro_dgp.model.sites import Message

__all__ = ["fixed_parameters", "whole_data"]


class whole_data(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler under which a plate that takes a random part of its rows is an error.

    Args:
        fn: the program; without it, use the handler in a ``with`` statement.
        owner: the function that needs all rows, for the message.

    Raises:
        ValueError: when a program runs that subsamples.

    Example:
        >>> import numpyro
        >>> def program():
        ...     with numpyro.plate("data", 100, subsample_size=10):
        ...         pass
        >>> numpyro.handlers.seed(whole_data(program, owner="minimize"), 0)()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: minimize: expected a program over all data, got plate 'data' that takes 10 of 100 rows: ...
    """

    def __init__(self, fn: Callable[..., Any] | None = None, *, owner: str) -> None:
        self.owner = owner
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "plate":
            return
        size, subsample_size = msg["args"]
        if subsample_size is not None and subsample_size != size:
            raise ValueError(
                f"{self.owner}: expected a program over all data, got plate {msg['name']!r} that takes "
                f"{subsample_size} of {size} rows: call the model without its batch argument"
            )


class fixed_parameters(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler under which a ``numpyro.param`` without a value is an error: a sampler would freeze it where it starts.

    Handlers inside this one, such as ``numpyro.handlers.substitute``, may give it a value.

    Args:
        fn: the program; without it, use the handler in a ``with`` statement.
        owner: the sampler, for the message.

    Raises:
        ValueError: when a program runs that has such a parameter.

    Example:
        >>> import numpyro
        >>> fixed_parameters(lambda: numpyro.param("noise", 0.1), owner="SGHMC")()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: SGHMC: expected a value for every numpyro.param, got none for 'noise', which MCMC would freeze ...
    """

    def __init__(self, fn: Callable[..., Any] | None = None, *, owner: str) -> None:
        self.owner = owner
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "param" and msg["value"] is None:
            raise ValueError(
                f"{self.owner}: expected a value for every numpyro.param, got none for {msg['name']!r}, which MCMC "
                "would freeze at its initial value: pass params=svi_result.params, make it random with "
                "handlers.lift(model, prior={...}), or write it as a numpyro.sample site"
            )
