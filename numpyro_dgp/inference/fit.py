"""Training that can be interrupted: ``fit`` with checkpoints, and parameters in one file.

``svi.run`` does the same steps. What ``fit`` adds: one compiled program for any number of steps, with the data
passed as arguments; a checkpoint from which a later call continues with bit-identical results; an error that
names the layer when a Cholesky factorisation fails.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_dgp._checks import require_count, require_finite_leaves
from numpyro_dgp._typing import Array

__all__ = ["explain", "fit", "is_key", "load", "read_checkpoint", "save", "split_arguments", "write_checkpoint"]

_CHUNK = 100


def fit(
    svi: SVI,
    rng_key: Array,
    num_steps: int,
    *args: Any,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1000,
    init_params: dict[str, Array] | None = None,
    stable_update: bool = False,
    progress_bar: bool = True,
    **kwargs: Any,
) -> SVIRunResult:
    """Run ``svi`` for ``num_steps`` steps, resuming from ``checkpoint`` where there is one.

    Args:
        svi: a NumPyro ``SVI``.
        rng_key: PRNG key; a resumed fit continues with the key in the checkpoint.
        num_steps: total number of steps, those of an earlier, interrupted call included.
        *args: arguments of the model; arrays are passed to the compiled program, not baked into it.
        checkpoint: file to write every ``checkpoint_every`` steps and at the end, and to continue from if it exists.
        checkpoint_every: steps between checkpoints.
        init_params: initial values of some parameters.
        stable_update: skip steps that give NaN, as in ``svi.run``.
        progress_bar: show NumPyro's progress bar.
        **kwargs: keyword arguments of the model.

    Returns:
        NumPyro's ``SVIRunResult``: ``params``, ``state``, ``losses``.

    Raises:
        ValueError: NaN or infinite data, a checkpoint of another fit, or a loss that became NaN; then the message says
            at which step and, where a Cholesky factorisation failed, in which layer.
    """
    require_count("fit", "num_steps", num_steps, "5000")
    require_count("fit", "checkpoint_every", checkpoint_every, "5000")
    arrays, rebuild = split_arguments(args, kwargs)
    args, kwargs = rebuild(arrays)
    update = svi.stable_update if stable_update else svi.update

    @jax.jit
    def advance(state: SVIState, arrays: list[Array], steps: Array) -> tuple[SVIState, Array]:
        """``steps`` updates, at most a chunk, by a loop of dynamic length: compiled once."""
        args, kwargs = rebuild(arrays)

        def body(i: Array, carry: tuple[SVIState, Array]) -> tuple[SVIState, Array]:
            state, loss = update(carry[0], *args, **kwargs)
            return state, carry[1].at[i].set(loss.astype(carry[1].dtype))

        return jax.lax.fori_loop(0, steps, body, (state, jnp.zeros(_CHUNK, jnp.result_type(float))))

    state = svi.init(rng_key, *args, init_params=init_params, **kwargs)
    losses: list[np.ndarray] = []
    done = 0
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists():
        state, saved = read_checkpoint(path, state)
        losses, done = [saved], len(saved)
    with tqdm.tqdm(total=num_steps, initial=done, disable=not progress_bar) as bar:
        while done < num_steps:
            until = min(num_steps, done + checkpoint_every - done % checkpoint_every) if path else num_steps
            steps = min(_CHUNK, until - done)
            before = state
            state, chunk = advance(state, arrays, steps)
            chunk = np.asarray(chunk[:steps])
            if not stable_update and not np.isfinite(chunk).all():
                _find(svi, advance, before, arrays, done, args, kwargs)
            losses.append(chunk)
            done += steps
            bar.update(steps)
            bar.set_postfix_str(f"loss: {chunk.mean():.4f}", refresh=False)
            if path is not None and (done == until):
                write_checkpoint(path, state, np.concatenate(losses))
    return SVIRunResult(svi.get_params(state), state, jnp.asarray(np.concatenate(losses)[:num_steps]))


def split_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Array], Callable[[list[Array]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The arrays among a model's arguments, to pass to a compiled program, and the way back to all arguments.

    Numbers, flags and the like stay what they are: a program may use them as shapes.

    Raises:
        ValueError: NaN or infinite data.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    require_finite_leaves("data", leaves)
    arrays = [jnp.asarray(leaf) for leaf in leaves if np.ndim(leaf)]

    def rebuild(arrays: list[Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = iter(arrays)
        return jax.tree.unflatten(treedef, [next(rest) if np.ndim(leaf) else leaf for leaf in leaves])

    return arrays, rebuild


def _find(
    svi: SVI,
    advance: Callable[..., tuple[SVIState, Array]],
    state: SVIState,
    arrays: list[Array],
    step: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Find the first step whose loss is not finite, and explain that one."""
    while True:
        following, loss = advance(state, arrays, 1)
        step += 1
        if not np.isfinite(loss[0]):
            explain(svi, state, loss[0], step, args, kwargs)
        state = following


