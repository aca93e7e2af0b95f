"""Training on minibatches read from disk during the fit: data larger than memory, on one device or several.

The program and the guide need no change: ``dgp.minibatch`` passes the number of rows to a program for all rows, which
can then be called with a minibatch. The rows of a batch are sharded over devices, every device has the parameters,
and XLA partitions the step. Random numbers do not depend on the number of devices, so neither does the result.

Checks ensure that a program scales the rows of a minibatch to the number of rows of its stream.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_dgp._checks import (
    expect_kind,
    expected,
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
from numpyro_dgp.inference.fit_loop import Steps, run_steps
from numpyro_dgp.inference.fit_start import (
    require_compiling_itself,
    require_svi,
    start_of_fit,
    warn_of_first_loss,
    warn_of_funnel,
)
from numpyro_dgp.inference.parameter_files import is_key
from numpyro_dgp.inference.program_sites import ProgramSite, SitesOfFit
from numpyro_dgp.inference.streams import BatchSource

__all__ = ["fit_stream", "require_row_counts"]


def require_row_counts(sites: SitesOfFit, guide: str, batch: int, rows: int) -> None:
    """Raise where the loss of a batch is not that of all rows.

    Args:
        sites: of guide and model.
        guide: its class, for messages.
        batch: B, rows of a batch.
        rows: N, rows of the stream.

    Raises:
        ValueError: no site counts its rows N / B times, or the guide has parameters for single rows.
    """
    observed = {name: site for name, site in sites.model.items() if site.kind == "observed"}
    plates = {p for site in observed.values() for p, size in site.plates.items() if size == batch}
    if batch != rows and observed and all(site.scale == 1 for site in observed.values()):
        where = ", ".join(f"{plate}=stream.num_rows" for plate in sorted(plates)) or "data=stream.num_rows"
        raise expected(
            f"observed sites that count every row of a batch {rows} / {batch} times",
            f"{list(observed)} that count it once",
            f"wrap the program, model = dgp.minibatch(model, {where}), and make the guide of that",
        )
    for name, site in observed.items():
        if len(site.plates) == 1 and plates & site.plates.keys() and not _close(site.scale, rows / batch):
            warnings.warn(
                f"fit_stream: expected site {name!r} to count every row of a batch {rows} / {batch} = "
                f"{rows / batch:.6g} times, got {site.scale:.6g} times: does dgp.minibatch have the rows of the "
                "stream, stream.num_rows?",
                UserWarning,
                stacklevel=4,
            )
    _require_amortised(sites, guide, plates)


def _require_amortised(sites: SitesOfFit, guide: str, plates: set[str]) -> None:
    """Raise where the guide has a parameter per row of a batch, or scales a latent per row differently from the
    model."""
    cure = (
        "its rows change from batch to batch: use an amortised rule, latent=dgp.guides.Amortised(), in one of "
        "dgp.guides, made of the same dgp.minibatch(model, ...)"
    )
    for name, site in sites.parameters.items():
        if site.per_row and plates & site.plates.keys():
            raise expected(f"no parameters per row in {guide}", repr(name), cure)
    for name, site in sites.model.items():
        q: ProgramSite | None = sites.guide.get(name)
        if site.kind != "sample" or q is None or not plates & site.plates.keys():
            continue
        if not plates & q.plates.keys() or not _close(q.scale, site.scale):
            raise expected(
                f"{guide} to scale site {name!r} like the model, by {site.scale:.6g} in plates {list(site.plates)}",
                f"{q.scale:.6g} in plates {list(q.plates)}",
                cure,
            )


def _close(a: float | None, b: float | None) -> bool:
    """Whether two scales are equal, or one is not known before the program runs."""
    return a is None or b is None or math.isclose(a, b, rel_tol=1e-5)


_AHEAD = 2
"""Batches that are read before they are needed."""


def fit_stream(
    svi: SVI,
    rng_key: Array,
    num_steps: int,
    stream: BatchSource,
    *,
    devices: Sequence[jax.Device] | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    init_params: dict[str, Array] | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> SVIRunResult:
    """Run ``svi`` for ``num_steps`` steps on the batches of a stream, which are read ahead.

    Args:
        svi: a NumPyro ``SVI`` of a program inside ``dgp.minibatch``, and of a guide for that.
        rng_key: PRNG key; the same on all hosts.
        num_steps: total number of steps, those of an earlier, interrupted call included.
        stream: the arguments of the program, batch by batch: a ``dgp.Stream``, or any ``dgp.extend.BatchSource``.
        devices: the rows of a batch are split over them and parameters copied to each, ``jax.devices()`` for all; by
            default the first device does everything. On several hosts (``jax.distributed``) all run the same call.
        checkpoint: file to write every 1000 steps and at the end, and to continue from if it exists; or a
            :class:`Checkpoint` with other settings.
        init_params: initial values of some parameters, constrained, by name. A resumed fit takes none of them.
        progress_bar: show a progress bar.
        **kwargs: keyword arguments of the program, the same in every step.

    Returns:
        NumPyro's ``SVIRunResult``: ``params``, ``state``, ``losses``.

    Raises:
        ValueError: something else than a source of batches, batches that change size or cannot be split evenly over
            the devices, NaN or infinite data; a program whose sites count a row of a batch once, or a guide with
            parameters for single rows; and as :func:`~numpyro_dgp.fit`.
        KeyboardInterrupt: after an interruption, with the number of steps saved in the checkpoint.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> import numpy as np
        >>> from numpyro.infer import SVI
        >>> def program(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 4)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> X = np.linspace(0, 1, 1000)[:, None]
        >>> stream = dgp.Stream((X, np.sin(X[:, 0])), batch_size=50)
        >>> model = dgp.minibatch(program, data=stream.num_rows)
        >>> svi = SVI(model, dgp.guides.InducingPoint(model), optax.adam(0.05), dgp.ELBO())
        >>> dgp.fit_stream(svi, jax.random.key(0), 40, stream, progress_bar=False).losses.shape
        (40,)
    """
    require_svi(svi)
    require_compiling_itself(rng_key)
    require_key(rng_key)
    require_keywords(fit_stream.__kwdefaults__, svi.model, kwargs)
    require_count("num_steps", num_steps, "5000")
    file = CheckpointFile.of(checkpoint, writes=jax.process_index() == 0)
    mesh = None if devices is None else Mesh(np.asarray(devices), ("rows",))
    first = _first_batch(stream, 1 if mesh is None else mesh.size)

    compiled = Compiled(lambda state, batch: svi.update(state, *batch, **kwargs))

    with file.reserved(num_steps), ThreadPoolExecutor(1) as pool:
        batches = _read_ahead(pool, partial(_placed, stream, [a.shape for a in first], mesh), num_steps)

        arrays = list(map(jnp.asarray, first))
        start, sites = start_of_fit(svi, rng_key, lambda a: (tuple(a), kwargs), arrays, init_params)
        require_row_counts(sites, type(svi.guide).__name__, len(first[0]), stream.num_rows)
        with taking_the_loss():
            update = compiled.at(start, tuple(arrays))
        if checkpoint is not None:
            step = compiled.trace(start, tuple(arrays))
            identity = identify("dgp.fit_stream", svi, _arguments(stream, first, kwargs), sites, start, step)
            file = dataclasses.replace(file, identity=identity)

        def advance(state: SVIState, step: int, count: int) -> tuple[SVIState, np.ndarray]:
            losses = []
            for i in range(step, step + count):
                state, loss = update(state, batches(i))
                losses.append(loss)
            return state, np.asarray([np.asarray(loss) for loss in losses])

        def evaluate(state: SVIState, step: int) -> Array:
            batch = batches(step)
            with one_thread:
                return svi.evaluate(state, *batch, **kwargs)

        steps = Steps(advance, evaluate, partial(_everywhere, mesh=mesh))
        result = run_steps(svi, start, num_steps, steps, file, progress_bar)
    warn_of_first_loss(sites, arrays, result.losses)
    warn_of_funnel(svi, sites, start, result.params, arrays, kwargs)
    return result


def _arguments(stream: BatchSource, first: tuple[np.ndarray, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the result depends on in addition to the program, by name; the batch of step 0 identifies the stream."""
    arguments: dict[str, Any] = {"the number of rows of the stream": stream.num_rows}
    arguments |= {f"array {i + 1} of batch 0": array for i, array in enumerate(first)}
    return arguments | {f"argument {name!r}": value for name, value in kwargs.items()}


