"""Parameters of a fit in one file: ``save`` and ``load``.

Files of named arrays are written completely or not at all, and damaged files raise one readable error.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expect_kind, expected
from numpyro_dgp._typing import Array

__all__ = [
    "entries_of",
    "is_key",
    "load",
    "params_of",
    "partial_files",
    "read_arrays",
    "require_dicts",
    "require_file_path",
    "save",
    "write_arrays",
]

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
    """Whether an array has typed random keys, which neither NumPy nor a file can represent."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def partial_files(path: Path) -> list[Path]:
    """Temporary files of processes that were killed while they wrote ``path``."""
    name = path.name + "."
    return [p for p in path.parent.iterdir() if p.name.startswith(name) and p.name.endswith(".part")]


def require_file_path(what: str, path: Any, example: str) -> None:
    """Raise unless ``path`` can be the path of a file.

    Args:
        what: the argument.
        path: its value.
        example: a name of a file.
    """
    expect(
        isinstance(path, str | os.PathLike) and os.fspath(path), f"{what} to be a path", repr(path), f'try "{example}"'
    )
    expect(
        not Path(path).is_dir(), f"{what} to be the path of a file", f"the folder {path}", f'add a name, "{example}"'
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


def read_arrays(path: str | os.PathLike[str], hint: str) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file by name.

    Args:
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
    raise expected("a file of arrays", f"{kind}, {size} bytes, in {path}", hint)


def save(path: str | os.PathLike[str], params: dict[str, Any]) -> None:
    """Write parameters to one ``.npz`` file.

    Args:
        path: the file; its folder is made if there is none.
        params: a dict of arrays, of such dicts, or of other trees of arrays, as in ``svi_result.params``.

    Raises:
        ValueError: no dict, something else than numbers of NumPy's dtypes under names that are text, or a folder.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from numpyro_dgp import load, save
        >>> file = tempfile.mkdtemp() + "/posterior.npz"
        >>> save(file, {"ls_auto_loc": jnp.ones(2), "net$params": {"w": jnp.zeros(3)}})
        >>> sorted(load(file)), load(file)["net$params"]["w"].shape
        (['ls_auto_loc', 'net$params'], (3,))
    """
    expect_kind(params, dict, "a dict of arrays", "save(path, svi_result.params)")
    require_file_path("path", path, "posterior.npz")
    write_arrays(path, entries_of(params))


def load(path: str | os.PathLike[str], *, like: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read what :func:`save` wrote.

    Args:
        path: the file.
        like: parameters of the same program, of which only the containers count: needed where arrays were in other
            ones than dicts, as those of an Equinox network are, ``like=svi.get_params(svi.init(key, X, y))``.

    Returns:
        The parameters, with the names, shapes and dtypes that they had; numbers of 64 bits have 32 where JAX has not
        more.

    Raises:
        ValueError: the file was written by something else, or is damaged; without ``like``, containers other than
            dicts; with it, other names than those in the file; numbers beyond the precision of JAX.
        FileNotFoundError: there is no such file.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> file = tempfile.mkdtemp() + "/posterior.npz"
        >>> dgp.save(file, {"noise": jnp.array(0.5)})
        >>> print(dgp.load(file)["noise"])
        0.5
    """
    require_file_path("path", path, "posterior.npz")
    return params_of(path, read_arrays(path, "check the name; dgp.save writes such files"), like)


def entries_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as arrays by name, to be written to a file.

    Args:
        params: a dict of arrays, or of trees of arrays.

    Raises:
        ValueError: something else than numbers of NumPy's dtypes, names that are no text.
    """
    entries = {}
    for where, value in jax.tree.leaves_with_path(params):
        if np.asarray(value).dtype.kind == "V":  # NumPy's files forget which dtype of another package it was
            raise expected(
                f"numbers of a dtype that NumPy has at params{jax.tree_util.keystr(where)}",
                np.asarray(value).dtype,
                "convert them, value.astype(jnp.float32)",
            )
        if np.asarray(value).dtype.kind not in "biufc":
            raise expected(f"numbers at params{jax.tree_util.keystr(where)}", type(value).__name__, "leave it out")
        if wrong := [p.key for p in where if isinstance(p, jax.tree_util.DictKey) and not isinstance(p.key, str | int)]:
            raise expected(
                "text as names in dicts", f"{wrong[0]!r} at params{jax.tree_util.keystr(where)}", "rename it"
            )
        entries[_name(where)] = value
    return entries


def require_dicts(params: Mapping[str, Any]) -> None:
    """Raise where parameters are in other containers than dicts, which a file does not record."""
    for where, _ in jax.tree.leaves_with_path(params):
        if not all(isinstance(part, jax.tree_util.DictKey) for part in where):
            raise expected(
                "arrays in dicts", f"params{jax.tree_util.keystr(where)}", "turn the other container into a dict"
            )


def params_of(
    path: str | os.PathLike[str], entries: Mapping[str, np.ndarray], like: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Parameters from what :func:`entries_of` gave, in the containers of ``like``.

    Raises:
        ValueError: names that it does not give; other containers than dicts without ``like``, or another ``like``.
    """
    params: dict[str, Any] = {}
    for name, value in entries.items():
        try:
            *parents, last = json.loads(name)
        except (ValueError, TypeError) as error:
            raise expected(
                "a file written by dgp.save", f"{path} with entry {name!r}", "read it by numpy.load"
            ) from error
        expect(
            like is not None or not any(isinstance(part, dict) for part in (*parents, last)),
            "like= for parameters in other containers than dicts",
            f"none for {name} in {path}",
            "dgp.load(path, like=svi.get_params(svi.init(key, X, y))), with program and guide of the fit",
        )
        if like is None:
            node = params
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = _held(name, value)
    return params if like is None else _in_containers(path, entries, like)


def _in_containers(
    path: str | os.PathLike[str], entries: Mapping[str, np.ndarray], like: dict[str, Any]
) -> dict[str, Any]:
    leaves, treedef = jax.tree.flatten_with_path(like)
    names = [_name(where) for where, _ in leaves]
    if other := sorted(set(names) ^ set(entries)):
        raise expected(
            f"like= with the names of {path}", f"another one at {', '.join(other[:3])}", "take those of the same guide"
        )
    return jax.tree.unflatten(treedef, [_held(name, entries[name]) for name in names])


def _held(name: str, value: np.ndarray) -> Array:
    """A parameter as a JAX array, with an error where integers would wrap around or large values overflow."""
    held = jax.dtypes.canonicalize_dtype(value.dtype)
    with np.errstate(over="ignore"):
        cast = value.astype(held)
    same = cast == value if value.dtype.kind in "iu" else np.isfinite(cast) == np.isfinite(value)
    if not same.all():
        raise expected(
            f"parameters within the range of {held}",
            f"{value[~same].flat[0]:g} of {value.dtype} in {name}",
            'switch on jax.config.update("jax_enable_x64", True), as in the fit',
        )
    return jnp.asarray(cast)


def _name(where: tuple[Any, ...]) -> str:
    """The place of an array in a tree; of dicts the keys, of other containers an index or a field."""

    def part(key: Any) -> Any:
        if isinstance(key, jax.tree_util.DictKey):
            return key.key
        return (
            {"field": key.name}
            if isinstance(key, jax.tree_util.GetAttrKey)
            else {"item": getattr(key, "idx", str(key))}
        )

    return json.dumps([part(key) for key in where])
