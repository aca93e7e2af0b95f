"""Cost of a training step on rows from disk, and what a pass over many more rows would take.

``python benchmarks/stream_step.py`` writes a data set to a temporary folder and prints, for several batch sizes and in
float32: reading and shuffling a batch alone, a step on a batch in memory, a step on batches from disk that are read
meanwhile, and the time of one pass over ``--project`` rows at that pace.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp

sys.path.insert(0, str(Path(__file__).parent))
from implementations import ours

D, M = 8, 100


def write(folder: Path, rows: int) -> None:
    """Inputs and targets in float32, block by block."""
    rng = np.random.default_rng(0)
    direction = rng.normal(size=D)
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float32, (rows, D))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.float32, (rows,))
    for start in range(0, rows, 10**6):
        block = rng.normal(size=(min(10**6, rows - start), D))
        X[start : start + len(block)] = block
        y[start : start + len(block)] = np.sin(block @ direction) + 0.1 * rng.normal(size=len(block))
    X.flush()
    y.flush()


def make_svi(rows: int, layers: int) -> SVI:
    """The model of train_step.py."""
    model = dgp.minibatch(
        ours.make_model(np.random.default_rng(1).normal(size=(M, D)), D, layers, "float32"), data=rows
    )
    return SVI(model, dgp.guides.InducingPoint(model), optax.adam(0.01), dgp.ELBO())


def median(count: int, action: Callable[[int], Any]) -> float:
    """Median milliseconds of an action."""
    times = []
    for i in range(count):
        start = time.perf_counter()
        jax.block_until_ready(action(i))
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1000, 10_000, 50_000])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--project", type=int, default=10**9)
    arguments = parser.parse_args()
    print(f"{arguments.layers} layers, {arguments.rows} rows of {D} columns on disk; {jax.devices()[0].device_kind}")
    print(f"{'batch':>7s}{'read ms':>10s}{'in memory ms':>14s}{'from disk ms':>14s}{'hours per pass':>16s}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, arguments.rows)
        for batch in arguments.batch:
            stream = dgp.Stream.open(folder / "X.npy", folder / "y.npy", batch_size=batch)
            start = time.perf_counter()
            for i in range(stream.steps_per_epoch):
                stream.batch(i)
            read = 1000 * (time.perf_counter() - start) / stream.steps_per_epoch  # a mean: windows are read at once
            svi = make_svi(arguments.rows, arguments.layers)
            kept = tuple(map(jnp.asarray, stream.batch(0)))
            states = [svi.init(jax.random.key(0), *kept)]
            update = jax.jit(svi.update)

            def step(_: int) -> Any:
                states[0], loss = update(states[0], *kept)  # noqa: B023
                return loss

            median(3, step)
            in_memory = median(arguments.steps, step)
            dgp.fit_stream(svi, jax.random.key(0), 3, stream, progress_bar=False)

            def fit(steps: int) -> float:
                start = time.perf_counter()
                dgp.fit_stream(svi, jax.random.key(0), steps, stream, progress_bar=False)  # noqa: B023
                return time.perf_counter() - start

            # Two lengths: what starting and compiling cost is the same in both.
            from_disk = 1000 * (fit(10 + arguments.steps) - fit(10)) / arguments.steps
            hours = arguments.project / batch * from_disk / 3.6e6
            print(f"{batch:7d}{read:10.2f}{in_memory:14.2f}{from_disk:14.2f}{hours:16.2f}", flush=True)


if __name__ == "__main__":
    main()
