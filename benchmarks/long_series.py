"""Evidence, gradient and posterior of long irregular series: ``StateSpaceNormal`` beside tinygp's quasiseparable one.

``python benchmarks/long_series.py`` runs every case in a process of its own, in double precision:
seconds of the evidence with its gradient by variance, lengthscale and noise, and of the posterior mean and variances at
all times, each after compilation (the fastest of three), and the largest memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_dgp as dgp

KERNELS = ("Matern12", "Matern32", "Matern52")


def series(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Irregular times, a twentieth apart on average, and a noisy sine."""
    rng = np.random.default_rng(0)
    t = np.sort(rng.uniform(0, 0.05 * rows, rows))
    return t, np.sin(t) + 0.1 * rng.normal(size=rows)


def ours(kernel: str, t: np.ndarray, y: np.ndarray) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def process(p: jax.Array) -> dgp.functions.StateSpaceNormal:
        return dgp.functions.StateSpaceNormal(getattr(dgp.kernels, kernel)(p[0], p[1]), t, p[2])

    return lambda p: process(p).log_prob(y), lambda p: process(p).posterior(y)


def theirs(kernel: str, t: np.ndarray, y: np.ndarray) -> tuple[Callable[..., Any], Callable[..., Any]]:
    import tinygp

    kind = {"Matern12": tinygp.kernels.quasisep.Exp}.get(kernel) or getattr(tinygp.kernels.quasisep, kernel)

    def process(p: jax.Array) -> tinygp.GaussianProcess:
        return tinygp.GaussianProcess(kind(p[1], jnp.sqrt(p[0])), t, diag=jnp.full(len(t), p[2] ** 2))

    def posterior(p: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = process(p).condition(y).gp
        return found.loc, found.variance

    return lambda p: process(p).log_probability(y), posterior


def seconds(program: Callable[..., Any], p: jax.Array) -> float:
    """The fastest of three runs after compilation."""
    run = jax.jit(program)
    jax.block_until_ready(run(p))
    found = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(run(p))
        found.append(time.perf_counter() - start)
    return min(found)


def one(package: str, kernel: str, rows: int) -> None:
    evidence, posterior = {"numpyro_dgp": ours, "tinygp": theirs}[package](kernel, *series(rows))
    p = jnp.array([0.8, 1.3, 0.1])
    times = seconds(jax.value_and_grad(evidence), p)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"| {package} | {kernel} | {rows} | {times:.3f} | {memory:.2f} | {seconds(posterior, p):.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    parser.add_argument("--packages", nargs="+", default=["numpyro_dgp", "tinygp"])
    parser.add_argument("--one", action="store_true", help="run the single case that is named, in this process")
    options = parser.parse_args()
    if options.one:
        jax.config.update("jax_enable_x64", True)
        return one(options.packages[0], options.kernels[0], options.rows[0])
    print(
        "| package | kernel | rows | evidence and gradient, s | GiB | posterior, s |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for rows in options.rows:
        for kernel in options.kernels:
            for package in options.packages:
                case = ["--rows", str(rows), "--kernels", kernel, "--packages", package, "--one"]
                subprocess.run([sys.executable, __file__, *case], check=True)
    return None


if __name__ == "__main__":
    main()
