"""Many fits and many chains at once beside the same ones in a loop, on JAX's default device.

``python benchmarks/at_once.py`` compares ``jax.vmap`` of training steps with a key of its own for every fit, and
``chain_method="vectorized"`` of NUTS, with one after the other. Times are medians without compilation, for all fits or
chains together; *ratio* is that of the loop over that of all at once. The fits have two layers, 8 columns and inner
width 8, the chains two layers with 10 inducing points each for 60 rows.
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
import jax.numpy as jnp
from numpyro.infer import MCMC, NUTS

sys.path.insert(0, str(Path(__file__).parent))
from gpu import two_layers
from implementations import ours
from train_step import make_data

import numpyro_dgp as dgp


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


def chains(count: int, draws: int) -> tuple[float, float]:
    """Seconds of ``count`` chains of NUTS with 31 leapfrogs a draw at most, after a run that compiled."""
    X, y, Z = (jnp.asarray(a, "float32") for a in make_data(60, dims=2, num_inducing=10))
    model = dgp.for_mcmc(two_layers(Z))

    def seconds(method: str) -> float:
        kernel, counts = NUTS(model, max_tree_depth=5), {"num_warmup": draws, "num_samples": draws}
        mcmc = MCMC(kernel, num_chains=count, chain_method=method, progress_bar=False, **counts)
        return median_seconds(lambda: mcmc.run(jax.random.key(0), X, y) or mcmc.get_samples()["scale"], 1)

    return seconds("sequential"), seconds("vectorized")


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
    count, draws = (2, 4) if smoke else (16, 30)
    loop, together = chains(count, draws)
    print(f"| {count} chains of NUTS, {draws} + {draws} draws | {loop:.1f} | {together:.1f} | {loop / together:.2f} |")


if __name__ == "__main__":
    main()
