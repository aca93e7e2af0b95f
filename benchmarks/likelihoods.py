"""A normal against a Student-t likelihood on validation rows: a ninth of the training rows, test rows untouched.

``python benchmarks/likelihoods.py --data DIRECTORY`` reads ``DIRECTORY/*.npz`` (arrays X, y) and prints one line per
set, split and likelihood, for two layers: mean log density of the validation rows, that of the worst, bound per row.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import regression


def validation(split: regression.Split, seed: int) -> regression.Split:
    """Eight ninths of the training rows for training, the others in place of the test rows."""
    order = np.random.RandomState(100 + seed).permutation(len(split.X))
    train, held = np.split(order, [len(order) * 8 // 9])
    return split._replace(X=split.X[train], y=split.y[train], X_test=split.X[held], y_test=split.y[held])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of .npz files")
    parser.add_argument("--sets", nargs="+", default=["yacht", "energy", "concrete", "airfoil", "kin8nm", "power"])
    parser.add_argument("--split", type=int, nargs="+", default=[0], help="seeds of the splits")
    parser.add_argument("--steps", type=int, default=5000)
    arguments = parser.parse_args()
    for name in arguments.sets:
        X, y = regression.load(str(arguments.data / f"{name}.npz"))
        for split in arguments.split:
            data = validation(regression.split_data(X, y, split, "B"), split)
            for likelihood in regression.LIKELIHOODS:
                found = regression.fit(
                    data,
                    2,
                    "inducing-point",
                    num_inducing=128,
                    optimizer="adam",
                    steps=arguments.steps,
                    seed=split,
                    likelihood=likelihood,
                    progress=False,
                )
                density = found.log_density
                print(
                    f"| {name}, split {split} | {likelihood} | {density.mean():.3f} | {density.min():.1f} | "
                    f"{found.bounds.mean():.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
