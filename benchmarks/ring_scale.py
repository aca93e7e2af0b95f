"""How far rings go: exact regression, and layers on a ``Grid`` whose values are computed from neighbours.

``python benchmarks/ring_scale.py`` runs five parts, each in a process of its own, and prints a table for each:

- ``neighbours``: how many grid points around an input count, by kernel and spacing;
- ``exact``: the log evidence of a regular series and its gradient by variance, lengthscale and noise, by size; once
  round the whole ring, and once with 128 unobserved points between its ends;
- ``pass``: passes of minibatch training over irregular data, RBF kernel, ``guides.Circulant()``, everything learned,
  from wrong hyperparameters and the best q(v) for them.
  The data are a draw of the model, so that learned hyperparameters can be compared with the true ones, and predictions
  with exact regression on a piece of the data;
- ``solve``: the same data with known hyperparameters: the optimal q(v) by ``rings.optimal_mean``, conjugate gradients
  over all data at once, and ``rings.optimal_gain``;
- ``figure``: seconds of a compiled training step by grid points and of an evidence by data, beside a layer on
  ``dgp.Points``: ``ring_scale.png``.

Time is that of compiled programs; compilation is given separately. Memory is the peak of the device that JAX keeps
count of, of the process on a CPU.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from scipy.interpolate import CubicSpline

import numpyro_dgp as dgp

NOISE = 0.5
START = {"lengthscale": 0.8, "variance": 0.7, "noise": 0.7}
PER_LENGTHSCALE = 2  # grid points; the kernels have lengthscale one


def peak() -> float:
    """Peak memory in GiB."""
    device = jax.devices()[0].memory_stats()
    if device:
        return device["peak_bytes_in_use"] / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def timed(program: Callable[..., Any], *arguments: Any, repeats: int = 3) -> tuple[float, float]:
    """Seconds to compile, and the least seconds of a call."""
    start = time.perf_counter()
    compiled = jax.jit(program).lower(*arguments).compile()
    compilation, seconds = time.perf_counter() - start, []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    return compilation, min(seconds)


# --- how many neighbours


def neighbours(options: argparse.Namespace) -> None:
    """How many neighbours a value needs, by kernel and tolerance, in double precision."""
    print("| kernel | points per lengthscale | 1e-3 | 1e-5 | scaled, 1e-3 | scaled, 1e-5 |\n" + "|---" * 6 + "|")
    for kernel in (dgp.kernels.RBF(), dgp.kernels.Matern52(), dgp.kernels.Matern32(), dgp.kernels.Matern12()):
        for per in (2, 5):
            grid = dgp.Grid(0.0, 4000 / per, 4000)
            found = [grid.local(kernel, tol=t, scaled=s).neighbours for s in (False, True) for t in (1e-3, 1e-5)]
            print(f"| {type(kernel).__name__} | {per} | " + " | ".join(str(n) for (n,) in found) + " |")


# --- exact regression


def evidence_seconds(size: int, unobserved: int, repeats: int) -> tuple[float, float]:
    """Of the log evidence and its gradient, 20 points per lengthscale."""
    ring, observed = dgp.rings.regular(np.arange(size - unobserved) / 20, margin=unobserved / 20)
    y = dgp.rings.RingNormal(dgp.kernels.RBF(), ring, NOISE, observed).sample(jax.random.key(0))

    def evidence(logs: jax.Array, y: jax.Array) -> jax.Array:
        variance, lengthscale, noise = jnp.exp(logs)
        return dgp.rings.RingNormal(dgp.kernels.RBF(variance, lengthscale), ring, noise, observed).log_prob(y)

    return timed(jax.value_and_grad(evidence), jnp.zeros(3), y, repeats=repeats)


def exact(options: argparse.Namespace) -> None:
    print("| points of the ring | observed | compile (s) | evidence and gradient (s) |\n|---|---|---|---|")
    for size in options.exact:
        for unobserved in (0, 128):
            compilation, seconds = evidence_seconds(size, unobserved, options.repeats)
            print(f"| {size} | {size - unobserved} | {compilation:.1f} | {seconds:.2f} |", flush=True)
    print(f"peak memory {peak():.2f} GiB")


# --- passes over irregular data


def make_data(num: int, length: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, CubicSpline]:
    """Inputs anywhere on [0, length], noisy values, and the function: a draw of the process on the ring."""
    rng = np.random.default_rng(seed)
    ring = dgp.rings.Ring(0.0, length, int(20 * length))
    draw = np.asarray(dgp.rings.RingNormal(dgp.kernels.RBF(), ring).sample(jax.random.key(seed)))
    places = length / len(draw) * np.arange(len(draw) + 1)
    function = CubicSpline(places, np.append(draw, draw[0]), bc_type="periodic")
    x = rng.uniform(0, length, num)
    return x[:, None], function(x) + NOISE * rng.normal(size=num), function


def make_model(inducing: dgp.Grid | dgp.Points, batch: int) -> Callable[..., None]:
    """Regression with everything learned, from wrong starting values."""

    def model(x: jax.Array, y: jax.Array | None = None) -> None:
        positive = dist.constraints.positive
        lengthscale = numpyro.param("lengthscale", START["lengthscale"], constraint=positive)
        variance = numpyro.param("variance", START["variance"], constraint=positive)
        noise = numpyro.param("noise", START["noise"], constraint=positive)
        f = dgp.gp("f", dgp.kernels.RBF(variance, lengthscale), inducing)
        with numpyro.plate("data", len(x), subsample_size=min(batch, len(x)) if y is not None else None) as i:
            values = f(x[i] if y is not None else x)
            likelihood = dgp.Likelihood(values, lambda v: dist.Normal(v, noise))
            numpyro.sample("y", likelihood, obs=None if y is None else y[i])

    return model


def make_grid(size: int) -> dgp.Grid:
    """The ring of the data, with as many neighbours as a kernel of one and a half times the lengthscale reaches."""
    return dgp.Grid(0.0, size / PER_LENGTHSCALE, size).local(dgp.kernels.RBF(1.0, 1.5))


def layer(grid: dgp.Grid, kernel: dgp.kernels.Kernel) -> Any:
    with numpyro.handlers.seed(rng_seed=0):
        return dgp.gp("f", kernel, grid)


def closed_form(
    grid: dgp.Grid, kernel: dgp.kernels.Kernel, noise: float, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Means and gains of the best circulant q(v) given hyperparameters."""
    f = layer(grid, kernel)
    return dgp.rings.optimal_mean(f, x, y, noise, tol=1e-6), dgp.rings.optimal_gain(f, x, noise)


