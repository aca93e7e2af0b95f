"""The identity of a fit: facts stored in a checkpoint and compared before the fit continues.

Among them is a digest of a jaxpr that is equal in every process: its operations and constants.
"""

from __future__ import annotations

import enum
import hashlib
import importlib.metadata
import json
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_dgp._compiled import one_thread
from numpyro_dgp._repr import brief
from numpyro_dgp.inference.parameter_files import is_key
from numpyro_dgp.inference.program_sites import SitesOfFit

__all__ = ["Digest", "FitIdentity", "array_digest", "digest", "identify", "versions"]

_SHOWN = 8
"""Entries of an array that is given in full, at most."""

_SAMPLE = 2**20
"""Entries of an array that enter its checksum, at most; of larger arrays as many, evenly spaced."""


class Digest(NamedTuple):
    """The operations of a jaxpr, and its constants in order of use."""

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
    """The operations of a jaxpr, and how they use each other's results.

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
    """The setting of an operation as text; for a jaxpr, its operations are appended to ``lines`` instead."""
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
    """Numbers as text; for large arrays, a digest."""
    if isinstance(value, jax.Array) and is_key(value):
        return array_digest(value)
    return str(np.asarray(value).tolist()) if np.size(value) <= _SHOWN else f"array {array_digest(value)}"


class FitIdentity(NamedTuple):
    """A description of a fit as text, to compare it with a saved one.

    Args:
        facts: the function, its arguments, the objective, the sites of guide and model.
        programs: of the optimiser and of a whole step, the operations and then the constants. They are comparable
            between equal ``versions`` only.
        versions: of the packages that make and run the programs.
    """

    facts: dict[str, str] = {}
    programs: dict[str, str | list[str]] = {}
    versions: dict[str, str] = {}

    def __repr__(self) -> str:
        return brief(self)

    @classmethod
    def from_json(cls, text: str) -> FitIdentity:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    def difference(self, saved: FitIdentity) -> str | None:
        """The first difference from the identity in a file, as a clause; ``None`` if there is none."""
        pairs = [(self.facts, saved.facts)]
        if self.versions == saved.versions:
            pairs.append((self.programs, saved.programs))  # type: ignore[arg-type]
        for here, there in pairs:
            for name in [*here, *(name for name in there if name not in here)]:
                a, b = there.get(name, "missing"), here.get(name, "missing")
                if a != b and isinstance(a, list) and isinstance(b, list):
                    a, b = next((pair for pair in zip(a, b, strict=False) if pair[0] != pair[1]), (len(a), len(b)))  # type: ignore[assignment]
                if a != b:
                    return f"{name} is {a} in the file and {b} in this call"
        return None

    def other_versions(self, saved: FitIdentity) -> str | None:
        """The versions in a file that differ from those here, as a clause; ``None`` if there are none."""
        found = [
            f"{name} {saved.versions.get(name)} (here {here})"
            for name, here in self.versions.items()
            if here != saved.versions.get(name)
        ]
        return ", ".join(found) or None


@one_thread
def identify(
    function: str, svi: SVI, arguments: dict[str, Any], sites: SitesOfFit, state: SVIState, step: core.ClosedJaxpr
) -> FitIdentity:
    """The identity of a fit.

    Args:
        function: that fits.
        svi: what is fitted.
        arguments: whatever the result depends on, by name: arrays, numbers, flags; of other objects the class counts.
        sites: of guide and model.
        state: before the first step.
        step: the program of a step.
    """
    facts = {"the function": function}
    for name, value in arguments.items():
        for where, leaf in jax.tree.leaves_with_path(value, is_leaf=lambda leaf: leaf is None):
            facts[f"{name}{jax.tree_util.keystr(where)}"] = _fact(leaf)
    particles = getattr(svi.loss, "num_particles", 1)
    facts["the objective"] = f"{type(svi.loss).__name__} with num_particles={particles}"
    for owner, found in (("guide", sites.guide), ("model", sites.model)):
        facts[f"the order of the {owner}'s sites"] = " ".join(found)
        facts |= {f"site {name!r} of the {owner}": str(site) for name, site in found.items()}
    programs: dict[str, str | list[str]] = {}
    optimiser = _optimiser(svi, state)
    if optimiser is not None:
        programs["the optimiser"] = optimiser.operations
        programs["a number of the optimiser (a learning rate, a schedule, a decay)"] = optimiser.constants
    whole = digest(step)
    programs["a training step (kernels, likelihoods, the guide, the optimiser)"] = whole.operations
    programs["a constant of a training step (of a kernel, a likelihood, inducing inputs, ...)"] = whole.constants
    return FitIdentity(facts, programs, versions())


def _optimiser(svi: SVI, state: SVIState) -> Digest | None:
    """The first step of the optimiser on a loss that is the same for all programs."""
    params = svi.optim.get_params(state.optim_state)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), jnp.result_type(p)), params)

    def step(params: Any) -> Any:
        def loss(params: Any) -> tuple[Any, None]:
            return sum(jnp.sum(p * p) for p in jax.tree.leaves(params)), None

        return svi.optim.eval_and_update(loss, svi.optim.init(params))

    try:
        return digest(jax.make_jaxpr(step)(shapes))
    except ValueError:  # natural gradients, which need the guide's own loss: they are part of the program of a step
        return None


def _fact(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | jax.Array):
        return array_digest(leaf)
    simple = leaf is None or isinstance(leaf, bool | int | float | complex | str | np.generic)
    return str(leaf) if simple else f"a {type(leaf).__name__}"


def versions() -> dict[str, str]:
    """The platform and the versions of the packages that make and run programs."""
    found = {"platform": jax.default_backend()}
    for package in ("numpyro-dgp", "jax", "numpyro", "optax"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
