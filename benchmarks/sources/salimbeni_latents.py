"""Latent variables and importance weighting on regression sets: tables 5.1 to 5.3 of Salimbeni (2020).

``python benchmarks/sources/salimbeni_latents.py --data DIRECTORY --out FILE.jsonl`` fits one to three layers, without a
latent and with one, the latter by variational inference or by importance weighting, appends one line per fit to
FILE.jsonl and prints the table. Fits found there already are not repeated. Two scores of the test rows: the mixture
density of the model, and a kernel density estimate from draws, which is the one published; they are not comparable with
each other. W is the median of Shapiro and Wilk's statistic over test rows. ``--draws DIRECTORY`` keeps draws of y at a
hundred test rows, from which ``--figure FILE`` draws figures 5.5 to 5.7. ``--published`` prints the table next to the
numbers of the source.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
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
from numpyro_dgp.densities import kde_log_density, log_mean_exp, shapiro_wilk
from numpyro_dgp.optim import NaturalGradient, log_linear

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import regression

SHARED = 5
DISCRETE = {"forest", "solar"}  # most targets are equal: densities of such data have no upper bound
positive = dist.constraints.positive


def make_model(
    X: jax.Array, layers: int, latent: bool, handed_on: bool = False, num_inducing: int = 128
) -> Callable[..., None]:
    """The model zoo of Salimbeni (2020), chapter 5: inner layers are five functions mixed through principal directions.

    Inducing inputs are k-means centres, filled up with standard normal rows where data are few. In the original only
    the first layer sees the latent; ``handed_on``, every layer does, and variances of inner layers are learned.
    """
    rng = np.random.default_rng(0)
    M, D = num_inducing, X.shape[1]
    distinct = len(np.unique(X, axis=0))
    centres = dgp.initial.kmeans(X, min(M, distinct))
    centres = np.concatenate([centres, rng.normal(size=(M - len(centres), D))])
    mixing = dgp.means.principal_directions(X, min(SHARED, D))

    def layer(name: str, columns: int, outputs: int | None) -> Any:
        Z = centres if columns == D else np.concatenate([centres, rng.normal(size=(M, columns - D))], 1)
        scales = numpyro.param(f"{name}_scales", jnp.full(columns, math.sqrt(columns)), constraint=positive)
        fixed = outputs is not None and not handed_on
        variance = 1.0 if fixed else numpyro.param(f"{name}_variance", 1.0, constraint=positive)
        kernel = dgp.kernels.RBF(variance, scales)
        return dgp.gp(name, kernel, dgp.Points(jnp.asarray(Z, X.dtype), learn=True), outputs=outputs)

    def model(X: jax.Array, y: Any = None, batch: int | None = None) -> None:
        noise = numpyro.param("noise", jnp.array(0.1, X.dtype), constraint=positive)
        columns = D + latent
        inner = []
        for i in range(layers - 1):
            inner.append(layer(f"f{i}", columns, mixing.shape[1]))
            columns = D + (latent and handed_on)
        last = layer("last", columns, None)
        with numpyro.plate("data", len(X), subsample_size=batch) as rows:
            h = dgp.latent("w", X[rows], 1) if latent else X[rows]
            for i, f in enumerate(inner):
                moved = h[..., :D] + numpyro.sample(f"h{i}", f(h)) @ mixing.T
                h = jnp.concatenate([moved, h[..., D:]], -1) if handed_on else moved
            likelihood = dgp.Likelihood(last(h), lambda v: dist.Normal(v, noise))
            numpyro.sample("y", likelihood, obs=None if y is None else y[rows])

    return model


class Configuration(NamedTuple):
    """A row of the table: ``samples`` importance samples (``None`` without a latent), ``last_samples`` in the last
    quarter of the steps; ``handed_on``, the last layer sees the latent too; ``deepened``, all steps go to the program
    without its inner layer, which is then put in as the identity (``dgp.initial.deepen``) and trained half as long at
    a tenth of the rate; ``nodes``, the optimal posterior of the latent by that many, instead of an amortised
    Gaussian. Without layers it is a linear function by least squares."""

    layers: int
    latent: bool
    samples: int | None
    handed_on: bool = False
    deepened: bool = False
    last_samples: int | None = None
    nodes: int | None = None

    def stages(self, steps: int) -> list[Stage]:
        """How the steps are spent."""
        if self.deepened:
            return [Stage(1, self.samples, steps, 0, steps), Stage(2, self.samples, steps // 2, 0, steps // 2, 0.1)]
        if self.last_samples is None:
            return [Stage(self.layers, self.samples, steps, 0, steps)]
        first = steps - steps // 4
        return [
            Stage(self.layers, self.samples, first, 0, steps),
            Stage(self.layers, self.last_samples, steps - first, first, steps),
        ]


class Stage(NamedTuple):
    """``steps`` with so many layers and importance samples, those from ``begin`` on of a schedule of length ``end``, at
    a share of the rate of Adam."""

    layers: int
    samples: int | None
    steps: int
    begin: int
    end: int
    share: float = 1.0


CONFIGURATIONS = {
    "Linear": Configuration(0, False, None),
    "GP": Configuration(1, False, None),
    "GP-GP": Configuration(2, False, None),
    "GP-GP-GP": Configuration(3, False, None),
    "LV-GP, optimal": Configuration(1, True, 1, nodes=100),
    "LV-GP, VI": Configuration(1, True, 1),
    "LV-GP, IW 5": Configuration(1, True, 5),
    "LV-GP, IW 20": Configuration(1, True, 20),
    "LV-GP-GP, VI": Configuration(2, True, 1),
    "LV-GP-GP, IW 5": Configuration(2, True, 5),
    "LV-GP-GP, IW 20": Configuration(2, True, 20),
    "LV-GP-GP-GP, VI": Configuration(3, True, 1),
    "LV-GP-GP-GP, IW 5": Configuration(3, True, 5),
    "LV-GP-GP, IW 5, handed on": Configuration(2, True, 5, handed_on=True),
    "LV-GP-GP, IW 5, deepened": Configuration(2, True, 5, handed_on=True, deepened=True),
    "LV-GP-GP, IW 5 to 50, handed on": Configuration(2, True, 5, handed_on=True, last_samples=50),
}


class Recipe(NamedTuple):
    """Steps, the first rate of Adam, which falls by a cosine, the size of natural steps, which falls from ``gamma`` to
    ``last_gamma`` by a constant factor, the length to which longer gradients are cut before Adam sees them, Adam's
    memory of their squares, b2, rows in a minibatch, and inducing points of each layer."""

    steps: int
    rate: float
    gamma: float
    last_gamma: float
    clip: float
    memory: float
    batch: int
    num_inducing: int

    def optimizer(self, guide: Any, stage: Stage) -> NaturalGradient:
        """Of one stage."""
        cosine = optax.cosine_decay_schedule(stage.share * self.rate, stage.end)
        start, ratio = log_linear(1e-4, self.gamma, 40), self.last_gamma / self.gamma
        adam = optax.adam(lambda step: cosine(stage.begin + step), b2=self.memory)
        return NaturalGradient(
            guide,
            lambda step: start(step) * ratio ** (jnp.minimum(stage.begin + step, stage.end) / stage.end),
            optax.chain(optax.clip_by_global_norm(self.clip), adam),
        )


def trained(
    split: regression.Split, row: Configuration, recipe: Recipe, key: jax.Array
) -> Iterator[tuple[dgp.Posterior, np.ndarray]]:
    """Natural gradients for the last layer and Adam for the rest: after every stage the posterior, and bounds per row
    of the last 200 steps."""
    rows = recipe.batch if len(split.X) > recipe.batch else None
    posterior = None
    for stage in row.stages(recipe.steps):
        model = make_model(split.X, stage.layers, row.latent, row.handed_on, recipe.num_inducing)
        proposal = dgp.guides.Amortised() if row.nodes is None else dgp.guides.Quadrature(row.nodes)
        if stage.samples is None or stage.samples == 1:
            guide: Any = dgp.guides.InducingPoint(model, latent=proposal)
        else:
            guide = dgp.guides.ImportanceWeighted(model, num_samples=stage.samples, latent=proposal)
        fit_key, start_key, key = jax.random.split(key, 3)
        start = None if posterior is None else posterior.params
        if posterior is not None and row.deepened:
            start = dgp.initial.deepen(posterior, model, guide, start_key, split.X, split.y, rows).params
        svi = SVI(model, guide, recipe.optimizer(guide, stage), dgp.ELBO())
        result = dgp.fit(svi, fit_key, stage.steps, split.X, split.y, rows, init_params=start, progress_bar=False)
        posterior = dgp.Posterior(model, guide, result.params)
        yield posterior, -np.asarray(result.losses)[-200:] / len(split.X)


class Score(NamedTuple):
    """Draws of y (S, N), and the scores of the test rows."""

    draws: np.ndarray
    mixture: float
    rmse: float


def score(posterior: dgp.Posterior, split: regression.Split, row: Configuration, key: jax.Array) -> Score:
    """Of a single layer without a latent there is one Gaussian, from which all draws are taken."""
    total, (moments_key, key) = 2000, jax.random.split(key)
    components = total if row.latent or row.layers > 1 else 1
    found = posterior.using(num_samples=components).predict(moments_key, split.X_test)
    spread = jnp.sqrt(found.variances)
    densities = log_mean_exp(dist.Normal(found.means, spread).log_prob(split.y_test))
    draws = found.means + spread * jax.random.normal(key, (total, len(split.y_test)))
    rmse = jnp.sqrt(jnp.square(found.mean - split.y_test).mean())
    return Score(np.asarray(draws), float(densities.mean()), float(rmse))


def least_squares(split: regression.Split) -> tuple[dict[str, Any], np.ndarray]:
    """A linear function and a normal error: the record, and draws of y."""
    design, at = (np.column_stack([part, np.ones(len(part))]) for part in (split.X, split.X_test))
    y, y_test = np.asarray(split.y, float), np.asarray(split.y_test, float)
    weights = np.linalg.lstsq(design, y)[0]
    mean, noise = at @ weights, math.sqrt(np.square(y - design @ weights).sum() / (len(y) - design.shape[1]))
    draws = mean + noise * np.random.default_rng(0).normal(size=(2000, len(mean)))
    record = {
        "mixture": float(dist.Normal(mean, noise).log_prob(y_test).mean()),
        "kde": float(np.mean(kde_log_density(draws, y_test))),
        "rmse": math.sqrt(np.square(y_test - mean).mean()),
        "noise": noise,
        "seconds": 0.0,
    }
    return record, draws


def fit(split: regression.Split, name: str, recipe: Recipe, seed: int) -> tuple[dict[str, Any], np.ndarray]:
    """Train, and score the test rows after every stage: the record, and draws of y."""
    row = CONFIGURATIONS[name]
    if not row.layers:
        return least_squares(split)
    fit_key, key = jax.random.split(jax.random.key(seed))
    stages: dict[str, list[float]] = {"bounds": [], "bound_errors": [], "mixtures": []}
    start, scoring = time.perf_counter(), 0.0
    for posterior, bounds in trained(split, row, recipe, fit_key):
        clock = time.perf_counter()
        found = score(posterior, split, row, key)
        stages["bounds"].append(float(bounds.mean()))
        stages["bound_errors"].append(float(bounds.std(ddof=1) / math.sqrt(len(bounds))))
        stages["mixtures"].append(found.mixture)
        scoring += time.perf_counter() - clock
    seconds = time.perf_counter() - start - scoring
    record = stages | {
        "mixture": stages["mixtures"][-1],
        "kde": float(np.mean(kde_log_density(found.draws, np.asarray(split.y_test)))),
        "shapiro": float(np.median(shapiro_wilk(found.draws).statistic)),
        "rmse": found.rmse,
        "bound": stages["bounds"][-1],
        "noise": float(posterior.params["noise"]),
        "seconds": seconds,
    }
    return record, found.draws


KEYS = ("set", "protocol", "model", "steps", "rate", "gamma", "last_gamma", "clip", "memory", "batch", "num_inducing")


def table(records: list[dict[str, Any]]) -> str:
    """Means with standard errors over splits."""
    lines = [
        "| set | protocol | model | steps | rate | natural steps | clip | memory | batch | inducing points | splits "
        "| mixture density | KDE density | RMSE | bound per row | W |",
        "|---|" + "---|" * 15,
    ]
    found = {tuple(r[k] for k in KEYS) for r in records}
    for key in sorted(found, key=lambda k: (k[0], k[1], list(CONFIGURATIONS).index(k[2]), *k[3:])):
        group = [r for r in records if tuple(r[k] for k in KEYS) == key]

        def cell(what: str, group: Any = group) -> str:
            values = np.array([r[what] for r in group if what in r])
            error = f" ({values.std(ddof=1) / math.sqrt(len(values)):.3f})" if len(values) > 1 else ""
            return f"{values.mean():.3f}{error}" if len(values) else ""

        name = key[0] + (" (discrete)" if key[0] in DISCRETE else "")
        cells = " | ".join(map(cell, ("mixture", "kde", "rmse", "bound", "shapiro")))
        rate, gamma, last_gamma, clip, memory, batch, inducing = key[4:]
        natural = f"{gamma}" if gamma == last_gamma else f"{gamma} to {last_gamma}"
        how = f"{key[3]} | {rate} | {natural} | {'' if clip == math.inf else clip} | {memory} | {batch} | {inducing}"
        lines.append(f"| {name} | {key[1]} | {key[2]} | {how} | {len(group)} | {cells} |")
    return "\n".join(lines)


# Table 5.1 as far as it is legible: one to three layers, LV-GP by VI and by IW, LV-GP-GP by VI, and, from table 5.2,
# LV-GP-GP-GP by IW. Every number is a KDE density of split 0, in units from all rows (protocol A).
PUBLISHED_MODELS = (
    "GP",
    "GP-GP",
    "GP-GP-GP",
    "LV-GP, VI",
    "LV-GP, IW 5",
    "LV-GP-GP, VI",
    "LV-GP-GP-GP, IW 5",
)
nan = math.nan
PUBLISHED = {
    "yacht": (1.32, 1.84, 2.00, 1.64, 1.65, 1.69, nan),
    "forest": (-1.38, -1.37, nan, nan, nan, nan, nan),
    "energy": (1.71, 1.85, 2.07, 1.86, 1.92, 2.00, 2.07),
    "concrete": (-0.43, -0.45, -0.35, -0.32, -0.32, -0.35, -0.22),
    "solar": (-1.75, -1.21, -1.20, -0.04, 0.07, 0.54, nan),
    "airfoil": (-0.79, 0.08, 0.14, -0.44, -0.36, 0.07, 0.34),
    "kin8nm": (-0.29, -0.00, -0.00, -0.28, -0.29, -0.02, 0.03),
    "power": (-0.65, -0.75, -0.80, -0.39, -0.23, -0.36, -0.11),
    "bike": (0.82, 3.49, 3.68, 2.48, 2.66, 3.48, 3.95),
    "protein": (-1.06, -0.98, -0.95, -0.85, -0.80, -0.70, -0.68),
}


def published(records: list[dict[str, Any]]) -> str:
    """KDE densities of the source and of split 0 here, then mixture densities and W of all models."""
    models = [name for name in CONFIGURATIONS if any(r["model"] == name for r in records)]
    found = {(r["set"], r["model"]): r for r in records if r["protocol"] == "A" and not r["split"]}

    def cell(name: str, model: str, what: str) -> str:
        value = found.get((name, model), {}).get(what)
        return "" if value is None else f"{value:.{3 if what == 'shapiro' else 2}f}"

    lines = ["| set | " + " | ".join(PUBLISHED_MODELS) + " |", "|---|" + "---|" * len(PUBLISHED_MODELS)]
    for name in PUBLISHED:
        pairs = zip(PUBLISHED[name], PUBLISHED_MODELS, strict=True)
        cells = [f"{'' if math.isnan(v) else f'{v:.2f}'} / {cell(name, m, 'kde')}" for v, m in pairs]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for what in ("mixture", "kde", "shapiro"):
        lines += ["", f"{what}:", "| set | " + " | ".join(models) + " |", "|---|" + "---|" * len(models)]
        for name in PUBLISHED:
            lines.append(f"| {name} | " + " | ".join(cell(name, model, what) for model in models) + " |")
    return "\n".join(lines)


def keep(path: Path, split: regression.Split, draws: np.ndarray) -> None:
    """A hundred test rows with 500 draws of y each."""
    rows = np.random.default_rng(0).permutation(len(split.y_test))[:100]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, X=np.asarray(split.X_test)[rows], y=np.asarray(split.y_test)[rows], draws=draws[:500, rows])


def draw(folder: Path, names: list[str], path: Path) -> None:
    """Figure 5.5: draws of y and the data in the plane of the principal components of (x, y).

    Figures 5.6 and 5.7: densities of y at thirty rows, each in its own standard units, coloured by the first principal
    component of x.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from scipy.stats import gaussian_kde

    models = ["GP", "GP-GP-GP", "LV-GP, IW 5", "LV-GP-GP-GP, IW 5"]
    shape, size = (2 * len(names), len(models)), (10, 4.6 * len(names))
    figure, axes = plt.subplots(*shape, figsize=size, layout="constrained", sharex="row", sharey="row")
    grid = np.linspace(-4, 4, 200)
    for pair, name in zip(axes.reshape(len(names), 2, len(models)), names, strict=True):
        for (above, below), model in zip(pair.T, models, strict=True):
            with np.load(folder / f"{name}_A0_{model}.npz") as file:
                X, y, draws = (np.asarray(file[what], float) for what in ("X", "y", "draws"))
            joint = np.column_stack([X, y])
            plane = np.linalg.svd(joint - joint.mean(0), full_matrices=False)[2][:2].T
            along = np.linalg.svd(X - X.mean(0), full_matrices=False)[0][:, 0]
            centre, scale = joint.mean(0), ((joint - joint.mean(0)) @ plane).std(0)
            for values in draws[:20]:
                points = (np.column_stack([X, values]) - centre) @ plane / scale
                above.plot(*points.T, ".", color="C1", ms=2, alpha=0.4)
            above.plot(*((joint - centre) @ plane / scale).T, ".", color="C0", ms=4)
            above.set(title=f"{name}, {model.replace(', IW 5', '')}", xlim=(-5, 5), ylim=(-5, 5))
            below.plot(grid, np.exp(-0.5 * grid**2) / math.sqrt(2 * math.pi), "k:", lw=1)
            colours = plt.get_cmap("viridis")((along - along.min()) / np.ptp(along))
            for column, colour in zip(draws[:, :30].T, colours[:30], strict=True):
                below.plot(grid, gaussian_kde((column - column.mean()) / column.std())(grid), color=colour, lw=0.6)
            below.set(ylim=(0, 1.3))
        pair[0, 0].set_ylabel("second component")
        pair[1, 0].set_ylabel("density")
    figure.savefig(path, dpi=110)


