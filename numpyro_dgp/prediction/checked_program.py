"""Compiled programs that say whether a check of a traced value failed in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from numpyro_dgp._checks import is_concrete, with_checks
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.compiled import Compiled

__all__ = ["CheckedProgram"]


class CheckedProgram:
    """A function of a key, draws, arrays and a number of a batch, compiled together with its checks.

    JAX cannot compile checks where draws from y need loops that end by chance, as counts do. Then only what is known
    while the program is traced is checked, such as the arguments.

    Args:
        function: the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._plain = Compiled(function)
        self._checked: Compiled | None = Compiled(with_checks(function))

    def __call__(self, key: Array, samples: Any, arrays: list[Any], batch: Array | None) -> tuple[bool, Any]:
        """Whether all checks are kept, and the result.

        Raises:
            ValueError: what a check says of known values.
        """
        call = key, samples, arrays, batch
        if not is_concrete(call):
            return True, self._plain(*call)
        if self._checked is not None:
            try:
                checks, found = self._checked(*call)
            except Exception:  # of JAX, which has no name for it; an error of the program comes again
                found = self._plain(*call)
                self._checked = None
            else:
                return checks.get() is None, found
        jax.eval_shape(lambda key, samples: self._function(key, samples, arrays, batch), key, samples)
        return True, self._plain(*call)
