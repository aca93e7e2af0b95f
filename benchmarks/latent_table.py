"""Latent variables and importance weighting on regression sets: the table of Salimbeni (2020), section 5.3.2.

``python benchmarks/latent_table.py --data DIRECTORY --out FILE.jsonl`` fits GP, GP-GP, LV-GP and LV-GP-GP, the last two
by variational inference and by importance weighting, appends one line per fit to FILE.jsonl and prints the table. Fits
found there already are not repeated. Two scores of the test rows: the mixture density of the model, and a kernel
density estimate from draws, which is the one published; they are not comparable with each other.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
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
from numpyro_dgp.densities import kde_log_density
from numpyro_dgp.optim import NaturalGradient, log_linear

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import regression

M, SHARED = 128, 5
DISCRETE = {"forest", "solar"}  # most targets are equal: densities of such data have no upper bound
positive = dist.constraints.positive


def make_model(X: jax.Array, layers: int, latent: bool, handed_on: bool = False) -> Callable[..., None]:
    """The model zoo of Salimbeni (2020), chapter 5: inner layers are five functions mixed through principal directions.

    Inducing inputs are k-means centres, filled up with standard normal rows where data are few. In the original only
    the first layer sees the latent; ``handed_on``, every layer does, and variances of inner layers are learned.
    """
    rng = np.random.default_rng(0)
    D = X.shape[1]
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
    """A row of the table: ``samples`` importance samples (``None`` without a latent); ``handed_on``, the last layer
    sees the latent too; ``deepened``, half of the steps go to the program without its inner layer, which then begins
    as the identity (``dgp.initial.deepen``)."""

    layers: int
    latent: bool
    samples: int | None
    handed_on: bool = False
    deepened: bool = False


CONFIGURATIONS = {
    "GP": Configuration(1, False, None),
    "GP-GP": Configuration(2, False, None),
    "LV-GP, VI": Configuration(1, True, 1),
    "LV-GP, IW 5": Configuration(1, True, 5),
    "LV-GP, IW 20": Configuration(1, True, 20),
    "LV-GP-GP, VI": Configuration(2, True, 1),
    "LV-GP-GP, IW 5": Configuration(2, True, 5),
    "LV-GP-GP, IW 20": Configuration(2, True, 20),
    "LV-GP-GP, IW 5, handed on": Configuration(2, True, 5, handed_on=True),
    "LV-GP-GP, IW 5, deepened": Configuration(2, True, 5, handed_on=True, deepened=True),
}


class Recipe(NamedTuple):
    """Steps, the first rate of Adam, which falls by a cosine, and the size of natural steps."""

    steps: int
    rate: float
    gamma: float


def trained(
    split: regression.Split, row: Configuration, recipe: Recipe, key: jax.Array
) -> tuple[dgp.Posterior, list[float]]:
    """Natural gradients for the last layer and Adam for the rest: the posterior, and the bound per row, an average over
    the last 200 steps, of every program on the way to it."""
    rows = 512 if len(split.X) > 512 else None
    shallow = None
    bounds: list[float] = []
    for layers in range(1 if row.deepened else row.layers, row.layers + 1):
        model = make_model(split.X, layers, row.latent, row.handed_on)
        proposal = dgp.guides.Amortised()
        if row.samples is None or row.samples == 1:
            guide: Any = dgp.guides.InducingPoint(model, latent=proposal)
        else:
            guide = dgp.guides.ImportanceWeighted(model, num_samples=row.samples, latent=proposal)
        fit_key, start_key, key = jax.random.split(key, 3)
        start = None
        if shallow is not None:
            start = dgp.initial.deepen(shallow, model, guide, start_key, split.X, split.y, rows).params
        steps = recipe.steps // (row.layers if row.deepened else 1)
        schedule = optax.cosine_decay_schedule(recipe.rate, steps)
        optimizer = NaturalGradient(guide, log_linear(1e-4, recipe.gamma, 40), optax.adam(schedule))
        svi = SVI(model, guide, optimizer, dgp.ELBO())
        result = dgp.fit(svi, fit_key, steps, split.X, split.y, rows, init_params=start, progress_bar=False)
        shallow = dgp.Posterior(model, guide, result.params)
        bounds.append(float(-np.mean(np.asarray(result.losses)[-200:]) / len(split.X)))
    return shallow, bounds


def fit(split: regression.Split, name: str, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Train, then score the test rows."""
    row = CONFIGURATIONS[name]
    keys = jax.random.split(jax.random.key(seed), 4)
    start = time.perf_counter()
    posterior, bounds = trained(split, row, recipe, keys[0])
    seconds = time.perf_counter() - start
    draws = 2000 if row.latent or row.layers > 1 else 1
    mixture = posterior.log_density(keys[1], split.y_test, split.X_test, num_samples=draws)
    mean = posterior.predict(keys[2], split.X_test, num_samples=draws).mean
    samples_of_y = posterior.sample(keys[3], split.X_test, num_samples=2000)
    kde = kde_log_density(np.asarray(samples_of_y), np.asarray(split.y_test))
    return {
        "mixture": float(mixture.mean()),
        "kde": float(np.mean(kde)),
        "rmse": float(jnp.sqrt(jnp.square(mean - split.y_test).mean())),
        "bound": bounds[-1],
        "bounds": bounds,
        "noise": float(posterior.params["noise"]),
        "seconds": seconds,
    }


