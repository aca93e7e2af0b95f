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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parent))
from gpu import chains as chains_of
from implementations import ours
from train_step import make_data


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(work())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def fits(rows: int, inducing: int, count: int, steps: int, repeats: int) -> tuple[float, float]:
    """Seconds of ``count`` fits of some steps, one after the other and at once."""
    svi, data = ours.make(*make_data(rows, num_inducing=inducing), 2, "float32")

    def fit(state: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, state: svi.update(state, *data)[0], state)

    keys = jax.random.split(jax.random.key(0), count)
    states = jax.jit(jax.vmap(lambda key: svi.init(key, *data)))(keys)
    single = [jax.tree.map(lambda leaf, i=i: leaf[i], states) for i in range(count)]
    one, all_ = jax.jit(fit), jax.jit(jax.vmap(fit))
    return median_seconds(lambda: [one(s) for s in single], repeats), median_seconds(lambda: all_(states), repeats)


def gradients(rows: int, inducing: int, count: int, steps: int, repeats: int) -> tuple[float, float]:
    """Seconds of some gradients of NUTS's potential for ``count`` chains, one after the other and at once."""

    def compiled(chains: int) -> Callable[[], Any]:
        work = chains_of(rows, inducing, "float32", chains)
        loop = jax.jit(lambda z: jax.lax.fori_loop(0, steps, lambda _, z: work.step(z)[0], z))
        return lambda: loop(work.state)

    one, all_ = compiled(1), compiled(count)
    return median_seconds(lambda: [one() for _ in range(count)], repeats), median_seconds(all_, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    smoke = parser.parse_args().smoke
    print(f"{jax.devices()[0].device_kind}\n| | loop, s | at once, s | ratio |\n|---|---|---|---|")
    count, steps, repeats = (2, 2, 1) if smoke else (16, 50, 3)
    for rows, inducing in ((50, 10),) if smoke else ((100, 20), (200, 50), (1000, 100)):
        loop, together = fits(rows, inducing, count, steps, repeats)
        what = f"{count} fits, {steps} steps, {rows} rows, {inducing} inducing points"
        print(f"| {what} | {loop:.2f} | {together:.2f} | {loop / together:.2f} |", flush=True)
    for rows, inducing in ((20, 5),) if smoke else ((60, 10), (200, 20)):
        loop, together = gradients(rows, inducing, count, steps, repeats)
        what = f"{count} chains, {steps} gradients, {rows} rows, {inducing} inducing points"
        print(f"| {what} | {loop:.2f} | {together:.2f} | {loop / together:.2f} |", flush=True)


if __name__ == "__main__":
    main()
