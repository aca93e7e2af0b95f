"""Seconds from the start of a process to the end of the first training step, by part, with and without JAX's cache.

``python benchmarks/first_step.py`` prints the median of several new processes for each row. *numpyro* and *dgp* are the
imports, the second what ``import numpyro_dgp`` adds to the first; *model* makes data, program and guide; *fit* is
``dgp.fit(svi, key, num_steps=1, ...)``: checks, the initial state, and tracing, compiling and running the step; *again*
the same of a new program, guide and SVI of the same shapes, afterwards in the same process, which is not in *all*. Rows
with *cache* are processes that find the compiled programs of an earlier one in
``jax.config.update("jax_compilation_cache_dir", ...)``. The model is that of ``train_step.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent
PARTS = ("numpyro", "dgp", "model", "fit", "all", "again")


def measure(started: float, layers: int, batch: int, dtype: str, cache: str | None) -> dict[str, float]:
    """One configuration in this process, which began at the clock time ``started``."""
    clock = [started]
    import numpyro  # noqa: F401

    clock.append(time.time())
    import numpyro_dgp as dgp

    clock.append(time.time())
    import jax

    sys.path.insert(0, str(FOLDER))
    from implementations import ours
    from train_step import make_data

    jax.config.update("jax_enable_x64", dtype == "float64")
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
    svi, arguments = ours.make(*make_data(batch), layers, dtype)
    clock.append(time.time())
    jax.block_until_ready(dgp.fit(svi, jax.random.key(0), 1, *arguments, progress_bar=False).losses)
    clock.append(time.time())
    parts = [after - before for before, after in itertools.pairwise(clock)]
    total = clock[-1] - clock[0]
    svi, arguments = ours.make(*make_data(batch), layers, dtype)
    begin = time.time()
    jax.block_until_ready(dgp.fit(svi, jax.random.key(1), 1, *arguments, progress_bar=False).losses)
    return dict(zip(PARTS, (*parts, total, time.time() - begin), strict=True))


def in_new_process(**request: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", json.dumps({"started": time.time(), **request})]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return print(json.dumps(measure(**json.loads(options.worker))))
    print(f"| layers | cache | {' | '.join(PARTS)} |\n|---|---{'|---' * len(PARTS)}|")
    for layers in options.layers:
        with tempfile.TemporaryDirectory() as folder:
            for cache in (None, folder):
                request = {"layers": layers, "batch": options.batch, "dtype": options.dtype, "cache": cache}
                runs = [in_new_process(**request) for _ in range(options.processes + bool(cache))][bool(cache) :]
                medians = (f"{statistics.median(run[part] for run in runs):.2f}" for part in PARTS)
                print(f"| {layers} | {'yes' if cache else 'no'} | {' | '.join(medians)} |", flush=True)


if __name__ == "__main__":
    main()
