"""One to three layers on ten regression sets: RMSE and mixture log density on test rows, in standard units.

``python benchmarks/uci_table.py --data DIRECTORY`` reads ``DIRECTORY/*.npz`` (arrays X, y). Protocol B: nine tenths of
the rows train, units from the training rows, five splits for sets below 10 000 rows and two for the larger ones.
Finished fits are appended to ``--results``, so that an interrupted run goes on, and ``--table`` prints what is there.
The model, its starting values and its training are those of ``examples/regression.py``, the same for every set. Several
runs with different ``--sets`` may share one file of results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import regression

SMALL = 10_000
# Many targets of these sets are equal, so that no bound holds for a density: it rises without limit on the equal ones.
DISCRETE = ("forest", "solar")
Key = tuple[str, int, int]  # set, layers, split


def read(path: Path, likelihood: str) -> dict[Key, dict[str, Any]]:
    """Finished fits by set, depth and split."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(r["data"], r["layers"], r["split"]): r for r in rows if r["likelihood"] == likelihood}


def run(path: Path, results: Path, likelihood: str, layers: int, split: int, steps: int) -> None:
    """One fit, appended to the results."""
    X, y = regression.load(str(path))
    found = regression.fit(
        regression.split_data(X, y, split, "B"),
        layers,
        "inducing-point",
        num_inducing=128,
        optimizer="adam",
        steps=steps,
        seed=split,
        likelihood=likelihood,
        progress=False,
    )
    record = {
        "data": path.stem,
        "rows": len(X),
        "likelihood": likelihood,
        "layers": layers,
        "split": split,
        "steps": steps,
        "rmse": float(np.sqrt(np.mean(found.errors**2))),
        "log_density": float(found.log_density.mean()),
        "bound": float(found.bounds.mean()),
        "seconds": round(found.seconds, 1),
    }
    print(record, flush=True)
    with open(results, "a") as file:
        file.write(json.dumps(record) + "\n")


def table(done: dict[Key, dict[str, Any]]) -> str:
    """A Markdown table; standard errors over splits. ``vs 1``: log density minus that of one layer, pair by pair."""
    lines = [
        "| set | rows | layers | splits | RMSE | log density | vs 1 | ELBO per row |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def mean(values: list[float]) -> str:
        error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return f"{np.mean(values):.3f} ({error:.3f})"

    for name in sorted({key[0] for key in done}, key=lambda n: next(r["rows"] for k, r in done.items() if k[0] == n)):
        for layers in sorted({key[1] for key in done if key[0] == name}):
            rows = [r for (n, depth, _), r in sorted(done.items()) if (n, depth) == (name, layers)]
            pairs = [
                r["log_density"] - done[name, 1, r["split"]]["log_density"]
                for r in rows
                if (name, 1, r["split"]) in done
            ]
            cells = [mean([r[what] for r in rows]) for what in ("rmse", "log_density")]
            cells += ["" if layers == 1 else mean(pairs), mean([r["bound"] for r in rows])]
            label = f"{name} (discrete)" if name in DISCRETE else name
            lines.append(f"| {label} | {rows[0]['rows']} | {layers} | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of .npz files")
    parser.add_argument("--sets", nargs="+", help="names of files, in this order; all by default")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--likelihood", choices=regression.LIKELIHOODS, default="student-t")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "uci.jsonl")
    parser.add_argument("--table", action="store_true", help="print the table and stop")
    arguments = parser.parse_args()
    if not arguments.table:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        names = arguments.sets or sorted(path.stem for path in arguments.data.glob("*.npz"))
        for layers in arguments.layers:
            for name in names:
                path = arguments.data / f"{name}.npz"
                splits = 5 if len(np.load(path)["y"]) < SMALL else 2
                for split in range(splits):
                    if (name, layers, split) not in read(arguments.results, arguments.likelihood):
                        run(path, arguments.results, arguments.likelihood, layers, split, arguments.steps)
    print(table(read(arguments.results, arguments.likelihood)))


if __name__ == "__main__":
    main()