def explain(svi: SVI, state: SVIState, loss: Any, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Run the step that gave a loss that is not finite without ``jit``, so that checks speak, and raise."""
    try:
        svi.evaluate(state, *args, **kwargs)
    except ValueError as error:
        raise ValueError(f"fit: the loss became {loss} at step {step}: {error}") from error
    raise ValueError(
        f"fit: expected a finite loss, got {loss} at step {step}: lower the learning rate, clip gradients "
        "(optax.clip_by_global_norm), bound the hyperparameters by priors, or run in float64"
    )


def save(path: str | os.PathLike[str], params: dict[str, Any]) -> None:
    """Write parameters, a (nested) dict of arrays, to one ``.npz`` file.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> file = tempfile.mkdtemp() + "/posterior.npz"
        >>> save(file, {"ls_auto_loc": jnp.ones(2), "net$params": {"w": jnp.zeros(3)}})
        >>> sorted(load(file)), load(file)["net$params"]["w"].shape
        (['ls_auto_loc', 'net$params'], (3,))
    """
    leaves = jax.tree.leaves_with_path(params)
    names = [[entry.key for entry in where] for where, _ in leaves]
    _write(Path(path), {json.dumps(name): value for name, (_, value) in zip(names, leaves, strict=True)})


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`save` wrote.

    Raises:
        ValueError: the file is not one of ours.
    """
    params: dict[str, Any] = {}
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            try:
                *parents, last = json.loads(name)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"load: expected a file written by dgp.save, got {path} with entry {name!r}"
                ) from error
            node = params
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = jnp.asarray(file[name])
    return params


def is_key(leaf: Any) -> bool:
    """Whether an array holds typed random keys, which are neither numbers nor NumPy's."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def write_checkpoint(path: Path, state: SVIState, losses: np.ndarray) -> None:
    """Write the state of a fit and its losses so far."""
    leaves = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in map(jnp.asarray, jax.tree.leaves(state))]
    _write(path, {"losses": losses} | {f"leaf{i}": leaf for i, leaf in enumerate(leaves)})


def read_checkpoint(path: Path, like: SVIState) -> tuple[SVIState, np.ndarray]:
    """The state and losses that :func:`write_checkpoint` wrote, for a fit whose state looks like ``like``."""
    expected, treedef = jax.tree.flatten(like)
    with np.load(path, allow_pickle=False) as file:
        found = [file[f"leaf{i}"] for i in range(len(file.files) - 1)] if "losses" in file.files else []
        losses = file["losses"] if found else np.zeros(0)
    leaves = []
    for old, new in zip(found, expected, strict=False):
        shape = jax.random.key_data(new).shape if is_key(jnp.asarray(new)) else np.shape(new)
        if old.shape == shape:
            leaves.append(jax.random.wrap_key_data(jnp.asarray(old)) if is_key(jnp.asarray(new)) else jnp.asarray(old))
    if not len(leaves) == len(found) == len(expected):
        raise ValueError(
            f"fit: expected a checkpoint of this fit in {path} ({len(expected)} arrays of the shapes of its state), "
            f"got one of another model, guide or optimiser ({len(found)} arrays): remove it or choose another name"
        )
    return jax.tree.unflatten(treedef, leaves), losses


def _write(path: Path, arrays: dict[str, Any]) -> None:
    """Write so that an interruption leaves the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    with open(partial, "wb") as file:
        np.savez(file, **{name: np.asarray(value) for name, value in arrays.items()})  # type: ignore[arg-type]
    os.replace(partial, path)
