"""One wrong call, and what must happen."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Wrong(NamedTuple):
    """``call`` must raise (or warn with) ``raises``, with a message in which the pattern ``match`` is found."""

    name: str
    call: Callable[[], Any]
    match: str
    raises: type[Exception] = ValueError
