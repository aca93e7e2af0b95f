"""Bayesian optimisation by Thompson sampling: every draw of the function proposes where to look next.

Branin's function, eight values to begin with, then rounds of four. Four functions are drawn from a fitted program, and
``dgp.design.loop`` finds the minimum of each: where the posterior is sure they agree, and where it is not they spread,
so that a batch explores by itself. The program has one layer or two.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_dgp as dgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MINIMUM = 0.397887
NAMES = {1: "GP", 2: "GP-GP"}
SQUARE = np.array([[0.0, 1.0], [0.0, 1.0]])


def branin(x: np.ndarray) -> np.ndarray:
    """Branin's function of the unit square: three minima, steep at one corner."""
    a, b = 15 * x[..., 0] - 5, 15 * x[..., 1]
    valley = b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6
    return valley**2 + 10 * (1 - 1 / (8 * math.pi)) * np.cos(a) + 10


def model(X: Any, y: Any = None, depth: int = 2, Z: Any = None) -> None:
    """One or two layers."""
    noise = numpyro.sample("noise", dist.LogNormal(-4.0, 0.5))
    h = X
    for i in range(depth):
        scale = numpyro.sample(f"scale{i}", dist.LogNormal(-0.5, 0.5).expand([2]).to_event(1))
        last = i == depth - 1
        variance = numpyro.sample(f"variance{i}", dist.LogNormal(0.0 if last else -2.0, 1.0))
        kernel, mean = dgp.kernels.Matern52(variance, scale), None if last else dgp.means.IdentityMean()
        f = dgp.gp(f"f{i}", kernel, dgp.Points(Z), outputs=None if last else 2, mean=mean)
        with numpyro.plate("data", len(X)):
            if last:
                numpyro.sample("y", dgp.Likelihood(f(h), lambda v: dist.Normal(v, noise)), obs=y)
            else:
                h = numpyro.sample(f"h{i}", f(h))


def thompson(posterior: Any, seen: Any, key: jax.Array) -> Any:
    """The sum over points x (q, 2) of minus draw j at point j: largest where every draw has its minimum."""

    def acquisition(x: jax.Array) -> jax.Array:
        return -jnp.trace(posterior.using(num_samples=len(x)).functions(key)(x)["y"])

    return acquisition


def optimise(depth: int, seed: int, arguments: argparse.Namespace) -> Any:
    """A search from a new start: record, posterior and units."""
    Z = dgp.initial.kmeans(dgp.design.sobol(SQUARE, 256, jax.random.key(0)), arguments.num_inducing)
    search = dgp.design.Search(
        partial(model, depth=depth, Z=Z), dgp.guides.InducingPoint, SQUARE, thompson,
        q=4, initial=dgp.design.sobol(SQUARE, 8, jax.random.key(seed)),
        refit_every=1, num_steps=arguments.steps, refit_steps=arguments.steps, num_particles=4,
        num_candidates=arguments.candidates, num_starts=min(8, arguments.candidates),
    )  # fmt: skip
    budget = 8 + 4 * arguments.rounds
    return dgp.design.loop(search, branin, jax.random.key(seed), budget=budget, progress_bar=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="of four evaluations")
    parser.add_argument("--repeats", type=int, default=4, help="starting designs")
    parser.add_argument("--steps", type=int, default=500, help="of natural gradients and Adam, each round")
    parser.add_argument("--candidates", type=int, default=1024, help="where a search of the acquisition begins")
    parser.add_argument("--num-inducing", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("bayesian_optimisation_output"))
    parser.add_argument("--smoke", action="store_true", help="two rounds of a few steps, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.repeats, arguments.steps = 2, 1, 5
        arguments.num_inducing, arguments.candidates = 8, 32
        del NAMES[1]
    arguments.out.mkdir(parents=True, exist_ok=True)
    numpyro.enable_x64()
    total = 8 + 4 * arguments.rounds

    def regret(y: np.ndarray) -> np.ndarray:
        return np.minimum.accumulate(y) - MINIMUM

    random = [regret(branin(np.random.default_rng(seed).random((total, 2)))) for seed in range(20 * arguments.repeats)]
    curves = {"random points": np.array(random)}
    for depth, name in NAMES.items():
        found = [optimise(depth, seed, arguments) for seed in range(arguments.repeats)]
        curves[name] = np.array([regret(one.record.y) for one in found])
        seconds = np.concatenate([one.record.search_seconds[8::4] for one in found])
        print(f"{name}: {np.median(seconds):.2f} s a round (median), {seconds.max():.1f} s the slowest, which compiles")
    print(
        f"regret, median over designs{'':3s}" + "".join(f"{n:>10d}" for n in range(8, total + 1, 8)) + "  evaluations"
    )
    for name, runs in curves.items():
        row = np.median(runs, 0)[7::8]
        print(f"{name:30s}" + "".join(f"{r:10.4f}" for r in row))

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    line = np.linspace(0, 1, 60)
    grid = np.stack(np.meshgrid(line, line), -1)
    record, posterior, units, _ = found[-1]
    draws = posterior.using(num_samples=30).functions(jax.random.key(7))(grid.reshape(-1, 2))["y"].reshape(-1, 60, 60)
    for ax, values, title in (
        (axes[0], branin(grid), "Branin's function and one run"),
        (axes[1], np.asarray(units.inverse(draws)).std(0), "GP-GP after it: sd of 30 draws"),
    ):
        shown = np.log10(values)
        image = ax.contourf(line, line, shown, 20, cmap="viridis")
        figure.colorbar(image, ax=ax, label="log10 of the value")
        ax.set(title=title, xlabel="first input", ylabel="second input")
    axes[0].plot(*record.X[:8].T, "ws", ms=4, label="first eight")
    axes[0].plot(*record.X[8:].T, "o", color="C1", ms=3.5, label="by Thompson sampling")
    axes[0].legend(fontsize=8)
    for name, runs in curves.items():
        low, middle, high = np.quantile(runs, [0.0, 0.5, 1.0] if name != "random points" else [0.1, 0.5, 0.9], axis=0)
        (curve,) = axes[2].plot(np.arange(1, total + 1), middle, label=name)
        axes[2].fill_between(np.arange(1, total + 1), low, high, alpha=0.2, lw=0, color=curve.get_color())
    axes[2].set(yscale="log", xlabel="evaluations", ylabel="best value so far minus the minimum",
                title="median, and range over designs")  # fmt: skip
    axes[2].legend(frameon=False)
    figure.savefig(arguments.out / "bayesian_optimisation.png", dpi=85)
    print(f"figure in {arguments.out}")


if __name__ == "__main__":
    main()
