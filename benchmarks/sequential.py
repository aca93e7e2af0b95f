"""Sequential design with ``dgp.design.loop``: accuracy by VIGF, and minima by expected improvement.

``python benchmarks/sequential.py`` prints two tables. The first: dgpsi's sine of two inputs, five points to begin with
and then one at a time by the variance of the improvement for global fit; the root mean squared error at 200 points,
relative to its range. The second: the least value of Shubert's function and of Hartman's of six inputs by the logarithm
of the expected improvement. One row is one search; records go to ``--out``, and an interrupted run goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from simulators import SIMULATORS

import numpyro_dgp as dgp

LEAST = {"shubert": -186.7309, "hartmann6": -3.32237}


def model(X: Any, y: Any = None, depth: int = 1, Z: Any = None) -> None:
    """Layers with lengthscales by column and next to no noise."""
    D, h = X.shape[1], X
    for i in reversed(range(depth)):
        scale = numpyro.sample(f"scale{i}", dist.LogNormal(-0.7, 0.7).expand([D]).to_event(1))
        variance = numpyro.sample(f"variance{i}", dist.LogNormal(-2.0 if i else 1.0, 1.0))
        mean = dgp.means.Identity() if i else None
        f = dgp.gp(f"f{i}", dgp.kernels.Matern52(variance, scale), dgp.Points(Z), outputs=D if i else None, mean=mean)
        with numpyro.plate("data", len(X)):
            if i:
                h = numpyro.sample(f"h{i}", f(h))
            else:
                numpyro.sample("y", dgp.Likelihood(f(h), lambda v: dist.Normal(v, 1e-3)), obs=y)


def vigf(posterior: Any, seen: Any, key: jax.Array) -> Any:
    return dgp.design.VIGF(posterior, key, seen.X, seen.y, num_samples=20)


def improvement(posterior: Any, seen: Any, key: jax.Array) -> Any:
    return dgp.design.LogExpectedImprovement(posterior, key, best=seen.best, num_samples=20)


def searched(name: str, depth: int, acquisition: Callable[..., Any], budget: int, seed: int, args: Any) -> Any:
    run, D = SIMULATORS[name]
    box = np.array([[0.0, 1.0]] * D)
    Z = dgp.initial.kmeans(dgp.design.sobol(box, 1024, jax.random.key(0)), args.num_inducing)
    start = 5 if name == "sine" else 10
    return dgp.design.loop(
        lambda x: float(run(x[None])[0]), partial(model, depth=depth, Z=Z), dgp.guides.InducingPoint, box, acquisition,
        jax.random.key(seed), budget=budget, initial=dgp.design.maximin(box, start, jax.random.key(seed)),
        refit_every=args.refit_every, num_steps=args.steps, refit_steps=args.steps // 4, num_particles=4,
        path=args.out / f"{name}_{depth}_{budget}_{seed}.npz", progress_bar=False,
    )  # fmt: skip


def accuracy(args: argparse.Namespace) -> None:
    run, D = SIMULATORS["sine"]
    X = dgp.design.latin_hypercube([[0.0, 1.0]] * D, 200, jax.random.key(99))
    true = run(X)
    print("| layers | seed | " + " | ".join(f"{n} points" for n in args.sizes) + " |")
    print("|" + "---|" * (2 + len(args.sizes)))
    for depth in args.depths:
        for seed in range(args.seeds):
            errors = []
            for n in args.sizes:
                found = searched("sine", depth, vigf, n, seed, args)
                mean = found.units.inverse(found.posterior.predict_function(jax.random.key(1), jnp.asarray(X)).mean)
                errors.append(np.sqrt(np.mean((np.asarray(mean) - true) ** 2)) / np.ptp(true))
            print(f"| {depth} | {seed} | " + " | ".join(f"{e:.4f}" for e in errors) + " |", flush=True)


def minima(args: argparse.Namespace) -> None:
    print("\n| function | layers | seed | least value | first within 1 % of the minimum | minimum |")
    print("|---|---|---|---|---|---|")
    for name in args.functions:
        for depth in args.depths:
            for seed in range(args.seeds):
                y = searched(name, depth, improvement, args.budget, seed, args).record.y
                near = np.flatnonzero(y <= LEAST[name] + 0.01 * abs(LEAST[name]))
                first = near[0] + 1 if len(near) else "-"
                print(f"| {name} | {depth} | {seed} | {y.min():.4f} | {first} | {LEAST[name]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[5, 30, 40, 50])
    parser.add_argument("--functions", nargs="*", default=["shubert", "hartmann6"])
    parser.add_argument("--budget", type=int, default=80)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--refit-every", type=int, default=5)
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("sequential_output"))
    arguments = parser.parse_args()
    numpyro.enable_x64()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.sizes:
        accuracy(arguments)
    if arguments.functions:
        minima(arguments)


if __name__ == "__main__":
    main()
