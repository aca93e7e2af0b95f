"""Training that can be interrupted and continued: ``fit``, with the data as arguments of the model.

``svi.run`` takes the same steps. ``fit`` adds one compiled program for any number of steps, with the data passed as
arguments; checkpoints from which a later call continues with bit-identical results; and errors that name the layer in
which a Cholesky factorisation fails.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_dgp._checks import (
    require_call,
    require_count,
    require_finite_leaves,
    require_key,
    require_keywords,
    taking_the_loss,
)
from numpyro_dgp._compiled import Compiled, one_thread
from numpyro_dgp._data import as_array
from numpyro_dgp._typing import Array
from numpyro_dgp.inference.checkpoints import Checkpoint, CheckpointFile
from numpyro_dgp.inference.fit_identity import identify
from numpyro_dgp.inference.fit_loop import CHUNK, Steps, run_steps
from numpyro_dgp.inference.fit_start import (
    require_compiling_itself,
    require_svi,
    start_of_fit,
    warn_of_first_loss,
    warn_of_funnel,
)
from numpyro_dgp.inference.program_sites import Rebuild

__all__ = ["fit", "split_arguments", "steps_of"]


def fit(
    svi: SVI,
    rng_key: Array,
    num_steps: int,
    *args: Any,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    init_params: dict[str, Array] | None = None,
    stable_update: bool = False,
    progress_bar: bool = True,
    **kwargs: Any,
) -> SVIRunResult:
    """Run ``svi`` for ``num_steps`` steps, resuming from ``checkpoint`` where there is one.

    Args:
        svi: a NumPyro ``SVI``.
        rng_key: PRNG key; a resumed fit continues with the key in the checkpoint.
        num_steps: total number of steps, including those of an earlier, interrupted call.
        *args: arguments of the model; arrays are arguments of the compiled program, not constants. Tables of numbers
            (pandas) become arrays.
        checkpoint: file to write every 1000 steps and at the end, and to continue from if it exists; or a
            :class:`Checkpoint` with other settings.
        init_params: initial values of some parameters, constrained, by name. A resumed fit ignores them.
        stable_update: skip steps that give NaN, as in ``svi.run``.
        progress_bar: show a progress bar.
        **kwargs: keyword arguments of the model.

    Returns:
        NumPyro's ``SVIRunResult``: ``params``, ``state``, ``losses``.

    Raises:
        ValueError: NaN or infinite data, times, text or categories; a call under ``jit`` or ``vmap``; initial values of
            unknown parameters or outside of their support; a guide of another model; a checkpoint of another fit (the
            message has the first difference), a damaged one, or one that another process uses or that cannot be
            written; a loss that became NaN (the message has the step and, where a Cholesky factorisation failed, the
            layer).
        KeyboardInterrupt: after an interruption, with the number of steps saved in the checkpoint.

    Warns:
        UserWarning: data far from the scale of the program; a last loss far above the lowest one; a scale of values in
            a plate that has collapsed to zero because both are points (``Delta``).

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> svi = numpyro.infer.SVI(model, dgp.guides.InducingPoint(model), optax.adam(0.05), dgp.ELBO())
        >>> result = dgp.fit(svi, jax.random.key(0), 50, X, y, progress_bar=False)
        >>> result.losses.shape, bool(result.losses[-1] < result.losses[0])
        ((50,), True)
    """
    require_svi(svi)
    require_compiling_itself(rng_key, args, kwargs)
    require_key(rng_key)
    require_keywords(fit.__kwdefaults__, svi.model, kwargs)
    require_count("num_steps", num_steps, "5000")
    require_call(svi.model, args, svi.static_kwargs | kwargs, "dgp.fit(svi, key, 1000, X, y)")
    file = CheckpointFile.of(checkpoint)
    arguments = {f"argument {i + 1}": value for i, value in enumerate(args)}
    arguments |= {f"argument {name!r}": value for name, value in {**kwargs, **svi.static_kwargs}.items()}
    arrays, rebuild = split_arguments(args, kwargs)
    args, kwargs = rebuild(arrays)
    update = svi.stable_update if stable_update else svi.update

    compiled = Compiled(steps_of(update, rebuild))

    with file.reserved(num_steps):
        start, sites = start_of_fit(svi, rng_key, rebuild, arrays, init_params)
        with taking_the_loss():
            program = compiled.at(start, arrays, 1)
        if checkpoint is not None:
            step = compiled.trace(start, arrays, 1)
            file = dataclasses.replace(file, identity=identify("dgp.fit", svi, arguments, sites, start, step))

        def advance(state: SVIState, step: int, count: int) -> tuple[SVIState, np.ndarray]:
            state, losses = program(state, arrays, count)
            return state, np.asarray(losses)[:count]

        @one_thread
        def evaluate(state: SVIState, step: int) -> Array:
            return svi.evaluate(state, *args, **kwargs)

        steps = Steps(advance, evaluate, skips=stable_update)
        result = run_steps(svi, start, num_steps, steps, file, progress_bar)
    warn_of_first_loss(sites, arrays, result.losses)
    warn_of_funnel(svi, sites, start, result.params, args, kwargs)
    return result


def steps_of(
    update: Callable[..., tuple[SVIState, Array]], rebuild: Rebuild
) -> Callable[[SVIState, list[Array], Array], tuple[SVIState, Array]]:
    """A function of ``count`` updates, at most a chunk, as a loop of dynamic length, which is compiled once.

    Args:
        update: ``svi.update`` or ``svi.stable_update``.
        rebuild: the arguments of the model, from arrays.

    Returns:
        A function of a state, the arrays and the count, that gives the new state and a chunk of losses.
    """

    def steps(state: SVIState, arrays: list[Array], count: Array) -> tuple[SVIState, Array]:
        args, kwargs = rebuild(arrays)

        def body(i: Array, carry: tuple[SVIState, Array]) -> tuple[SVIState, Array]:
            state, loss = update(carry[0], *args, **kwargs)
            return state, carry[1].at[i].set(loss.astype(carry[1].dtype))

        return jax.lax.fori_loop(0, count, body, (state, jnp.zeros(CHUNK, jnp.result_type(float))))

    return steps


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Array], Rebuild]:
    """Split the arguments of a model into arrays, for a compiled program, and a function that restores them.

    Numbers, flags and other objects remain Python objects: a program may use them as shapes. Tables and their columns
    become arrays.

    Args:
        args: positional arguments of the model.
        kwargs: its keyword arguments.

    Returns:
        The arrays, and a function of arrays in their place that gives ``(args, kwargs)``.

    Raises:
        ValueError: NaN or infinite data, data that are no numbers, or rows that rounding makes equal.

    Example:
        >>> arrays, rebuild = split_arguments((np.ones(3), 5), {"width": 2})
        >>> rebuild([a.tolist() for a in arrays])
        (([1.0, 1.0, 1.0], 5), {'width': 2})
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    leaves = [as_array("data", leaf) if np.ndim(leaf) else leaf for leaf in leaves]
    require_finite_leaves("data", leaves)
    arrays = [leaf for leaf in leaves if np.ndim(leaf)]

    def rebuild(arrays: list[Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = iter(arrays)
        return jax.tree.unflatten(treedef, [next(rest) if np.ndim(leaf) else leaf for leaf in leaves])

    return arrays, rebuild
