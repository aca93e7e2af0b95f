"""A friction law from one recorded oscillation: a differential equation with a Gaussian process inside.

A mass on a spring is let go and its position recorded with noise. Its equation is known but for the friction F:

    x'' = -omega**2 x - F(x')

F is a Gaussian process, and the solver asks for it at every step; solver, unknown frequency and unknown start are
ordinary lines of the program. A stock guide of NumPyro, one Gaussian over everything unknown, is fitted by the stock
ELBO. The truth has dry friction, which linear damping cannot describe. Both models then forecast a run from another
start, which tells the laws apart.
"""

from __future__ import annotations

import argparse
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
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_dgp as dgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FREQUENCY, NOISE, STEP = 2.0, 0.01, 0.1
START, OTHER_START = (1.0, 0.0), (0.4, 1.2)
VELOCITIES = np.linspace(-3, 3, 151)


def true_friction(v: jax.Array) -> jax.Array:
    """Dry friction that gives way at small velocities, and drag."""
    return 0.15 * jnp.tanh(10 * v) + 0.05 * v * jnp.abs(v)


def oscillate(friction: Any, frequency: Any, start: Any, times: int, substeps: int = 2) -> jax.Array:
    """Positions at ``times`` multiples of STEP, by the fourth-order Runge-Kutta method."""

    def slope(state: jax.Array) -> jax.Array:
        x, v = state
        return jnp.array([v, -(frequency**2) * x - friction(v)])

    def step(state: jax.Array, _: Any) -> tuple[jax.Array, None]:
        size = STEP / substeps
        a = slope(state)
        b = slope(state + 0.5 * size * a)
        c = slope(state + 0.5 * size * b)
        d = slope(state + size * c)
        return state + size / 6 * (a + 2 * b + 2 * c + d), None

    def advance(state: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
        state, _ = jax.lax.scan(step, state, None, length=substeps)
        return state, state[0]

    return jax.lax.scan(advance, jnp.asarray(start, float), None, length=times)[1]


def model(times: int, x: Any = None, start: Any = None, gaussian_process: bool = True, grid: Any = None) -> None:
    """Positions at ``times`` moments; a ``grid`` of velocities asks for the friction law there."""
    frequency = numpyro.sample("frequency", dist.LogNormal(0.5, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-3.0, 1.0))
    # The law at fixed velocities, once; the solver interpolates.
    if gaussian_process:
        # Known beforehand: its size (m/s²), and over which velocities (m/s) it changes.
        f = dgp.gp("f", dgp.kernels.Matern52(0.3**2, 0.4), dgp.Points(jnp.linspace(0.0, 2.4, 15)[:, None]))
        # Friction changes sign with the velocity, so it is the odd part of f. Given the values at the inducing inputs,
        # f is taken for its mean: between so many of them nothing else is left.
        values = f(VELOCITIES[:, None]).loc
        law = 0.5 * (values - values[::-1])
    else:
        law = VELOCITIES * numpyro.sample("damping", dist.HalfNormal(0.3))

    def friction(v: jax.Array) -> jax.Array:
        place = jnp.clip((v - VELOCITIES[0]) / (VELOCITIES[1] - VELOCITIES[0]), 0, len(VELOCITIES) - 1.001)
        index = place.astype(int)
        return law[index] + (place - index) * (law[index + 1] - law[index])

    if start is None:
        start = numpyro.sample("start", dist.Normal(jnp.zeros(2), 1.5).to_event(1))
    path = numpyro.deterministic("path", oscillate(friction, frequency, start, times))
    if grid is not None:
        numpyro.deterministic("friction", jax.vmap(friction)(grid))
    with numpyro.plate("times", times):
        numpyro.sample("x", dist.Normal(path, noise), obs=x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--times", type=int, default=120, help="recorded positions, a tenth of a second apart")
    parser.add_argument("--steps", type=int, default=6000, help="of Adam")
    parser.add_argument("--draws", type=int, default=300, help="from the posterior")
    parser.add_argument("--out", type=Path, default=Path("physical_output"))
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.times, arguments.steps, arguments.draws = 10, 3, 4
    arguments.out.mkdir(parents=True, exist_ok=True)
    numpyro.enable_x64()
    times, grid = arguments.times, jnp.linspace(-2, 2, 201)
    clean = oscillate(true_friction, FREQUENCY, START, times, 20)
    x = clean + NOISE * np.random.default_rng(0).normal(size=times)
    truth = oscillate(true_friction, FREQUENCY, OTHER_START, times, 20)

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    seconds = STEP * np.arange(1, times + 1)
    axes[0].plot(seconds, x, ".", color="0.2", ms=3, label="recorded")
    axes[1].plot(grid, true_friction(grid), color="0.2", lw=1, ls="--", label="truth")
    axes[2].plot(seconds, truth, color="0.2", lw=1, ls="--", label="truth")
    print(f"{'friction':18s}{'RMSE of law':>14s}{'covered':>9s}{'forecast RMSE':>14s}{'covered':>9s}{'ELBO':>10s}")
    for colour, (name, process) in zip(("C1", "C0"), {"linear": False, "Gaussian process": True}.items(), strict=True):
        program = partial(model, gaussian_process=process)
        guide = AutoMultivariateNormal(program)
        svi = SVI(program, guide, optax.adam(optax.cosine_decay_schedule(0.02, arguments.steps)), Trace_ELBO())
        result = svi.run(jax.random.key(0), arguments.steps, times, x, progress_bar=False)
        samples = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(arguments.draws,))
        predictive = Predictive(program, samples, return_sites=["path", "friction"])
        path = predictive(jax.random.key(2), times, grid=grid)["path"]
        other = predictive(jax.random.key(3), times, start=jnp.array(OTHER_START), grid=grid)

        reached = np.abs(grid) < 1.6  # velocities of the recorded run
        scores = []
        for value, exact, rows in (
            (other["friction"], true_friction(grid), reached),
            (other["path"], truth, slice(None)),
        ):
            low, high = np.quantile(value, [0.025, 0.975], axis=0)
            inside = (low <= exact) & (exact <= high)
            scores += [np.sqrt(np.mean((value.mean(0) - exact)[rows] ** 2)), 100 * np.mean(inside[rows])]
        bound = -float(result.losses[-max(1, arguments.steps // 10) :].mean())
        print(
            f"{name:18s}{scores[0]:12.4f}{scores[1]:7.0f} %{scores[2]:15.4f}{scores[3]:7.0f} %{bound:10.1f}", flush=True
        )

        curves = (seconds, path), (grid, other["friction"]), (seconds, other["path"])
        for ax, (place, value) in zip(axes, curves, strict=True):
            low, high = np.quantile(value, [0.025, 0.975], axis=0)
            ax.plot(place, value.mean(0), color=colour, lw=1.2, label=name)
            ax.fill_between(place, low, high, color=colour, alpha=0.25, lw=0)
    axes[0].set(xlabel="time (s)", ylabel="position (m)", title="the recorded run")
    axes[1].set(xlabel="velocity (m/s)", ylabel="friction per mass (m/s²)", title="friction: mean, 95 % interval")
    axes[2].set(xlabel="time (s)", ylabel="position (m)", title="forecast from another start")
    for ax in axes:
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(arguments.out / "physical_model.png", dpi=90)
    print(f"figure in {arguments.out}")


if __name__ == "__main__":
    main()
