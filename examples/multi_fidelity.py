"""Two data sources, one program: many cheap, wrong values and a few good ones.

A deep Gaussian process for two fidelities: the good function sees the input and the cheap function there,
high(x) = g(x, low(x)), and both sources are observed sites of one program with plates of their own. On Forrester's
pair of functions the relation between the two is linear, on that of Perdikaris et al. (2017) it is not. A Gaussian
process on the good data alone is fitted for comparison. After Perdikaris et al. (2017), section 3; Salimbeni
(2020) names the model in the chapter "Impact".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
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

import numpyro_dgp as dgp
from numpyro_dgp import plots
from numpyro_dgp.kernels import RBF, ActiveDims, Linear

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAIRS = {
    "Forrester": (
        lambda x: 0.5 * PAIRS["Forrester"][1](x) + 10 * (x - 0.5) - 5,
        lambda x: (6 * x - 2) ** 2 * np.sin(12 * x - 4),
    ),
    "Perdikaris": (
        lambda x: np.sin(8 * np.pi * x),
        lambda x: (x - np.sqrt(2)) * np.sin(8 * np.pi * x) ** 2,
    ),
}
POINTS = {"Forrester": (40, 5), "Perdikaris": (50, 14)}


NOISE = 0.02  # of computer code that has none, in units of the functions' spread


def positive(name: str, typical: float, spread: float = 1.0) -> Any:
    return numpyro.sample(name, dist.LogNormal(jnp.log(typical), spread))


def two_fidelities(X_low: Any, X_high: Any, y_low: Any = None, y_high: Any = None) -> None:
    """The good function is a product of what depends on x and what depends on the cheap one, plus a difference."""
    Z = jnp.linspace(0, 1, 30)[:, None]
    low = dgp.gp("low", RBF(1.0, positive("low scale", 0.1)), dgp.Points(Z))
    # Inducing inputs over the plane of (x, low(x)).
    plane = jnp.stack(jnp.meshgrid(jnp.linspace(0, 1, 6), jnp.linspace(-2, 3.5, 8)), -1).reshape(-1, 2)
    cheap = Linear(positive("slope", 1.0)) + RBF(positive("bend", 0.5), positive("bend scale", 1.0))
    varies = RBF(1.0, positive("varies scale", 2.0))
    difference = RBF(positive("difference", 1.0), positive("difference scale", 1.0, 0.5))
    kernel = ActiveDims(varies, (0,)) * ActiveDims(cheap, (1,)) + ActiveDims(difference, (0,))
    high = dgp.gp("high", kernel, dgp.Points(plane))
    with numpyro.plate("cheap data", len(X_low)):
        numpyro.sample("y_low", dgp.Likelihood(low(X_low), lambda v: dist.Normal(v, NOISE)), obs=y_low)
    with numpyro.plate("good data", len(X_high)):
        h = numpyro.sample("h", low(X_high))
        v = high(jnp.stack(jnp.broadcast_arrays(X_high[:, 0], h), -1))
        numpyro.sample("y_high", dgp.Likelihood(v, lambda v: dist.Normal(v, NOISE)), obs=y_high)


def good_data_only(X_high: Any, y_high: Any = None) -> None:
    f = dgp.gp("f", RBF(positive("variance", 1.0), positive("scale", 0.1)), dgp.Points(jnp.linspace(0, 1, 30)[:, None]))
    with numpyro.plate("good data", len(X_high)):
        numpyro.sample("y_high", dgp.Likelihood(f(X_high), lambda v: dist.Normal(v, NOISE)), obs=y_high)


def fit(model: Callable[..., None], steps: int, *data: Any) -> tuple[dgp.Posterior, Any]:
    guide = dgp.guides.InducingPoint(model)
    adam = optax.adam(optax.cosine_decay_schedule(0.02, steps))
    optimizer = dgp.optim.NaturalGradient(guide, dgp.optim.log_linear(1e-3, 0.1, steps // 10 + 1), adam)
    svi = SVI(model, guide, optimizer, dgp.ELBO(num_particles=5))
    result = dgp.fit(svi, jax.random.key(0), steps, *data, progress_bar=False)
    return dgp.Posterior(model, guide, result.params, site="y_high"), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=200, help="for predictions")
    parser.add_argument("--out", type=Path, default=Path("multi_fidelity_output"))
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.draws = 5, 3
        del PAIRS["Perdikaris"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    grid = jnp.linspace(0, 1, 301)[:, None]
    figure, axes = plt.subplots(len(PAIRS), 3, figsize=(12.5, 3.2 * len(PAIRS)), squeeze=False, layout="constrained")
    print(f"{'functions':12s}{'model':18s}{'RMSE':>8s}{'log density':>13s}{'covered':>9s}")
    for row, (name, pair) in zip(axes, PAIRS.items(), strict=True):
        X_low, X_high = (np.linspace(0, 1, n)[:, None] for n in POINTS[name])
        # Standard units, of each source on its own.
        low_units, high_units = (dgp.initial.Standardizer.fit(f(np.asarray(grid[:, 0]))) for f in pair)
        y_low, y_high = low_units(pair[0](X_low[:, 0])), high_units(pair[1](X_high[:, 0]))
        truth = high_units(pair[1](grid[:, 0]))
        X_low, X_high = jnp.asarray(X_low), jnp.asarray(X_high)
        alone = fit(good_data_only, arguments.steps, X_high, y_high)[0]
        both = fit(two_fidelities, arguments.steps, X_low, X_high, y_low, y_high)[0]
        for ax, (title, posterior, inputs) in zip(
            row, [("good data only", alone, (grid,)), ("both sources", both, (X_low, grid))], strict=False
        ):
            prediction = posterior.using(num_samples=arguments.draws).predict(jax.random.key(1), *inputs)
            density = posterior.using(num_samples=arguments.draws).log_density(jax.random.key(2), truth, *inputs)
            error = np.asarray(prediction.mean - truth)
            covered = 100 * np.mean(np.abs(error) < 1.96 * np.sqrt(prediction.variance))
            rmse, score = np.sqrt(np.mean(error**2)), float(density.mean())
            print(f"{name:12s}{title:18s}{rmse:8.4f}{score:13.2f}{covered:7.0f} %", flush=True)
            plots.fit(grid[:, 0], prediction, data=(X_high[:, 0], y_high), ax=ax)
            ax.plot(grid[:, 0], truth, color="C3", lw=1, ls="--", label="truth")
            ax.set(title=f"{name}: {title}, RMSE {rmse:.3f}", xlabel="x", ylabel="good function (standard units)")
            ax.legend(frameon=False, fontsize=8)
        draws = both.using(num_samples=20).functions(jax.random.key(3))(X_low, grid)
        for h, v in zip(draws["h"], draws["y_high"], strict=True):
            row[2].plot(h, v, color="C0", lw=0.5, alpha=0.5)
        row[2].plot(low_units(pair[0](grid[:, 0])), truth, color="C3", lw=1, ls="--", label="truth")
        row[2].set(title=f"{name}: relation, 20 draws", xlabel="cheap function (standard units)",
                   ylabel="good function (standard units)")  # fmt: skip
        row[2].legend(frameon=False, fontsize=8)
    figure.savefig(arguments.out / "multi_fidelity.png", dpi=80)
    print(f"figure in {arguments.out}")


if __name__ == "__main__":
    main()
