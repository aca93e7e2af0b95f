"""Two and three layers from their own start, and deepened from the fit of one layer less, at equal numbers of steps.

``python benchmarks/deepen.py --data DIRECTORY`` fits the sets of ``--sets``: files of DIRECTORY (arrays X, y), names of
``library_sets.py``, ``step`` and ``sinusoids`` of ``examples/step_function.py``. The program is that of
``examples/regression.py``. Depth L costs L times ``--steps`` steps of Adam from its own start, and ``--steps`` for each
of the L fits of a chain of deepened ones. Fits are appended to ``--results``; what is there is not fitted again, and
``--table`` prints it.

Bounds are per row, without the log densities of hyperparameters: these are points here, each layer brings its own, and
their densities change with the units. ``pull`` is the sum of the latter, per row.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from numpyro import handlers
from numpyro.infer import SVI

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import library_sets
import regression
import step_function

import numpyro_dgp as dgp

SETS = ("nile", "sinusoids", "step", "yacht", "diabetes", "engel", "statecrime", "friedman1", "energy", "forest")
WAYS = {"own": 1.0, "deepened": 1.0, "deepened, wide": 3.0}  # and the spread of the prior of inner variances
MOST = 1000


def load(name: str, data: Path, seed: int) -> regression.Split:
    """A set by name, in standard units of its training rows."""
    if name in step_function.FUNCTIONS:
        return step_function.make_data(name, 200, 0.05, seed)
    if (data / f"{name}.npz").exists():
        X, y = regression.load(str(data / f"{name}.npz"))
    else:
        X, y = library_sets.load(name)
    return regression.split_data(X[:MOST], y[:MOST], seed, "B")


def renamed(depth: int) -> dict[str, str]:
    """Names of sites with ``depth`` layers, those of one layer less: the new layer is the first."""
    layers = {f"{site}{i}": f"{site}{i - 1}" for site in ("f", "variance", "lengthscale") for i in range(1, depth)}
    return layers | {f"h{i}": f"h{i - 1}" for i in range(1, depth - 1)}


class Fits:
    """Fits of one set.

    Args:
        split: the rows.
        num_inducing: inducing points, at most one per row.
        steps: of Adam for each layer.
        rate: of the first step; rates fall to zero by a cosine.
        seed: of everything random.
    """

    def __init__(self, split: regression.Split, num_inducing: int, steps: int, rate: float, seed: int) -> None:
        self.split, self.steps, self.rate, self.seed = split, steps, rate, seed
        self.num_inducing = min(num_inducing, len(split.X) // 2)

    def program(self, depth: int, spread: float) -> tuple[Any, Any]:
        model = regression.make_model(self.split.X, depth, self.num_inducing, inner_spread=spread)
        return model, dgp.guides.InducingPoint(model)

    def fit(self, model: Any, guide: Any, steps: int, init_params: Any = None) -> dgp.Posterior:
        svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(self.rate, steps)), dgp.ELBO())
        key, X, y = jax.random.key(self.seed), self.split.X, self.split.y
        result = dgp.fit(svi, key, steps, X, y, init_params=init_params, progress_bar=False)
        return dgp.Posterior(model, guide, result.params)

    def scores(self, posterior: dgp.Posterior) -> dict[str, float]:
        X, y, guide = self.split.X, self.split.y, posterior.guide
        values = guide.median(posterior.params, X, y)
        given = handlers.substitute(handlers.seed(posterior.model, 0), data=values | dict(posterior.params))
        sites = handlers.trace(given).get_trace(X, y)
        points = [n for n in values if not n.startswith("f")]
        pull = float(sum(sites[n]["fn"].log_prob(sites[n]["value"]).sum() for n in points)) / len(X)
        keys = jax.random.split(jax.random.key(9), 100)

        @jax.jit
        def bounds(params: Any) -> jax.Array:
            return jax.lax.map(lambda k: -dgp.ELBO().loss(k, params, posterior.model, guide, X, y), keys)

        found = np.asarray(bounds(posterior.params), float) / len(X) - pull
        density = posterior.log_density(jax.random.key(8), self.split.y_test, self.split.X_test)
        return {
            "bound": found.mean(),
            "error": found.std(ddof=1) / math.sqrt(len(found)),
            "pull": pull,
            "log_density": float(density.mean()),
        }

    def chains(self) -> Iterator[dict[str, Any]]:
        """Records of all fits."""
        first = self.fit(*self.program(1, 1.0), self.steps)
        yield {"way": "", "layers": 1, **self.scores(first)}
        for way, spread in WAYS.items():
            below = first
            for depth in (2, 3):
                model, guide = self.program(depth, spread)
                clock = time.perf_counter()
                if way == "own":
                    found, start = self.fit(model, guide, depth * self.steps), {}
                else:
                    begin = dgp.initial.deepen(
                        below,
                        model,
                        guide,
                        jax.random.key(7),
                        self.split.X,
                        self.split.y,
                        names=renamed(depth),
                        num_samples=20,
                    )
                    found = below = self.fit(model, guide, self.steps, begin.params)
                    start = {"start": (begin.bound - begin.fitted) / len(self.split.X), "variance": begin.variance}
                seconds = time.perf_counter() - clock
                yield {"way": way, "layers": depth, **self.scores(found), **start, "seconds": round(seconds, 1)}


def table(records: list[dict[str, Any]]) -> str:
    """A Markdown table; means over seeds."""
    lines = [
        "| set | training rows | layers | start | bound per row | vs one layer less | pull | test log density |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["set"] for r in records):
        mine = [r for r in records if r["set"] == name]
        for way, depth in [("", 1), *((way, depth) for depth in (2, 3) for way in WAYS)]:
            rows = [r for r in mine if (r["way"], r["layers"]) == (way, depth)]
            if not rows:
                continue
            below = [r for r in mine if (r["way"], r["layers"]) == (way if depth == 3 else "", depth - 1)]
            mean = {key: np.mean([r[key] for r in rows]) for key in ("bound", "pull", "log_density")}
            error = math.sqrt(sum(r["error"] ** 2 for r in rows)) / len(rows)
            gain = f"{mean['bound'] - np.mean([r['bound'] for r in below]):+.3f}" if below else ""
            lines.append(
                f"| {name} | {rows[0]['rows']} | {depth} | {way} | {mean['bound']:.3f} ({error:.3f}) | {gain} | "
                f"{mean['pull']:.3f} | {mean['log_density']:.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("."), help="directory of .npz files")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--num-inducing", type=int, default=50)
    parser.add_argument("--steps", type=int, default=500, help="for each layer")
    parser.add_argument("--rate", type=float, default=0.03, help="of the first step of Adam")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "deepen.jsonl")
    parser.add_argument("--table", action="store_true", help="print the table and stop")
    arguments = parser.parse_args()
    settings = {"steps": arguments.steps, "rate": arguments.rate, "num_inducing": arguments.num_inducing}

    def done() -> list[dict[str, Any]]:
        lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
        return [r for r in map(json.loads, lines) if settings.items() <= r.items()]

    for name in [] if arguments.table else arguments.sets:
        for seed in arguments.seeds:
            known = {(r["way"], r["layers"]) for r in done() if (r["set"], r["seed"]) == (name, seed)}
            if len(known) == 1 + 2 * len(WAYS):
                continue
            split = load(name, arguments.data, seed)
            fits = Fits(split, arguments.num_inducing, arguments.steps, arguments.rate, seed)
            for record in fits.chains():
                if (record["way"], record["layers"]) in known:
                    continue
                record = (
                    {"set": name, "seed": seed, "rows": len(split.X), "version": dgp.__version__} | settings | record
                )
                print(record, flush=True)
                with open(arguments.results, "a") as file:
                    file.write(json.dumps(record) + "\n")
            jax.clear_caches()  # compiled programs of one set are of no use to the next
    print(table(done()))


if __name__ == "__main__":
    main()
