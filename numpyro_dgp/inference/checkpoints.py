"""Files of arrays, and the checkpoints of a fit: its state and its losses so far, in one such file."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.svi import SVIState

from numpyro_dgp._checks import require_count

__all__ = ["Checkpoint", "is_key", "read_arrays", "write_arrays"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The file from which an interrupted fit continues.

    Args:
        owner: the function that fits, for its messages.
        path: the file; ``None`` for a fit without one.
        every: steps between two writes.
        writes: whether this process writes the file; of several hosts only one does, and all read it.

    Raises:
        ValueError: ``every`` is not a positive integer.
    """

    owner: str
    path: str | os.PathLike[str] | None
    every: int
    writes: bool = True

    def __post_init__(self) -> None:
        require_count(self.owner, "checkpoint_every", self.every, "5000")

    def next_write(self, done: int, num_steps: int) -> int:
        """The number of steps at which the file is written next, after ``done`` of ``num_steps``."""
        return num_steps if self.path is None else min(num_steps, done + self.every - done % self.every)

    def resume(self, start: SVIState) -> tuple[SVIState, np.ndarray]:
        """The state and the losses in the file; where there is no file, ``start`` and no losses.

        Raises:
            ValueError: the state in the file does not have the arrays of ``start``.
        """
        if self.path is None or not Path(self.path).exists():
            return start, np.zeros(0)
        arrays = read_arrays(self.path) or {}
        losses = arrays.pop("losses", None)
        expected, treedef = jax.tree.flatten(start)
        saved = [arrays.get(f"leaf{i}") for i in range(len(arrays))]
        leaves = [_restored(a, like) for a, like in zip(saved, expected, strict=False)]
        if losses is None or not len(saved) == len(expected) or any(leaf is None for leaf in leaves):
            raise ValueError(
                f"{self.owner}: expected a checkpoint of this fit in {self.path} ({len(expected)} arrays of the shapes "
                f"of its state), got one of another model, guide or optimiser ({len(saved)} arrays): remove it or "
                "choose another name"
            )
        return jax.tree.unflatten(treedef, leaves), losses

    def write(self, state: SVIState, losses: np.ndarray) -> None:
        """Write the state of the fit and its losses so far, if this process writes at all."""
        if self.path is None or not self.writes:
            return
        leaves = map(jnp.asarray, jax.tree.leaves(state))
        numbers = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]
        write_arrays(self.path, {"losses": losses} | {f"leaf{i}": leaf for i, leaf in enumerate(numbers)})


def _restored(saved: np.ndarray | None, like: Any) -> Any:
    """A leaf of a state, from its numbers in a file; ``None`` if their shape is not that of ``like``."""
    key = is_key(jnp.asarray(like))
    shape = jax.random.key_data(like).shape if key else np.shape(like)
    if saved is None or saved.shape != shape:
        return None
    array = jnp.asarray(saved)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)) if key else array


def is_key(leaf: Any) -> bool:
    """Whether an array holds typed random keys, which neither NumPy nor a file can hold as they are."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def write_arrays(path: str | os.PathLike[str], arrays: dict[str, Any]) -> None:
    """Write named arrays to an ``.npz`` file; an interruption leaves the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    with open(partial, "wb") as file:
        np.savez(file, **{name: np.asarray(value) for name, value in arrays.items()})  # type: ignore[arg-type]
    os.replace(partial, path)


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray] | None:
    """The arrays of an ``.npz`` file by name, or ``None`` if the file is of another kind."""
    with open(path, "rb") as file:
        if not zipfile.is_zipfile(file):
            return None
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
