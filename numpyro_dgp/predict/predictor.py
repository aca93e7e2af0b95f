r"""Predictions of a fit: one compiled run of the program per posterior sample, at the rows of a call.

**Independent rows.** The program is traced on shapes at two small numbers of rows, and
:mod:`numpyro_dgp.jaxprs.row_by_row` compares the two: this finds the arguments with one value per row, and whether rows
are predicted independently of each other.

**Padding and batches.** A compiled program is for one number of rows. Where rows are independent, inputs are padded to
one of a few sizes with copies of the last row, whose predictions are dropped, or they are predicted in batches.

**Uncertain inputs.** Where the inputs are normal around X with variances V, the prediction is a mixture over them too.
Posterior sample s has the inputs

.. math:: x_{snd} = X_{nd} + \sqrt{V_{nd}}\, \Phi^{-1}\bigl((t_{sd} + u_d) \bmod 1\bigr), \qquad
          u_d \sim \mathrm{Uniform}[0, 1]

with points t of Sobol's sequence, which cover the distribution of the inputs evenly. All rows share the same S points,
so the prediction of a row does not depend on the other rows, and predictions are smooth in X.

Source: Girard et al. (2003) for the prediction; Cranley and Patterson (1976) for the points.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import tqdm

from numpyro_dgp._checks import expect, expected, inside_transformation, is_concrete, require_key, violated, with_checks
from numpyro_dgp._compiled import Compiled, one_thread
from numpyro_dgp._data import as_floats
from numpyro_dgp._numpyro import apart
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.calls import require_conditionals
from numpyro_dgp.jaxprs.argument_indices import ArgumentIndices, require_inside
from numpyro_dgp.jaxprs.row_by_row import row_axes
from numpyro_dgp.likelihoods.outcomes import Range
from numpyro_dgp.math.linalg import safe_sqrt
from numpyro_dgp.math.quadrature import shifted_normals, sobol_points
from numpyro_dgp.predict.draws import DrawnSite, IndependentDraws, over_draws
from numpyro_dgp.predict.fitted import Fit, Options, Target, as_data, is_array, require_arguments

__all__ = [
    "ALL_COMPARED",
    "IndependentRows",
    "Predictor",
    "Quantity",
    "RowLayout",
    "at_uncertain_inputs",
    "filled",
    "in_batches",
    "round_up",
]

_FEW = 1, 5, 10, 20, 40, 70, 100
_QUARTERS = 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40


class Quantity(NamedTuple):
    """A predicted quantity.

    Args:
        of_draw: a function of :mod:`~numpyro_dgp.predict.quantities`.
        settings: its first arguments.
        finish: from the quantities of all draws, along the first axis, to the result; ``None`` to leave them.
        needs_site: whether it is of a single observed site.
        observations: how many of the arguments come before those of the model.
        leading: how many axes ``finish`` puts before those of one draw.
        num_samples: the number of draws by default; fewer where ``samples`` has fewer.
        every: that many also where all are the same.
    """

    of_draw: Callable[..., Any]
    settings: tuple[Any, ...] = ()
    finish: Callable[[Any], Any] | None = None
    needs_site: bool = True
    observations: int = 0
    leading: int = 0
    num_samples: int = 100
    every: bool = False

    def axes_of_rows(self, of_draw: Sequence[int | None]) -> tuple[int | None, ...]:
        """The axis of rows of every result, given that of everything computed from one draw."""
        leading = self.leading if self.finish else 1
        axes = tuple(None if axis is None else axis + leading for axis in of_draw)
        return axes[:1] if self.finish else axes


class RowLayout(NamedTuple):
    """The axes of the rows in the arguments and results of a prediction.

    Args:
        total: the number of rows, N.
        arguments: for every array argument, whether its first axis is that of the rows.
        results: the axis of rows of every result, or ``None``.
        size: how many rows the program runs at.
        in_plates: whether the program draws all that it draws per row in the plates of the rows.
    """

    total: int
    arguments: tuple[bool, ...]
    results: tuple[int | None, ...]
    size: int
    in_plates: bool

    @property
    def are_found(self) -> bool:
        """Whether the results have these rows too; an argument with one row may also be a table with one row."""
        return not self.results or any(axis is not None for axis in self.results)

    def take(self, arrays: Sequence[Any], start: int = 0) -> list[Any]:
        """``size`` rows of the arguments from row ``start`` on; beyond the end, copies of the last one."""
        index = np.minimum(np.arange(start, start + self.size), self.total - 1)
        return [_on_its_device(a, index) if by_row else a for a, by_row in zip(arrays, self.arguments, strict=True)]


def round_up(count: int) -> int:
    """The padded number of rows for ``count`` rows: round numbers, above 100 at most a quarter more.

    Example:
        >>> [round_up(n) for n in (1, 3, 9, 200, 301, 1000, 10_001)]
        [1, 5, 10, 200, 350, 1000, 12500]
    """
    if count <= _FEW[-1]:
        return next(n for n in _FEW if n >= count)
    decade = 10 ** (len(str(count - 1)) - 1)
    return next(n for n in (quarters * decade // 4 for quarters in _QUARTERS) if n >= count)


def filled(run: Callable[..., Any], arrays: Sequence[Any], rows: RowLayout) -> Any:
    """``run(arrays, None)`` with padded rows."""
    found, tree = jax.tree.flatten(run(rows.take(arrays), None))
    # Slices of arrays in NumPy need no program for every number of rows.
    kept = [_slice(np.asarray(value), axis, rows.total) for value, axis in zip(found, rows.results, strict=True)]
    return jax.tree.unflatten(tree, map(jnp.asarray, kept))


def in_batches(run: Callable[..., Any], arrays: Sequence[Any], rows: RowLayout, progress_bar: bool) -> Any:
    """``run(arrays, b)`` for every batch b of rows, concatenated in host memory.

    Args:
        run: from arguments and the number of the batch to results.
        arrays: the arguments.
        rows: which of them have rows, and how many are a batch.
        progress_bar: show progress.
    """
    size = rows.size
    out: list[np.ndarray] = []
    for start in tqdm.trange(0, rows.total, size, desc="batches of rows", disable=not progress_bar):
        batch = np.uint32(start // size)
        found, tree = jax.tree.flatten(run(rows.take(arrays, start), batch))
        stop = min(size, rows.total - start)
        for i, (value, axis) in enumerate(zip(map(np.asarray, found), rows.results, strict=True)):
            if start == 0:
                shape = tuple(rows.total if j == axis else n for j, n in enumerate(value.shape))
                out.append(np.empty(shape, value.dtype))
            if axis is None:
                out[i] = value
            else:
                _slice(out[i], axis, start + stop, start)[...] = _slice(value, axis, stop)
    return jax.tree.unflatten(tree, out)


def _on_its_device(array: Any, index: np.ndarray) -> Array | np.ndarray:
    """Rows of an array, in host memory unless the array was put on one device."""
    rows = np.asarray(array)[index]
    placed = getattr(array, "committed", False) and len(array.devices()) == 1
    return jax.device_put(rows, *array.devices()) if placed else rows


def _slice(array: np.ndarray, axis: int | None, stop: int, start: int = 0) -> Array | np.ndarray:
    return array if axis is None else array[(slice(None),) * axis + (slice(start, stop),)]


_SIZES_TRIED = 5, 7
ALL_COMPARED = 500
"""Up to this number of rows, the program is compared at every number of rows that is asked for or run: it may branch on
them, ``if len(X) > 100``. Above, loops over blocks of rows make one program look different, and a branch is not seen.
"""

_Traced = tuple[Any, list[DrawnSite]]


class IndependentRows:
    """Whether rows of a prediction are independent, and for which numbers of rows the program is the same.

    Args:
        run: from a key, one draw of MCMC and the arguments to the prediction.
        draw: shapes of a key and a draw.
        arrays: shapes of the arguments, with ``None`` in the places of those that are no arrays.
        by_row: which of them have rows along the first axis.
        plates: the names of the plates of every predicted site.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        draw: tuple[Array, Any],
        arrays: Sequence[Any],
        by_row: tuple[bool, ...],
        plates: tuple[frozenset[str], ...],
    ) -> None:
        self.run, self.draw, self.arrays, self.by_row, self.plates = run, draw, arrays, by_row, plates
        self.rows: RowLayout | None = None
        self._few: _Traced | None = None
        self._compared: dict[int, bool] = {}
        numbers = [a for a, own in zip(arrays, by_row, strict=True) if own]
        if numbers and not any(jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) for a in numbers):
            self._few, more = map(self._traced, _SIZES_TRIED)
            self.rows = self._compare(more)

    def at(self, count: int) -> bool:
        """Whether the program, as far as tracing shows, is the same at this number of rows."""
        if count > ALL_COMPARED or count in _SIZES_TRIED:
            return True
        if count not in self._compared:
            self._compared[count] = self._compare(self._traced(count)) is not None
        return self._compared[count]

    def _traced(self, count: int) -> _Traced | None:
        tried = [
            None if a is None else jax.ShapeDtypeStruct((count, *a.shape[1:]) if own else a.shape, a.dtype)
            for a, own in zip(self.arrays, self.by_row, strict=True)
        ]
        try:
            with warnings.catch_warnings(), IndependentDraws() as draws:
                warnings.simplefilter("ignore")  # given at the rows that were asked for
                return jax.make_jaxpr(self.run)(*self.draw, tried), draws.sites
        except Exception:  # whatever it is that a program raises which is made for one number of rows
            return None

    def _compare(self, other: _Traced | None) -> RowLayout | None:
        if self._few is None or other is None or len(self._few[1]) != len(other[1]):
            return None
        in_plates = True
        for a, b in zip(self._few[1], other[1], strict=True):
            if a.name != b.name or a.event_shape != b.event_shape or len(a.batch_shape) != len(b.batch_shape):
                return None
            differ = [n != m for n, m in zip(a.batch_shape, b.batch_shape, strict=True)]
            if sum(differ) > 1:
                return None
            in_plates &= not any(differ) or any(these and these <= a.plates for these in self.plates)
        axes = row_axes(self._few[0], other[0])
        return None if axes is None else RowLayout(0, self.by_row, tuple(axes), 0, in_plates)


