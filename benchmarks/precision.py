"""Single against double precision: the same fits in both, on regression sets, by depth and guide.

``python benchmarks/precision.py --data DIRECTORY`` reads ``DIRECTORY/*.npz`` (arrays X, y), trains every combination
for some steps in float32 and in float64, appends one line per pair of fits to ``--out`` and prints tables. Pairs found
there already are not repeated, so that an interrupted run goes on. Both fits have the same rows, rounded to single
precision, and the same random numbers, drawn in single precision: what differs is rounding. Many small sets are in
``precision_library.py``.

A cell of a table is the difference of the mean log densities of test rows, float32 minus float64, in units of the
standard error of the latter over rows; or what was not finite, a loss or a density. Below the tables are the fits
whose test density is below that of a Gaussian with the mean and variance of the training targets, which ignores X.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp import guides as G  # noqa: N812
from numpyro_dgp.optim import NaturalGradient, log_linear

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).parent / "sources"))
import library_sets
import regression
import salimbeni_latents

SETS = ("yacht", "energy", "forest", "concrete", "solar", "airfoil", "kin8nm", "power", "bike", "protein")
DTYPES = ("float32", "float64")
TEST, DRAWS = 1000, 100


class Case(NamedTuple):
    """A guide with the kind of program that it is for."""

    guide: Callable[[Any], G.Guide]
    program: str = "plain"  # or "noise" between the layers, "latent" numbers per datum, "student" for its likelihood
    natural: bool = False
    depths: tuple[int, ...] = (1, 2, 3)


def hidden(rule: dgp.extend.Rule) -> Case:
    """``rule`` for every hidden layer, a full Gaussian for every q(v)."""
    return Case(lambda m: G.MeanField(m, inducing=G.Full(), hidden=rule), "noise", depths=(2, 3))


CASES = {
    "InducingPoint": Case(G.InducingPoint),
    "natural gradients": Case(G.InducingPoint, natural=True),
    "Diagonal": Case(lambda m: G.InducingPoint(m, inducing=G.Diagonal())),
    "Student-t": Case(G.InducingPoint, "student"),
    "MeanField": Case(G.MeanField, "noise", depths=(2, 3)),
    "MeanField, Full": hidden(G.Normal()),
    "GivenInducing": hidden(G.GivenInducing()),
    "GivenInducing, rank 3": hidden(G.GivenInducing(3)),
    "JointOutputs, rank 3": hidden(G.JointOutputs(3)),
    "GivenBelow": hidden(G.GivenBelow()),
    "Normal latents": Case(G.InducingPoint, "latent"),
    "Amortised latents": Case(lambda m: G.InducingPoint(m, latent=G.Amortised()), "latent"),
    "ImportanceWeighted": Case(lambda m: G.ImportanceWeighted(m, num_samples=5, latent=G.Amortised()), "latent"),
    "doubly reparameterised": Case(
        lambda m: G.ImportanceWeighted(m, num_samples=5, latent=G.Amortised(), doubly_reparameterised=True), "latent"
    ),
    "Quadrature": Case(lambda m: G.InducingPoint(m, latent=G.Quadrature(10)), "latent"),
}


def draw_in_single_precision() -> None:
    """Make JAX draw the same numbers whatever the precision."""

    def in_single(draw: Callable[..., Any], single: str) -> Callable[..., Any]:
        signature = inspect.signature(draw)

        @wraps(draw)
        def drawn(*args: Any, **kwargs: Any) -> jax.Array:
            bound = signature.bind(*args, **kwargs)
            wanted = bound.arguments.get("dtype") or (int if single == "int32" else float)
            bound.arguments["dtype"] = single
            return draw(*bound.args, **bound.kwargs).astype(jnp.result_type(wanted))

        return drawn

    for name, single in (("normal", "float32"), ("uniform", "float32"), ("randint", "int32")):
        setattr(jax.random, name, in_single(getattr(jax.random, name), single))


def make_model(X: jax.Array, layers: int, num_inducing: int, program: str) -> Callable[..., None]:
    if program == "latent":
        return salimbeni_latents.make_model(X, layers, latent=True)
    likelihood = "student-t" if program == "student" else "normal"
    return regression.make_model(X, layers, num_inducing, program == "noise", likelihood=likelihood)


def fit(split: regression.Split, case: Case, layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train and score in the precision that JAX is in: the bound of the last steps, and log densities of test rows."""
    X, y, X_test, y_test = (jnp.asarray(a, float) for a in split[:4])
    model = make_model(X, layers, options.num_inducing, case.program)
    guide = case.guide(model)
    adam = optax.adam(optax.cosine_decay_schedule(options.learning_rate, options.steps))
    optimizer = NaturalGradient(guide, log_linear(1e-4, 0.1, 40), adam) if case.natural else adam
    svi = SVI(model, guide, optimizer, dgp.ELBO())
    keys = jax.random.split(jax.random.key(options.seed), 2)
    rows = options.batch if options.batch < len(X) else None
    try:
        result = dgp.fit(svi, keys[0], options.steps, X, y, rows, progress_bar=False)
    except ValueError as error:  # how ``fit`` reports a loss that is not finite
        return {"problem": str(error)}
    wrong = [name for name, value in result.params.items() if value.dtype != X.dtype]
    if wrong:
        return {"problem": f"parameters that are not {X.dtype}: {wrong}"}
    draws = DRAWS if layers > 1 or case.program == "latent" else 1
    posterior = dgp.Posterior(model, guide, result.params)
    density = np.asarray(posterior.using(num_samples=draws).log_density(keys[1], y_test, X_test), float)
    if not np.isfinite(density).all():
        return {"problem": f"log densities of {(~np.isfinite(density)).sum()} test rows are not finite"}
    bound = -np.asarray(result.losses, float)[-options.steps // 10 :].mean() / len(X)
    return {"bound": float(bound), "densities": density}


def compare(split: regression.Split, name: str, layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both fits: means over test rows with their standard errors, also that of the difference row by row."""
    found = {}
    for dtype in DTYPES:
        jax.config.update("jax_enable_x64", dtype == "float64")
        found[dtype] = fit(split, CASES[name], layers, options)
    return scored(found, constant_density(np.asarray(split.y, float), np.asarray(split.y_test, float)))


def scored(found: dict[str, Any], constant: np.ndarray) -> dict[str, Any]:
    """A pair of fits as a record: log densities of test rows become means with their standard errors."""
    rows = [found[dtype].pop("densities", None) for dtype in DTYPES]
    error = lambda values: float(values.std(ddof=1) / math.sqrt(len(values)))  # noqa: E731
    for dtype, values in zip(DTYPES, rows, strict=True):
        found[dtype] |= {} if values is None else {"density": float(values.mean()), "error": error(values)}
    found["constant"] = float(constant.mean())
    for dtype, values in zip(DTYPES, rows, strict=True):
        if values is not None:
            found[dtype] |= {"gain": float((values - constant).mean()), "gain_error": error(values - constant)}
    if all(values is not None for values in rows):
        found |= {"difference": float((rows[0] - rows[1]).mean()), "difference_error": error(rows[0] - rows[1])}
    return found


def constant_density(y: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Log densities of test targets under a Gaussian with the moments of the training targets."""
    return -0.5 * np.log(2 * np.pi * y.var()) - 0.5 * np.square(test - y.mean()) / y.var()


def cell(record: dict[str, Any] | None) -> str:
    """What the table says about a pair."""
    if record is None:
        return ""
    problems = [dtype for dtype in DTYPES if "problem" in record[dtype]]
    return ", ".join(problems) + " failed" if problems else f"{record['difference'] / record['float64']['error']:+.2f}"


def table(records: list[dict[str, Any]]) -> str:
    """One table per depth: a row per guide, a column per set."""
    lines = []
    for layers in sorted({r["layers"] for r in records}):
        of_depth = {(r["guide"], r["set"]): r for r in records if r["layers"] == layers}
        sets = [s for s in (*SETS, *library_sets.LIBRARY_SETS) if any(s == column for _, column in of_depth)]
        lines += [f"\nlayers: {layers}\n", "| guide | " + " | ".join(sets) + " |", "|---" * (len(sets) + 1) + "|"]
        for guide in [g for g in CASES if any(g == row for row, _ in of_depth)]:
            lines.append(f"| {guide} | " + " | ".join(cell(of_depth.get((guide, s))) for s in sets) + " |")
    ratios = [abs(r["difference"]) / r["float64"]["error"] for r in records if "difference" in r]
    failed = len(records) - len(ratios)
    summary = f"\n{len(records)} pairs of fits, {failed} with something that is not finite"
    if ratios:
        summary += f"; of the others {sum(v > 2 for v in ratios)} differ by more than two standard errors, "
        summary += f"the median by {np.median(ratios):.2f}, the largest by {max(ratios):.2f}"
    for dtype in DTYPES:
        known = [r for r in records if "gain" in r[dtype]]
        worse = [r for r in known if r[dtype]["gain"] < -r[dtype]["gain_error"]]
        names = ", ".join(f"{r['guide']} with {r['layers']} on {r['set']}" for r in worse)
        summary += (
            f"\n{dtype}: of {len(known)} fits {len(worse)} are worse than a constant by more than a standard error"
        )
        summary += f": {names}" if worse else ""
    return "\n".join([*lines, summary])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory of .npz files; without it what is there is printed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "precision.jsonl")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--layers", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--guides", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--num-inducing", type=int, default=64, help="programs with latents have 128")
    parser.add_argument("--learning-rate", type=float, default=0.03, help="first one of Adam; it falls by a cosine")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw_in_single_precision()

    settings = {k: getattr(options, k) for k in ("steps", "batch", "num_inducing", "learning_rate", "seed")}

    def records() -> list[dict[str, Any]]:
        lines = options.out.read_text().splitlines() if options.out.exists() else []
        return [r for r in map(json.loads, lines) if settings.items() <= r.items()]

    jobs = [(g, n, s) for g in options.guides for n in options.layers for s in options.sets if n in CASES[g].depths]
    for guide, layers, name in jobs if options.data else []:
        key = {"set": name, "layers": layers, "guide": guide}
        if any(key.items() <= r.items() for r in records()):
            continue
        data = regression.load(str(Path(options.data) / f"{name}.npz"))
        split = regression.split_data(*data, 0, "B", TEST)
        record = key | settings | compare(split, guide, layers, options)
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{name}, {layers} layers, {guide}: {cell(record)}", flush=True)
        jax.clear_caches()
    print(table(records()))


if __name__ == "__main__":
    main()
