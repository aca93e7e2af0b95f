"""A lock on a file name, held by one process at a time and released by the kernel when that process ends."""

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

__all__ = ["LockedError", "locked"]


class LockedError(Exception):
    """Another process holds the lock; the text says which."""


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock of ``path``, which lives in a file beside it, ``<name>.lock``, removed at the end.

    A process that is killed leaves that file, but not the lock. Where the system has no such locks (Windows, some
    network file systems) only the file is made.

    Yields:
        Whether the lock keeps others out.

    Raises:
        LockedError: another process holds it, or another fit in this one.
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