_ERRORS = "standard normal errors of the inputs"  # no site is called so


def at_uncertain_inputs(
    fit: Fit, quantity: Quantity, X_variance: Any, key: Array, num_samples: int, args: Any
) -> tuple[Quantity, Any, dict[str, Array]]:
    """The quantity at inputs that are drawn anew for each draw of the latent variables.

    Args:
        fit: the fitted program.
        quantity: what is predicted; the inputs are the first argument of the model.
        X_variance: variances, of a shape that broadcasts to that of the inputs.
        key: PRNG key.
        num_samples: the number of draws, S.
        args: arguments of the model, behind those of the quantity.

    Returns:
        A quantity, its arguments, and what it needs among the draws, (S, ...).

    Raises:
        ValueError: no inputs, variances that do not fit to them, or a program with an argument of that name.
    """
    place = quantity.observations
    _require_free_name(fit.model)
    X: Any = args[place] if len(args) > place else None
    if not is_array(X) or not jnp.issubdtype(X.dtype, jnp.floating) or not X.ndim:
        got = "none" if X is None else f"{X.dtype} {X.shape}" if is_array(X) else type(X).__name__
        raise expected(
            "an array of real inputs as the first argument of the program with X_variance=",
            got,
            "X_variance is the variance of each of its entries",
        )
    variance = as_floats("X_variance", X_variance)
    try:
        variance = jnp.broadcast_to(variance, X.shape).astype(X.dtype)
    except ValueError:
        raise expected(
            f"X_variance of a shape that broadcasts to the inputs {X.shape}",
            variance.shape,
            "one variance for all, for every column (D,), every row (N, 1), or every entry (N, D)",
        ) from None
    if violated(lambda v: (v >= 0) & (v < np.inf), variance):
        raise expected("X_variance of 0 or more", f"{float(variance.min())}", "the squared error, 0 for none")
    columns = X.shape[1:]
    points = sobol_points(1 << (num_samples - 1).bit_length(), 0, math.prod(columns))[:num_samples]  # t (S, D)
    shift = jax.random.uniform(jax.random.fold_in(key, 0), points.shape[1:], X.dtype)  # u
    # Phi^-1((t + u) mod 1) (S, D)
    errors = shifted_normals(jnp.asarray(points, X.dtype), shift).reshape(num_samples, *columns)
    moved = quantity._replace(of_draw=_at_moved, settings=(quantity,), observations=place + 1)
    return moved, (*args[:place], safe_sqrt(variance), *args[place:]), {_ERRORS: errors}


