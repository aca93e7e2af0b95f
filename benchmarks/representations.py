"""One program on every representation of its function: what each loses against the exact process, and what it costs.

``python benchmarks/representations.py`` fits one layer at fixed hyperparameters to three sets: a draw of a rough
process, weekly carbon dioxide (from statsmodels, with its gaps), and pixels of a photograph (from scikit-learn, two
columns). Layers with weights or inducing values have their best Gaussian posterior (one natural step of length one);
the others their evidence. A row has the bound or evidence less the exact evidence, the mean log density of test rows
less the exact one, the root mean square of the difference of means in exact standard deviations of the test values,
milliseconds of the bound with its gradient by hyperparameters and posterior, and MiB that the compiled program needs.
``--data FILE`` adds a set of one's own (arrays X, y), whose hyperparameters are those of the largest exact evidence.
``--deep`` fits two layers to a step instead, by Adam. All in double precision.

Every row is appended to ``--out``, and is not computed again if it is there; ``--table`` prints what is there, and
``--figure FILE`` draws what it costs against what is lost.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from scipy.optimize import minimize

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient

Kernel = Callable[[Any, Any], dgp.kernels.Kernel]


class Problem(NamedTuple):
    """Training and test rows, the kernel with its hyperparameters (variance, lengthscale, noise), representations."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    kernel: Kernel
    theta: np.ndarray
    ways: dict[str, Any]


def rough(size: int) -> Problem:
    rng = np.random.default_rng(0)
    t = np.sort(rng.uniform(0, 20, size + size // 4))
    kernel, theta = dgp.kernels.Matern12, np.array([1.0, 1.0, 0.2])
    root = np.linalg.cholesky(np.asarray(kernel(1.0, 1.0).gram(t[:, None])) + 1e-10 * np.eye(len(t)))
    y = root @ rng.normal(size=len(t)) + 0.2 * rng.normal(size=len(t))
    return _split(t[:, None], y, kernel, theta, np.arange(len(t)) % 5 == 2)


def carbon_dioxide(size: int) -> Problem:
    from statsmodels.datasets import co2

    series = co2.load_pandas().data["co2"]
    years, y = np.arange(len(series)) / 52.1775, series.to_numpy(float)
    known = np.isfinite(y)
    years, y = years[known][-size:], y[known][-size:]
    y = y - np.polyval(np.polyfit(years, y, 2), years)
    return _split(
        years[:, None] - years[0],
        y / y.std(),
        dgp.kernels.Matern52,
        np.array([1.0, 0.4, 0.15]),
        np.arange(len(y)) % 5 == 2,
    )


def photograph(size: int) -> Problem:
    from sklearn.datasets import load_sample_image

    step = 6 if size <= 2000 else 3  # pixels apart: more rows are more pixels of the same picture
    grey = load_sample_image("china.jpg").mean(-1)[60:360:step, 160:460:step]
    line = np.linspace(-1, 1, 300 // step)
    X = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    y = (grey - grey.mean()).reshape(-1) / grey.std()
    rows = np.random.default_rng(0).permutation(len(X))[: size + size // 4]
    return _split(X[rows], y[rows], dgp.kernels.Matern32, np.array([1.0, 0.25, 0.2]), np.arange(len(rows)) % 5 == 2)


def from_file(path: Path, size: int) -> Problem:
    """Rows of a file in standard units, an isotropic kernel at the optimum of the exact evidence."""
    with np.load(path) as arrays:
        X, y = np.asarray(arrays["X"], float), np.asarray(arrays["y"], float).reshape(-1)
    rows = np.random.default_rng(0).permutation(len(X))[: size + size // 4]
    X, y = ((a - a.mean(0)) / a.std(0) for a in (X[rows], y[rows]))
    test = np.arange(len(rows)) % 5 == 2

    def loss(logs: Any) -> Any:
        variance, lengthscale, noise = jnp.exp(logs)
        process = dgp.gp("f", dgp.kernels.Matern52(variance, lengthscale), None)
        return -process(jnp.asarray(X[~test]), noise=noise).log_prob(jnp.asarray(y[~test]))

    start = np.log([1.0, np.sqrt(X.shape[1]), 0.3])
    found = minimize(jax.jit(jax.value_and_grad(loss)), start, jac=True, method="L-BFGS-B", options={"maxiter": 30})
    return _split(X, y, dgp.kernels.Matern52, np.exp(found.x), test)


def _split(X: np.ndarray, y: np.ndarray, kernel: Kernel, theta: np.ndarray, test: np.ndarray) -> Problem:
    X_train, lengthscale = X[~test], float(theta[1])
    low, high = X.min(0) - 2 * lengthscale, X.max(0) + 2 * lengthscale
    ways: dict[str, Any] = {"exact": None}
    numbers = (25,) * (len(X_train) < 1000) + (50, 200, 400) + (800,) * (len(X_train) > 4000)
    for number in (n for n in numbers if n < len(X_train)):
        ways[f"`Points`, {number}"] = dgp.Points(dgp.initial.kmeans(X_train, number))
    sides: dict[int, Any] = {1: numbers, 2: ((5, 5),) * (len(X_train) < 1000) + ((10, 10), (20, 20), (30, 30))}
    for kind in (dgp.Grid, dgp.Basis):
        for size in sides.get(X.shape[-1], ()):  # products of more columns are too many
            ways[f"`{kind.__name__}`, {size}"] = kind(low, high, size)
    if X.shape[-1] == 1:
        for number in (50, 200):
            ways[f"`StateSpace`, {number} times"] = dgp.StateSpace(np.linspace(X.min(), X.max(), number))
        ways["`StateSpaceNormal`"] = "states"
    for number in (10, 30):
        ways[f"`Neighbours`, {number}"] = dgp.Neighbours(X_train, num=number)
    return Problem(X_train, y[~test], X[test], y[test], kernel, theta, ways)


class Found(NamedTuple):
    """Bound or evidence, moments of test values, seconds of a step, MiB."""

    bound: float
    mean: np.ndarray
    variance: np.ndarray
    seconds: float
    memory: float


def costs(loss: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """Median seconds of the loss with its gradient, and MiB of the compiled program beside its arguments."""
    program = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arguments))))).lower(*arguments).compile()
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < 6 and sum(seconds) < 20):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds[1:])), program.memory_analysis().temp_size_in_bytes / 2**20


