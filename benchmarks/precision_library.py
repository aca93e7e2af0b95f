"""Single against double precision on small sets, each also against a constant: all guides, one to three layers.

``python benchmarks/precision_library.py`` takes the sets that come with scikit-learn and statsmodels
(``library_sets.py``) and, with ``--data DIRECTORY``, those of ``DIRECTORY/*.npz`` (arrays X, y) too. It appends one
line per pair of fits to ``--out`` and prints tables; pairs found there already are not repeated.

Nearly all of the time of a small fit is compilation, so that all sets are brought to one shape, and one program per
guide, depth and precision serves them all, with the data and the initial values as its arguments:

- *rows*: at most 256 for training and 100 for testing, in a random order of their own; sets with fewer are filled up
  with copies of a row that ``numpyro.handlers.mask`` takes out of the program, and out of the scores;
- *columns*: standardised, then filled up to 30 with zeros, which no distance sees;
- *widths*: inner layers have three outputs, which start as the first three principal directions;
- *inducing inputs*: 32 per layer, by k-means; where a set has fewer distinct rows, standard normal rows beside them.

All rows are in every step (no minibatches). The random numbers are the same in both precisions (``precision.py``).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import library_sets
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import precision
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient, log_linear

regression = precision.regression
ROWS, TEST, COLUMNS, WIDTH, M, DRAWS = 256, 100, 30, 3, 32, 50


class Padded(NamedTuple):
    """A set in the common shape: arrays for the compiled program."""

    X: np.ndarray  # (ROWS, COLUMNS)
    y: np.ndarray  # (ROWS,)
    present: np.ndarray  # (ROWS,), False for rows that fill up
    X_test: np.ndarray  # (TEST, COLUMNS)
    y_test: np.ndarray  # (TEST,)
    Z: tuple[np.ndarray, ...]  # by layer, (M, COLUMNS) or (M, WIDTH)
    W: np.ndarray  # (COLUMNS, WIDTH), mean of the first layer
    lengthscales: np.ndarray  # by layer, initial


def padded(X: np.ndarray, y: np.ndarray) -> tuple[Padded, int]:
    """A set in the common shape, and the number of its test rows."""
    split = regression.split_data(X, y, 0, "B", TEST)
    X, y, X_test, y_test = (np.asarray(a) for a in split[:4])
    X, y = X[:ROWS], y[:ROWS]
    rng = np.random.default_rng(0)
    fill = lambda rows, count: np.concatenate([rows, np.repeat(rows[:1], count - len(rows), 0)])  # noqa: E731
    widen = lambda rows, width: np.pad(rows, ((0, 0), (0, width - rows.shape[1])))  # noqa: E731
    used = min(WIDTH, X.shape[1])
    directions = np.asarray(dgp.means.principal_directions(X, used))
    hidden = widen(X @ directions, WIDTH)

    def inducing(rows: np.ndarray, columns: int) -> np.ndarray:
        centres = dgp.initial.kmeans(rows, min(M, len(np.unique(rows, axis=0))))
        extra = rng.normal(size=(M - len(centres), rows.shape[1])) * (rows.std(0) > 0)
        return widen(np.concatenate([centres, extra]), columns).astype(X.dtype)

    deep = inducing(hidden, WIDTH)
    return Padded(
        fill(widen(X, COLUMNS), ROWS),
        fill(y, ROWS),
        np.arange(ROWS) < len(y),
        fill(widen(X_test, COLUMNS), TEST),
        fill(y_test, TEST),
        (inducing(X, COLUMNS), deep, deep),
        widen(np.pad(directions, ((0, COLUMNS - len(directions)), (0, 0))), WIDTH),
        np.sqrt(np.array([X.shape[1], used, used], X.dtype)),
    ), len(split.X_test)


def make_model(data: Padded, layers: int, program: str) -> Callable[..., None]:
    """As ``examples/regression.py``, with the initial values of ``data``, rows that are not there, and latents."""
    latent = program == "latent"

    def model(X: Any, y: Any = None, present: Any = True) -> None:
        functions = []
        for i in range(layers):
            Z = data.Z[i]
            if i == 0 and latent:
                Z = jnp.concatenate([Z, dist.Normal(0, 1).icdf((jnp.arange(M)[::-1] * 7 % M + 0.5) / M)[:, None]], 1)
            start = jnp.broadcast_to(jnp.log(data.lengthscales[i]), Z.shape[1])
            scales = numpyro.sample(f"lengthscale{i}", dist.LogNormal(start, 1.0).to_event(1))
            kernel = dgp.kernels.RBF(numpyro.sample(f"variance{i}", dist.LogNormal(0.0, 1.0)), scales)
            last = i == layers - 1
            W = jnp.eye(WIDTH) if i else jnp.pad(data.W, ((0, int(latent)), (0, 0)))
            mean = dgp.means.ZeroMean() if last else dgp.means.LinearMean(W)
            functions.append(
                dgp.gp(f"f{i}", kernel, dgp.Points(Z, learn=True), outputs=None if last else WIDTH, mean=mean)
            )
        jitters = [
            numpyro.sample(f"process_noise{i}", dist.LogNormal(math.log(0.03), 0.5)) if program == "noise" else None
            for i in range(layers - 1)
        ]
        noise = numpyro.sample("noise", dist.LogNormal(math.log(0.1), 1.0))
        tails = numpyro.sample("tails", dist.Gamma(2.0, 0.1)) if program == "student" else None
        with numpyro.plate("data", len(X)), numpyro.handlers.mask(mask=present):
            h = dgp.latent("w", X, 1) if latent else X
            for i, f in enumerate(functions[:-1]):
                h = numpyro.sample(f"h{i}", f(h, noise=jitters[i]))
            observed = dgp.Likelihood(
                functions[-1](h),
                lambda v: dist.Normal(v, noise) if tails is None else dist.StudentT(2 + tails, v, noise),
            )
            numpyro.sample("y", observed, obs=y)

    return model


def compiled(case: precision.Case, layers: int, steps: int, rate: float, seed: int) -> Callable[..., Any]:
    """The fit of any set and its test densities, in the precision that JAX is in: losses, parameters, densities."""

    def run(data: Padded) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
        model = make_model(data, layers, case.program)
        guide = case.guide(model)
        adam = optax.adam(optax.cosine_decay_schedule(rate, steps))
        optimizer = NaturalGradient(guide, log_linear(1e-4, 0.1, 40), adam) if case.natural else adam
        svi = SVI(model, guide, optimizer, dgp.ELBO())
        keys = jax.random.split(jax.random.key(seed), 2)
        rows = (data.X, data.y, data.present)
        state, losses = jax.lax.scan(lambda s, _: svi.update(s, *rows), svi.init(keys[0], *rows), length=steps)
        params = svi.get_params(state)
        draws = DRAWS if layers > 1 or case.program == "latent" else 1
        posterior = dgp.Posterior(model, guide, params)
        return losses, params, posterior.using(num_samples=draws).log_density(keys[1], data.y_test, data.X_test)

    return jax.jit(run)


def scores(fitted: Any, data: Padded, tested: int, dtype: str, steps: int) -> dict[str, Any]:
    """What a record says of one fit."""
    losses, params, densities = jax.tree.map(np.asarray, fitted)
    rows = int(data.present.sum())
    if not np.isfinite(losses).all():
        return {"problem": f"the loss of step {int(np.argmin(np.isfinite(losses)))} is not finite"}
    if wrong := [name for name, value in params.items() if value.dtype != dtype]:
        return {"problem": f"parameters that are not {dtype}: {wrong}"}
    if wrong := [name for name, value in params.items() if not np.isfinite(value).all()]:
        return {"problem": f"parameters that are not finite: {wrong}"}
    densities = densities[:tested].astype(float)
    if not np.isfinite(densities).all():
        return {"problem": f"log densities of {(~np.isfinite(densities)).sum()} test rows are not finite"}
    return {"bound": float(-losses[-steps // 10 :].astype(float).mean() / rows), "densities": densities}


def sets(directory: str | None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """All sets: those of the libraries, then those of a directory."""
    for name in library_sets.LIBRARY_SETS:
        yield name, *library_sets.load(name)
    for name in precision.SETS if directory else ():
        yield name, *regression.load(str(Path(directory or "") / f"{name}.npz"))


def summary(records: list[dict[str, Any]]) -> str:
    """A row per guide and depth: what is finite, how far the precisions are apart, what is worse than a constant."""
    lines = ["| guide | layers | sets | not finite | median | largest | worse than a constant |", "|---" * 7 + "|"]
    for guide in precision.CASES:
        for layers in (1, 2, 3):
            found = [r for r in records if r["guide"] == guide and r["layers"] == layers]
            finite = [r for r in found if "difference" in r]
            apart = [abs(r["difference"]) / r["float64"]["error"] for r in finite]
            worse = {d: [r["set"] for r in finite if r[d]["gain"] < -r[d]["gain_error"]] for d in precision.DTYPES}
            names = [
                name
                + "".join(f" (in {d} only)" for d in precision.DTYPES if name in worse[d])
                * (sum(name in worse[d] for d in precision.DTYPES) == 1)
                for name in dict.fromkeys([*worse["float32"], *worse["float64"]])
            ]
            if found:
                numbers = f"{np.median(apart):.2f} | {max(apart):.2f}" if apart else " | "
                lines.append(
                    f"| {guide} | {layers} | {len(found)} | {len(found) - len(finite)} | {numbers} | "
                    f"{', '.join(names) or 'none'} |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a directory of .npz files, beside the sets of the libraries")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "precision_library.jsonl")
    parser.add_argument("--print", action="store_true", help="print what is there")
    parser.add_argument("--layers", type=int, nargs="+", choices=(1, 2, 3), default=[2, 1, 3])
    parser.add_argument("--guides", nargs="+", choices=list(precision.CASES), default=list(precision.CASES))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=0.03, help="first one of Adam; it falls by a cosine")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    precision.draw_in_single_precision()
    settings = {k: getattr(options, k) for k in ("steps", "learning_rate", "seed")}

    def records() -> list[dict[str, Any]]:
        lines = options.out.read_text().splitlines() if options.out.exists() else []
        return [r for r in map(json.loads, lines) if settings.items() <= r.items()]

    jobs = [(n, g) for n in options.layers for g in options.guides if n in precision.CASES[g].depths]
    loaded = {} if options.print else {name: padded(X, y) for name, X, y in sets(options.data)}
    for layers, guide in jobs if loaded else []:
        there = {r["set"] for r in records() if r["layers"] == layers and r["guide"] == guide}
        missing = {name: value for name, value in loaded.items() if name not in there}
        found: dict[str, dict[str, Any]] = {name: {} for name in missing}
        for dtype in precision.DTYPES if missing else ():
            jax.config.update("jax_enable_x64", dtype == "float64")
            run = compiled(precision.CASES[guide], layers, *settings.values())
            for name, (data, tested) in missing.items():
                arrays = jax.tree.map(lambda a: jnp.asarray(a, bool if a.dtype == bool else float), data)
                found[name][dtype] = scores(run(arrays), data, tested, dtype, options.steps)
                if dtype == "float64":
                    y, y_test = data.y[data.present].astype(float), data.y_test[:tested].astype(float)
                    constant = precision.constant_density(y, y_test)
                    record = {"set": name, "layers": layers, "guide": guide} | settings
                    record |= precision.scored(found[name], constant)
                    with options.out.open("a") as file:
                        file.write(json.dumps(record) + "\n")
                    print(f"{name}, {layers} layers, {guide}: {precision.cell(record)}", flush=True)
            jax.clear_caches()
    there = records()
    library = [r for r in there if r["set"] in library_sets.LIBRARY_SETS]
    for found in (library, [r for r in there if r not in library]):
        print(precision.table(found), summary(found), sep="\n\n")


if __name__ == "__main__":
    main()
