"""Names of the program's own sites that would be taken for parameters of its guide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from numpyro_dgp.model.sites import Message

__all__ = ["NamesApart"]


class NamesApart:
    """The names that a program and its guide give to sites in one run, each of which has one owner only.

    NumPyro gives all ``numpyro.param`` of one name the same value, whoever opens them.

    Args:
        owner: the guide, for messages.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._guide: set[str] = set()
        self._program: set[str] = set()
        self._in_guide = False

    @contextmanager
    def of_guide(self) -> Iterator[None]:
        """Where parameters are those of the guide."""
        self._in_guide = True
        try:
            yield
        finally:
            self._in_guide = False

    def meet(self, msg: Message) -> None:
        """Note a site.

        Raises:
            ValueError: a site of the program with the name of a parameter of the guide.
        """
        if msg["type"] not in ("param", "sample"):
            return
        name = msg["name"]
        (self._guide if self._in_guide else self._program).add(name)
        if name in self._guide and name in self._program:
            raise ValueError(
                f"{self.owner}: expected names of the model's sites other than those of the guide's parameters, got "
                f"{name!r} for both: rename the site of the model, or give the guide's another prefix, "
                f"{self.owner}(model, prefix='q')"
            )
