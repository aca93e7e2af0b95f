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
    """A row of the table: ``samples`` importance samples (``None`` without a latent), ``last_samples`` in the last
    quarter of the steps; ``handed_on``, the last layer sees the latent too; ``deepened``, all steps go to the program
    without its inner layer, which is then put in as the identity (``dgp.initial.deepen``) and trained half as long at
    a tenth of the rate."""

    layers: int
    latent: bool
    samples: int | None
    handed_on: bool = False
    deepened: bool = False
    last_samples: int | None = None

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
    "LV-GP-GP, IW 5 to 50, handed on": Configuration(2, True, 5, handed_on=True, last_samples=50),
}


class Recipe(NamedTuple):
    """Steps, the first rate of Adam, which falls by a cosine, the size of natural steps, which falls from ``gamma`` to
    ``last_gamma`` by a constant factor, the length to which longer gradients are cut before Adam sees them, and Adam's
    memory of their squares, b2."""

    steps: int
    rate: float
    gamma: float
    last_gamma: float
    clip: float
    memory: float

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
    rows = 512 if len(split.X) > 512 else None
    posterior = None
    for stage in row.stages(recipe.steps):
        model = make_model(split.X, stage.layers, row.latent, row.handed_on)
        proposal = dgp.guides.Amortised()
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


def fit(split: regression.Split, name: str, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Train, and score the test rows after every stage."""
    row = CONFIGURATIONS[name]
    keys = jax.random.split(jax.random.key(seed), 4)
    draws = 2000 if row.latent or row.layers > 1 else 1
    stages: dict[str, list[float]] = {"bounds": [], "bound_errors": [], "mixtures": []}
    start, scoring = time.perf_counter(), 0.0
    for posterior, bounds in trained(split, row, recipe, keys[0]):
        clock = time.perf_counter()
        mixture = posterior.using(num_samples=draws).log_density(keys[1], split.y_test, split.X_test)
        stages["bounds"].append(float(bounds.mean()))
        stages["bound_errors"].append(float(bounds.std(ddof=1) / math.sqrt(len(bounds))))
        stages["mixtures"].append(float(mixture.mean()))
        scoring += time.perf_counter() - clock
    seconds = time.perf_counter() - start - scoring
    mean = posterior.using(num_samples=draws).predict(keys[2], split.X_test).mean
    samples_of_y = posterior.using(num_samples=2000).sample(keys[3], split.X_test)
    kde = kde_log_density(np.asarray(samples_of_y), np.asarray(split.y_test))
    return stages | {
        "mixture": stages["mixtures"][-1],
        "kde": float(np.mean(kde)),
        "rmse": float(jnp.sqrt(jnp.square(mean - split.y_test).mean())),
        "bound": stages["bounds"][-1],
        "noise": float(posterior.params["noise"]),
        "seconds": seconds,
    }


def table(records: list[dict[str, Any]]) -> str:
    """Means with standard errors over splits."""
    lines = [
        "| set | protocol | model | steps | rate | natural steps | clip | memory | splits | mixture density | "
        "KDE density | RMSE | bound per row |",
        "|---|" + "---|" * 12,
    ]
    columns = ("set", "protocol", "model", "steps", "rate", "gamma", "last_gamma", "clip", "memory")
    keys = {tuple(r[k] for k in columns) for r in records}
    for key in sorted(keys, key=lambda k: (k[0], k[1], list(CONFIGURATIONS).index(k[2]), *k[3:])):
        found = [r for r in records if tuple(r[k] for k in columns) == key]

        def cell(what: str, found: Any = found) -> str:
            values = np.array([r[what] for r in found])
            error = f" ({values.std(ddof=1) / math.sqrt(len(values)):.3f})" if len(values) > 1 else ""
            return f"{values.mean():.3f}{error}"

        name = key[0] + (" (discrete)" if key[0] in DISCRETE else "")
        cells = " | ".join(map(cell, ("mixture", "kde", "rmse", "bound")))
        rate, gamma, last_gamma, clip, memory = key[4:]
        natural = f"{gamma}" if gamma == last_gamma else f"{gamma} to {last_gamma}"
        how = f"{key[3]} | {rate} | {natural} | {'' if clip == math.inf else clip} | {memory}"
        lines.append(f"| {name} | {key[1]} | {key[2]} | {how} | {len(found)} | {cells} |")
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
    parser.add_argument("--gamma", type=float, default=0.3, help="first step size of natural gradients")
    parser.add_argument("--last-gamma", type=float, help="the last one; default: the first")
    parser.add_argument("--clip", type=float, default=math.inf, help="longer gradients are cut to this, before Adam")
    parser.add_argument("--memory", type=float, default=0.999, help="b2 of Adam")
    parser.add_argument("--print", action="store_true", help="only print the table of what is there")
    arguments = parser.parse_args()

    def records() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
        return [{"last_gamma": r["gamma"], "clip": math.inf, "memory": 0.999} | r for r in found]

    jobs = [
        (s, p, n, m)
        for s in arguments.sets
        for p in arguments.protocol
        for n in arguments.split
        for m in arguments.models
    ]
    for name, protocol, split, model in [] if arguments.print else jobs:
        recipe = Recipe(
            arguments.steps,
            arguments.learning_rate,
            arguments.gamma,
            arguments.last_gamma or arguments.gamma,
            arguments.clip,
            arguments.memory,
        )
        key = {"set": name, "protocol": protocol, "model": model, "split": split} | recipe._asdict()
        if any(key.items() <= r.items() for r in records()):
            continue
        data = regression.split_data(*regression.load(str(arguments.data / f"{name}.npz")), split, protocol)
        found = key | fit(data, model, recipe, split)
        with arguments.out.open("a") as file:
            file.write(json.dumps({k: v for k, v in found.items() if v != math.inf}) + "\n")
        print(found, flush=True)
    print(table(records()))


if __name__ == "__main__":
    main()
