"""NumPyro's list of active handlers: who is in it, and runs of programs for which it is another one.

This file alone reads and changes the list, which NumPyro keeps to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from numpyro.handlers import block
from numpyro.primitives import _PYRO_STACK, Messenger, plate

from numpyro_dgp._compiled import one_thread

__all__ = ["Everywhere", "active", "apart", "of_this_run", "outside", "plates_around"]


class Everywhere(Messenger):
    """A handler that sees the messages of programs that run apart, too."""


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
    """Within it, messages pass by ``handler`` and those that have been entered after it."""
    start = _PYRO_STACK.index(handler)
    inside = _PYRO_STACK[start:]
    del _PYRO_STACK[start:]
    try:
        yield
    finally:
        _PYRO_STACK.extend(inside)
