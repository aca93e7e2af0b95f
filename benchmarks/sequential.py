"""Sequential design with ``dgp.design.loop``: accuracy by VIGF, and minima by expected improvement.

``python benchmarks/sequential.py`` runs searches one after the other and appends a line for each to ``--results``; what
is there is not run again, and ``--table`` prints the tables. Two searches are those of the vignettes of dgpsi, the
package of Ming et al. (2023), with its initial designs, kernels and numbers of evaluations:

- ``sine``: five points, then one at a time by the variance of the improvement for global fit, to fifty; the root mean
  squared error at 200 points of a Latin hypercube, in units of the function, which is between -1 and 1;
- ``shubert``: Shubert's function on [-2, 2]^2, twenty points, then expected improvement.

The third is Hartman's function of six inputs, twenty points and sixty more by expected improvement, and with
``--methods botorch`` the same by ``SingleTaskGP`` and ``LogExpectedImprovement`` of BoTorch (``pip install botorch``).
``--methods fit_best`` fits one and two layers by ``dgp.fit_best`` in every round, and asks the mixture; with
``--depths 1 2x1 2`` two layers with one hidden column too.
Records of the searches are kept in ``--out``, so that an interrupted search goes on.
"""

from __future__ import annotations

import argparse
import json
import math
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
from emulation import depth_of, family
from numpyro.infer import init_to_median
from numpyro.infer.autoguide import AutoDelta
from simulators import SIMULATORS

import numpyro_dgp as dgp

NOISE = 1e-5
"""Standard deviation of the noise of one layer, in that of the values: the codes have none."""


def one_layer(X: Any, y: Any = None, runs: Any = None, *, kernel: Any) -> None:
    """An exact process, with inducing inputs at the runs. Lengthscales have the prior of Hvarfner et al. (2024)."""
    D = X.shape[1]
    prior = dist.LogNormal(math.sqrt(2) + math.log(D) / 2, math.sqrt(3))
    scale = numpyro.sample("scale", prior.expand([D]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 2.0))
    mean = dgp.means.ConstantMean(numpyro.sample("mean", dist.Normal(0.0, 1.0)))
    f = dgp.gp("f", kernel(variance, scale), dgp.Points(runs), mean=mean)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def two_layers(X: Any, y: Any = None, runs: Any = None, *, kernel: Any) -> None:
    """A hidden layer, the identity and a small process, and a process. The noise is learned: a fit begins where it is
    large (``BEGIN``) and makes it small, without which it stays where it begins."""
    D = X.shape[1]

    def positive(name: str, median: float, spread: float, *shape: int) -> Any:
        return jnp.exp(numpyro.sample(name, dist.Normal(jnp.full(shape, math.log(median)), spread).to_event()))

    noise = positive("log_noise", 1e-4, 2.0)
    inner = kernel(positive("log_variance1", 0.05, 1.5), positive("log_scale1", 0.5, 1.0, D))
    f = dgp.gp("f", inner, dgp.Points(runs), outputs=D, mean=dgp.means.IdentityMean())
    outer = kernel(positive("log_variance0", 2.0, 2.0), positive("log_scale0", 0.5, 1.0, D))
    mean = dgp.means.ConstantMean(numpyro.sample("mean", dist.Normal(0.0, 1.0)))
    g = dgp.gp("g", outer, dgp.Points(f(runs).loc), mean=mean)
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)


BEGIN = {"log_noise": math.log(0.1)}


def begin(site: Any = None) -> Any:
    """Where a fit of two layers begins: large noise, and all else at medians, where the hidden layer is the identity.

    ``init_to_value`` would put all that it has no value for at random places.
    """
    if site is None:
        return partial(begin)
    return BEGIN[site["name"]] if site["name"] in BEGIN else init_to_median(site, num_samples=1000)


def vigf(posterior: Any, seen: Any, key: jax.Array, num_samples: int) -> Any:
    return dgp.design.VIGF(posterior.using(num_samples=num_samples), key, seen.X, seen.y)


def improvement(posterior: Any, seen: Any, key: jax.Array, num_samples: int) -> Any:
    return dgp.design.LogExpectedImprovement(posterior.using(num_samples=num_samples), key, best=seen.best)


class Task(NamedTuple):
    """A search: the function of a point of the unit cube, how it is searched, and how it is judged."""

    run: Callable[[np.ndarray], np.ndarray]
    dims: int
    initial: int
    budget: int
    acquisition: Callable[..., Any]
    kernel: Any
    bars: tuple[float, ...] = ()


def shubert(X: np.ndarray) -> np.ndarray:
    """On [-2, 2]^2, where it has two least values of -186.7309."""
    return SIMULATORS["shubert"].run(0.4 + 0.2 * X)


