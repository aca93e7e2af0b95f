"""Bayesian optimisation by Thompson sampling: every draw of the function proposes where to look next.

Branin's function, eight values to begin with, then rounds of four. ``posterior.functions`` draws four functions
from a fitted program, and each names its own minimum over the same candidates: where the posterior is sure they agree,
and where it is not they spread, so that a batch explores by itself. The program has one layer or two; the arrays keep
one size and unused rows are masked, so that everything is compiled once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer import SVI
from scipy.stats import qmc

import numpyro_dgp as dgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MINIMUM = 0.397887
NAMES = {1: "GP", 2: "GP-GP"}


def branin(x: np.ndarray) -> np.ndarray:
    """Branin's function of the unit square: three minima, steep at one corner."""
    a, b = 15 * x[..., 0] - 5, 15 * x[..., 1]
    valley = b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6
    return valley**2 + 10 * (1 - 1 / (8 * math.pi)) * np.cos(a) + 10


def model(X: Any, y: Any = None, known: Any = True, depth: int = 2, Z: Any = None) -> None:
    """One or two layers; rows that are not ``known`` yet do not count."""
    noise = numpyro.sample("noise", dist.LogNormal(-4.0, 0.5))
    h = X
    for i in range(depth):
        scale = numpyro.sample(f"scale{i}", dist.LogNormal(-0.5, 0.5).expand([2]).to_event(1))
        last = i == depth - 1
        variance = numpyro.sample(f"variance{i}", dist.LogNormal(0.0 if last else -2.0, 1.0))
        kernel, mean = dgp.kernels.Matern52(variance, scale), None if last else dgp.means.Identity()
        f = dgp.gp(f"f{i}", kernel, dgp.Points(Z), outputs=None if last else 2, mean=mean)
        with numpyro.plate("data", len(X)), handlers.mask(mask=known):
            if last:
                numpyro.sample("y", dgp.Likelihood(f(h), lambda v: dist.Normal(v, noise)), obs=y)
            else:
                h = numpyro.sample(f"h{i}", f(h))


class Surrogate:
    """A fitted program that takes more data in: ``steps`` of Adam from where it was, then draws."""

    def __init__(self, depth: int, steps: int, num_inducing: int) -> None:
        Z = dgp.initial.kmeans(qmc.Sobol(2, seed=0).random(256), num_inducing)
        self.program: Callable[..., None] = partial(model, depth=depth, Z=Z)
        self.guide = dgp.guides.InducingPoint(self.program)
        self.svi = SVI(self.program, self.guide, optax.adam(0.01), dgp.ELBO(num_particles=4))
        self.state: Any = None

        @jax.jit
        def train(state: Any, *data: jax.Array) -> Any:
            return jax.lax.fori_loop(0, steps, lambda _, state: self.svi.update(state, *data)[0], state)

        @partial(jax.jit, static_argnums=3)
        def draw(params: Any, key: jax.Array, X: jax.Array, number: int) -> jax.Array:
            return dgp.Posterior(self.program, self.guide, params).functions(key, num_samples=number)(X)["y"]

        self.train, self.draw = train, draw

    def fit(self, X: np.ndarray, y: np.ndarray, known: np.ndarray) -> None:
        units = dgp.initial.Standardizer.fit(y[known])
        data = jnp.asarray(X), jnp.where(known, units(y), 0.0), jnp.asarray(known)
        if self.state is None:
            self.state = self.svi.init(jax.random.key(0), *data)
        self.state = self.train(self.state, *data)

    def draws(self, key: jax.Array, X: np.ndarray, number: int) -> np.ndarray:
        return np.asarray(self.draw(self.svi.get_params(self.state), key, jnp.asarray(X), number))


def candidates(best: np.ndarray, seed: int) -> np.ndarray:
    """Sobol points, and points near the best one so far."""
    near = best + 0.03 * np.random.default_rng(seed).normal(size=(256, 2))
    return np.concatenate([qmc.Sobol(2, seed=seed).random(1024), near.clip(0, 1)])


def optimise(surrogate: Surrogate, seed: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and values in the order of evaluation, from a new start."""
    total = 8 + 4 * rounds
    X, y, known = np.zeros((total, 2)), np.zeros(total), np.arange(total) < 8
    X[:8] = qmc.Sobol(2, seed=seed).random(8)
    y[:8] = branin(X[:8])
    surrogate.state = None
    for step in range(rounds):
        surrogate.fit(X, y, known)
        done = known.sum()
        places = candidates(X[:done][y[:done].argmin()], 1000 * seed + step)
        draws = surrogate.draws(jax.random.key(1000 * seed + step), places, 4)
        new = slice(done, done + 4)
        X[new] = places[draws.argmin(1)]
        y[new] = branin(X[new])
        known[new] = True
    return X, y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="of four evaluations")
    parser.add_argument("--repeats", type=int, default=4, help="starting designs")
    parser.add_argument("--steps", type=int, default=500, help="of Adam, each round")
    parser.add_argument("--num-inducing", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("bayesian_optimisation_output"))
    parser.add_argument("--smoke", action="store_true", help="two rounds of a few steps, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.repeats, arguments.steps, arguments.num_inducing = 2, 1, 5, 8
        del NAMES[1]
    arguments.out.mkdir(parents=True, exist_ok=True)
    numpyro.enable_x64()
    total = 8 + 4 * arguments.rounds

    def regret(y: np.ndarray) -> np.ndarray:
        return np.minimum.accumulate(y) - MINIMUM

    random = [regret(branin(np.random.default_rng(seed).random((total, 2)))) for seed in range(20 * arguments.repeats)]
    curves = {"random points": np.array(random)}
    for depth, name in NAMES.items():
        surrogate, runs = Surrogate(depth, arguments.steps, arguments.num_inducing), []
        for seed in range(arguments.repeats):
            X, y = optimise(surrogate, seed, arguments.rounds)
            runs.append(regret(y))
        curves[name] = np.array(runs)
    print(
        f"regret, median over designs{'':3s}" + "".join(f"{n:>10d}" for n in range(8, total + 1, 8)) + "  evaluations"
    )
    for name, runs in curves.items():
        row = np.median(runs, 0)[7::8]
        print(f"{name:30s}" + "".join(f"{r:10.4f}" for r in row))

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    line = np.linspace(0, 1, 60)
    grid = np.stack(np.meshgrid(line, line), -1)
    true = branin(grid)
    draws = surrogate.draws(jax.random.key(7), grid.reshape(-1, 2), 30).reshape(-1, 60, 60)
    units = dgp.initial.Standardizer.fit(y)
    for ax, values, title in (
        (axes[0], true, "Branin's function and one run"),
        (axes[1], np.asarray(units.inverse(draws)).std(0), "GP-GP after it: sd of 30 draws"),
    ):
        shown = np.log10(values)
        image = ax.contourf(line, line, shown, 20, cmap="viridis")
        figure.colorbar(image, ax=ax, label="log10 of the value")
        ax.set(title=title, xlabel="first input", ylabel="second input")
    axes[0].plot(*X[:8].T, "ws", ms=4, label="first eight")
    axes[0].plot(*X[8:].T, "o", color="C1", ms=3.5, label="by Thompson sampling")
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
