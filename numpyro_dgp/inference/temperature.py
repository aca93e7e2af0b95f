"""The factor of the divergences in one evaluation of an objective, which an optimiser passes among the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from numpyro_dgp._typing import Array

__all__ = ["split_temperature", "tempered"]

_NAME = "numpyro_dgp temperature"


class _Temperature(NamedTuple):
    """A factor, and the objectives that have read it."""

    value: Array
    readers: list[str]


def tempered(loss: Callable[[Any], Any], value: Array) -> tuple[Callable[[Any], Any], list[str]]:
    """``loss`` of parameters with a temperature beside them, and the list that objectives enter themselves into."""
    temperature = _Temperature(value, [])
    return lambda params: loss({**params, _NAME: temperature}), temperature.readers


def split_temperature(owner: str, params: Mapping[str, Any]) -> tuple[Array | None, dict[str, Any]]:
    """The temperature in ``params``, ``None`` without one, and the parameters.

    Args:
        owner: the objective that reads it.
        params: by name.
    """
    rest = dict(params)
    found: _Temperature | None = rest.pop(_NAME, None)
    if found is None:
        return None, rest
    found.readers.append(owner)
    return found.value, rest
