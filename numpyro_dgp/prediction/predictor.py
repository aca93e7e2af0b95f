"""Predictions of a fit: one run of the program per draw, at the rows of a call, compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_dgp._checks import (
    inside_transformation,
    is_concrete,
    require_count,
    require_key,
    require_keywords,
    with_checks,
)
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.argument_indices import ArgumentIndices, require_inside
from numpyro_dgp.algebra.compiled import Compiled, one_thread
from numpyro_dgp.draws import over_draws
from numpyro_dgp.fitted import Fit, Target, as_data, is_array, require_arguments
from numpyro_dgp.model.call_checks import require_conditionals
from numpyro_dgp.model.other_rows import apart
from numpyro_dgp.model.outcomes import Range
from numpyro_dgp.prediction.independent_rows import IndependentRows
from numpyro_dgp.prediction.quantity import Options, Quantity
from numpyro_dgp.prediction.row_batches import Rows, filled, in_batches, round_up
from numpyro_dgp.prediction.uncertain_inputs import at_uncertain_inputs

__all__ = ["Predictor"]


_TRIED = 10
"""Draws that are looked at without compilation, for the reason of NaN."""


class _Seen(NamedTuple):
    """What a call of the program with arguments of these shapes predicts.

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

    def __call__(self, quantity: Quantity, key: Array, options: Options, args: Any, kwargs: Any) -> Any:
        """The quantity of S draws.

        Args:
            quantity: what is predicted.
            key: PRNG key.
            options: how.
            args: arguments of the model, behind those of the quantity.
            kwargs: its keyword arguments.

        Raises:
            ValueError: a misspelt option; what the program says of these values where it runs without being compiled,
                if a check of its fails or it predicts NaN.
        """
        require_keywords("Posterior", Options._fields, self.fit.model, kwargs)
        num_samples, samples = self._samples(options)
        args, kwargs = jax.tree.map(as_data, (args, kwargs))
        if options.X_variance is not None:
            require_key("Posterior", key)
            quantity, args, errors = at_uncertain_inputs(self.fit, quantity, options.X_variance, key, num_samples, args)
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
        if options.batch_size is not None:
            require_count("Posterior", "batch_size", options.batch_size, "10_000")
            if not is_concrete(key, leaves) or inside_transformation():
                raise ValueError(
                    "Posterior: expected arrays with batch_size=, whose batches are predicted one after the other, got "
                    "traced ones: under jax.jit, jax.grad or jax.vmap leave batch_size out"
                )
        arrays = [leaf if is_array(leaf) else None for leaf in leaves]
        constants = tuple(None if is_array(leaf) else leaf for leaf in leaves)
        seen = self._seen(args[quantity.observations :], kwargs, quantity.needs_site)
        target = Target(seen.site, seen.plates)
        every = options.every or options.num_samples is not None or bool(samples)
        name = quantity, num_samples, every, treedef, constants, target
        if name not in self._programs:
            self._programs[name] = Compiled(partial(_predicted, self.fit, *name))

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
            raise ValueError(
                "Posterior: expected rows that are predicted independently of each other with batch_size=, got a "
                "program in which they are not known to be: joint values (f.joint, exact layers), rows that are added "
                "up or compared, sites outside the plate of the rows, arguments in which rows are not the first axis, "
                "or numbers computed from how many rows there are: leave batch_size out"
            )
        if not any(map(_is_float, jax.tree.leaves(found))):  # labels and counts cannot be NaN
            whole = partial(_predicted, self.fit, *name)
            _shapes_of(lambda key, samples: whole(key, samples, arrays, None), key, samples)
        return found

    def _require_sound(
        self, name: Any, sound: np.ndarray, key: Array, samples: dict[str, Array], arrays: list[Any], batch: Any
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
        quantity, num_samples, _, treedef, constants, target = name
        i = int(sound.argmin())
        sample = {site: values[i] for site, values in samples.items()}
        args, kwargs = _arguments(treedef, constants, arrays)
        draw, target = jax.random.split(key, num_samples)[i], target._replace(batch=batch)
        with numpyro.validation_enabled(not outside):  # the index is the reason of what NumPyro would say
            _of_draw(quantity, self.fit, target, draw, sample, args, kwargs)
        require_inside("Posterior", outside)

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
        if num_samples > total:
            raise ValueError(
                f"Posterior: expected num_samples of at most {total}, the number of MCMC draws, got {num_samples}"
            )
        index = np.linspace(0, total - 1, num_samples).astype(int)
        return {name: jnp.asarray(value)[index] for name, value in self.fit.samples.items()}

    def _samples(self, options: Options) -> tuple[int, dict[str, Array]]:
        num_samples = options.num_samples
        if num_samples is None:
            samples = self.fit.samples
            num_samples = options.default
            num_samples = num_samples if samples is None else min(num_samples, len(next(iter(samples.values()))))
        require_count("Posterior", "num_samples", num_samples, "100")
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
        self, name: Any, key: Array, samples: Any, arrays: list[Any], sizes: tuple[int, ...], batch_size: int | None
    ) -> Rows | None:
        """Where the rows of a call are that runs at another number of rows, if they are predicted independently and may
        be moved to the host. With ``batch_size`` a single row is found too."""
        given = [a for a in arrays if a is not None]
        traced = not is_concrete(given, key, samples) or inside_transformation()
        if traced or (batch_size is None and any(getattr(a, "committed", False) for a in given)):
            return None
        quantity, _, _, treedef, constants, target = name
        shapes = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        draw = jax.eval_shape(lambda: (key, {site: value[0] for site, value in samples.items()}))

        def run(key: Array, sample: Any, arrays: list[Any]) -> Any:
            args, kwargs = _arguments(treedef, constants, arrays)
            return _of_draw(quantity, self.fit, target, key, sample, args, kwargs)

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
                self._rows[place] = IndependentRows(run, draw, shapes, by_row, target.plates)
            known = self._rows[place]
            rows = known.rows
            if rows is not None and (rows.are_found if count == 1 else known.at(count) and known.at(size)):
                return rows._replace(total=count, size=size, results=quantity.axes_of_rows(rows.results))
        return None


