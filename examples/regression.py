"""Fit Gaussian processes of one and two layers to a regression data set.

``python examples/regression.py`` fits Mauna Loa CO2. ``--data FILE.npz`` takes any file with arrays X (N, D) and
y (N,); ``--layers 1 2 3`` adds a third layer, ``--guide inducing-point mean-field`` a second guide, and
``python examples/regression.py --help`` lists the rest. It prints a table and writes figures and the fitted parameters
to ``--out``; ``summary.png`` shows all fits, for a series with a forecast. Fits run in processes of their own,
``--jobs`` at a time, so that one compiles while another computes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient, log_linear

GUIDES = {"inducing-point": dgp.guides.InducingPoint, "mean-field": dgp.guides.MeanField}
NAMES = {1: "GP", 2: "GP-GP", 3: "GP-GP-GP"}
LIKELIHOODS = ("normal", "student-t")
# The first rate of Adam, which falls to zero, and steps: means and variances of every row take longer.
RATES = {"natural": 0.02, "adam": 0.05}
STEPS = {"natural": {"inducing-point": 1200, "mean-field": 2000}, "adam": dict.fromkeys(GUIDES, 5000)}


class Split(NamedTuple):
    """One division into training and test rows, in standard units, and the way back for y."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array
    units_X: dgp.initial.Standardizer
    units_y: dgp.initial.Standardizer