def piece(x: np.ndarray) -> np.ndarray:
    """Inputs on fifty lengthscales in the middle of the data, to predict at."""
    return 0.45 * x.max() + np.linspace(0, 50, 400)


def rmse(difference: np.ndarray | jax.Array) -> float:
    return float(np.sqrt(np.square(difference).mean()))


def local_regression(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Exact means at some inputs from the data up to ten lengthscales away."""
    near = (x[:, 0] > at.min() - 10) & (x[:, 0] < at.max() + 10)
    k, X = dgp.kernels.RBF(), jnp.asarray(x[near])
    return np.asarray(k(at[:, None], X) @ jnp.linalg.solve(k(X, X) + NOISE**2 * jnp.eye(len(X)), y[near]))


def passes(options: argparse.Namespace) -> None:
    size, num = options.grid[-1], options.data
    x, y, function = make_data(num, size / PER_LENGTHSCALE)
    grid = make_grid(size)
    model = make_model(grid, options.batch)
    guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.Circulant())
    per_pass = -(-num // options.batch)
    steps = options.passes * per_pass
    rates = {"f": optax.cosine_decay_schedule(options.rate, steps), "rest": optax.cosine_decay_schedule(0.01, steps)}
    labels = lambda params: {name: "f" if name.startswith("f_") else "rest" for name in params}  # noqa: E731
    optimiser = optax.partition({name: optax.adam(rate) for name, rate in rates.items()}, labels)
    svi = SVI(model, guide, optimiser, dgp.ELBO())
    data = jnp.asarray(x), jnp.asarray(y)
    q = closed_form(grid, dgp.kernels.RBF(START["variance"], START["lengthscale"]), START["noise"], *data)
    state = svi.init(jax.random.key(1), *data, init_params=dict(zip(("f_auto_loc", "f_auto_gain"), q, strict=True)))
    start = time.perf_counter()
    update = jax.jit(svi.update).lower(state, *data).compile()
    compilation = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(steps):
        state, _ = update(state, *data)
    params = jax.block_until_ready(svi.get_params(state))
    seconds = (time.perf_counter() - start) / options.passes
    at = piece(x)
    predicted = dgp.Posterior(model, guide, params).using(num_samples=1).predict(jax.random.key(2), at[:, None]).mean
    lengthscale, variance, noise = (params[name] for name in START)
    kernel = dgp.kernels.RBF(variance, lengthscale)
    loc, _ = closed_form(grid, kernel, noise, *data)
    again = layer(grid, kernel).means_at(at[:, None])(loc[None])[:, 0]
    errors = [rmse(m - function(at)) for m in (predicted, again, local_regression(x, y, at))]
    row = [
        num,
        size,
        grid.neighbours[0],
        options.batch,
        options.passes,
        f"{compilation:.1f}",
        f"{seconds:.1f}",
        f"{peak():.2f}",
    ]
    print(
        "| data | grid points | neighbours | batch | passes | compile (s) | one pass (s) | peak memory (GiB) |\n"
        + "|---" * 8
        + "|"
    )
    print("| " + " | ".join(map(str, row)) + " |")
    found = ", ".join(f"{name} {float(params[name]):.3f}" for name in START)
    print(f"learned: {found} (true: 1, 1, {NOISE})")
    print(f"RMSE of the function: {errors[0]:.4f}; with q(v) in closed form for these hyperparameters {errors[1]:.4f}; "
          f"exact regression with the true ones {errors[2]:.4f}")  # fmt: skip


def solve(options: argparse.Namespace) -> None:
    size, num = options.grid[-1], options.data
    x, y, function = make_data(num, size / PER_LENGTHSCALE)
    grid = dgp.Grid(0.0, size / PER_LENGTHSCALE, size).local(dgp.kernels.RBF())
    data, kernel = (jnp.asarray(x), jnp.asarray(y)), dgp.kernels.RBF()
    optimum = lambda kernel, x, y: closed_form(grid, kernel, NOISE, x, y)  # noqa: E731
    compilation, seconds = timed(optimum, kernel, *data, repeats=1)
    loc, _ = jax.jit(optimum)(kernel, *data)
    at = piece(x)
    predicted = layer(grid, kernel).means_at(at[:, None])(loc[None])[:, 0]
    errors = [rmse(m - function(at)) for m in (predicted, local_regression(x, y, at))]
    print("| data | grid points | neighbours | compile (s) | solve (s) | peak memory (GiB) |\n" + "|---" * 6 + "|")
    print(f"| {num} | {size} | {grid.neighbours[0]} | {compilation:.1f} | {seconds:.1f} | {peak():.2f} |")
    print(f"RMSE of the function: {errors[0]:.4f}; exact regression: {errors[1]:.4f}")


# --- time by size


def step_seconds(inducing: dgp.Grid | dgp.Points, rule: Any, length: float, batch: int, repeats: int) -> float:
    """Of a bound of a minibatch and its gradient by all parameters."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(0, length, (batch, 1)))
    y = jnp.sin(x[:, 0])
    model = make_model(inducing, batch)
    guide = dgp.guides.InducingPoint(model, inducing=rule)
    svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
    state = svi.init(jax.random.key(0), x, y)
    return timed(svi.update, state, x, y, repeats=repeats)[1]


def figure(options: argparse.Namespace) -> None:
    batch, repeats = options.batch, options.repeats
    rows: dict[str, list[tuple[int, float]]] = {"exact": [], "grid": [], "grid, all points": [], "points": []}
    for size in options.figure_exact:
        rows["exact"].append((size, evidence_seconds(size, 0, repeats)[1]))
    for size in options.grid:
        length, grid = size / PER_LENGTHSCALE, make_grid(size)
        rows["grid"].append((size, step_seconds(grid, dgp.guides.Circulant(), length, batch, repeats)))
        if size <= 10_000:
            dense = dgp.Grid(0.0, length, size)
            rows["grid, all points"].append((size, step_seconds(dense, dgp.guides.Circulant(), length, batch, repeats)))
    for size in options.points:
        length = size / PER_LENGTHSCALE
        points = dgp.Points(np.linspace(0, length, size)[:, None])
        rows["points"].append((size, step_seconds(points, dgp.guides.Full(), length, batch, repeats)))
    by_data = [(b, step_seconds(make_grid(options.grid[-1]), dgp.guides.Circulant(), options.grid[-1] / 2, b, repeats))
               for b in options.batches]  # fmt: skip
    print("| | size | seconds |\n|---|---|---|")
    for name, found in [*rows.items(), ("grid, by batch", by_data)]:
        for size, seconds in found:
            print(f"| {name} | {size} | {seconds:.4f} |")
    print(f"peak memory {peak():.2f} GiB")
    draw(rows, by_data, options)


def draw(
    rows: dict[str, list[tuple[int, float]]], by_data: list[tuple[int, float]], options: argparse.Namespace
) -> None:
    """The figure of the table, where there is matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return print("no figure: matplotlib is not installed")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.3), layout="constrained")
    axes[0].set(xlabel="data N", ylabel="seconds", title="exact evidence and gradient")
    axes[1].set(xlabel="inducing points M", title=f"training step, {options.batch} data")
    axes[2].set(xlabel="data in a step", title=f"training step, M = {options.grid[-1]}")
    for axis, found, ideal in (
        (axes[0], rows["exact"], "N log N"),
        (axes[1], rows["grid"], "M log M"),
        (axes[2], by_data, "linear"),
    ):
        sizes, seconds = np.array(found).T
        growth = sizes if ideal == "linear" else sizes * np.log(sizes)
        axis.loglog(sizes, growth * seconds[-1] / growth[-1], "k:", lw=1, label=ideal)
        axis.loglog(sizes, seconds, "o-", label="Grid, neighbours" if axis is axes[1] else None)
    for name, label in (("grid, all points", "Grid, all points"), ("points", "Points, full covariance")):
        axes[1].loglog(*np.array(rows[name]).T, "o-", label=label)
    for axis in axes:
        axis.legend(frameon=False, fontsize=8, loc="lower right" if axis is axes[1] else "upper left")
    axes[1].set_ylim(bottom=1e-5)  # room for the legend
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "ring_scale.png", dpi=150)


PARTS = {"neighbours": neighbours, "exact": exact, "pass": passes, "solve": solve, "figure": figure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--exact", type=int, nargs="+", default=[1_000_000], help="points, for the table")
    parser.add_argument("--figure-exact", type=int, nargs="+", default=[10_000, 30_000, 100_000, 300_000, 1_000_000])
    parser.add_argument("--data", type=int, default=1_000_000)
    parser.add_argument("--grid", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000, 100_000])
    parser.add_argument("--points", type=int, nargs="+", default=[100, 300, 1000, 3000])
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000, 100_000])
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.01, help="of Adam for q(v)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.exact, options.figure_exact, options.data, options.grid = [1000], [500, 1000], 4000, [200, 400]
        options.points, options.batch, options.batches, options.repeats = [20, 40], 100, [50, 100], 1
    if options.part == "all":
        for part in PARTS:
            print(f"\n{part}\n", flush=True)
            subprocess.run([sys.executable, *sys.argv, part], check=True)
        return
    numpyro.enable_x64()
    print(f"{jax.devices()[0].device_kind}, float64\n")
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