def with_values(problem: Problem, way: Any) -> Found:
    """A layer with weights or inducing values, at its best Gaussian posterior."""
    X, y, X_test = (jnp.asarray(a) for a in (problem.X, problem.y, problem.X_test))
    fixed = jnp.asarray(problem.theta)

    def model(X: Any, y: Any = None, theta: Any = fixed) -> None:
        f = dgp.gp("f", problem.kernel(theta[0], theta[1]), way)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, theta[2])), obs=y)

    guide = dgp.guides.InducingPoint(model)
    svi = SVI(model, guide, NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
    params = dgp.fit(svi, jax.random.key(0), 3, X, y, progress_bar=False).params

    def loss(params: Any, theta: Any) -> Any:
        return dgp.ELBO().loss(jax.random.key(0), params, model, guide, X, y, theta)

    found = dgp.Posterior(model, guide, params).predict(jax.random.key(1), X_test)
    return Found(
        -float(loss(params, fixed)), *map(np.asarray, (found.mean, found.variance)), *costs(loss, params, fixed)
    )


def without_values(problem: Problem, way: Any) -> Found:
    """The exact process, its states, or its neighbours: the evidence, and predictions by conditioning."""
    X, y, X_test = (jnp.asarray(a) for a in (problem.X, problem.y, problem.X_test))
    fixed = jnp.asarray(problem.theta)

    def loss(theta: Any) -> Any:
        kernel = problem.kernel(theta[0], theta[1])
        if way == "states":
            return -dgp.functions.StateSpaceNormal(kernel, X[:, 0], theta[2]).log_prob(y)
        return -dgp.gp("f", kernel, way)(X, noise=theta[2]).log_prob(y)

    kernel, noise = problem.kernel(*fixed[:2]), float(fixed[2])
    if way == "states":
        mean, variance = dgp.functions.StateSpaceNormal(kernel, X[:, 0], noise).posterior(y, X_test[:, 0])
        variance = variance + noise**2
    else:
        found = dgp.gp("f", kernel + dgp.kernels.White(noise**2), way).condition(X, y)(X_test)
        mean, variance = found.mean, found.variance
    return Found(-float(loss(fixed)), np.asarray(mean), np.asarray(variance), *costs(loss, fixed))


def one_layer(name: str, load: Callable[[int], Problem], size: int, out: Path) -> None:
    """Rows of one set that are not in ``out`` yet, each appended to it."""
    there = {r["held by"] for r in records(out) if (r["set"], r["size"]) == (name, size)}
    problem = load(size)
    exact = without_values(problem, None) if set(problem.ways) - there else None
    if exact is None:
        return
    density = dist.Normal(exact.mean, np.sqrt(exact.variance)).log_prob(problem.y_test).mean()
    for label, way in problem.ways.items():
        if label in there:
            continue
        run = without_values if way is None or way == "states" or "Neighbours" in label else with_values
        found = exact if way is None else run(problem, way)
        mine = dist.Normal(found.mean, np.sqrt(found.variance)).log_prob(problem.y_test).mean()
        record = {
            "set": name,
            "size": size,
            "columns": problem.X.shape[1],
            "held by": label,
            "evidence": exact.bound,
            "lost": found.bound - exact.bound,
            "density": float(mine - density),
            "means": float(np.sqrt(np.mean(np.square(found.mean - exact.mean) / exact.variance))),
            "seconds": found.seconds,
            "MiB": found.memory,
        }
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(_row(record), flush=True)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _row(r: dict[str, Any]) -> str:
    return (
        f"| {r['held by']} | {r['lost']:.2f} | {r['density']:+.4f} | {r['means']:.4f} | {1e3 * r['seconds']:.1f} | "
        f"{r['MiB']:.0f} |"
    )


def tables(found: list[dict[str, Any]]) -> None:
    for name, size in dict.fromkeys((r["set"], r["size"]) for r in found):
        rows = [r for r in found if (r["set"], r["size"]) == (name, size)]
        print(f"\n{name}: {size} rows, {rows[0]['columns']} column(s), exact log evidence {rows[0]['evidence']:.1f}\n")
        print("| held by | bound - evidence | test density, nats a row | means, sd | ms | MiB |\n" + "|---" * 6 + "|")
        print("\n".join(map(_row, rows)))


def beside(found: list[dict[str, Any]], title: str, columns: dict[str, tuple[str, int]]) -> None:
    """One table for several sets and sizes, by the heads of its columns: bound less evidence, and milliseconds."""
    print(f"\n{title}\n\n| held by | " + " | ".join(f"{head} | ms" for head in columns) + " |")
    print("|---" * (1 + 2 * len(columns)) + "|")
    cells = {(r["held by"], r["set"], r["size"]): f"{r['lost']:.1f} | {1e3 * r['seconds']:.1f}" for r in found}
    for label in dict.fromkeys(r["held by"] for r in found if (r["set"], r["size"]) in columns.values()):
        print(f"| {label} | " + " | ".join(cells.get((label, *column), " | ") for column in columns.values()) + " |")


def figure(found: list[dict[str, Any]], size: int, path: Path) -> None:
    """A panel for each set: milliseconds of a step against what is lost of the evidence per row."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r["set"] for r in found if r["size"] == size))
    kinds = ("Points", "Grid", "Basis", "StateSpace", "Neighbours", "exact")
    shown, axes = plt.subplots(1, len(names), figsize=(3.1 * len(names), 3.6), sharey=True, layout="constrained")
    for axis, name in zip(np.atleast_1d(axes), names, strict=True):
        rows = [r for r in found if (r["set"], r["size"]) == (name, size)]
        for kind, marker in zip(kinds, "osD^vX", strict=True):
            of_kind = [r for r in rows if r["held by"].lstrip("`").startswith(kind)]
            if of_kind:
                axis.plot(
                    [1e3 * r["seconds"] for r in of_kind],
                    [max(abs(r["lost"]) / size, 1e-5) for r in of_kind],
                    marker,
                    label=kind,
                    color=f"C{kinds.index(kind)}",
                )
        axis.set(xscale="log", yscale="log", title=f"{name}, {rows[0]['columns']} column(s)", xlabel="milliseconds")
    np.atleast_1d(axes)[0].set_ylabel("|bound - evidence|, nats a row")
    handles = {
        label: h for axis in np.atleast_1d(axes) for h, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    shown.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    shown.savefig(path, dpi=150)


def two_layers(steps: int) -> None:
    """A step in one column, 500 rows: the bound at the end of a fit by Adam, test density, milliseconds of a step."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (700, 1))
    y = np.sign(x[:, 0] + 0.2) + 0.1 * rng.normal(size=len(x))
    X, y, X_test, y_test = (jnp.asarray(a) for a in (x[:500], y[:500], x[500:], y[500:]))
    line = jnp.linspace(-1, 1, 30)
    ways: dict[str, Callable[[float], Any]] = {
        "`Points`, 30": lambda r: dgp.Points(r * line[:, None]),
        "`Grid`, 60": lambda r: dgp.Grid(-2.0 * r, 2.0 * r, 60),
        "`Basis`, 60": lambda r: dgp.Basis(-2.0 * r, 2.0 * r, 60),
        "`StateSpace`, 30 times": lambda r: dgp.StateSpace(r * line),
    }
    print("| held by | bound | test density, nats a row | ms a step |\n|---|---|---|---|")
    for label, way in ways.items():

        def model(X: Any, y: Any = None, way: Any = way) -> None:
            scales = numpyro.param("scales", jnp.array([0.5, 0.5]), constraint=dist.constraints.positive)
            noise = numpyro.param("noise", jnp.array(0.2), constraint=dist.constraints.positive)
            f = dgp.gp("f", dgp.kernels.Matern52(0.3, scales[0]), way(1.0), outputs=1, mean=dgp.means.IdentityMean())
            g = dgp.gp("g", dgp.kernels.Matern52(1.0, scales[1]), way(2.0))
            with numpyro.plate("data", len(X)):
                h = numpyro.sample("h", f(X))
                numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)

        print(_fitted(label, model, dgp.guides.InducingPoint(model), steps, (X, y), (y_test, X_test)), flush=True)
    y_train = y
    near = {"exact": (None, dgp.guides.Full())} | {
        f"`Neighbours`, {num}": (dgp.Neighbours(X, num=num), dgp.guides.SparseFactor()) for num in (10, 30)
    }
    for label, (held, rule) in near.items():

        def at_rows(X_new: Any = None, y: Any = None, held: Any = held) -> None:
            """Hidden values of all rows at once; the upper layer is integrated."""
            scales = numpyro.param("scales", jnp.array([0.5, 0.5]), constraint=dist.constraints.positive)
            noise = numpyro.param("noise", jnp.array(0.2), constraint=dist.constraints.positive)
            f = dgp.gp("f", dgp.kernels.Matern52(0.3, scales[0]), held, outputs=1, mean=dgp.means.IdentityMean())
            upper = dgp.kernels.Matern52(1.0, scales[1]) + dgp.kernels.White(noise**2)
            g, h = dgp.gp("g", upper, held), numpyro.sample("h", f(X))
            if y is not None:
                numpyro.sample("y", g(h), obs=y)
                return
            with numpyro.plate("new", len(X_new)):
                h_new = numpyro.sample("h_new", f.condition(X, h)(X_new))
                v = g.condition(h, y_train)(h_new)
                numpyro.sample("y", dist.Normal(v.mean, jnp.sqrt(v.variance)))

        guide = dgp.guides.InducingPoint(at_rows, exact=rule)
        print(_fitted(label, at_rows, guide, steps, (None, y), (y_test, X_test)), flush=True)


