"""Draws of whole functions at given rows, in blocks of rows, from a posterior or from any function of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numpyro_dgp._checks import require_count, require_finite, require_key
from numpyro_dgp._data import as_array
from numpyro_dgp._typing import Array
from numpyro_dgp.fitted import Fit

__all__ = ["draws_held", "function_draws", "observed_site", "of_observed"]


def function_draws(
    owner: str, emulator: Any, key: Array, num_functions: int, batch_size: int, example: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """A function from rows (N, D) to the values of all draws there, (S, N).

    Args:
        owner: who asks, for messages.
        emulator: a posterior, or a function from rows (N, D) to values (N,) or draws (S, N).
        key: PRNG key of the draws of a posterior.
        num_functions: S, for a posterior.
        batch_size: how many rows at a time.
        example: two rows.

    Raises:
        ValueError: another emulator, more functions than a chain has draws, or, when the function is called, values of
            another shape, or NaN.
    """
    require_key(owner, key)
    require_count(owner, "num_functions", num_functions, "50")
    require_count(owner, "batch_size", batch_size, "1024")
    if hasattr(emulator, "functions"):
        held = draws_held(emulator)
        if held is not None and num_functions > held:
            raise ValueError(
                f"{owner}: expected num_functions of at most {held}, the number of draws of the chain, got "
                f"{num_functions}: num_functions={held}, or a chain with more draws"
            )
        draws = emulator.functions(key, num_samples=num_functions)
        site = observed_site(emulator, (as_array(f"inputs of {owner}", example),), {})

        def values(X: Array) -> Any:
            return of_observed(owner, site, draws(X))

    elif callable(emulator):
        values = emulator
    else:
        raise ValueError(
            f"{owner}: expected a posterior or a function of X, got {type(emulator).__name__}: "
            "dgp.Posterior(model, guide, result.params)"
        )

    def at(rows: np.ndarray) -> np.ndarray:
        size = min(batch_size, len(rows))
        blocks = []
        for start in range(0, len(rows), size):
            # Beyond the end, copies of the last row: all blocks have one shape, and one compiled program.
            index = np.minimum(np.arange(start, start + size), len(rows) - 1)
            found = np.atleast_2d(np.asarray(values(as_array(f"inputs of {owner}", rows[index]))))
            if np.iscomplexobj(found):
                raise ValueError(
                    f"{owner}: expected a function with real values, got {found.dtype}: take .real, or jnp.abs of it"
                )
            if found.ndim != 2 or found.shape[1] != size:
                raise ValueError(
                    f"{owner}: expected a function with values of shape ({size},), or draws (S, {size}), at {size} "
                    f"rows, got {found.shape}: of several outputs take one, lambda X: draws(X)['y'][..., 0]"
                )
            if found.dtype == bool:  # an event, whose mean is a probability
                found = found.astype(float)
            blocks.append(found[:, : len(rows) - start])
        together = np.concatenate(blocks, 1)
        require_finite(f"values of the functions of {owner}", together, "check the fit: NaN in its losses?")
        return together

    return at


def draws_held(emulator: Any) -> int | None:
    """How many draws the chain of a posterior has, of a mixture the shortest; ``None`` if there is none."""
    samples = [program.samples for program in _programs(emulator)]
    return min((len(next(iter(values.values()))) for values in samples if values), default=None)


def observed_site(emulator: Any, args: Any, kwargs: Any) -> str | None:
    """The observed site of a posterior in a call; ``None`` if it is not known."""
    programs = _programs(emulator)
    return programs[0].call(args, kwargs).observed if programs else None


def _programs(emulator: Any) -> list[Fit]:
    """The fitted programs of a posterior: itself, or those of a mixture that have a weight."""
    if isinstance(emulator, Fit):
        return [emulator]
    return [part.posterior for depth, part in getattr(emulator, "parts", {}).items() if emulator.weights[depth] > 0]


def of_observed(owner: str, site: str | None, found: Mapping[str, Array]) -> Array:
    """The function under the observed site, among the values of all layers.

    Raises:
        ValueError: the site is not known, and there are several functions.
    """
    if site is None and len(found) == 1:
        (site,) = found
    if site is None or site not in found:
        raise ValueError(
            f"{owner}: expected the function under an observed dgp.Likelihood, got functions of {', '.join(found)}: "
            "choose one, draws = posterior.functions(key); lambda X: draws(X)['f']"
        )
    return found[site]