def smoke() -> None:
    """A few steps of three models on made-up rows with two branches."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 2))
    data = regression.split_data(X, np.sign(rng.normal(size=120)) * X[:, 0], 0, "A")
    recipe = Recipe(20, 0.03, 0.3, 0.3, 1.0, 0.999, 64, 10)
    records = []
    for name in ("Linear", "GP", "LV-GP-GP, VI", "LV-GP-GP-GP, IW 5"):
        key = {"set": "branches", "protocol": "A", "model": name, "split": 0} | recipe._asdict()
        records.append(key | fit(data, name, recipe, 0)[0])
    print(table(records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of .npz files with X and y")
    parser.add_argument("--out", type=Path, help="one line of JSON per fit")
    parser.add_argument("--sets", nargs="+", default=["forest", "solar", "power", "energy"])
    parser.add_argument("--models", nargs="+", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    parser.add_argument("--protocol", nargs="+", choices="AB", default=["A", "B"])
    parser.add_argument("--split", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--learning-rate", type=float, default=0.03, help="first one of Adam; it falls by a cosine")
    parser.add_argument("--gamma", type=float, default=0.3, help="first step size of natural gradients")
    parser.add_argument("--last-gamma", type=float, help="the last one; default: the first")
    parser.add_argument("--clip", type=float, default=math.inf, help="longer gradients are cut to this, before Adam")
    parser.add_argument("--memory", type=float, default=0.999, help="b2 of Adam")
    parser.add_argument("--batch", type=int, default=512, help="rows in a minibatch")
    parser.add_argument("--num-inducing", type=int, default=128, help="of each layer")
    parser.add_argument("--max-test", type=int, default=10_000, help="test rows at most")
    parser.add_argument("--draws", type=Path, help="directory for draws of y at a hundred test rows of each fit")
    parser.add_argument("--print", action="store_true", help="only print the table of what is there")
    parser.add_argument("--published", action="store_true", help="only print it next to the numbers of the source")
    parser.add_argument("--figure", type=Path, help="only draw, from --draws, the figure of --sets")
    parser.add_argument("--smoke", action="store_true", help="a few steps on made-up rows, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        smoke()
        return
    if arguments.figure:
        draw(arguments.draws, arguments.sets, arguments.figure)
        return

    def records() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
        usual = {"clip": math.inf, "memory": 0.999, "batch": 512, "num_inducing": 128}
        return [{"last_gamma": r["gamma"]} | usual | r for r in found]

    jobs = [
        (s, p, n, m)
        for s in arguments.sets
        for p in arguments.protocol
        for n in arguments.split
        for m in arguments.models
    ]
    for name, protocol, split, model in [] if arguments.print or arguments.published else jobs:
        recipe = Recipe(
            arguments.steps,
            arguments.learning_rate,
            arguments.gamma,
            arguments.last_gamma or arguments.gamma,
            arguments.clip,
            arguments.memory,
            arguments.batch,
            arguments.num_inducing,
        )
        key = {"set": name, "protocol": protocol, "model": model, "split": split} | recipe._asdict()
        if any(key.items() <= r.items() for r in records()):
            continue
        whole = regression.load(str(arguments.data / f"{name}.npz"))
        data = regression.split_data(*whole, split, protocol, arguments.max_test)
        record, draws = fit(data, model, recipe, split)
        found = key | record
        with arguments.out.open("a") as file:
            file.write(json.dumps({k: v for k, v in found.items() if v != math.inf}) + "\n")
        if arguments.draws:
            keep(arguments.draws / f"{name}_{protocol}{split}_{model}.npz", data, draws)
        print(found, flush=True)
    if arguments.published:
        shown = {k: getattr(arguments, k) for k in ("steps", "batch", "num_inducing", "clip")}
        print(published([r for r in records() if shown.items() <= r.items()]))
    else:
        print(table(records()))


if __name__ == "__main__":
    main()
