"""Many fits and many chains at once beside the same ones in a loop, on JAX's default device.

``python benchmarks/at_once.py`` compares ``jax.vmap`` of training steps with a key of its own for every fit, and of
gradients of NUTS's potential as ``chain_method="vectorized"`` takes them, with one after the other. Times are medians
without compilation, for all fits or chains together; *ratio* is that of the loop over that of all at once. Programs
have two layers, 8 columns and inner width 8.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))
from gpu import Work, chains, training


def seconds(work: Work, count: int, steps: int, repeats: int) -> float:
    """The median time of some steps, ``count`` times one after the other."""
    loop = jax.jit(lambda state: jax.lax.fori_loop(0, steps, lambda _, state: work.step(state)[0], state))
    jax.block_until_ready(loop(work.state))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([loop(work.state) for _ in range(count)])
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    smoke = parser.parse_args().smoke
    print(f"{jax.devices()[0].device_kind}\n| | loop, s | at once, s | ratio |\n|---|---|---|---|")
    count, steps, repeats = (2, 2, 1) if smoke else (16, 50, 3)
    for rows, inducing in ((50, 10),) if smoke else ((100, 20), (200, 50), (1000, 100)):
        several = partial(training, 2, rows, "float32", inducing=inducing)
        one, all_ = (several(copies=copies) for copies in (1, count))
        row(f"{count} fits, {steps} steps, {rows} rows, {inducing} inducing points", one, all_, count, steps, repeats)
    for rows, inducing in ((20, 5),) if smoke else ((60, 10), (200, 20)):
        one, all_ = (chains(rows, inducing, "float32", copies) for copies in (1, count))
        what = f"{count} chains, {steps} gradients, {rows} rows, {inducing} inducing points"
        row(what, one, all_, count, steps, repeats)


def row(what: str, one: Work, all_: Work, count: int, steps: int, repeats: int) -> None:
    """A line of the table."""
    loop, together = seconds(one, count, steps, repeats), seconds(all_, 1, steps, repeats)
    print(f"| {what} | {loop:.2f} | {together:.2f} | {loop / together:.2f} |", flush=True)


if __name__ == "__main__":
    main()