def _require_free_name(model: Any) -> None:
    try:
        names = inspect.signature(model).parameters
    except (TypeError, ValueError):
        return
    expect(
        "X_variance" not in names,
        "a program without an argument X_variance",
        "one that has it",
        "give it another name, since X_variance=... of a prediction are the variances of its inputs",
    )


def _at_moved(
    quantity: Quantity, fit: Fit, target: Target, key: Array, sample: dict[str, Array], args: Any, kwargs: Any
) -> Any:
    """The quantity of one draw at inputs moved by its errors."""
    sample = dict(sample)
    errors = sample.pop(_ERRORS)
    before, (scale, X, *rest) = args[: quantity.observations], args[quantity.observations :]
    moved = (*before, X + scale * errors, *rest)
    return quantity.of_draw(*quantity.settings, fit, target, key, sample, moved, kwargs)


_TRIED = 10
"""Draws that are looked at without compilation, for the reason of NaN."""


class _Program(NamedTuple):
    """The key of one compiled program.

    Args:
        quantity: what is predicted.
        num_samples: the number of draws, S.
        every: that many also where all are the same.
        treedef: the structure of the arguments of the program.
        constants: those of them that are no arrays, with ``None`` in the places of arrays.
        target: what is predicted.
    """

    quantity: Quantity
    num_samples: int
    every: bool
    treedef: Any
    constants: tuple[Any, ...]
    target: Target

    def arguments(self, arrays: list[Any]) -> Any:
        """Positional and keyword arguments of the program."""
        merged = [c if a is None else a for a, c in zip(arrays, self.constants, strict=True)]
        return jax.tree.unflatten(self.treedef, merged)


