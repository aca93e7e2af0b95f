"""One wrong call, and what must happen."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

from packaging.version import Version


class Wrong(NamedTuple):
    """``call`` must raise (or warn with) ``raises``, with a message in which the pattern ``match`` is found."""

    name: str
    call: Callable[[], Any]
    match: str
    raises: type[Exception] = ValueError


def of_numpyro(first: str, *wrong: Wrong) -> list[Wrong]:
    """Calls that NumPyro itself must help to refuse, which it does from a version on."""
    return list(wrong) if Version(version("numpyro")) >= Version(first) else []
