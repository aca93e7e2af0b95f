"""How public names and arguments go: one decorator, which warns at every place in the code that still uses them."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["deprecated"]

T = TypeVar("T", bound=Callable[..., Any])


def deprecated(*, since: str, removed: str, instead: str, argument: str | None = None) -> Callable[[T], T]:
    """Mark a function, a method, a class or one argument of it as going.

    A call gives a ``DeprecationWarning`` that points at the line of the caller; Python shows it once per line. Name,
    signature and type stay as they are, and the docstring says the same as the warning.

    Args:
        since: the version that warns first.
        removed: the version that will not have it any more.
        instead: what to write, as in ``"dgp.fit(..., rows=n)"``.
        argument: the argument that goes, if not all of it goes. Only calls that give it are warned of.

    Raises:
        ValueError: there is no such argument.

    Example:
        >>> import warnings
        >>> from numpyro_dgp._deprecations import deprecated
        >>> @deprecated(since="1.1", removed="2.0", instead="math.sqrt")
        ... def root(x):
        ...     return x**0.5
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("default")
        ...     roots = [root(4.0) for _ in range(3)]
        >>> [str(w.message) for w in seen]
        ['root is deprecated since version 1.1 and will be removed in version 2.0: use math.sqrt']
    """

    def decorate(target: T) -> T:
        marked: Any = target
        function = marked.__init__ if isinstance(target, type) else marked
        signature = inspect.signature(function)
        if argument is not None and argument not in signature.parameters:
            raise ValueError(
                f"deprecated: expected an argument of {target.__qualname__}, got {argument!r}: it has "
                f"{', '.join(signature.parameters)}"
            )
        name = target.__qualname__ if argument is None else f"the argument {argument} of {target.__qualname__}"
        message = f"{name} is deprecated since version {since} and will be removed in version {removed}: use {instead}"

        @functools.wraps(function)
        def warning(*args: Any, **kwargs: Any) -> Any:
            if argument is None or argument in signature.bind_partial(*args, **kwargs).arguments:
                warnings.warn(message, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        if isinstance(target, type):
            marked.__init__ = warning
        else:
            marked = warning
        marked.__doc__ = f"{inspect.cleandoc(target.__doc__ or '')}\n\n.. deprecated:: {since}\n   {message}."
        return marked

    return decorate
