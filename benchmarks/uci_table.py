"""One to three layers on regression sets: RMSE and mixture log density on test rows, in standard units.

``python benchmarks/uci_table.py --data DIRECTORY`` reads ``DIRECTORY/*.npz`` (arrays X, y), ``--data FILE ...`` files
of your own: ``.npz``, ``.mat``, or tables of numbers whose last column is y (``implementations/data_files.py``).
Protocol B: nine tenths of the rows train, units from the training rows, five splits for sets below 10 000 rows and two
for the larger ones. Finished fits are appended to ``--results``, so that an interrupted run goes on, and ``--table``
prints what is there. The model, its starting values and its training are those of ``examples/regression.py``, the same
for every set. Several runs with different ``--sets`` may share one file of results.

``--peers gpytorch --likelihood normal`` fits GPyTorch's SVGP (one layer) and deep GP (two and more) in the same run,
with the same splits, inducing inputs, kernels, starting lengthscales, sizes of minibatches, rates of Adam and numbers
of steps. Its hyperparameters have no priors, and its layers are as wide as the inputs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from implementations import data_files
from time_to_density import log_density, minibatches

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import regression

SMALL = 10_000
# Many targets of these sets are equal, so that no bound holds for a density: it rises without limit on the equal ones.
DISCRETE = ("forest", "solar")
OURS, GPYTORCH = "numpyro_dgp", "gpytorch"
Key = tuple[str, str, int, int]  # set, package, layers, split
NUM_INDUCING, BATCH, RATE, DRAWS = 128, 1000, 0.05, 100


def read(path: Path, likelihood: str) -> dict[Key, dict[str, Any]]:
    """Finished fits by set, package, depth and split."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [{"package": OURS, **row} for row in rows]
    return {(r["data"], r["package"], r["layers"], r["split"]): r for r in rows if r["likelihood"] == likelihood}


def ours(split: regression.Split, layers: int, steps: int, likelihood: str, seed: int) -> dict[str, float]:
    """Scores of the recipe of this package."""
    found = regression.fit(
        split,
        layers,
        "inducing-point",
        num_inducing=NUM_INDUCING,
        optimizer="adam",
        steps=steps,
        batch=BATCH,
        learning_rate=RATE,
        seed=seed,
        likelihood=likelihood,
        draws=DRAWS,
        progress=False,
    )
    return {
        "rmse": float(np.sqrt(np.mean(found.errors**2))),
        "log_density": float(found.log_density.mean()),
        "bound": float(found.bounds.mean()),
        "seconds": round(found.seconds, 1),
    }


def gpytorch(split: regression.Split, layers: int, steps: int, seed: int) -> dict[str, float]:
    """Scores of GPyTorch's SVGP or deep GP with a normal likelihood, trained alike."""
    import torch
    from implementations.gpytorch_peer import train

    X, y, X_test, y_test = (np.asarray(part) for part in split[:4])
    first = regression.dgp.initial.layers(split.X, [], min(NUM_INDUCING, len(np.unique(X, axis=0))))[0]
    training = train(
        np.asarray(first.Z),
        layers,
        "float32",
        len(X),
        lengthscale=float(first.lengthscale),
        rate=lambda step: RATE * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1))),
    )
    torch.manual_seed(seed)
    start = time.perf_counter()
    rows = itertools.islice(minibatches(len(X), min(BATCH, len(X))), steps)
    losses = [float(training.update(X[i], y[i])) for i in rows]
    seconds = time.perf_counter() - start
    means, variances = training.predict(X_test, DRAWS)
    return {
        "rmse": float(np.sqrt(np.mean((means.mean(0) - y_test) ** 2))),
        "log_density": log_density(y_test, means, variances),
        "bound": -float(np.mean(losses[-100:])) / len(X),
        "seconds": round(seconds, 1),
    }


