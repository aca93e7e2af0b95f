"""A sequential search with a simulator, from the initial design until the budget is used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from numpyro_dgp._checks import expect, expect_kind, expected, require_count
from numpyro_dgp._typing import Array
from numpyro_dgp.design.search import Fitted, Search
from numpyro_dgp.design.search_record import Record
from numpyro_dgp.inference.checkpoints import LockedError, locked
from numpyro_dgp.inference.parameter_files import require_file_path

__all__ = ["loop"]


def loop(
    search: Search,
    simulator: Callable[[np.ndarray], Any],
    key: Array,
    *,
    budget: int,
    path: str | os.PathLike[str] | None = None,
    progress_bar: bool = True,
) -> Fitted:
    """Run a simulator where a search finds it most worthwhile, until a number of evaluations is reached.

    The initial design is evaluated; then every round fits or conditions the program, maximises the acquisition and
    evaluates the points, as :class:`Search` says. With ``path`` the record is written after every evaluation, as a
    whole or not at all. The same call goes on from there, after an error or a kill or with a larger budget, and
    evaluates what it would have evaluated without interruption, bit for bit on the same machine.

    Args:
        search: the program, the guide, the bounds, the acquisition and their settings.
        simulator: from one point (D,), in double precision, to one number.
        key: PRNG key.
        budget: evaluations in all, those of the initial design and of the record included.
        path: the file of the record; ``None`` for none.
        progress_bar: show a progress bar.

    Returns:
        The record with the posterior given all of it, its units, and what was seen.

    Raises:
        ValueError: as :class:`Search` and :func:`maximise`; something else than a search; a budget below two; a
            simulator that returns something else than a finite number; a file of another search, with the first
            difference, one that is damaged or that another process uses, or that cannot be written. Whatever the
            simulator raises passes through, with a note where it was and what is saved.

    Example:
        >>> import jax, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> def variance(posterior, seen, key):
        ...     return lambda x: posterior.using(num_samples=1).predict_function(key, x).variance.sum()
        >>> search = dgp.design.Search(model, dgp.guides.InducingPoint, [[0.0, 1.0]], variance, initial=2, num_steps=2)
        >>> found = dgp.design.loop(search, lambda x: x[0] ** 2, jax.random.key(0), budget=4, progress_bar=False)
        >>> found.record.X.shape, found.record.rounds.tolist()
        ((4, 1), [0, 0, 1, 2])
    """
    expect_kind(
        search,
        Search,
        "a dgp.design.Search",
        "loop(dgp.design.Search(model, dgp.guides.InducingPoint, bounds, acquisition), simulator, key, budget=50)",
    )
    expect(
        callable(simulator),
        "the simulator, a function of one point x (D,)",
        type(simulator).__name__,
        "dgp.design.Search proposes points to simulators that run elsewhere",
    )
    require_count("budget", budget, "50")
    if budget < 2:
        raise expected("a budget of at least 2, what a fit needs", budget, "try 50")
    with _reserved(path):
        record = _begun(search, key, path)
        with tqdm.tqdm(total=budget, initial=min(budget, len(record.y)), disable=not progress_bar) as bar:
            while len(record.y) < budget:
                if not len(record.pending):
                    record = search.propose(record)
                    _save(record, path)
                record = _evaluated(simulator, record, path)
                _save(record, path)
                best = record.y.min() if search.minimise else record.y.max()
                bar.set_postfix_str(f"best: {best:.6g}", refresh=False)
                bar.update()
        return search.fitted(record)


@contextmanager
def _reserved(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Keep other searches off the file."""
    if path is None:
        yield
        return
    require_file_path("path", path, "search.npz")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(Path(path)))
        except LockedError as error:
            raise expected(
                f"{path} to be the record of one search at a time",
                f"it while {error} searches with it",
                "wait for that search, or choose another name",
            ) from None
        except OSError as error:
            raise expected(
                "path to be one that can be written", f"{path} ({error})", "choose another folder"
            ) from error
        yield


def _begun(search: Search, key: Array, path: str | os.PathLike[str] | None) -> Record:
    """The record in the file, or a new one."""
    record = search.start(key)
    if path is None or not Path(path).exists():
        return record
    saved = Record.load(path)
    difference = search.identity.difference(saved.identity)
    if difference is None and (saved.key != record.key).any():
        difference = "the key is another"
    expect(
        difference is None,
        f"the record of this search in {path}",
        "one of another",
        f"{difference}: call with the settings of the record, remove it, or choose another name",
    )
    return saved


def _save(record: Record, path: str | os.PathLike[str] | None) -> None:
    if path is not None:
        record.save(path)


def _evaluated(simulator: Callable[[np.ndarray], Any], record: Record, path: Any) -> Record:
    """The record with the value at its first pending point."""
    x, began = record.pending[0].copy(), time.perf_counter()
    where = f"evaluation {len(record.y) + 1}, x = {x.tolist()}"
    saved = "nothing is saved, since path is None" if path is None else (
        f"the {len(record.y)} before it are saved in {path}, and the same call goes on there"
    )  # fmt: skip
    try:
        value = simulator(x)
    except BaseException as error:
        error.add_note(f"design.loop: the simulator raised this at {where}; {saved}")
        raise
    seconds = time.perf_counter() - began
    number = np.asarray(value)
    if number.size != 1 or number.dtype.kind not in "biuf" or not np.isfinite(number).all():
        got = f"shape {number.shape}" if number.size != 1 else repr(value)
        raise expected(
            "the simulator to return one finite number",
            f"{got} at {where}; {saved}",
            "return a bad value of the size of the others where a run fails",
        )
    return record.add(number.reshape(1), seconds=seconds)
