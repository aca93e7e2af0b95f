"""An emulator of a simulator, from a design to sensitivity indices: the cycle time of a piston.

Seven inputs, a hundred runs at the points of a Latin hypercube, and a program of one layer or two fitted to them. It
prints test error and coverage of both. Of the deep one it prints first-order and total Sobol' indices, with what a
hundred runs leave open and the error of the integrals, beside those of the simulator itself, which is fast enough here
to be asked; and it draws them, and the main effect of every input.

Source: Kenett and Zacks (1998) for the piston; Ben-Ari and Steinberg (2007) for the ranges of its inputs.
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
from numpyro.infer import SVI
from scipy.stats import qmc

import numpyro_dgp as dgp

matplotlib.use("Agg")
from numpyro_dgp import plots

INPUTS = {
    "weight, kg": (30.0, 60.0),
    "surface, m²": (0.005, 0.020),
    "gas volume, m³": (0.002, 0.010),
    "spring, N/m": (1000.0, 5000.0),
    "pressure, N/m²": (90_000.0, 110_000.0),
    "air, K": (290.0, 296.0),
    "gas, K": (340.0, 360.0),
}
LOW, HIGH = np.array(list(INPUTS.values())).T
NAMES = {1: "GP", 2: "GP-GP"}


def piston(X: Any) -> Any:
    """Seconds that a piston takes for one cycle."""
    weight, surface, volume, spring, pressure, air, gas = X.T
    force = pressure * surface + 19.62 * weight - spring * volume / surface
    state = spring * pressure * volume * air / gas
    room = surface / (2 * spring) * (np.sqrt(force**2 + 4 * state) - force)
    return 2 * math.pi * np.sqrt(weight / (spring + surface**2 * state / (spring * room**2)))


def model(X: Any, y: Any = None, *, depth: int, Z: Any) -> None:
    """One or two layers over inputs in their own units; ``Z`` are inducing inputs in the unit cube."""
    D = Z.shape[1]
    noise = numpyro.sample("noise", dist.LogNormal(-5.0, 1.0))
    h = (X - LOW) / (HIGH - LOW)
    for i in range(depth):
        last = i == depth - 1
        scales = numpyro.sample(f"scales{i}", dist.LogNormal(0.5, 1.0).expand([D]).to_event(1))
        variance = numpyro.sample(f"variance{i}", dist.LogNormal(1.0 if last else -3.0, 1.0))
        kernel, mean = dgp.kernels.Matern52(variance, scales), None if last else dgp.means.IdentityMean()
        f = dgp.gp(f"f{i}", kernel, dgp.Points(Z), outputs=None if last else D, mean=mean)
        with numpyro.plate("data", len(X)):
            if last:
                numpyro.sample("y", dgp.Likelihood(f(h), lambda v: dist.Normal(v, noise)), obs=y)
            else:
                h = numpyro.sample(f"h{i}", f(h))


def fit(depth: int, X: np.ndarray, y: np.ndarray, steps: int) -> dgp.Posterior:
    """The program at the data ``X``, ``y``, with an inducing point at every run."""
    program: Callable[..., None] = partial(model, depth=depth, Z=jnp.asarray((X - LOW) / (HIGH - LOW)))
    guide = dgp.guides.InducingPoint(program)
    optimiser = optax.adam(optax.cosine_decay_schedule(0.02, steps))
    svi = SVI(program, guide, optimiser, dgp.ELBO(num_particles=2))
    result = dgp.fit(svi, jax.random.key(0), steps, jnp.asarray(X), jnp.asarray(y), progress_bar=False)
    return dgp.Posterior(program, guide, result.params)


def scores(posterior: dgp.Posterior, X: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Root mean squared error, log density, and the share of the values in intervals of 90 %, in units of y."""
    rows, values = jnp.asarray(X), jnp.asarray(y)
    prediction = posterior.predict(jax.random.key(1), rows)
    low, high = prediction.interval(0.9)
    density = posterior.log_density(jax.random.key(1), values, rows).mean()
    error = jnp.sqrt(jnp.mean((prediction.mean - values) ** 2))
    return float(error), float(density), float(((low <= values) & (values <= high)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="of the simulator, at the points of a Latin hypercube")
    parser.add_argument("--steps", type=int, default=4000, help="of Adam")
    parser.add_argument("--functions", type=int, default=50, help="draws of the emulator")
    parser.add_argument("--points", type=int, default=512, help="of the integrals of the indices, a power of two")
    parser.add_argument("--out", type=Path, default=Path("emulator_output"))
    parser.add_argument("--smoke", action="store_true", help="a few steps and points, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.runs, arguments.steps, arguments.functions, arguments.points = 20, 3, 3, 128
        del NAMES[1]
    arguments.out.mkdir(parents=True, exist_ok=True)
    numpyro.enable_x64()

    design = qmc.LatinHypercube(7, seed=0, optimization="random-cd").random(arguments.runs)
    X, X_test = LOW + (HIGH - LOW) * design, LOW + (HIGH - LOW) * qmc.Sobol(7, seed=1).random(1024)
    units = dgp.initial.Standardizer.fit(piston(X))
    y, y_test = (np.asarray(units(piston(rows))) for rows in (X, X_test))
    print(f"{arguments.runs} runs, spread {float(units.scale):.4f} s; at {len(X_test)} others, in units of the spread")
    print(f"{'':8s}{'RMSE':>8s}{'log density':>13s}{'in 90 %':>9s}")
    for depth, name in NAMES.items():
        posterior = fit(depth, X, y, arguments.steps)
        error, density, inside = scores(posterior, X_test, y_test)
        print(f"{name:8s}{error:8.4f}{density:13.3f}{100 * inside:7.1f} %", flush=True)

    draws = posterior.using(num_samples=arguments.functions).functions(jax.random.key(2))

    def seconds(X: jax.Array) -> Any:
        """Draws of the emulator in units of the simulator."""
        return units.inverse(draws(X)["y"])

    key, integral = jax.random.key(3), {"num_points": arguments.points, "progress_bar": False}
    found = dgp.design.sobol_indices(seconds, INPUTS, key, **integral)
    truth = dgp.design.sobol_indices(lambda X: piston(np.asarray(X)), INPUTS, key, num_points=8192, progress_bar=False)
    print(f"\n{'':16s}{'first':>8s}{'emulator':>10s}{'integral':>10s}{'true':>8s}"
          f"{'total':>10s}{'emulator':>10s}{'integral':>10s}{'true':>8s}")  # fmt: skip
    for d, name in enumerate(found.names):
        print(f"{name:16s}" + "  ".join(
            f"{index.mean[d]:8.4f}{index.emulator_error[d]:10.4f}{index.integration_error[d]:10.4f}{true.mean[d]:8.4f}"
            for index, true in ((found.first, truth.first), (found.total, truth.total))
        ))  # fmt: skip
    for index, true, order in ((found.first, truth.first, "first"), (found.total, truth.total, "total")):
        low, high = index.interval(0.9)
        inside = int(((low <= true.mean) & (true.mean <= high)).sum())
        print(f"{order} indices of the simulator in the intervals of 90 %: {inside} of {len(low)}")
    plots.sobol_indices(found, reference=truth).savefig(arguments.out / "emulator_indices.png", dpi=85)

    integral["num_points"] = max(8, arguments.points // 8)
    effects = dgp.design.main_effects(seconds, INPUTS, key, **integral)
    true_effects = dgp.design.main_effects(
        lambda X: piston(np.asarray(X)), INPUTS, key, num_points=1024, batch_size=32_768, progress_bar=False
    )
    figure = plots.main_effects(effects, reference=true_effects, label="mean cycle time, s")
    figure.savefig(arguments.out / "emulator_main_effects.png", dpi=85)
    print(f"figures in {arguments.out}")


if __name__ == "__main__":
    main()