def run(path: Path, results: Path, likelihood: str, package: str, layers: int, split: int, steps: int) -> None:
    """One fit, appended to the results."""
    X, y = data_files.load(path)
    parts = regression.split_data(X, y, split, "B")
    peer = package == GPYTORCH
    scores = gpytorch(parts, layers, steps, split) if peer else ours(parts, layers, steps, likelihood, split)
    record = {
        "data": name_of(path),
        "package": package,
        "rows": len(X),
        "likelihood": likelihood,
        "layers": layers,
        "split": split,
        "steps": steps,
        **scores,
    }
    print(record, flush=True)
    with open(results, "a") as file:
        file.write(json.dumps(record) + "\n")


def name_of(path: Path) -> str:
    """The name of a set, without folder and endings."""
    return path.name.split(".")[0]


def table(done: dict[Key, dict[str, Any]]) -> str:
    """A Markdown table; standard errors over splits. ``vs 1``: log density minus that of one layer, pair by pair."""
    lines = [
        "| set | rows | layers | splits | RMSE | log density | vs 1 | ELBO per row |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def mean(values: list[float]) -> str:
        error = f" ({np.std(values, ddof=1) / math.sqrt(len(values)):.3f})" if len(values) > 1 else ""
        return f"{np.mean(values):.3f}{error}"

    packages = sorted({key[1] for key in done}, reverse=True)
    sizes = {row["data"]: row["rows"] for row in done.values()}
    for name, layers, package in itertools.product(
        sorted(sizes, key=lambda n: sizes[n]), sorted({key[2] for key in done}), packages
    ):
        rows = [r for (n, p, depth, _), r in sorted(done.items()) if (n, p, depth) == (name, package, layers)]
        if not rows:
            continue
        pairs = [
            r["log_density"] - done[name, package, 1, r["split"]]["log_density"]
            for r in rows
            if (name, package, 1, r["split"]) in done
        ]
        cells = [mean([r[what] for r in rows]) for what in ("rmse", "log_density")]
        cells += ["" if layers == 1 or not pairs else mean(pairs), mean([r["bound"] for r in rows])]
        label = f"{name} (discrete)" if name in DISCRETE else name
        depth = f"{layers}" if packages == [OURS] else f"{layers}, {package}"
        lines.append(f"| {label} | {rows[0]['rows']} | {depth} | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine() -> str:
    """What a table has to say beside its numbers."""
    names = ("numpyro-dgp", "jax", "numpyro", "torch", "gpytorch")
    found = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {found[name]}" for name in names if name in found)
    device = f"{regression.jax.devices()[0].device_kind} with {os.cpu_count()} cores, {platform.machine()}"
    return f"{time.strftime('%Y-%m-%d')}; {device}; Python {platform.python_version()}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help=f"a directory of .npz files, or files: {data_files.KINDS}"
    )
    parser.add_argument("--sets", nargs="+", help="names of files of the directory, in this order; all by default")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--likelihood", choices=regression.LIKELIHOODS, default="student-t")
    parser.add_argument("--peers", nargs="+", choices=[GPYTORCH], default=[], help="in the same run; normal likelihood")
    parser.add_argument("--splits", type=int, help="5 below 10 000 rows and 2 above, by default")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "uci.jsonl")
    parser.add_argument("--table", action="store_true", help="print the table and stop")
    arguments = parser.parse_args()
    if arguments.peers and arguments.likelihood != "normal":
        parser.error("--peers: expected --likelihood normal, the likelihood that both packages fit here")
    if not arguments.table:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        for layers in arguments.layers:
            for path in files(arguments.data, arguments.sets):
                splits = arguments.splits or (5 if len(data_files.load(path)[1]) < SMALL else 2)
                for split, package in itertools.product(range(splits), [OURS, *arguments.peers]):
                    if (name_of(path), package, layers, split) not in read(arguments.results, arguments.likelihood):
                        settings = package, layers, split, arguments.steps
                        run(path, arguments.results, arguments.likelihood, *settings)
    print(table(read(arguments.results, arguments.likelihood)))
    print(f"\n{arguments.likelihood} likelihood; {machine()}")


def files(data: list[Path], sets: list[str] | None) -> list[Path]:
    """The files that the command line names."""
    paths = [path for entry in data for path in (sorted(entry.glob("*.npz")) if entry.is_dir() else [entry])]
    found = {name_of(path): path for path in paths}
    return [found[name] for name in sets] if sets else paths


if __name__ == "__main__":
    main()
