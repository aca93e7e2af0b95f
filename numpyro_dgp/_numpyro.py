"""Handlers made of functions, NumPyro's stack of active handlers, and programs that run with a separate stack.

Only this file reads and changes the stack, which is internal to NumPyro.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from numpyro.handlers import block
from numpyro.primitives import _PYRO_STACK, Messenger, plate

from numpyro_dgp._compiled import one_thread

__all__ = ["Everywhere", "active", "apart", "each_message", "of_this_run", "outside", "plates_around"]


Hook: TypeAlias = Callable[[dict[str, Any]], None]


class each_message(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """A handler of one or two functions.

    Args:
        before: gets every message on its way in, when a site may have no value.
        after: gets it on its way out, when it has one.
        fn: the program; without it, use the handler in a ``with`` statement.
    """

    def __init__(self, before: Hook | None = None, after: Hook | None = None, fn: Callable[..., Any] | None = None):
        self.before, self.after = before, after
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if self.before is not None:
            self.before(msg)

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if self.after is not None:
            self.after(msg)


class Everywhere(Messenger):
    """A handler that also receives the messages of programs that run with their own stack."""


def active(inside: Messenger | None = None) -> tuple[Messenger, ...]:
    """The handlers of a message, the innermost first: all of them, or those entered after ``inside``."""
    start = 0 if inside is None else _PYRO_STACK.index(inside) + 1
    return tuple(reversed(_PYRO_STACK[start:]))


def of_this_run() -> Iterator[Messenger]:
    """The handlers of a message, the innermost first, without those of a program that this one runs within."""
    for handler in active():
        if isinstance(handler, block):
            return
        yield handler


def plates_around() -> list[plate]:
    """The plates of this program that are open here, the innermost first."""
    return [handler for handler in of_this_run() if isinstance(handler, plate)]


@contextmanager
def apart() -> Iterator[None]:
    """Within it, programs run by themselves: messages meet no handler that has been entered before, but those that
    are :class:`Everywhere`, and a program that asks for a prediction gets no sites of the fitted one. One thread at a
    time is within it."""
    with one_thread:
        around = _PYRO_STACK[:]
        _PYRO_STACK[:] = [handler for handler in around if isinstance(handler, Everywhere)]
        try:
            yield
        finally:
            _PYRO_STACK[:] = around


@contextmanager
def outside(handler: Messenger) -> Iterator[None]:
    """Context in which messages bypass ``handler`` and the handlers entered after it."""
    start = _PYRO_STACK.index(handler)
    inside = _PYRO_STACK[start:]
    del _PYRO_STACK[start:]
    try:
        yield
    finally:
        _PYRO_STACK.extend(inside)
