"""Checkpoints: the state of a fit, its losses so far and its identity, in one file.

A lock on the file name, owned by one process at a time, is released by the kernel when that process ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
import dataclasses
import warnings
from contextlib import ExitStack
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.svi import SVIState

from numpyro_dgp._checks import caller, expected
from numpyro_dgp._fields import Checked, count, flag
from numpyro_dgp._repr import brief
from numpyro_dgp.inference.fit_identity import FitIdentity
from numpyro_dgp.inference.parameter_files import is_key, partial_files, read_arrays, require_file_path, write_arrays

__all__ = ["Checkpoint", "CheckpointFile", "LockedError", "locked"]


class LockedError(Exception):
    """Another process has the lock; the text names it."""


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock of ``path``, the file ``<name>.lock`` next to it, which is removed at the end.

    A process that is killed leaves that file, but not the lock. Where the system has no such locks (Windows, some
    network file systems) only the file is made.

    Yields:
        Whether the lock keeps others out.

    Raises:
        LockedError: another process has it, or another fit in this one.
        OSError: no file can be made there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    file, keeps_out = _acquire(lock)
    try:
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield keeps_out
    finally:
        if fcntl is None:
            os.close(file)  # Windows does not remove a file that is open
            lock.unlink(missing_ok=True)
        else:
            lock.unlink(missing_ok=True)
            os.close(file)


def _acquire(lock: Path) -> tuple[int, bool]:
    """The opened lock file, and whether it is locked."""
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        if fcntl is None:
            return file, False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace")
            os.close(file)
            raise LockedError(holder or "another process") from None
        except OSError:  # a file system without locks
            return file, False
        try:
            if os.path.samestat(os.fstat(file), os.stat(lock)):
                return file, True
        except FileNotFoundError:
            pass
        os.close(file)  # its holder has removed it meanwhile


_ELSE = "remove it or choose another name"


@dataclasses.dataclass(frozen=True)
class Checkpoint(Checked):
    """The file from which an interrupted fit continues, and how often it is written.

    ``dgp.fit(..., checkpoint="fit.npz")`` is short for ``checkpoint=dgp.Checkpoint("fit.npz")``.

    Args:
        path: the file.
        every: steps between two writes; it is written at the end too.
        force: continue from the file even if it is of another fit, as long as the arrays of its state have the same
            names, shapes and types: with more data, another learning rate, a longer schedule.

    Raises:
        ValueError: ``every`` is not a positive integer, ``path`` no path of a file, or ``force`` no flag.

    Example:
        >>> import numpyro_dgp as dgp
        >>> dgp.Checkpoint("fit.npz", every=100)
        Checkpoint(path='fit.npz', every=100)
    """

    path: str | os.PathLike[str]
    every: int = count(1000)
    force: bool = flag()

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        require_file_path("path", self.path, "fit.npz")


@dataclasses.dataclass(frozen=True)
class CheckpointFile:
    """The checkpoint of one fit.

    Args:
        checkpoint: the file; ``None`` for a fit without one.
        writes: whether this process writes the file; of several hosts only one does, and all read it.
        identity: what fit it is.
    """

    checkpoint: Checkpoint | None
    writes: bool = True
    identity: FitIdentity = dataclasses.field(default_factory=FitIdentity)

    @classmethod
    def of(cls, checkpoint: Checkpoint | str | os.PathLike[str] | None, writes: bool = True) -> CheckpointFile:
        """The checkpoint file of a call with ``checkpoint=``, a path or a :class:`Checkpoint`.

        Raises:
            ValueError: no path of a file.
        """
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            require_file_path("checkpoint", checkpoint, "fit.npz")
            checkpoint = Checkpoint(checkpoint)
        return cls(checkpoint, writes)

    @property
    def path(self) -> str | os.PathLike[str] | None:
        """The file, if there is one."""
        return None if self.checkpoint is None else self.checkpoint.path

    def next_write(self, done: int, num_steps: int) -> int:
        """The number of steps at which the file is written next, after ``done`` of ``num_steps``."""
        if self.checkpoint is None:
            return num_steps
        return min(num_steps, done + self.checkpoint.every - done % self.checkpoint.every)

    @contextmanager
    def reserved(self, num_steps: int) -> Iterator[None]:
        """Lock the file against other fits, and check before the first step that it can be written.

        A file that already has ``num_steps`` steps need not be writable.

        Raises:
            ValueError: another fit uses the file now, or it cannot be written.
        """
        if self.path is None or not self.writes:
            yield
            return
        path = Path(self.path)
        with ExitStack() as stack:
            try:
                alone = stack.enter_context(locked(path))
            except LockedError as error:
                raise expected(
                    f"{path} to be the checkpoint of one fit at a time",
                    f"it while {error} fits with it",
                    "wait for that fit, or choose another name",
                ) from None
            except OSError as error:
                if not path.is_file() or len(self._arrays()["losses"]) < num_steps:
                    raise expected(
                        "checkpoint to be a path that can be written", f"{path} ({error})", "choose another folder"
                    ) from error
                alone = False
            for partial in partial_files(path) if alone else ():
                partial.unlink(missing_ok=True)
            yield

    def resume(self, start: SVIState) -> tuple[SVIState, np.ndarray]:
        """The state and the losses in the file; where there is no file, ``start`` and no losses.

        Raises:
            ValueError: the file is damaged, or of another fit.
        """
        if self.path is None:
            return start, np.zeros(0)
        try:
            arrays = self._arrays()
        except FileNotFoundError:
            return start, np.zeros(0)
        self._require_same(FitIdentity.from_json(str(arrays["identity"])))
        paths = [jax.tree_util.keystr(where) for where, _ in jax.tree.leaves_with_path(start)]
        expected, treedef = jax.tree.flatten(start)
        saved = dict(zip(arrays["paths"].tolist(), (arrays.get(f"leaf{i}") for i in range(len(arrays))), strict=False))
        for where, like in zip(paths, expected, strict=True):
            shape, dtype = _numbers(like).shape, _numbers(like).dtype
            found = saved.get(where)
            if found is None or (found.shape, found.dtype) != (shape, dtype):
                what = "missing" if found is None else f"of type {found.dtype} and shape {found.shape}"
                self._refuse(f"state{where} is {what} in the file and of type {dtype} and shape {shape} in this call")
        leaves = [_restored(saved[where], like) for where, like in zip(paths, expected, strict=True)]
        return jax.tree.unflatten(treedef, leaves), arrays["losses"]

    def write(self, state: SVIState, losses: np.ndarray) -> bool:
        """Write the state of the fit and its losses so far, if this process writes; returns whether it did.

        Where that fails (a full disk, a folder that has become read-only) the file stays as it was, with a warning.
        """
        if self.path is None or not self.writes:
            return False
        found = jax.tree.leaves_with_path(state)
        arrays = {f"leaf{i}": _numbers(leaf) for i, (_, leaf) in enumerate(found)}
        arrays["paths"] = np.array([jax.tree_util.keystr(where) for where, _ in found])
        arrays["identity"] = np.array(self.identity.to_json())
        try:
            write_arrays(self.path, arrays | {"losses": losses})
        except OSError as error:
            warnings.warn(
                f"{caller()}: the checkpoint {self.path} could not be written after step {len(losses)} ({error}). "
                "The file is as it was before; a fit that goes on tries again at the next checkpoint: make room",
                RuntimeWarning,
                stacklevel=4,
            )
            return False
        return True

    def _arrays(self) -> dict[str, np.ndarray]:
        """What :meth:`write` has put into the file."""
        assert self.path is not None
        arrays = read_arrays(self.path, _ELSE)
        if not {"losses", "paths", "identity"} <= arrays.keys():
            older = {"losses", "leaf0"} <= arrays.keys()
            kind = "one of an older version, which does not identify its fit" if older else "other arrays"
            raise expected(f"a checkpoint of this fit in {self.path}", kind, _ELSE)
        return arrays

    def _require_same(self, saved: FitIdentity) -> None:
        difference = self.identity.difference(saved)
        if difference is not None and self.checkpoint is not None and not self.checkpoint.force:
            self._refuse(difference, ", or continue from it all the same with dgp.Checkpoint(path, force=True)")
        versions = self.identity.other_versions(saved)
        if versions is not None:
            warnings.warn(
                f"{caller()}: the checkpoint {self.path} was written with {versions}: the fit continues from it, "
                "and further steps may differ from those of a fit without interruption in their last digits",
                UserWarning,
                stacklevel=6,
            )

    def _refuse(self, difference: str, otherwise: str = "") -> NoReturn:
        raise expected(
            f"a checkpoint of this fit in {self.path}", "one of another", f"{difference}: {_ELSE}{otherwise}"
        )


def _numbers(leaf: Any) -> np.ndarray:
    """A leaf of a state as an array of numbers."""
    leaf = jnp.asarray(leaf)
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _restored(saved: np.ndarray, like: Any) -> Any:
    """A leaf of a state, from its numbers in a file."""
    array = jnp.asarray(saved)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)) if is_key(jnp.asarray(like)) else array