def load(data: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, D) and targets (N,) in their own units."""
    if data == "co2":
        from statsmodels.datasets import co2

        table = co2.load_pandas().data.dropna()
        years = table.index.year + table.index.day_of_year / 365.25
        return np.asarray(years, float)[:, None], table["co2"].to_numpy()
    if data == "diabetes":
        from sklearn.datasets import load_diabetes

        return load_diabetes(return_X_y=True)
    file = np.load(data)
    return file["X"].astype(float), file["y"].astype(float).reshape(len(file["X"]))


def split_data(X: np.ndarray, y: np.ndarray, split: int, protocol: str, max_test: int = 10_000) -> Split:
    """Nine tenths of the rows for training. Protocol A takes the units from all rows, B from the training rows."""
    order = np.arange(len(X))
    np.random.RandomState(split).shuffle(order)
    train, test = np.split(order, [int(0.9 * len(X))])
    test = test[:max_test]
    source = order if protocol == "A" else train
    units_X, units_y = dgp.initial.Standardizer.fit(X[source]), dgp.initial.Standardizer.fit(y[source])
    parts = [units(values[rows]) for rows in (train, test) for units, values in ((units_X, X), (units_y, y))]
    return Split(*(jnp.asarray(part, jnp.float32) for part in parts), units_X, units_y)


def make_model(
    X: jax.Array,
    depth: int,
    num_inducing: int,
    process_noise: bool = False,
    period: float | None = None,
    likelihood: str = "student-t",
    inner_spread: float = 1.0,
) -> Callable[..., None]:
    """A deep GP for inputs like ``X``: hyperparameters have priors, inner layers start as the identity.

    With a ``period``, in units of X, the first layer may also be periodic. The degrees of freedom of a Student-t
    likelihood are learned, above 2 so that the variance is finite; the larger, the closer to normal. Logarithms of the
    variances of inner layers have a prior with the standard deviation ``inner_spread``.
    """
    starts = dgp.initial.layers(X, [min(X.shape[1], 30)] * (depth - 1), min(num_inducing, len(np.unique(X, axis=0))))

    def model(X: Any, y: Any = None, batch_size: int | None = None) -> None:
        functions = []
        for i, (Z, mean, lengthscale) in enumerate(starts):
            scales = dist.LogNormal(math.log(lengthscale), 1.0).expand([Z.shape[1]]).to_event(1)
            spread = 1.0 if i == depth - 1 else inner_spread
            kernel = dgp.kernels.RBF(
                numpyro.sample(f"variance{i}", dist.LogNormal(0.0, spread)), numpyro.sample(f"lengthscale{i}", scales)
            )
            if i == 0 and period is not None:
                season = numpyro.sample("season", dist.LogNormal(jnp.array([-4.0, 0.0]), 1.0).to_event(1))
                kernel = kernel + dgp.kernels.Periodic(season[0], season[1], period)
            outputs = None if i == depth - 1 else starts[i + 1].Z.shape[1]
            functions.append(dgp.gp(f"f{i}", kernel, dgp.Points(Z, learn=True), outputs=outputs, mean=mean))
        jitters = [
            numpyro.sample(f"process_noise{i}", dist.LogNormal(math.log(0.03), 0.5)) if process_noise else None
            for i in range(depth - 1)
        ]
        noise = numpyro.sample("noise", dist.LogNormal(math.log(0.1), 1.0))
        tails = numpyro.sample("tails", dist.Gamma(2.0, 0.1)) if likelihood == "student-t" else None
        with numpyro.plate("data", len(X), subsample_size=batch_size) as rows:
            h = X[rows]
            for i, f in enumerate(functions[:-1]):
                h = numpyro.sample(f"h{i}", f(h, noise=jitters[i]))
            observed = dgp.Likelihood(
                functions[-1](h),
                lambda v: dist.Normal(v, noise) if tails is None else dist.StudentT(2 + tails, v, noise),
            )
            numpyro.sample("y", observed, obs=None if y is None else y[rows])

    return model


@dataclasses.dataclass
class Fit:
    """A fitted model, its errors, predictive standard deviations and log densities of test rows, in standard units.

    ``bounds`` are estimates of the bound per row, by the last hundred steps, which hardly move. ``posterior`` is
    ``None`` in a fit that comes from another process. ``curves`` is for a single input: the inputs and predictions over
    the whole record and over its end with a forecast, in the units of the data.
    """

    name: str
    posterior: dgp.Posterior | None
    losses: np.ndarray
    errors: np.ndarray
    deviations: np.ndarray
    log_density: np.ndarray
    bounds: np.ndarray
    seconds: float
    curves: tuple[tuple[np.ndarray, dgp.densities.Mixture], ...] = ()


def train(
    split: Split,
    depth: int,
    guide_name: str,
    *,
    num_inducing: int = 100,
    optimizer: str = "natural",
    steps: int | None = None,
    batch: int = 1000,
    learning_rate: float | None = None,
    seed: int = 0,
    process_noise: bool = False,
    period: float | None = None,
    likelihood: str = "student-t",
    checkpoint: Path | None = None,
    progress: bool = True,
) -> tuple[dgp.Posterior, np.ndarray, float]:
    """The posterior of a fit, its losses and seconds, with ``RATES`` and ``STEPS`` by default.

    Rates fall to zero by a cosine. ``optimizer="natural"`` is Adam, and natural gradients for q(v) of the last layer.
    ``"adam"`` is Adam alone.
    """
    steps, learning_rate = steps or STEPS[optimizer][guide_name], learning_rate or RATES[optimizer]
    model = make_model(split.X, depth, num_inducing, process_noise, period, likelihood)
    guide = GUIDES[guide_name](model)
    fall, rise = optax.cosine_decay_schedule(1.0, steps), log_linear(1e-4, 0.1, 40)
    adam = optax.adam(lambda step: learning_rate * fall(step))
    natural = NaturalGradient(guide, lambda step: rise(step) * fall(step), adam)
    svi = SVI(model, guide, natural if optimizer == "natural" else adam, dgp.ELBO())
    rows = batch if batch < len(split.X) else None
    key = jax.random.split(jax.random.key(seed), 4)[0]
    start = time.perf_counter()
    result = dgp.fit(svi, key, steps, split.X, split.y, rows, checkpoint=checkpoint, progress_bar=progress)
    seconds = time.perf_counter() - start
    return dgp.Posterior(model, guide, result.params), np.asarray(result.losses, float), seconds


def score(
    split: Split,
    name: str,
    posterior: dgp.Posterior,
    losses: np.ndarray,
    seconds: float,
    *,
    draws: int = 100,
    seed: int = 0,
) -> Fit:
    """A fit with its predictions for the test rows."""
    keys = jax.random.split(jax.random.key(seed), 4)
    prediction = posterior.using(num_samples=draws).predict(keys[1], split.X_test)
    density = posterior.using(num_samples=draws).log_density(keys[2], split.y_test, split.X_test)
    return Fit(
        name,
        posterior,
        losses,
        np.asarray(prediction.mean - split.y_test, float),
        np.sqrt(np.asarray(prediction.variance, float)),
        np.asarray(density, float),
        -losses[-100:] / len(split.X),
        seconds,
    )


def name_of(depth: int, guide_name: str) -> str:
    """How a fit is called in tables and figures."""
    return f"{NAMES.get(depth, f'{depth} layers')}, {guide_name}"


def fit(split: Split, depth: int, guide_name: str, *, draws: int = 100, seed: int = 0, **settings: Any) -> Fit:
    """:func:`train`, then :func:`score`."""
    return score(
        split,
        name_of(depth, guide_name),
        *train(split, depth, guide_name, seed=seed, **settings),
        draws=draws,
        seed=seed,
    )


def row(fits: list[Fit], shallow: list[Fit]) -> str:
    """One line of the table: means with standard errors, over splits where there are several, else over rows.

    A fit whose test rows are less probable than under the ``shallow`` one, by more than two standard errors of the
    difference, is marked.
    """

    def summary(values: list[np.ndarray], root: bool = False) -> str:
        pool = np.array([v.mean() for v in values]) if len(values) > 1 else values[0]
        mean, error = pool.mean(), pool.std(ddof=1) / math.sqrt(len(pool))
        if not root:
            return f"{mean:8.3f} ({error:.3f})"
        if len(values) == 1:  # of a square root, by the delta method
            return f"{math.sqrt(mean):8.3f} ({error / (2 * math.sqrt(mean)):.3f})"
        pool = np.sqrt(pool)
        return f"{pool.mean():8.3f} ({pool.std(ddof=1) / math.sqrt(len(pool)):.3f})"

    cells = [
        summary([f.errors**2 for f in fits], root=True),
        summary([f.log_density for f in fits]),
        summary([f.bounds for f in fits]),
        f"{np.mean([f.seconds for f in fits]):6.0f}",
    ]
    differences = [f.log_density - s.log_density for f, s in zip(fits, shallow, strict=True)]
    pool = np.array([d.mean() for d in differences]) if len(differences) > 1 else differences[0]
    worse = pool.mean() < -2 * pool.std(ddof=1) / math.sqrt(len(pool))
    remark = f"  worse than {shallow[0].name}" if worse else ""
    return f"{fits[0].name:26s}" + " ".join(f"{cell:>17s}" for cell in cells[:3]) + cells[3] + remark


def curves(split: Split, posterior: dgp.Posterior) -> tuple[tuple[np.ndarray, dgp.densities.Mixture], ...]:
    """Predictions over the inputs, and over the last eighth of them and a sixteenth beyond: a forecast."""
    low, high = split.X.min(), split.X.max()
    reach = (high - low) / 8
    # Pieces of as many points as the test rows of CO2 are filled up to, for which there is a program.
    ranges = jnp.linspace(low, high, 500), jnp.linspace(high - reach, high + reach / 2, 500)
    found = []
    for x in ranges:
        halves = [posterior.predict(jax.random.key(9), half) for half in jnp.split(x[:, None], 2)]
        means, variances = (np.concatenate(parts, 1) for parts in zip(*halves, strict=True))
        prediction = dgp.densities.Mixture(split.units_y.inverse(means), variances * split.units_y.scale**2)
        found.append((np.asarray(split.units_X.inverse(x[:, None]))[:, 0], prediction))
    return tuple(found)


def draw_summary(split: Split, fits: list[Fit], out: Path, labels: dict[str, str]) -> None:
    """One figure of all fits: a column each, for a single input the record above its end with a forecast."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from numpyro_dgp import plots

    rows = max(1, len(fits[0].curves))
    size = (max(4.6 * len(fits), 6.0), 3.2 * rows)
    figure, axes = plt.subplots(rows, len(fits), figsize=size, squeeze=False, sharey="row", layout="constrained")
    for column, found in zip(axes.T, fits, strict=True):
        for ax, (x, prediction) in zip(column, found.curves, strict=False):
            X = np.asarray(split.units_X.inverse(split.X))[:, 0]
            shown = x.min() <= X
            plots.fit(x, prediction, data=(X[shown], split.units_y.inverse(split.y)[shown]), ax=ax)
            ax.set(xlim=(x.min(), x.max()), **labels)
        if found.curves:
            column[-1].axvline(float(split.units_X.inverse(split.X).max()), color="0.3", lw=0.8, ls=":")
        else:
            mean = np.asarray(split.y_test) + found.errors
            plots.observed(split.y_test, dgp.densities.Mixture(mean[None], found.deviations[None] ** 2), ax=column[0])
        scores = f"log density {found.log_density.mean():.2f}, RMSE {math.sqrt((found.errors**2).mean()):.3f}"
        column[0].set_title(f"{found.name}\n{scores}")
    figure.savefig(out / "summary.png", dpi=120)
    plots.bounds({f.name: f.losses for f in fits}, size=len(split.X)).savefig(out / "elbo.png", dpi=120)
    plt.close("all")


