"""Seconds until the first training step is done, and the peak memory of a step, each configuration in a new process.

``python benchmarks/compile_memory.py`` prints a table. *init* is ``svi.init``, *first step* is tracing, compiling and
running one update; *buffers* is what XLA allocates for the step beside its arguments, *peak* the resident memory of the
process at its highest, Python and its libraries included. The model is that of ``train_step.py``.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from train_step import device, make_data


def measure(layers: int, batch: int, dtype: str) -> dict[str, float]:
    """One configuration in this process."""
    import jax
    from implementations import ours

    jax.config.update("jax_enable_x64", dtype == "float64")
    svi, arguments = ours.make(*make_data(batch), layers, dtype)
    start = time.perf_counter()
    state = jax.block_until_ready(svi.init(jax.random.key(0), *arguments))
    initialised = time.perf_counter()
    compiled = jax.jit(svi.update).lower(state, *arguments).compile()
    jax.block_until_ready(compiled(state, *arguments))
    done = time.perf_counter()
    return {
        "init": initialised - start,
        "first step": done - initialised,
        "buffers": compiled.memory_analysis().temp_size_in_bytes / 2**30,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return print(json.dumps(measure(**json.loads(arguments.worker))))
    print(device())
    names = "".join(
        f"{n:>{w}s}" for n, w in (("init s", 9), ("first step s", 14), ("buffers GiB", 13), ("peak GiB", 10))
    )
    print(f"{'dtype':9s}{'batch':>7s}{'layers':>7s}{names}")
    for dtype in arguments.dtype:
        for batch in arguments.batch:
            for layers in arguments.layers:
                request = json.dumps({"layers": layers, "batch": batch, "dtype": dtype})
                command = [sys.executable, __file__, "--worker", request]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found = json.loads(out.splitlines()[-1])
                print(
                    f"{dtype:9s}{batch:7d}{layers:7d}{found['init']:9.1f}{found['first step']:14.1f}"
                    f"{found['buffers']:13.2f}{found['peak']:10.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
