"""Densities that no single Gaussian fits: the letters DGP, and food expenditure against income.

A latent input w per datum makes the distribution of y at one x as flexible as the function of w above it; layers below
and above decide how it changes with x. The models are named from the input up: LV-GP-GP is y = g(h([x, w])) + noise.
The letters are drawn by matplotlib; the horizontal coordinate is the input, the vertical one the output. After
Salimbeni (2020), sections 5.1 and 5.3.1. It prints two tables and writes figures to ``--out``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from numpyro_dgp import plots

# Name, number of Gaussian-process layers, latent columns.
MODELS = {"GP": (1, 0), "GP-GP": (2, 0), "LV-GP": (1, 1), "LV-GP-GP": (2, 1), "LV-GP-GP-GP": (3, 1)}


class Data(NamedTuple):
    """Training and test rows in standard units of the training rows, and the ways back."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array
    units_X: dgp.initial.Standardizer
    units_y: dgp.initial.Standardizer


def split(X: np.ndarray, y: np.ndarray, seed: int, test: float = 0.1) -> Data:
    """A random part of the rows held out."""
    order = np.random.default_rng(seed).permutation(len(X))
    held, kept = np.split(order, [math.ceil(test * len(X))])
    units_X, units_y = dgp.initial.Standardizer.fit(X[kept]), dgp.initial.Standardizer.fit(y[kept])
    parts = [units(values[rows]) for rows in (kept, held) for units, values in ((units_X, X), (units_y, y))]
    return Data(*(jnp.asarray(part, jnp.float32) for part in parts), units_X, units_y)


def letters(num: int, seed: int = 0, text: str = "DGP") -> tuple[np.ndarray, np.ndarray]:
    """``num`` points uniform inside the glyphs: inputs (num, 1) and outputs (num,)."""
    font = FontProperties(family="DejaVu Sans", weight="bold")  # it comes with matplotlib
    outlines = TextPath((0, 0), text, size=1, prop=font).to_polygons()
    outlines = [matplotlib.path.Path(outline) for outline in outlines]
    low, high = (f([f(o.vertices, 0) for o in outlines], 0) for f in (np.min, np.max))
    rng = np.random.default_rng(seed)
    points = np.zeros((0, 2))
    while len(points) < num:
        some = rng.uniform(low, high, (num, 2))
        crossed = sum(o.contains_points(some).astype(int) for o in outlines)  # an even number in the holes
        points = np.concatenate([points, some[crossed % 2 == 1]])
    return points[:num, :1], points[:num, 1]


def engel() -> tuple[np.ndarray, np.ndarray]:
    """Engel's 235 households: income and expenditure on food, whose spread grows with income."""
    from statsmodels.datasets import engel

    table = engel.load_pandas().data
    return table[["income"]].to_numpy(), table["foodexp"].to_numpy()


def make_model(X: jax.Array, layers: int, latent: int, num_inducing: int = 50) -> Callable[..., None]:
    """A program with ``layers`` Gaussian-process layers over the inputs and ``latent`` latent columns.

    Hidden layers are shared functions, at most five, mixed along principal directions of the inputs; their mean is the
    identity, which drops w.
    """
    D = X.shape[1]
    W = dgp.means.principal_directions(X, min(5, D))
    Z = dgp.initial.kmeans(np.asarray(X), min(num_inducing, len(np.unique(X, axis=0))))
    w = np.random.default_rng(0).normal(size=(len(Z), latent)).astype(Z.dtype)

    def model(X: Any, y: Any = None, batch: int | None = None) -> None:
        functions = []
        for i in range(layers):
            last, inducing = i == layers - 1, np.hstack([Z, w]) if i == 0 else Z
            width = inducing.shape[1]
            prior = dist.LogNormal(0.5 * math.log(width), 1.0).expand([width]).to_event(1)
            variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0)) if last else 1.0
            kernel = dgp.kernels.RBF(variance, numpyro.sample(f"lengthscale{i}", prior))
            outputs = None if last else W.shape[1]
            functions.append(dgp.gp(f"f{i}", kernel, dgp.Points(inducing, learn=True), outputs=outputs))
        noise = numpyro.sample("noise", dist.LogNormal(math.log(0.1), 1.0))
        with numpyro.plate("data", len(X), subsample_size=batch) as rows:
            h = dgp.latent("w", X[rows], latent) if latent else X[rows]
            for i, f in enumerate(functions[:-1]):
                h = h[..., :D] + numpyro.sample(f"h{i}", f(h)) @ W.T
            observed = dgp.Likelihood(functions[-1](h), lambda v: dist.Normal(v, noise))
            numpyro.sample("y", observed, obs=None if y is None else y[rows])

    return model


def make_guide(model: Callable[..., None], name: str, num_samples: int, latent: int) -> Any:
    """Variational inference with a Gaussian per latent, or importance weighting where there are latents."""
    if name == "vi" or not latent:
        return dgp.guides.InducingPoint(model)
    return dgp.guides.ImportanceWeighted(model, num_samples=num_samples)


class Fit(NamedTuple):
    """A fitted model with its scores on the test rows, in standard units."""

    posterior: dgp.Posterior
    mixture: np.ndarray
    estimate: np.ndarray
    normality: float
    noise: float