def _first_batch(stream: BatchSource, devices: int) -> tuple[np.ndarray, ...]:
    """The batch of step 0, after checks: as many rows in every array, a multiple of the number of devices, and numbers
    that stay apart in the default precision."""
    expect_kind(
        stream, BatchSource, "a source of batches, with num_rows and batch(step)", "dgp.Stream((X, y), batch_size=1000)"
    )
    require_count("num_rows", stream.num_rows, "the length of its arrays")
    found = stream.batch(0)
    shapes = [np.shape(a) for a in found] if isinstance(found, tuple) else []
    if not shapes or () in shapes or len({shape[0] for shape in shapes}) > 1:
        raise expected(
            "batch(0), a tuple of arrays with equally many rows", shapes or type(found).__name__, "(X[rows], y[rows])"
        )
    rows = shapes[0][0]
    if rows % devices:
        raise expected(
            f"a batch size that is a multiple of the {devices} devices", rows, f"try {-(-rows // devices) * devices}"
        )
    for a in found:
        as_array("data in the batch of step 0", a)
    return tuple(map(np.asarray, found))


def _placed(stream: BatchSource, shapes: list[tuple[int, ...]], mesh: Mesh | None, step: int) -> tuple[Array, ...]:
    """The batch of a step on its devices; with several hosts, each transfers its share of the rows."""
    arrays = [np.asarray(a) for a in stream.batch(step)]
    if [a.shape for a in arrays] != shapes:
        raise expected(
            f"batches of one size, of shapes {shapes} as in step 0",
            f"{[a.shape for a in arrays]} in step {step}",
            "keep rows that are left over for a later batch",
        )
    batch = [a.astype(jax.dtypes.canonicalize_dtype(a.dtype)) for a in arrays]
    require_finite_leaves(f"data in the batch of step {step}", batch)
    if mesh is None:
        return tuple(map(jnp.asarray, batch))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    return tuple(jax.make_array_from_callback(a.shape, rows, a.__getitem__) for a in batch)


def _read_ahead(
    pool: Executor, read: Callable[[int], tuple[Array, ...]], num_steps: int
) -> Callable[[int], tuple[Array, ...]]:
    """``read`` for a caller that takes the steps in order: the next batches are read by the thread pool in advance."""
    pending: dict[int, Future[tuple[Array, ...]]] = {}

    def batch(step: int) -> tuple[Array, ...]:
        for i in range(step, min(step + _AHEAD + 1, num_steps)):
            if i not in pending:
                pending[i] = pool.submit(read, i)
        return pending.pop(step).result()

    return batch


def _everywhere(state: SVIState, mesh: Mesh | None) -> SVIState:
    """The same state on every device of the mesh, those of other hosts included."""
    if mesh is None:
        return state
    leaves, treedef = jax.tree.flatten(state)
    keys = [is_key(leaf) for leaf in leaves]

    @partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def copies(values: list[Array]) -> list[Array]:
        return [jax.random.wrap_key_data(v) if key else v for v, key in zip(values, keys, strict=True)]

    values = [jax.random.key_data(leaf) if key else leaf for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, copies([np.asarray(v) for v in values]))