class _Seen(NamedTuple):
    """The analysis of a call with arguments of these shapes.

    Args:
        site: the observed site, if it is one.
        plates: of every predicted site.
        values: the range of y.
        sizes: lengths of the batch axes of predicted sites, of which one is that of the rows, unless that is 1.
        longest: no axis of rows is longer: neither a predicted site nor the first axis of an argument is.
    """

    site: str | None
    plates: tuple[frozenset[str], ...]
    values: Range | None
    sizes: tuple[int, ...]
    longest: int


class Predictor:
    """Predictions of one fit, with its compiled programs.

    Args:
        fit: the fitted program.
    """

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self._programs: dict[Any, Compiled] = {}
        self._calls: dict[Any, _Seen] = {}
        self._rows: dict[Any, IndependentRows] = {}
        self._indices: dict[Any, ArgumentIndices] = {}

    def __call__(
        self, quantity: Quantity, key: Array, options: Options, args: Any, kwargs: Any, X_variance: Any = None
    ) -> Any:
        """The quantity for S posterior samples.

        Args:
            quantity: what is predicted.
            key: PRNG key.
            options: how.
            args: arguments of the model, behind those of the quantity.
            kwargs: its keyword arguments.
            X_variance: variances of the inputs; ``None`` where they are known.

        Raises:
            ValueError: an option among the arguments; a check of the program that fails for these values, or NaN in
                its predictions (the program then runs again without compilation, which gives the error).
        """
        num_samples, samples = self._samples(quantity, options)
        args, kwargs = jax.tree.map(as_data, (args, kwargs))
        if X_variance is not None:
            require_key(key)
            quantity, args, errors = at_uncertain_inputs(self.fit, quantity, X_variance, key, num_samples, args)
            samples |= errors
        found = self._run(quantity, num_samples, samples, key, options, args, kwargs)
        leaves = jax.tree.leaves(found)
        if is_concrete(found) and any(np.isnan(leaf).any() for leaf in leaves if _is_float(leaf)):
            seen = self._seen(args[quantity.observations :], kwargs, quantity.needs_site)
            target = Target(seen.site, seen.plates)
            for i, draw in enumerate(jax.random.split(key, num_samples)[:_TRIED]):
                sample = {name: values[i] for name, values in samples.items()}
                _of_draw(quantity, self.fit, target, draw, sample, args, kwargs)
        return found

    def _run(
        self,
        quantity: Quantity,
        num_samples: int,
        samples: dict[str, Array],
        key: Array,
        options: Options,
        args: Any,
        kwargs: Any,
    ) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        require_arguments(key, leaves)
        expect(
            options.batch_size is None or (is_concrete(key, leaves) and not inside_transformation()),
            "arrays with batch_size=, whose batches are predicted one after the other",
            "traced ones",
            "under jax.jit, jax.grad or jax.vmap leave batch_size out",
        )
        arrays = [leaf if is_array(leaf) else None for leaf in leaves]
        constants = tuple(None if is_array(leaf) else leaf for leaf in leaves)
        seen = self._seen(args[quantity.observations :], kwargs, quantity.needs_site)
        target = Target(seen.site, seen.plates)
        every = quantity.every or options.num_samples is not None or bool(samples)
        name = _Program(quantity, num_samples, every, treedef, constants, target)
        if name not in self._programs:
            self._programs[name] = Compiled(partial(_predicted, self.fit, name))

        def run(arrays: list[Any], batch: Any) -> Any:
            sound, found = self._programs[name](key, samples, arrays, batch)
            if is_concrete(sound, key, samples, arrays) and not inside_transformation():
                self._require_sound(name, np.asarray(sound), key, samples, arrays, batch)
            return found

        rows = self._independent(name, key, samples, arrays, seen.sizes, options.batch_size)
        if options.batch_size is None:
            found = run(arrays, None) if rows is None else filled(run, arrays, rows)
        elif rows is not None and rows.in_plates:
            found = in_batches(run, arrays, rows, options.progress_bar)
        elif (seen.longest if rows is None else rows.total) <= options.batch_size:  # one batch, whatever its rows share
            found = jax.tree.map(np.asarray, run(arrays, None))
        else:
            _shapes_of(run, arrays, None)  # raises what is wrong with the call itself
            raise expected(
                "rows predicted independently for batch_size=",
                "a program whose rows may depend on each other",
                "leave batch_size out; look for f.joint, exact layers, sums over rows, or sites outside the plate",
            )
        if not any(map(_is_float, jax.tree.leaves(found))):  # labels and counts cannot be NaN
            whole = partial(_predicted, self.fit, name)
            _shapes_of(lambda key, samples: whole(key, samples, arrays, None), key, samples)
        return found

    def _require_sound(
        self, name: _Program, sound: np.ndarray, key: Array, samples: dict[str, Array], arrays: list[Any], batch: Any
    ) -> None:
        """Raise, or warn, where a check of a prediction failed, or an argument picks a row that an array does not have.

        Args:
            name: of the program.
            sound: whether all checks of each draw passed.
            key: PRNG key.
            samples: draws of MCMC.
            arrays: the arguments.
            batch: the number of the batch of rows.
        """
        inputs = key, samples, arrays, batch
        closed = self._programs[name].trace(*inputs)
        if closed.jaxpr not in self._indices:
            given = [a is arrays for a in inputs for _ in jax.tree.leaves(a)]
            self._indices[closed.jaxpr] = ArgumentIndices(closed, given)
        outside = self._indices[closed.jaxpr].outside(jax.tree.leaves(inputs))
        if sound.all() and not outside:
            return
        i = int(sound.argmin())
        sample = {site: values[i] for site, values in samples.items()}
        args, kwargs = name.arguments(arrays)
        draw, target = jax.random.split(key, name.num_samples)[i], name.target._replace(batch=batch)
        with numpyro.validation_enabled(not outside):  # the index is the reason of NumPyro's error
            _of_draw(name.quantity, self.fit, target, draw, sample, args, kwargs)
        require_inside(outside)

    def range(self, args: Any, kwargs: Any) -> Range:
        """The range of y in a call with such arguments."""
        args, kwargs = jax.tree.map(as_data, (args, kwargs))
        found = self._seen(args, kwargs, needs_site=True).values
        assert found is not None
        return found

    def thinned(self, num_samples: int) -> dict[str, Array]:
        """``num_samples`` of the MCMC draws, evenly spaced; empty for a guide.

        Raises:
            ValueError: there are fewer.
        """
        if self.fit.samples is None:
            return {}
        total = len(next(iter(self.fit.samples.values())))
        expect(num_samples <= total, f"num_samples of at most {total}, the number of MCMC draws", num_samples)
        index = np.linspace(0, total - 1, num_samples).astype(int)
        return {name: jnp.asarray(value)[index] for name, value in self.fit.samples.items()}

    def _samples(self, quantity: Quantity, options: Options) -> tuple[int, dict[str, Array]]:
        num_samples, samples = options.num_samples, self.fit.samples
        if num_samples is None:
            most = quantity.num_samples
            num_samples = most if samples is None else min(most, len(next(iter(samples.values()))))
        return num_samples, self.thinned(num_samples)

    def _seen(self, args: Any, kwargs: Any, needs_site: bool) -> _Seen:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        name = treedef, tuple((leaf.shape, leaf.dtype) if is_array(leaf) else leaf for leaf in leaves)
        if name not in self._calls or (needs_site and self._calls[name].site is None):
            call = self.fit.call(args, kwargs)
            require_conditionals(call, below=True)
            site = call.observed if needs_site or len(call.candidates) == 1 else None
            predicted = [call.sites[y]["fn"] for y in call.predicted]
            sizes = sorted({n for fn in predicted for n in fn.batch_shape if n > 1}, reverse=True)
            axes = [n for fn in predicted for n in fn.shape()] + [n for a in leaves for n in np.shape(a)[:1]]
            values = None if site is None else call.ranges[site]
            self._calls[name] = _Seen(site, call.plates, values, tuple(sizes), max(axes, default=1))
        return self._calls[name]

    @one_thread
    def _independent(
        self,
        name: _Program,
        key: Array,
        samples: Any,
        arrays: list[Any],
        sizes: tuple[int, ...],
        batch_size: int | None,
    ) -> RowLayout | None:
        """The layout of the rows of a call, if they are predicted independently and may be moved to the host. With
        ``batch_size`` a single row is found too."""
        given = [a for a in arrays if a is not None]
        traced = not is_concrete(given, key, samples) or inside_transformation()
        if traced or (batch_size is None and any(getattr(a, "committed", False) for a in given)):
            return None
        shapes = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        draw = jax.eval_shape(lambda: (key, {site: value[0] for site, value in samples.items()}))

        def run(key: Array, sample: Any, arrays: list[Any]) -> Any:
            args, kwargs = name.arguments(arrays)
            return _of_draw(name.quantity, self.fit, name.target, key, sample, args, kwargs)

        for count in sizes if batch_size is None else (*sizes, 1):
            # A program is another one at a single row, where axes of length 1 broadcast.
            size = min(count if count == 1 else max(batch_size or 2 * count, 2), round_up(count))
            if size == count and batch_size is None:
                continue
            by_row = tuple(a is not None and a.shape[:1] == (count,) for a in shapes)
            tails = tuple(
                None if a is None else (a.shape[own:], a.dtype) for a, own in zip(shapes, by_row, strict=True)
            )
            place = name, by_row, tails
            if place not in self._rows:
                self._rows[place] = IndependentRows(run, draw, shapes, by_row, name.target.plates)
            known = self._rows[place]
            rows = known.rows
            if rows is not None and (rows.are_found if count == 1 else known.at(count) and known.at(size)):
                return rows._replace(total=count, size=size, results=name.quantity.axes_of_rows(rows.results))
        return None


@one_thread
def _shapes_of(function: Callable[..., Any], *args: Any) -> Any:
    return jax.eval_shape(function, *args)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


@apart()
def _of_draw(
    quantity: Quantity, fit: Fit, target: Target, key: Array, sample: Mapping[str, Array], args: Any, kwargs: Any
) -> Any:
    """The quantity for one posterior sample, computed by a program that runs with its own handlers."""
    return quantity.of_draw(*quantity.settings, fit, target, key, sample, args, kwargs)


def _predicted(
    fit: Fit, program: _Program, key: Array, samples: dict[str, Array], arrays: list[Array | None], batch: Array | None
) -> Any:
    args, kwargs = program.arguments(arrays)
    of_draw = partial(_of_draw, program.quantity, fit, program.target._replace(batch=batch))
    width = max([len(a) for a in arrays if a is not None and a.ndim], default=1)
    dtype = jnp.result_type(jnp.float32, *(a for a in arrays if a is not None))
    draws = jax.random.split(key, program.num_samples), samples
    checked = with_checks(lambda key, sample: of_draw(key, sample, args, kwargs), hidden=True)
    sound, found = over_draws(checked, draws, width, dtype, every=program.every)
    return sound, found if program.quantity.finish is None else program.quantity.finish(found)