def fit(data: Data, name: str, arguments: argparse.Namespace) -> Fit:
    """Natural gradients for the last layer, Adam for the rest, both falling along a cosine; then the scores."""
    model = make_model(data.X, *MODELS[name], arguments.num_inducing)
    guide = make_guide(model, arguments.guide, arguments.num_samples, MODELS[name][1])
    steps, batch = arguments.steps, arguments.batch if arguments.batch < len(data.X) else None
    adam = optax.adam(optax.cosine_decay_schedule(arguments.learning_rate, steps))
    optimizer = dgp.optim.NaturalGradient(guide, optax.cosine_decay_schedule(arguments.gamma, steps), adam)
    svi = SVI(model, guide, optimizer, dgp.ELBO())
    keys = jax.random.split(jax.random.key(arguments.seed), 3)
    result = dgp.fit(svi, keys[0], steps, data.X, data.y, batch, progress_bar=False)
    posterior = dgp.Posterior(model, guide, result.params)
    mixture = posterior.using(num_samples=arguments.draws).log_density(keys[1], data.y_test, data.X_test)
    draws = posterior.using(num_samples=arguments.draws).sample(keys[2], data.X_test)
    return Fit(
        posterior,
        np.asarray(mixture, float),
        np.asarray(dgp.densities.kde_log_density(draws, data.y_test), float),
        float(np.median(dgp.densities.shapiro_wilk(draws).statistic)),
        float(guide.median(result.params, data.X, data.y)["noise"]),
    )


def heat_map(data: Data, posterior: dgp.Posterior, draws: int, ax: Any) -> None:
    """The density at 200 inputs and 150 levels, into ``ax``, in the original units."""
    x = jnp.linspace(data.X.min(), data.X.max(), 200)
    margin = 0.25 * (data.y.max() - data.y.min())
    y = jnp.linspace(data.y.min() - margin, data.y.max() + margin, 150)
    grid = jnp.broadcast_to(y[:, None], (len(y), len(x)))
    values = posterior.using(num_samples=draws).log_density(jax.random.key(9), grid, x[:, None])
    plots.density(data.units_X.inverse(x), data.units_y.inverse(y), values - jnp.log(data.units_y.scale), ax=ax)


def compare(title: str, splits: list[Data], names: list[str], arguments: argparse.Namespace) -> None:
    """Fit every model to every split; print a table, and draw the last split with one heat map per model."""
    print(f"{title}: {len(splits[0].X)} training and {len(splits[0].X_test)} test rows; standard units")
    print(f"{'model':14s}{'mixture':>18s}{'KDE':>18s}{'Shapiro W':>12s}{'noise':>8s}", flush=True)
    figure, axes = plt.subplots(1, 1 + len(names), figsize=(3.4 * (1 + len(names)), 3.2), layout="constrained")
    data = splits[-1]
    axes[0].plot(data.units_X.inverse(data.X), data.units_y.inverse(data.y), ".", color="0.2", ms=1)
    axes[0].set(title="data", xlabel="x", ylabel="y")
    for name, ax in zip(names, axes[1:], strict=True):
        fits = [fit(data, name, arguments) for data in splits]
        cells = [summary([getattr(found, metric) for found in fits]) for metric in ("mixture", "estimate")]
        others = f"{np.mean([f.normality for f in fits]):12.3f}{np.mean([f.noise for f in fits]):8.3f}"
        print(f"{name:14s}" + "".join(f"{cell:>18s}" for cell in cells) + others, flush=True)
        heat_map(data, fits[-1].posterior, arguments.draws, ax)
        ax.set(title=f"{name}: {np.mean([f.mixture.mean() for f in fits]):.3f}")
        chosen = np.linspace(0, len(data.X_test) - 1, 5).astype(int)
        draw_marginals(data, fits[-1].posterior, chosen, arguments).savefig(arguments.out / f"{title}_{name}.png")
    axes[0].set(xlim=axes[1].get_xlim(), ylim=axes[1].get_ylim())
    figure.savefig(arguments.out / f"{title}.png", dpi=120)
    plt.close("all")


def draw_marginals(data: Data, posterior: dgp.Posterior, rows: np.ndarray, arguments: argparse.Namespace) -> Any:
    """Predictive distributions at a few test rows."""
    X, y = data.X_test[rows], jnp.linspace(data.y.min() - 1, data.y.max() + 1, 300)
    grid = jnp.broadcast_to(y[:, None], (len(y), len(X)))
    values = posterior.using(num_samples=arguments.draws).log_density(jax.random.key(9), grid, X)
    draws = posterior.using(num_samples=arguments.draws).sample(jax.random.key(8), X)
    return plots.marginals(draws, y, values, observed=data.y_test[rows])


def summary(scores: list[np.ndarray]) -> str:
    """Mean and standard error: over splits where there are several, else over rows."""
    pool = np.array([s.mean() for s in scores]) if len(scores) > 1 else scores[0]
    return f"{pool.mean():.3f} ({pool.std(ddof=1) / math.sqrt(len(pool)):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--guide", choices=["vi", "iw"], default="vi")
    parser.add_argument("--num-samples", type=int, default=5, help="importance samples of one datum")
    parser.add_argument("--num", type=int, default=4000, help="points in the letters")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--num-inducing", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--gamma", type=float, default=0.05, help="first step size of natural gradients")
    parser.add_argument("--draws", type=int, default=2000, help="draws of the predictive distribution")
    parser.add_argument("--splits", type=int, default=5, help="of the expenditure data")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("density_output"))
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few rows, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.num, arguments.steps, arguments.num_inducing, arguments.draws, arguments.splits = 200, 20, 10, 50, 1
        arguments.models = ["GP", "LV-GP-GP"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    compare("letters", [split(*letters(arguments.num, arguments.seed), arguments.seed)], arguments.models, arguments)
    expenditure = [split(*engel(), seed) for seed in range(arguments.splits)]
    compare("expenditure", expenditure, ["GP", "LV-GP"], arguments)
    print(f"figures are in {arguments.out}")


if __name__ == "__main__":
    main()
