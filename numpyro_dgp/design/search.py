"""Sequential search: the next points to evaluate, given a record of all evaluations.

:func:`loop` runs a simulator that is a Python function, from the initial design until the budget is used.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from numpyro_dgp._checks import expect, expect_kind, expected, require_count, require_key
from numpyro_dgp._data import known_numbers
from numpyro_dgp._fields import Checked, count, flag
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.design.designs import maximin
from numpyro_dgp.design.input_space import Box, as_box, generator
from numpyro_dgp.design.maximise import (
    NOT_TRACEABLE,
    Acquisition,
    CompiledAcquisition,
    Programs,
    candidate_points,
    compiled_alone,
    maximum,
    sizes_of,
)
from numpyro_dgp.design.posterior_acquisition import require_function_of_points
from numpyro_dgp.design.search_record import Record
from numpyro_dgp.design.surrogate import (
    Data,
    Surrogate,
    filled_rows,
    made_surrogate,
    require_maker,
)
from numpyro_dgp.functions.layer_starts import Standardizer
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.inference.checkpoints import LockedError, locked
from numpyro_dgp.inference.fit_identity import FitIdentity, array_digest, digest, versions
from numpyro_dgp.inference.parameter_files import require_file_path
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["Fitted", "Search", "Seen", "loop"]

_NEAR = 128
"""Candidates near the best points so far."""

_STEPS = 200
"""Steps of an ascent at most."""


class Seen(NamedTuple):
    """The evaluations so far, as an acquisition receives them.

    Arrays are padded to 64, 128, 256, ... rows with copies of the last one.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> X, y, known = jnp.zeros((2, 1)), jnp.array([3.0, 3.0]), jnp.array([True, False])
        >>> print(dgp.design.Seen(X, y, known, best=y.min()).best)
        3.0
    """

    X: Array
    """Inputs (R, D)."""
    y: Array
    """Values (R,), in the units of the program."""
    known: Array
    """Which rows are evaluations (R,), and no copies."""
    best: Array
    """The smallest of the values, or the largest with ``minimise=False``."""

    def __repr__(self) -> str:
        return brief(self)


class Fitted(NamedTuple):
    """A record and the fit to it.

    Example:
        >>> import numpyro_dgp as dgp
        >>> dgp.design.Fitted._fields
        ('record', 'posterior', 'units', 'seen')
    """

    record: Record
    """The record, with the parameters of the fit."""
    posterior: Posterior
    """The posterior of the program ``(X, y)``, whose values are in ``units``."""
    units: Standardizer
    """From values of the simulator to those of the program; ``units.inverse`` goes back."""
    seen: Seen
    """The evaluations in the units of the program."""

    def __repr__(self) -> str:
        return brief(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Search(Checked):
    r"""A sequential search: fit a program, maximise an acquisition, propose points; for simulators that run elsewhere.

    Each round is a pure function of the record::

        search = dgp.design.Search(model, dgp.guides.InducingPoint, bounds, acquisition)
        record = search.start(key)                      # record.pending is the initial design
        while ...:
            record = record.add(run(record.pending))    # wherever that is
            record = search.propose(record)             # record.pending is what to run next
            record.save("search.npz")                   # dgp.design.Record.load reads it

    ``dgp.design.loop(search, simulator, key, budget=50)`` does this with a simulator that is a Python function.

    In a round without a refit, hyperparameters are fixed and q(v) of the last layers, ``Full()``, are updated to all
    rows: by natural-gradient steps from the last fit, the first of which is exact for one layer and Gaussian noise, or
    exactly under ``Collapsed``. A refit starts at the parameters of the last one. Arrays are padded to 64, 128, 256,
    ... rows, and padding is masked in the plate of the rows, so that programs are compiled once per doubling.

    A program with an argument ``runs`` receives the inputs of all runs, also for predictions, so that inducing inputs
    can be at the runs, ``dgp.Points(runs)``, as simulators without noise need. With a guide of NumPyro, such as
    ``AutoNormal`` or ``AutoDelta``, the program is that of :func:`dgp.for_mcmc`: the last layer is integrated out where
    its likelihood is Gaussian, the guide covers all other sites, and the posterior consists of 100 draws.

    Args:
        model: the program ``model(X, y=None)`` or ``model(X, y=None, runs=None)``, with all values of rows in a
            ``numpyro.plate`` of the rows.
        guide: makes a guide from a program: ``dgp.guides.InducingPoint``, a function ``lambda model: ...``, or a class
            of NumPyro's autoguides.
        bounds: lowest and highest inputs (D, 2), in the units of the program's X, or a :class:`Box`.
        acquisition: from the posterior, the evaluations (:class:`Seen`) and a key to a function of x (q, D) that is
        maximised:
            ``lambda posterior, seen, key: dgp.design.LogExpectedImprovement(posterior, key, best=seen.best)``. It is
            traced once if it consists of JAX operations, and otherwise in every round.
        q: points of a round, chosen together.
        initial: how many points the initial design has, 5 D by default, by :func:`maximin`; or the points (N, D).
        minimise: whether small values are good; it decides what ``seen.best`` is and where candidates are added.
        standardise: whether the program receives standardised values, by the rows of the last fit.
        refit_every: rounds from one fit to the next.
        num_steps: of the first fit.
        refit_steps: of the others.
        condition_steps: natural-gradient steps in other rounds; one is enough for one layer and Gaussian noise.
        num_particles: draws of the hidden layers in a step.
        optimizer: of optax or NumPyro; by default ``NaturalGradient(guide, 0.1, optax.adam(0.01))`` where q(v) of the
            last layers are Gaussians, and else Adam.
        num_candidates: of :func:`maximise`.
        num_starts: of :func:`maximise`.

    Raises:
        ValueError: not a program, a guide instead of a function that makes one, an acquisition without three
            arguments, bounds as :class:`Box`, numbers that are not positive, an initial design outside of the bounds or
            with less than two points, a program without a plate of its rows, a guide with parameters per row, or
            without ``Full()`` where rounds have no refit; by its methods, a record of another search or with points
            outside of the bounds.

    Example:
        >>> import jax, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> alm = lambda posterior, seen, key: dgp.design.ALM(posterior, key)
        >>> search = dgp.design.Search(model, dgp.guides.InducingPoint, [[0.0, 1.0]], alm, initial=[[0.2], [0.5]],
        ...                            num_steps=2)
        >>> record = search.start(jax.random.key(0))
        >>> print(search.propose(record.add(record.pending[:, 0] ** 2)).pending)  # where it knows least
        [[1.]]
    """

    model: Callable[..., Any]
    guide: Callable[[Callable[..., Any]], Guide]
    bounds: ArrayLike | Box
    acquisition: Callable[[Posterior, Seen, Array], Acquisition]
    q: int = count(1, kw_only=True)
    initial: int | ArrayLike | None = dataclasses.field(default=None, kw_only=True)
    minimise: bool = flag(True, kw_only=True)
    standardise: bool = flag(True, kw_only=True)
    refit_every: int = count(5, kw_only=True)
    num_steps: int = count(1000, kw_only=True)
    refit_steps: int = count(500, kw_only=True)
    condition_steps: int = count(2, kw_only=True)
    num_particles: int = count(1, kw_only=True)
    optimizer: Any = dataclasses.field(default=None, kw_only=True)
    num_candidates: int = count(1024, kw_only=True)
    num_starts: int = count(8, kw_only=True)

    __repr__ = brief

    def __post_init__(self) -> None:
        for name, value in (("the model", self.model), ("the acquisition", self.acquisition)):
            expect(callable(value), f"{name}, a function", type(value).__name__)
        _require_three_arguments(self.acquisition)
        super().__post_init__()
        object.__setattr__(self, "bounds", as_box(self.bounds))
        self.box.require_resolved()
        require_maker(self.guide)
        if isinstance(self.initial, int | np.integer):
            require_count("initial", self.initial, "5 times the number of columns, at least 2")
            _require_two(int(self.initial))
        elif self.initial is not None:
            points = self.box.require_points("initial", known_numbers("initial", self.initial))
            _require_two(len(points))
            object.__setattr__(self, "initial", points)

    @property
    def box(self) -> Box:
        """The bounds as a box."""
        return as_box(self.bounds)

    def start(self, key: Array) -> Record:
        """The record of a search that has evaluated nothing; its pending points are the initial design.

        Args:
            key: PRNG key; with the values of the simulator it fixes the search.

        Raises:
            ValueError: as :class:`Search`, for the program and the guide.
        """
        require_key(key)
        initial = 5 * self.box.dims if self.initial is None else self.initial
        if isinstance(initial, int | np.integer):
            initial = maximin(self.box, int(initial), jax.random.fold_in(key, 0))
        numbers = np.asarray(jax.random.bits(key, (2,), jnp.uint32))
        return Record(X=np.zeros((0, self.box.dims)), pending=np.asarray(initial), key=numbers, identity=self.identity)

    def propose(self, record: Record) -> Record:
        """The record with the next points to evaluate as ``pending``; as it is where it has some.

        Args:
            record: of this search.

        Raises:
            ValueError: as :meth:`fitted`, and as :func:`maximise`.
        """
        self.require_own(record)
        if len(record.pending):
            return record
        began = time.perf_counter()
        fitted = self.fitted(record)
        record = fitted.record
        keys = self._keys(record)
        program = self._acquisition_of(fitted, keys[2])
        rng, near = generator(keys[3]), self._near_best(record, keys[4])
        found = maximum(program, self.box, candidate_points(self.box, self.q, self.num_candidates, near, rng), _STEPS)
        seconds = time.perf_counter() - began
        return dataclasses.replace(
            record, pending=found.x, pending_round=self._round(record), pending_acquisition=found.value,
            pending_seconds=seconds,
        )  # fmt: skip

    def fitted(self, record: Record) -> Fitted:
        """The posterior given all values so far, after a fit where one is due.

        Args:
            record: of this search, with two values at least.

        Raises:
            ValueError: a record of another search, no two values, points outside of the bounds or without whole numbers
                in their columns, a fit that becomes NaN.
        """
        self.require_own(record)
        expect(len(record.y) >= 2, "at least two values", len(record.y), "call record.add(values) first")
        self.box.require_points("X of the record", record.X)
        keys, now = self._keys(record), self._round(record)
        if not record.params or now - record.fitted_round >= self.refit_every:
            loc, scale = self._units_of(record.y)
            units = np.array([loc, scale])
            data = self._data(record, units)
            steps = self.refit_steps if record.params else self.num_steps
            learned = self._surrogate.fit(record.params or None, keys[0], steps, data)
            record = dataclasses.replace(
                record, params=learned, units=units, fitted_round=now, fitted_rows=len(record.y)
            )
        data = self._data(record, record.units)
        is_fitted = record.fitted_rows == len(record.y)
        found = self._surrogate.conditioned(record.params, keys[1], data, is_fitted=is_fitted)
        best = jnp.min(data.y) if self.minimise else jnp.max(data.y)
        posterior = self._surrogate.posterior(found, data)
        return Fitted(record, posterior, Standardizer(*map(float, record.units)), Seen(*data, best))

    def require_own(self, record: Record) -> None:
        """Raise unless a record belongs to this search; the error names the first difference."""
        difference = self.identity.difference(record.identity)
        expect(
            difference is None,
            "a record of this search",
            "one of another",
            f"{difference}: go on with the settings of the record, or start a new one",
        )

    @cached_property
    def identity(self) -> FitIdentity:
        """The identity of the search: its settings, and the operations of a fit."""
        initial = self.initial
        facts = self.box.facts() | {
            "initial": array_digest(initial) if isinstance(initial, np.ndarray) else initial,
            **{name: vars(self)[name] for name in _SETTINGS},
        }
        whole = digest(self._surrogate.operations())
        programs: dict[str, str | list[str]] = {
            "the program of a fit (model, guide, optimiser)": whole.operations,
            "a constant of a fit (of a kernel, a likelihood, inducing inputs, ...)": whole.constants,
        }
        return FitIdentity({name: str(value) for name, value in facts.items()}, programs, versions())

    @cached_property
    def _surrogate(self) -> Surrogate:
        every_round = self.refit_every == 1
        return made_surrogate(
            self.model, self.guide, self.box, self.optimizer, self.num_particles, self.condition_steps, every_round
        )

    @cached_property
    def _programs(self) -> Programs:
        """The acquisition as a function of arrays, the same in all rounds."""

        def acquired(arrays: tuple[Any, Seen, Array], x: Array) -> Any:
            found, seen, key = arrays
            return self._acquire(self._surrogate.posterior(found, Data(*seen[:3])), seen, key)(x)

        return Programs(acquired)

    def _acquisition_of(self, fitted: Fitted, key: Array) -> CompiledAcquisition:
        arrays = self._surrogate.found(fitted.posterior), fitted.seen, key
        sizes = sizes_of(self.num_candidates, self.num_starts)
        try:
            return self._programs.at(arrays, self.box, self.q, *sizes)
        except NOT_TRACEABLE:
            return compiled_alone(self._acquire(fitted.posterior, fitted.seen, key), self.box, self.q, *sizes)

    def _acquire(self, posterior: Posterior, seen: Seen, key: Array) -> Acquisition:
        found: Acquisition = require_function_of_points(self.acquisition(posterior, seen, key))
        return found

    def _round(self, record: Record) -> int:
        """The number of the round that comes next."""
        return int(record.rounds.max()) + 1

    def _keys(self, record: Record) -> Array:
        key = jax.random.wrap_key_data(jnp.asarray(record.key), impl="threefry2x32")
        return jax.random.split(jax.random.fold_in(key, self._round(record)), 5)

    def _units_of(self, y: np.ndarray) -> tuple[float, float]:
        if not self.standardise:
            return 0.0, 1.0
        units = Standardizer.fit(y)
        return float(np.asarray(units.loc)), float(np.asarray(units.scale))

    def _data(self, record: Record, units: np.ndarray) -> Data:
        return Data(*filled_rows(record.X, (record.y - units[0]) / units[1]))  # (y - loc) / scale

    def _near_best(self, record: Record, key: Array) -> np.ndarray:
        """Points (K, q, D) near the best ones so far."""
        order = np.argsort(record.y if self.minimise else -record.y, kind="stable")[: 3 * self.q]
        rng = generator(key)
        chosen = record.X[rng.choice(order, (min(_NEAR, self.num_candidates // 2), self.q))]
        # 1e-3 to 1e-1 of the range
        width = 10.0 ** rng.uniform(-3, -1, (len(chosen), self.q, 1)) * (self.box.high - self.box.low)
        moved = self.box.snapped(chosen + width * rng.normal(size=chosen.shape))
        moved[..., self.box.categories] = chosen[..., self.box.categories]
        return moved


def _require_three_arguments(acquisition: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(acquisition)
    except ValueError:  # compiled code without one
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise expected(
            "acquisition(posterior, seen, key)",
            f"one that takes {signature}",
            "lambda posterior, seen, key: dgp.design.LogExpectedImprovement(posterior, key, best=seen.best)",
        ) from error


def _require_two(count: int) -> None:
    expect(count >= 2, "initial of at least 2 points", count, "initial=10 makes some")


_SETTINGS = ("q", "minimise", "standardise", "refit_every", "num_steps", "refit_steps", "condition_steps",
             "num_particles", "num_candidates", "num_starts")  # fmt: skip


def loop(
    search: Search,
    simulator: Callable[[np.ndarray], Any],
    key: Array,
    *,
    budget: int,
    path: str | os.PathLike[str] | None = None,
    progress_bar: bool = True,
) -> Fitted:
    """Run a simulator at the points that a search proposes, up to a number of evaluations.

    The initial design is evaluated; then every round fits or conditions the program, maximises the acquisition and
    evaluates the points, see :class:`Search`. With ``path`` the record is written atomically after every evaluation.
    The same call continues from there, after an interruption or with a larger budget, with bit-identical results on the
    same machine.

    Args:
        search: the program, the guide, the bounds, the acquisition and their settings.
        simulator: from one point (D,), in double precision, to one number.
        key: PRNG key.
        budget: total number of evaluations, including the initial design and the record.
        path: the file of the record; ``None`` for none.
        progress_bar: show a progress bar.

    Returns:
        The record, the posterior given all of it, its units, and the evaluations (:class:`Seen`).

    Raises:
        ValueError: as :class:`Search` and :func:`maximise`; not a search; a budget below two; a simulator that does not
            return a finite number; a file of another search, a damaged one, or one that another process uses or that
            cannot be written. Errors of the simulator pass through, with a note of the point and of the saved record.

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
    expect(budget >= 2, "a budget of at least 2, what a fit needs", budget, "try 50")
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