TASKS = {
    "sine": Task(SIMULATORS["sine"].run, 2, 5, 50, vigf, dgp.kernels.RBF),
    "shubert": Task(shubert, 2, 20, 91, improvement, dgp.kernels.Matern52, (-186.0, -186.7275)),
    "hartmann6": Task(SIMULATORS["hartmann6"].run, 6, 20, 80, improvement, dgp.kernels.RBF, (-3.0, -3.289, -3.319)),
}
SIZES = 5, 10, 20, 30, 40, 50


def start_of(task: Task, seed: int) -> np.ndarray:
    return dgp.design.maximin([[0.0, 1.0]] * task.dims, task.initial, jax.random.key(seed))


def search_of(task: Task, seed: int, args: argparse.Namespace, depth: int) -> dgp.design.Search:
    """One layer collapsed; two layers with the last one integrated, the rest at its largest density."""
    steps = {"num_steps": args.steps, "refit_steps": max(1, args.steps // 5), "refit_every": depth}
    settings: dict[str, Any] = steps | {"num_candidates": 256, "num_starts": 4, "initial": start_of(task, seed)}
    optimizer = optax.chain(optax.clip_by_global_norm(100.0), optax.adam(0.02))
    guide: Any = dgp.guides.Collapsed if depth == 1 else partial(AutoDelta, init_loc_fn=begin)
    acquisition = partial(task.acquisition, num_samples=1 if depth == 1 else 16)
    program = partial(one_layer if depth == 1 else two_layers, kernel=task.kernel)
    return dgp.design.Search(program, guide, [[0.0, 1.0]] * task.dims, acquisition, optimizer=optimizer, **settings)


def rmse(task: Task, found: dgp.design.Fitted) -> float:
    X = dgp.design.latin_hypercube([[0.0, 1.0]] * task.dims, 200, jax.random.key(99))
    mean = found.units.inverse(found.posterior.predict_function(jax.random.key(1), jnp.asarray(X)).mean)
    return float(np.sqrt(np.mean((np.asarray(mean) - task.run(X)) ** 2)))


def layers(task: Task, name: str, seed: int, args: argparse.Namespace, depth: int) -> dict[str, Any]:
    """A search."""
    search, path, errors = search_of(task, seed, args, depth), args.out / f"{name}_{depth}_{seed}.npz", {}
    record = search.start(jax.random.key(seed))
    if path.exists():
        record = dgp.design.Record.load(path)
    while True:
        if len(record.pending):
            record = record.add(task.run(record.pending))
            record.save(path)
        if name == "sine" and len(record.y) in SIZES:
            errors[len(record.y)] = rmse(task, search.fitted(record))
            print(f"{name}, {depth} layers, {len(record.y)} runs: {errors[len(record.y)]:.4f}", flush=True)
        if len(record.y) >= task.budget:
            break
        record = search.propose(record)
    seconds = float(np.median(record.search_seconds[task.initial :]))
    return {"y": record.y.tolist(), "rmse": errors, "round": seconds}


def fit_to(search: dgp.design.Search, record: Any, size: int, seed: int) -> dgp.design.Fitted:
    """A fit, from its start, to the first runs of a search."""
    return search.fitted(search.start(jax.random.key(seed)).add(record.y[:size], record.X[:size]))


def weighed(task: Task, name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One and two layers of ``emulation.py`` weighed by their evidence, each fit from the prior and from the draws
    of the last one; ``args.batch`` runs are chosen together by the criterion of a batch."""
    X, errors, seconds, best = start_of(task, seed), {}, [], None
    y = task.run(X)
    X_test = dgp.design.latin_hypercube([[0.0, 1.0]] * task.dims, 200, jax.random.key(99))
    while True:
        clock, key = time.perf_counter(), jax.random.fold_in(jax.random.key(seed), len(y))
        mean, unit = y.mean(), y.std()
        values = jnp.asarray((y - mean) / unit)
        seen = dgp.design.Seen(jnp.asarray(X), values, jnp.ones(len(y), bool), values.min())
        options = {"depths": tuple(args.depths), "weigh": "evidence", "one_layer": "draws", "num_draws": args.draws}
        options["num_runs"] = 1  # others, from the prior, may miss what was found before
        program = family(seen.X, seen.y, kernel=task.kernel)
        best = dgp.fit_best(program, key, seen.X, seen.y, previous=best, **options)
        if name == "sine":
            predicted = mean + unit * np.asarray(best.predict_function(key, jnp.asarray(X_test)).mean)
            errors[len(y)] = float(np.sqrt(np.mean((predicted - task.run(X_test)) ** 2)))
        print(
            f"{name}, {len(y)} runs: {errors.get(len(y), y.min()):.4f}, {round(time.perf_counter() - clock)} s",
            flush=True,
        )
        print(best, flush=True)
        if len(y) >= task.budget:
            return {"X": X.tolist(), "y": y.tolist(), "rmse": errors, "round": float(np.median(seconds))}
        criterion = task.acquisition(best, seen, key, min(32, args.draws))
        batch = min(args.batch, min(n for n in (*SIZES, task.budget) if n > len(y)) - len(y))
        found = dgp.design.maximise(criterion, [[0.0, 1.0]] * task.dims, key, q=batch, num_candidates=256, num_starts=4)
        X, y = np.concatenate([X, found.x]), np.concatenate([y, task.run(np.asarray(found.x))])
        seconds.append(time.perf_counter() - clock)
        jax.clear_caches()  # shapes change with every run


def two_layers_there(task: Task, name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Two layers fitted to the runs that a search with one layer has chosen."""
    record = dgp.design.Record.load(args.out / f"{name}_1_{seed}.npz")
    search = search_of(task, seed, args, 2)
    sizes = [n for n in SIZES if n <= len(record.y)]
    return {"rmse": {n: rmse(task, fit_to(search, record, n, seed)) for n in sizes}}


def botorch(task: Task, name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """A search by BoTorch's own process and acquisition, from the same initial design."""
    import torch
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    torch.manual_seed(seed)
    X, seconds = start_of(task, seed), []
    y = task.run(X)
    bounds = torch.tensor([[0.0] * task.dims, [1.0] * task.dims], dtype=torch.double)
    while len(y) < task.budget:
        clock = time.perf_counter()
        inputs, values = torch.tensor(X), torch.tensor(-y[:, None])
        process = SingleTaskGP(inputs, values, torch.full_like(values, NOISE * float(y.var())))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(process.likelihood, process))
        acquisition = LogExpectedImprovement(process, best_f=values.max())
        new, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=8, raw_samples=512)
        seconds.append(time.perf_counter() - clock)
        X = np.concatenate([X, new.numpy()])
        y = np.append(y, task.run(X[-1:]))
    return {"y": y.tolist(), "rmse": {}, "round": float(np.median(seconds))}


METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    "one layer": partial(layers, depth=1),
    "two layers": partial(layers, depth=2),
    "two layers, runs of one": two_layers_there,
    "fit_best": weighed,
    "botorch": botorch,
}


def table(records: list[dict[str, Any]]) -> str:
    """Two Markdown tables."""
    lines = ["| sine, layers | seed | " + " | ".join(map(str, SIZES)) + " |", "|---" * (2 + len(SIZES)) + "|"]
    for r in records:
        if r["task"] == "sine":
            cells = [f"{r['rmse'][str(n)]:.4f}" if str(n) in r["rmse"] else "-" for n in SIZES]
            lines.append(f"| {r['method']} | {r['seed']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| function | method | seed | evaluations | least value | first below | s a round |",
        "|---" * 7 + "|",
    ]
    for r in records:
        if r["task"] != "sine":
            y = np.array(r["y"])
            first = [f"{bar}: {np.argmax(y <= bar) + 1 if (y <= bar).any() else '-'}" for bar in TASKS[r["task"]].bars]
            lines.append(
                f"| {r['task']} | {r['method']} | {r['seed']} | {len(y)} | {y.min():.4f} | {', '.join(first)} | "
                f"{r['round']:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS)[:2], choices=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=int, help="evaluations, where not those of the task")
    parser.add_argument("--steps", type=int, default=1000, help="of the first fit, a fifth of them for others")
    parser.add_argument("--draws", type=int, default=200, help="of each number of layers, of fit_best")
    parser.add_argument("--depths", type=depth_of, nargs="+", default=[1, 2], help="of fit_best, as in emulation.py")
    parser.add_argument("--batch", type=int, default=1, help="runs in a round, of fit_best")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "sequential.jsonl")
    parser.add_argument("--out", type=Path, default=Path("sequential_output"))
    parser.add_argument("--table", action="store_true", help="print the tables and stop")
    arguments = parser.parse_args()
    numpyro.enable_x64()
    arguments.out.mkdir(parents=True, exist_ok=True)

    def done() -> list[dict[str, Any]]:
        lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
        return [json.loads(line) for line in lines]

    cases = [(t, m, s) for t in arguments.tasks for s in arguments.seeds for m in arguments.methods]
    for name, method, seed in [] if arguments.table else cases:
        task = TASKS[name]._replace(budget=arguments.budget or TASKS[name].budget)
        how = f", layers {tuple(arguments.depths)}" if method == "fit_best" and arguments.depths != [1, 2] else ""
        case = {"task": name, "method": method + how, "seed": seed, "budget": task.budget}
        if any(case.items() <= record.items() for record in done()):
            continue
        clock = time.perf_counter()
        found = METHODS[method](task, name, seed, arguments)
        settings = {name: getattr(arguments, name) for name in ("steps", "draws", "batch")}
        record = case | settings | {"version": dgp.__version__} | found
        record["seconds"] = round(time.perf_counter() - clock, 1)
        with open(arguments.results, "a") as file:
            file.write(json.dumps(record) + "\n")
        print(table([json.loads(json.dumps(record))]), flush=True)
    print(table(done()))


if __name__ == "__main__":
    main()
