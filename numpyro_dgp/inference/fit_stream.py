"""Training on minibatches that come as arguments: data larger than memory, on one device or many.

The program and the guide stay as they are. A program of all rows is one of a minibatch too, once :class:`minibatch` has
told it how many rows there are. The rows of a batch are spread over devices, every device has the parameters, and XLA
partitions the step. Random numbers do not depend on the number of devices, so neither does the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState
from numpyro.primitives import Messenger

from numpyro_dgp._checks import require_count, require_finite_leaves
from numpyro_dgp._typing import Array
from numpyro_dgp.inference.fit import explain, is_key, read_checkpoint, write_checkpoint
from numpyro_dgp.inference.streams import Stream
from numpyro_dgp.model.sites import Message

__all__ = ["fit_stream", "minibatch"]

_CHUNK = 100
_AHEAD = 2


class minibatch(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    r"""Handler that tells a program's plates that their rows are a minibatch of more.

    Every site in the plate counts :math:`N / |B|` times, with N given here and :math:`|B|` the size that the program
    gives the plate. For rows that are all in memory, ``numpyro.plate("data", N, subsample_size=B)`` does the same.

    Args:
        fn: the program.
        **rows: N of every plate concerned, by name.

    Raises:
        ValueError: when the program runs: it has no such plate, or the plate subsamples itself or has more rows than
            N, or a guide keeps parameters per row in it.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> def model(y):
        ...     m = numpyro.sample("m", dist.Normal())
        ...     with numpyro.plate("data", len(y)):
        ...         numpyro.sample("y", dist.Normal(m), obs=y)
        >>> def density(program):
        ...     return numpyro.infer.util.log_density(program, (jnp.ones(5),), {}, {"m": jnp.ones(())})[0]
        >>> round(float(density(minibatch(model, data=1000)) - density(model)), 3)  # 995 more rows
        -914.344

    Source: Salimbeni (2020), equation 2.19.
    """

    def __init__(self, fn: Callable[..., Any] | None = None, **rows: int) -> None:
        self.rows, self.seen = rows, dict.fromkeys(rows, False)
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate" and msg["name"] in self.rows:
            self._check(msg["name"], *msg["args"])
        elif msg["type"] in ("sample", "param"):
            for frame in msg["cond_indep_stack"]:
                per_row = msg["type"] == "sample" or msg["kwargs"].get("event_dim") is not None
                if frame.name in self.rows and per_row:
                    self._scale(msg, self.rows[frame.name] / frame.size, frame.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        missing = [name for name, seen in self.seen.items() if not seen]
        if missing:
            raise ValueError(
                f"minibatch: expected the program to have the plates {sorted(self.rows)}, got none named {missing}"
            )
        return result

    def _check(self, name: str, size: int, subsample_size: int | None) -> None:
        self.seen[name] = True
        if subsample_size not in (None, size) or size > self.rows[name]:
            raise ValueError(
                f"minibatch: expected plate {name!r} to hold a batch of at most {self.rows[name]} rows, passed as "
                f"arguments, got size {size} with subsample_size {subsample_size}: leave subsampling to the arguments"
            )

    def _scale(self, msg: Message, factor: float, plate: str) -> None:
        if msg["type"] == "param":
            raise ValueError(
                f"minibatch: expected no parameters per row in plate {plate!r}, got {msg['name']!r}: its rows change "
                "from batch to batch; use an amortised guide (guides.Amortised), or subsample inside the program"
            )
        msg["scale"] = factor if msg["scale"] is None else factor * msg["scale"]


def fit_stream(
    svi: SVI,
    rng_key: Array,
    num_steps: int,
    stream: Stream,
    *,
    devices: Sequence[jax.Device] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1000,
    init_params: dict[str, Array] | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> SVIRunResult:
    """Run ``svi`` for ``num_steps`` steps on the batches of a stream, the next ones read meanwhile.

    Args:
        svi: a NumPyro ``SVI`` of a program in :class:`minibatch` and a guide of that.
        rng_key: PRNG key; the same on all hosts.
        num_steps: total number of steps, those of an earlier, interrupted call included.
        stream: the arguments of the program, batch by batch.
        devices: the rows of a batch are split over them and parameters copied to each, ``jax.devices()`` for all; by
            default the first device does everything. On several hosts (``jax.distributed``) all run the same call.
        checkpoint: file to write every ``checkpoint_every`` steps and at the end, and to continue from if it exists.
        checkpoint_every: steps between checkpoints.
        init_params: initial values of some parameters.
        progress_bar: show a progress bar.
        **kwargs: keyword arguments of the program, the same in every step.

    Returns:
        NumPyro's ``SVIRunResult``: ``params``, ``state``, ``losses``.

    Raises:
        ValueError: a batch that cannot be split evenly over the devices, NaN or infinite data, a loss that became NaN,
            or a checkpoint of another fit.
    """
    require_count("fit_stream", "num_steps", num_steps, "5000")
    require_count("fit_stream", "checkpoint_every", checkpoint_every, "5000")
    mesh = None if devices is None else Mesh(np.asarray(devices), ("rows",))
    if mesh is not None and stream.batch_size % mesh.size:
        raise ValueError(
            f"fit_stream: expected a batch size that is a multiple of the {mesh.size} devices, got "
            f"{stream.batch_size}: try {-(-stream.batch_size // mesh.size) * mesh.size}"
        )

    @jax.jit
    def advance(state: SVIState, batch: tuple[Array, ...]) -> tuple[SVIState, Array]:
        return svi.update(state, *batch, **kwargs)

    state = svi.init(rng_key, *map(jnp.asarray, stream.batch(0)), init_params=init_params, **kwargs)
    losses: list[np.ndarray] = []
    done = 0
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists():
        state, saved = read_checkpoint(path, state)
        losses, done = [saved], len(saved)
    if mesh is not None:
        state = _everywhere(state, mesh)
    batches = _placed(stream, range(done, num_steps), mesh)
    with tqdm.tqdm(total=num_steps, initial=done, disable=not progress_bar) as bar:
        while done < num_steps:
            until = min(num_steps, done + _CHUNK, done + checkpoint_every - done % checkpoint_every)
            before, chunk = state, []
            for _ in range(done, until):
                state, loss = advance(state, next(batches))
                chunk.append(loss)
            found = np.asarray([np.asarray(loss) for loss in chunk])
            if not np.isfinite(found).all():
                _find(svi, advance, before, stream, done, mesh, kwargs)
            losses.append(found)
            done = until
            bar.update(len(found))
            bar.set_postfix_str(f"loss: {found.mean():.4f}", refresh=False)
            if path is not None and (done % checkpoint_every == 0 or done == num_steps) and jax.process_index() == 0:
                write_checkpoint(path, state, np.concatenate(losses))
    return SVIRunResult(svi.get_params(state), state, jnp.asarray(np.concatenate(losses)[:num_steps]))


def _everywhere(state: SVIState, mesh: Mesh) -> SVIState:
    """The same state on every device, those of other hosts included."""
    leaves, treedef = jax.tree.flatten(state)
    keys = [is_key(leaf) for leaf in leaves]

    @partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def copies(values: list[Array]) -> list[Array]:
        return [jax.random.wrap_key_data(v) if key else v for v, key in zip(values, keys, strict=True)]

    values = [jax.random.key_data(leaf) if key else leaf for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, copies([np.asarray(v) for v in values]))


def _place(stream: Stream, step: int, mesh: Mesh | None) -> tuple[Array, ...]:
    """The batch of a step on its devices; of several hosts, every one hands over its rows."""
    batch = [a.astype(jax.dtypes.canonicalize_dtype(a.dtype)) for a in stream.batch(step)]
    require_finite_leaves(f"data in the batch of step {step}", batch)
    if mesh is None:
        return tuple(map(jnp.asarray, batch))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    return tuple(jax.make_array_from_callback(a.shape, rows, a.__getitem__) for a in batch)


def _placed(stream: Stream, steps: range, mesh: Mesh | None) -> Iterator[tuple[Array, ...]]:
    """Batches of several steps, read ahead by a thread."""
    with ThreadPoolExecutor(1) as pool:
        pending = [pool.submit(_place, stream, step, mesh) for step in steps[:_AHEAD]]
        for step in steps:
            if step + _AHEAD < steps.stop:
                pending.append(pool.submit(_place, stream, step + _AHEAD, mesh))
            yield pending.pop(0).result()


def _find(
    svi: SVI,
    advance: Callable[..., tuple[SVIState, Array]],
    state: SVIState,
    stream: Stream,
    step: int,
    mesh: Mesh | None,
    kwargs: dict[str, Any],
) -> None:
    """Repeat a chunk up to the step whose loss is not finite, and explain that one."""
    while True:
        batch = _place(stream, step, mesh)
        following, loss = advance(state, batch)
        step += 1
        if not np.isfinite(loss):
            explain(svi, state, float(loss), step, batch, kwargs)
        state = following