def rows_of(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """The data, or a few rows of them in a smoke run."""
    X, y = load(arguments.data)
    return (X[:100], y[:100]) if arguments.smoke else (X, y)


class Trained(NamedTuple):
    """A fit as it travels between processes."""

    seed: int
    depth: int
    guide: str
    params: dict[str, np.ndarray]
    losses: np.ndarray
    seconds: float

    def posterior(self, arguments: argparse.Namespace, split: Split) -> dgp.Posterior:
        settings = settings_of(arguments, split)
        names = "num_inducing", "process_noise", "period", "likelihood"
        model = make_model(split.X, self.depth, **{name: settings[name] for name in names})
        return dgp.Posterior(model, GUIDES[self.guide](model), self.params)


def settings_of(arguments: argparse.Namespace, split: Split) -> dict[str, Any]:
    """Keyword arguments of :func:`train`."""
    period = 1.0 if arguments.data == "co2" else arguments.period
    return {
        "num_inducing": arguments.num_inducing,
        "optimizer": arguments.optimizer,
        "steps": arguments.steps,
        "batch": arguments.batch,
        "learning_rate": arguments.learning_rate,
        "seed": arguments.seed,
        "process_noise": arguments.process_noise == "yes",
        "period": period and period / float(split.units_X.scale[0]),
        "likelihood": arguments.likelihood,
    }


def split_of(arguments: argparse.Namespace, seed: int) -> Split:
    """One split of the data."""
    return split_data(*rows_of(arguments), seed, arguments.protocol)


def run(arguments: argparse.Namespace, seed: int, depth: int, guide: str) -> Trained:
    """One fit of the table; its parameters are in ``arguments.out``."""
    split, stem = split_of(arguments, seed), f"split{seed}_{depth}_{guide}"
    posterior, losses, seconds = train(
        split,
        depth,
        guide,
        **settings_of(arguments, split),
        checkpoint=arguments.out / f"{stem}.checkpoint" if arguments.resume else None,
        progress=arguments.jobs == 1,
    )
    dgp.save(arguments.out / f"{stem}.npz", posterior.params)
    params = {name: np.asarray(value) for name, value in posterior.params.items()}
    return Trained(seed, depth, guide, params, losses, seconds)


def scored(arguments: argparse.Namespace, trained: Trained) -> Fit:
    """The scores of a fit, and its predictions along a single input if it is of the last split."""
    split = split_of(arguments, trained.seed)
    posterior, name = trained.posterior(arguments, split), name_of(trained.depth, trained.guide)
    found = score(split, name, posterior, trained.losses, trained.seconds, seed=arguments.seed)
    single = trained.seed == arguments.split[-1] and split.X.shape[1] == 1
    return dataclasses.replace(found, posterior=None, curves=curves(split, posterior) if single else ())


def draw_layers(arguments: argparse.Namespace, trained: Trained) -> None:
    """A figure of the layers of a deepest fit of the last split."""
    if trained.seed != arguments.split[-1] or trained.depth < max(arguments.layers):
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from numpyro_dgp import plots

    split = split_of(arguments, trained.seed)
    figure = plots.layers(trained.posterior(arguments, split), jax.random.key(9), split.X, num_points=2000)
    figure.savefig(arguments.out / f"layers_{name_of(trained.depth, trained.guide).replace(', ', '_')}.png", dpi=120)
    plt.close("all")


def run_all(arguments: argparse.Namespace) -> dict[tuple[int, str], list[Fit]]:
    """All fits of the table, by depth and guide."""
    # All guides are one for a single layer without a latent: it has no hidden values.
    rows = [
        (depth, guide)
        for depth in arguments.layers
        for guide in (arguments.guide if depth > 1 else arguments.guide[:1])
    ]
    tasks = [(seed, *names) for seed in arguments.split for names in rows]
    found: dict[Any, Fit] = {}
    if arguments.jobs == 1:
        for task in tasks:
            trained = run(arguments, *task)
            found[task] = scored(arguments, trained)
            draw_layers(arguments, trained)
    else:
        with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
            # The deepest first: they take longest. Scores and the figure of layers of a fit at the same time.
            waiting = [pool.submit(run, arguments, *task) for task in sorted(tasks, key=lambda t: -t[1])]
            last = {}
            for future in as_completed(waiting):
                trained = future.result()
                print(f"{name_of(*trained[1:3])} of split {trained.seed}: {trained.seconds:.0f} s", flush=True)
                last[trained[:3]] = (
                    pool.submit(scored, arguments, trained),
                    pool.submit(draw_layers, arguments, trained),
                )
            for task, (scores, figure) in last.items():
                found[task] = scores.result()
                figure.result()
    return {names: [found[seed, *names] for seed in arguments.split] for names in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="co2", help="co2, diabetes, or an .npz file with X and y")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--guide", nargs="+", choices=sorted(GUIDES), default=["inducing-point"])
    parser.add_argument("--likelihood", choices=LIKELIHOODS, default="normal")
    parser.add_argument("--optimizer", choices=list(RATES), default="natural")
    parser.add_argument("--steps", type=int, help=f"by optimiser and guide: {STEPS}")
    parser.add_argument("--split", type=int, nargs="+", default=[0], help="seeds of the splits")
    parser.add_argument("--protocol", choices="AB", default="B", help="units from all rows (A) or training rows (B)")
    parser.add_argument("--num-inducing", type=int, default=60)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, help=f"of Adam in the first step: {RATES}")
    parser.add_argument("--process-noise", choices=["yes", "no"], default="yes", help="of hidden layers")
    parser.add_argument("--period", type=float, help="of a season, in units of a single input; a year for co2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("regression_output"))
    parser.add_argument("--resume", action="store_true", help="keep checkpoints in --out and continue from them")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few rows, to see that it runs")
    at_once = min(2, os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
    parser.add_argument("--jobs", type=int, default=at_once, help="fits at the same time, each in its own process")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.num_inducing = 20, 10
    arguments.out.mkdir(parents=True, exist_ok=True)
    X, _ = rows_of(arguments)
    print(f"{arguments.data}: {len(X)} rows, {X.shape[1]} inputs; protocol {arguments.protocol}; all in standard units")
    results = run_all(arguments)
    lines = [
        f"{'model, guide':26s}" + " ".join(f"{h:>17s}" for h in ("test RMSE", "log density", "ELBO per row")) + "   sec"
    ]
    shallow = next(iter(results.values()))
    lines += [row(fits, shallow) for fits in results.values()]
    print("\n".join(lines))
    (arguments.out / "table.txt").write_text("\n".join(lines) + "\n")
    split = split_data(*rows_of(arguments), arguments.split[-1], arguments.protocol)
    co2 = arguments.data == "co2"
    labels = {"xlabel": "year" if co2 else "X", "ylabel": "CO2 (parts per million)" if co2 else "y"}
    draw_summary(split, [fits[-1] for fits in results.values()], arguments.out, labels)
    print(f"figures and parameters are in {arguments.out}; summary.png shows all fits")


if __name__ == "__main__":
    main()