def table(records: list[dict[str, Any]]) -> str:
    """Means with standard errors over splits."""
    lines = [
        "| set | protocol | model | steps | splits | mixture density | KDE density | RMSE | bound per row |",
        "|---|" + "---|" * 8,
    ]
    keys = {tuple(r[k] for k in ("set", "protocol", "model", "steps")) for r in records}
    for key in sorted(keys, key=lambda k: (k[0], k[1], list(CONFIGURATIONS).index(k[2]), k[3])):
        found = [r for r in records if tuple(r[k] for k in ("set", "protocol", "model", "steps")) == key]

        def cell(what: str, found: Any = found) -> str:
            values = np.array([r[what] for r in found])
            error = f" ({values.std(ddof=1) / math.sqrt(len(values)):.3f})" if len(values) > 1 else ""
            return f"{values.mean():.3f}{error}"

        name = key[0] + (" (discrete)" if key[0] in DISCRETE else "")
        cells = " | ".join(map(cell, ("mixture", "kde", "rmse", "bound")))
        lines.append(f"| {name} | {key[1]} | {key[2]} | {key[3]} | {len(found)} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of .npz files with X and y")
    parser.add_argument("--out", type=Path, required=True, help="one line of JSON per fit")
    parser.add_argument("--sets", nargs="+", default=["forest", "solar", "power", "energy"])
    parser.add_argument("--models", nargs="+", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    parser.add_argument("--protocol", nargs="+", choices="AB", default=["A", "B"])
    parser.add_argument("--split", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--learning-rate", type=float, default=0.03, help="first one of Adam; it falls by a cosine")
    parser.add_argument("--gamma", type=float, default=0.3, help="step size of natural gradients")
    parser.add_argument("--print", action="store_true", help="only print the table of what is there")
    arguments = parser.parse_args()

    def records() -> list[dict[str, Any]]:
        return [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []

    jobs = [
        (s, p, n, m)
        for s in arguments.sets
        for p in arguments.protocol
        for n in arguments.split
        for m in arguments.models
    ]
    for name, protocol, split, model in [] if arguments.print else jobs:
        key = {"set": name, "protocol": protocol, "model": model, "split": split, "steps": arguments.steps}
        if any(key.items() <= r.items() for r in records()):
            continue
        data = regression.split_data(*regression.load(str(arguments.data / f"{name}.npz")), split, protocol)
        found = key | {"rate": arguments.learning_rate, "gamma": arguments.gamma}
        found |= fit(data, model, Recipe(arguments.steps, arguments.learning_rate, arguments.gamma), split)
        with arguments.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(found, flush=True)
    print(table(records()))


if __name__ == "__main__":
    main()
