"""Files of named arrays: written as a whole or not at all, and read with one error for whatever is wrong with them."""

from __future__ import annotations

import os
import secrets
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["is_key", "partial_files", "read_arrays", "require_file_path", "write_arrays"]

# What NumPy and the zip format raise for files that are cut off or overwritten.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    ValueError,
    NotImplementedError,
    MemoryError,
)


def is_key(leaf: Any) -> bool:
    """Whether an array holds typed random keys, which neither NumPy nor a file can hold as they are."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def partial_files(path: Path) -> list[Path]:
    """What processes that were killed while they wrote ``path`` have left behind."""
    name = path.name + "."
    return [p for p in path.parent.iterdir() if p.name.startswith(name) and p.name.endswith(".part")]


def require_file_path(owner: str, what: str, path: Any, example: str) -> None:
    """Raise unless ``path`` can be the path of a file.

    Args:
        owner: who reads or writes.
        what: the argument.
        path: its value.
        example: a name of a file.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f'{owner}: expected {what} to be a path, got {path!r}: try "{example}"')
    if Path(path).is_dir():
        raise ValueError(
            f'{owner}: expected {what} to be the path of a file, got the folder {path}: add a name, "{example}"'
        )


def write_arrays(path: str | os.PathLike[str], arrays: dict[str, Any]) -> None:
    """Write named arrays to an ``.npz`` file; an interruption leaves the old file or the new one, never a part.

    Raises:
        OSError: the folder cannot be written, or the disk is full; the old file is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(6)}.part")
    try:
        with open(partial, "xb") as file:
            np.savez(file, **{name: np.asarray(value) for name, value in arrays.items()})  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_arrays(owner: str, path: str | os.PathLike[str], hint: str) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file by name.

    Args:
        owner: the function that reads, for its messages.
        path: the file.
        hint: what to do about a file that cannot be read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, of another kind, or damaged.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if zipfile.is_zipfile(file):
                file.seek(0)
                with np.load(file, allow_pickle=False) as arrays:
                    return {name: arrays[name] for name in arrays.files}
            reason = ""
        except _DAMAGE as error:
            reason = f" ({type(error).__name__}: {error})"
        file.seek(0)
        whole = file.read(2) != b"PK"
    kind = "an empty file" if not size else "no .npz file" if whole else f"a damaged or truncated file{reason}"
    raise ValueError(f"{owner}: expected a file of arrays, got {kind}, {size} bytes, in {path}: {hint}")
