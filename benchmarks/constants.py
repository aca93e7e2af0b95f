"""The constants of ``numpyro_dgp/math/tuning.py``, one or two at a time, on JAX's default device.

``python benchmarks/constants.py`` prints, for steps that a constant may matter for, the median milliseconds with
several values of it, and the ratio to that with the values in use.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import initialize_model

sys.path.insert(0, str(Path(__file__).parent))
from gpu import Work, chains, many_steps, seconds, training, two_layers
from long_series import series
from train_step import make_data

import numpyro_dgp as dgp
from numpyro_dgp.math import tuning
from numpyro_dgp.mcmc.population import populate

DTYPE = "float32"


class Question(NamedTuple):
    """Other values of constants, and what is timed with them."""

    values: list[dict[str, Any]]
    works: list[Work]
    whole: bool = False  # works that are whole runs, and not steps


def points(rows: int, inducing: int, count: int) -> Work:
    """A sequential Monte Carlo over two layers' hyperparameters and inducing values."""
    X, y, Z = (jnp.asarray(a, DTYPE) for a in make_data(rows, dims=2, num_inducing=inducing))
    found = initialize_model(jax.random.key(0), dgp.for_mcmc(two_layers(Z)), model_args=(X, y))
    flat, unravel = ravel_pytree(found.param_info.z)
    blocks = jnp.ones((1, flat.size))

    def log_ratios(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(()), 0.5 * jnp.square(z).sum() - found.potential_fn(unravel(z))

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (flat.size,), flat.dtype)

    def step(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        population = populate(log_ratios, key, jax.random.split(key, 50 * count), draw, blocks, count, 1)
        return jax.random.split(key)[0], population.log_evidence + population.points.sum()

    return Work(f"{count} points, {rows} rows, sequential Monte Carlo", step, jax.random.key(2))


def chain(rows: int) -> Work:
    """Gradients of the evidence of an irregular series by three hyperparameters."""
    t, y = (jnp.asarray(a, DTYPE) for a in series(rows))
    slope = jax.value_and_grad(
        lambda p: dgp.functions.StateSpaceNormal(dgp.kernels.Matern52(p[0], p[1]), t, p[2]).log_prob(y)
    )

    def step(p: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, g = slope(p)
        return p + 1e-9 * g, value

    return Work(f"gradient of a series of {rows} rows", step, jnp.ones(3, DTYPE))


def questions(smoke: bool) -> Iterator[Question]:
    b, M = (40, 10) if smoke else (1000, 100)
    B = 10 * b
    small, large = (training(2, rows, DTYPE, inducing=M) for rows in (b, B))
    wide = training(2, B, DTYPE, inducing=5 * M)
    fits = training(2, b // 5, DTYPE, copies=16, inducing=M // 5)
    together = chains(b // 5, M // 5, DTYPE, 16)
    factors = [{"small_solve": 25, "single_factor": 2**16}, {"small_solve": 25, "single_factor": 200}]
    yield Question(factors, [small, wide, fits])
    yield Question([{"many_matrices": 8}], [fits, together])
    yield Question([{"single_rows": 2500}, {"halves": 400}], [large, wide])
    yield Question([{"block_columns": c} for c in (32, 1024)], [small, wide])
    yield Question([{"chunk": n} for n in (4, 64, 256)], [chain(B)])
    yield Question([{"narrow": 128}, {"summed": 8}, {"few_columns": 8}, {"kept_products": 0}], [small])
    yield Question([{"single_rows": r} for r in (25_000, 10_000)], [training(2, 10 * B, DTYPE, inducing=M)])
    yield Question([{"together": 500}], [points(max(b // 50, 5), max(M // 20, 2), 5 * b // 10)], whole=True)


def traced(values: dict[str, Any], work: Work, loop: int) -> Any:
    """The lowered program of some steps, traced with these values."""
    name = "CPU" if jax.default_backend() == "cpu" else "ACCELERATOR"
    usual = getattr(tuning, name)
    setattr(tuning, name, dataclasses.replace(usual, **values))
    try:
        jax.clear_caches()
        return jax.jit(many_steps(work, loop)).lower(work.state)
    finally:
        setattr(tuning, name, usual)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", type=int, default=50, help="steps in one compiled call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="constants")
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.loop, arguments.repeats = 2, 1
    start = time.perf_counter()
    usual: dict[str, Any] = {}
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}\n")
    print("| what | constants | ms | ratio |\n|---|---|---|---|", flush=True)
    for question in questions(arguments.smoke):
        if arguments.only and not any(set(arguments.only) & set(values) for values in question.values):
            continue
        cases = [
            (work, values) for work in question.works for values in [{}] * (work.name not in usual) + question.values
        ]
        loop = 1 if question.whole else arguments.loop
        lowered = [traced(values, work, loop) for work, values in cases]
        with ThreadPoolExecutor(8) as threads:
            programs = list(threads.map(lambda one: one.compile(), lowered))
        for (work, values), program in zip(cases, programs, strict=True):
            step = seconds(program, work.state, arguments.repeats) / loop
            usual.setdefault(work.name, step)
            names = ", ".join(f"{name} {value}" for name, value in values.items()) or "those in use"
            print(f"| {work.name} | {names} | {1e3 * step:.3g} | {step / usual[work.name]:.2f} |", flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
