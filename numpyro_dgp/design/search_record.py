"""The record of a search, as arrays and as one file from which the search continues."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from numpyro_dgp._checks import expect, expected, require_finite
from numpyro_dgp._data import known_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import ArrayLike
from numpyro_dgp.inference.fit_identity import FitIdentity
from numpyro_dgp.inference.parameter_files import (
    entries_of,
    params_of,
    read_arrays,
    require_dicts,
    require_file_path,
    write_arrays,
)

__all__ = ["Record"]

_PARAMS = "params/"


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """The state of a search: evaluations so far, pending points, and the last fit.

    Args:
        X: inputs in the order of evaluation (N, D), in double precision.
        y: values of the simulator (N,), in its units.
        rounds: the round in which each was chosen (N,); 0 for the initial design and for points of one's own.
        acquisition: the acquisition at the points of that round together (N,); NaN in round 0.
        seconds: that the simulator took (N,).
        search_seconds: that the fit and the search of that round took (N,).
        pending: the points to evaluate next (P, D).
        pending_round: their round.
        pending_acquisition: the acquisition there.
        pending_seconds: that their search took.
        params: parameters of the last fit; none before the first.
        fitted_round: the round of that fit.
        fitted_rows: how many rows it saw.
        units: location and scale of y in that fit (2,).
        key: the numbers of the search's PRNG key.
        identity: the settings of the search.

    Raises:
        ValueError: by :meth:`add`, values or points that are not finite numbers, or more values than there are pending
            points; by :meth:`load`, a file with other contents.

    Example:
        >>> import numpy as np
        >>> import numpyro_dgp as dgp
        >>> record = dgp.design.Record(pending=np.array([[0.1], [0.9]]))
        >>> record = record.add([3.0])  # the value at the first of them
        >>> print(record.X, record.y, record.pending)
        [[0.1]] [3.] [[0.9]]
    """

    X: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))
    y: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    rounds: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))
    acquisition: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    seconds: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    search_seconds: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    pending: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))
    pending_round: int = 0
    pending_acquisition: float = np.nan
    pending_seconds: float = 0.0
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fitted_round: int = 0
    fitted_rows: int = 0
    units: np.ndarray = dataclasses.field(default_factory=lambda: np.array([0.0, 1.0]))
    key: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2, np.uint32))
    identity: FitIdentity = dataclasses.field(default_factory=FitIdentity)

    __repr__ = brief

    def add(self, y: ArrayLike, X: ArrayLike | None = None, *, seconds: float = np.nan) -> Record:
        """The record with more values.

        Args:
            y: values (K,) at the first K pending points, in the units of the simulator.
            X: points of one's own (K, D) instead, such as runs that were there before; pending points stay.
            seconds: that each of them took.

        Raises:
            ValueError: values or points that are not finite numbers, more values than there are pending points, or
                points of another shape. Bounds are checked by the search that continues from the record.
        """
        values = np.asarray(known_numbers("values", y), float)
        values = values[None] if values.ndim == 0 else values
        if values.ndim != 1 or not np.isfinite(values).all():
            what = f"shape {values.shape}" if values.ndim != 1 else f"{values[~np.isfinite(values)][0]}"
            raise expected(
                "finite values of shape (K,)", what, "drop failed runs, or give them a bad value of the others' size"
            )
        count = len(values)
        if X is None:
            expect(
                count <= len(self.pending),
                f"at most {len(self.pending)} values, one per pending point",
                count,
                "pass others with X=",
            )
            rows, pending = self.pending[:count], self.pending[count:]
            facts = self.pending_round, self.pending_acquisition, self.pending_seconds
        else:
            rows, pending = np.asarray(known_numbers("points X", X), float), self.pending
            facts = 0, np.nan, 0.0
            if rows.shape != (count, self.pending.shape[1]):
                raise expected(
                    f"points X of shape {(count, self.pending.shape[1])}",
                    rows.shape,
                    "one row per value; a single one is x[None, :]",
                )
            require_finite("points X", rows, "leave out runs whose inputs are not known")

        def grown(old: np.ndarray, value: float) -> np.ndarray:
            return np.append(old, np.full(count, value, old.dtype))

        return dataclasses.replace(
            self,
            X=np.concatenate([self.X.reshape(-1, self.pending.shape[1]), rows]),
            y=np.append(self.y, values),
            rounds=grown(self.rounds, facts[0]),
            acquisition=grown(self.acquisition, facts[1]),
            seconds=grown(self.seconds, seconds),
            search_seconds=grown(self.search_seconds, facts[2]),
            pending=pending,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to one ``.npz`` file; an interruption leaves the old file or the new one.

        Args:
            path: the file; its folder is made if there is none.

        Raises:
            ValueError: something else than a path, or a folder.
        """
        require_file_path("path", path, "search.npz")
        arrays = dict(vars(self))
        params, identity = arrays.pop("params"), arrays.pop("identity")
        require_dicts(params)
        entries = {_PARAMS + name: value for name, value in entries_of(params).items()}
        write_arrays(path, arrays | entries | {"identity": np.array(identity.to_json())})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """Read what :meth:`save` wrote.

        Args:
            path: the file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file was written by something else, or is damaged.
        """
        require_file_path("path", path, "search.npz")
        arrays = read_arrays(path, "choose another name")
        params = {name.removeprefix(_PARAMS): arrays.pop(name) for name in list(arrays) if name.startswith(_PARAMS)}
        names = {field.name for field in dataclasses.fields(cls)} - {"params"}
        expect(
            arrays.keys() == names,
            "a file of Record.save or design.loop",
            f"other arrays in {path}",
            "choose another name",
        )
        numbers: dict[str, Any] = {name: value.item() if value.ndim == 0 else value for name, value in arrays.items()}
        numbers["identity"] = FitIdentity.from_json(str(arrays["identity"]))
        return cls(**numbers, params=params_of(path, params))