def _fitted(label: str, model: Any, guide: Any, steps: int, data: Any, test: Any) -> str:
    """A row of the table: the bound at the end, test density, milliseconds of a step."""
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.02, steps)), dgp.ELBO())
    dgp.fit(svi, jax.random.key(0), 1, *data, progress_bar=False)
    begin = time.perf_counter()
    result = dgp.fit(svi, jax.random.key(0), steps, *data, progress_bar=False)
    seconds = time.perf_counter() - begin
    posterior = dgp.Posterior(model, guide, result.params)
    density = posterior.using(num_samples=200, progress_bar=False).log_density(jax.random.key(1), *test).mean()
    losses = result.losses[-steps // 10 :]
    return f"| {label} | {-losses.mean():.1f} | {density:.3f} | {1e3 * seconds / steps:.2f} |"


SETS = {"rough": rough, "CO2": carbon_dioxide, "photograph": photograph}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", choices=list(SETS), default=list(SETS))
    parser.add_argument("--data", type=Path, help="file of one more set")
    parser.add_argument("--size", type=int, default=1600, help="training rows")
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "representations.jsonl")
    parser.add_argument("--table", action="store_true", help="print what is there")
    parser.add_argument("--figure", type=Path, help="draw what is there of this size")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if options.table or options.figure:
        found = records(options.out)
        tables(found)
        names = dict.fromkeys(r["set"] for r in found)
        beside(found, f"{options.size} rows", {name: (name, options.size) for name in names})
        for name in names:
            sizes = sorted({r["size"] for r in found if r["set"] == name})
            if len(sizes) > 1:
                beside(found, name, {f"{size} rows": (name, size) for size in sizes})
        if options.figure:
            figure(found, options.size, options.figure)
    elif options.deep:
        two_layers(options.steps)
    else:
        sets = {name: SETS[name] for name in options.sets}
        if options.data:
            sets[options.data.stem] = partial(from_file, options.data)
        for name, load in sets.items():
            one_layer(name, load, options.size, options.out)


if __name__ == "__main__":
    main()
