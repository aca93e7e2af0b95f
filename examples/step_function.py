"""A step and a sum of sinusoids: where a deep Gaussian process beats a shallow one, and where it need not.

No stationary Gaussian process fits a jump: one lengthscale must serve the flat parts and the edge. A deep one bends its
inputs first. After Chamberlin (2016), chapter 3, which follows Damianou (2015).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from regression import NAMES, Split, fit

import numpyro_dgp as dgp
from numpyro_dgp import plots

FUNCTIONS = {
    "step": lambda x: np.where(x > 0, 1.0, -1.0),
    "sinusoids": lambda x: np.sin(2 * np.pi * x) + 0.5 * np.sin(6 * np.pi * x + 1.0),
}


def make_data(name: str, num: int, noise: float, seed: int) -> Split:
    """``num`` training rows and 1000 test rows on [-1, 1], in standard units."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, num + 1000)
    y = FUNCTIONS[name](x) + noise * rng.normal(size=x.shape)
    units_X, units_y = dgp.initial.Standardizer.fit(x[:num, None]), dgp.initial.Standardizer.fit(y[:num])
    X, y = (jnp.asarray(v, jnp.float32) for v in (units_X(x[:, None]), units_y(y)))
    return Split(X[:num], y[:num], X[num:], y[num:], units_X, units_y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num", type=int, default=200, help="training rows")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3, help="data sets")
    parser.add_argument("--out", type=Path, default=Path("step_output"))
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.repeats, arguments.num = 20, 1, 40
    arguments.out.mkdir(parents=True, exist_ok=True)

    print(f"{'function':12s}{'model':12s}{'test log density':>18s}{'RMSE':>10s}{'ELBO per row':>15s}")
    figure, axes = plt.subplots(2, 3, figsize=(8, 4.6), layout="constrained", sharex=True, sharey="row")
    for axis_row, name in zip(axes, FUNCTIONS, strict=True):
        for ax, depth in zip(axis_row, NAMES, strict=True):
            density, rmse, bound = [], [], []
            for seed in range(arguments.repeats):
                split = make_data(name, arguments.num, arguments.noise, seed)
                settings = {"num_inducing": 25, "steps": arguments.steps, "likelihood": "normal", "progress": False}
                found = fit(split, depth, "inducing-point", **settings)
                density.append(found.log_density.mean())
                rmse.append(np.sqrt((found.errors**2).mean()))
                bound.append(found.bounds.mean())
            spread = f"({np.std(density, ddof=1) / np.sqrt(len(density)):.3f})" if len(density) > 1 else ""
            values = f"{np.mean(density):9.3f} {spread:8s}{np.mean(rmse):10.4f}{np.mean(bound):15.3f}"
            print(f"{name:12s}{NAMES[depth]:12s}{values}", flush=True)
            x = jnp.linspace(split.X.min(), split.X.max(), 400)[:, None]
            prediction = found.posterior.predict(jax.random.key(1), x)
            draws = found.posterior.using(num_samples=5).functions(jax.random.key(2))(x)["y"]
            plots.fit(x[:, 0], prediction, data=(split.X[:, 0], split.y), functions=draws, ax=ax)
            ax.set(title=f"{name}, {NAMES[depth]}", xlabel="x (standard units)", ylabel="y (standard units)")
            ax.label_outer()
            ax.get_legend().remove()
            if name == "step" and depth > 1:
                layers = plots.layers(found.posterior, jax.random.key(3), split.X)
                layers.savefig(arguments.out / f"step_layers_{depth}.png", dpi=110)
    axes[0, 2].legend(frameon=False, loc="upper left", handlelength=1, borderpad=0, fontsize="medium")
    figure.savefig(arguments.out / "step_function.png", dpi=165)
    print(f"figures are in {arguments.out}")


if __name__ == "__main__":
    main()