@one_thread
def _shapes_of(function: Callable[..., Any], *args: Any) -> Any:
    return jax.eval_shape(function, *args)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _arguments(treedef: Any, constants: tuple[Any, ...], arrays: list[Any]) -> Any:
    return jax.tree.unflatten(treedef, [c if a is None else a for a, c in zip(arrays, constants, strict=True)])


@apart()
def _of_draw(
    quantity: Quantity, fit: Fit, target: Target, key: Array, sample: Mapping[str, Array], args: Any, kwargs: Any
) -> Any:
    """The quantity of one draw, of a program that runs by itself wherever the prediction is asked for."""
    return quantity.of_draw(*quantity.settings, fit, target, key, sample, args, kwargs)


def _predicted(
    fit: Fit,
    quantity: Quantity,
    num_samples: int,
    every: bool,
    treedef: Any,
    constants: tuple[Any, ...],
    target: Target,
    key: Array,
    samples: dict[str, Array],
    arrays: list[Array | None],
    batch: Array | None,
) -> Any:
    args, kwargs = _arguments(treedef, constants, arrays)
    of_draw = partial(_of_draw, quantity, fit, target._replace(batch=batch))
    width = max([len(a) for a in arrays if a is not None and a.ndim], default=1)
    dtype = jnp.result_type(jnp.float32, *(a for a in arrays if a is not None))
    draws = jax.random.split(key, num_samples), samples
    checked = with_checks(lambda key, sample: of_draw(key, sample, args, kwargs), hidden=True)
    sound, found = over_draws(checked, draws, width, dtype, every=every)
    return sound, found if quantity.finish is None else quantity.finish(found)
