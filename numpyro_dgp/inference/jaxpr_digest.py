"""A digest of a jaxpr that is the same in every process: what is computed, and the constants in it."""

from __future__ import annotations

import enum
import hashlib
import zlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from numpyro_dgp.inference.array_files import is_key

__all__ = ["Digest", "array_digest", "digest"]

_SHOWN = 8
"""Entries of an array that is given in full, at most."""

_SAMPLE = 2**20
"""Entries of an array that enter its checksum, at most; of larger arrays as many, evenly spaced."""


class Digest(NamedTuple):
    """What a jaxpr computes, and its numbers and constant arrays, in the order in which they are used."""

    operations: str
    constants: list[str]


def array_digest(array: Any) -> str:
    """Type, shape and checksum of an array; of a large one, the checksum of rows that are evenly spaced."""
    if is_key(array):
        return f"keys {array_digest(jax.random.key_data(array))}"
    rows = max(1, array.shape[0] * _SAMPLE // max(array.size, 1)) if array.ndim else 1
    step = -(-array.shape[0] // rows) if array.ndim and array.size else 1
    sample = np.ascontiguousarray(array[::step] if array.ndim else array)
    return f"{np.dtype(array.dtype)} {array.shape} with checksum {zlib.crc32(sample.tobytes()):08x}"


def digest(program: core.ClosedJaxpr) -> Digest:
    """What a jaxpr computes: its operations, and how they use each other's results.

    Names of functions and whatever differs between two runs of the same program, such as addresses, are left out.
    """
    lines: list[str] = []
    constants: list[str] = []
    _collect(program.jaxpr, program.consts, lines, constants)
    code = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
    return Digest(f"{len(lines)} operations with digest {code}", constants)


def _collect(jaxpr: Any, values: Any, lines: list[str], constants: list[str]) -> None:
    """Append a line for every operation of a jaxpr and of those that it calls, and every constant."""
    numbers: dict[Any, int] = {}

    def atom(found: Any) -> str:
        if isinstance(found, core.Literal):
            constants.append(_constant(found.val))
            return f"constant {found.aval}"
        return f"{numbers.setdefault(found, len(numbers))} {found.aval}"

    lines.append(" ".join(atom(v) for v in (*jaxpr.constvars, *jaxpr.invars)))
    constants.extend(map(_constant, values))
    for equation in jaxpr.eqns:
        arguments = [atom(v) for v in equation.invars]
        settings = {k: _setting(v, lines, constants) for k, v in sorted(equation.params.items()) if k != "name"}
        results = [atom(v) for v in equation.outvars]
        lines.append(f"{equation.primitive.name} {arguments} {settings} {results}")
    lines.append(f"return {[atom(v) for v in jaxpr.outvars]}")


def _setting(value: Any, lines: list[str], constants: list[str]) -> str:
    """The setting of an operation, in words; for a jaxpr in it, its operations are appended instead."""
    if isinstance(value, core.ClosedJaxpr):
        _collect(value.jaxpr, value.consts, lines, constants)
        return "program"
    if isinstance(value, core.Jaxpr):
        _collect(value, (), lines, constants)
        return "program"
    if isinstance(value, tuple | list):
        return f"({', '.join(_setting(v, lines, constants) for v in value)})"
    if isinstance(value, np.ndarray | jax.Array):
        constants.append(_constant(value))
        return f"array {value.shape}"
    if value is None or isinstance(value, bool | int | float | complex | str | enum.Enum | np.generic | np.dtype):
        return str(value)
    return type(value).__name__


def _constant(value: Any) -> str:
    """Numbers as they are printed; of many, the digest of their array."""
    if isinstance(value, jax.Array) and is_key(value):
        return array_digest(value)
    return str(np.asarray(value).tolist()) if np.size(value) <= _SHOWN else f"array {array_digest(value)}"
