"""Seconds until the log density of test rows reaches a level, beside GPflux and GPyTorch, in one run.

``python benchmarks/time_to_density.py --data FILE.npz`` (arrays X, y; after ``pip install ".[bench]"``) trains two
layers on minibatches. All have the model of ``train_step.py``, the same inducing inputs to start from (k-means centres
of the training rows), the same minibatches and the same rate of Adam; *natural* adds natural gradients for q(v) of the
last layer, *softplus* has the peers' coordinates of positive parameters. Peers that are not installed are left out.

Every implementation runs in a process of its own; the processes take turns of ``--every`` steps. Only steps are timed:
after each turn the density is measured off the clock, for all as the mixture of ``--draws`` normals per row that their
own predictive means and variances give. *with start* adds what comes before: the start of a process with its imports,
building the model and the first step, which compiles.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from train_step import IMPLEMENTATIONS, ask, device, installed, start_worker

# The options of ``train`` in the implementation before the comma.
RUNS: dict[str, dict[str, Any]] = {
    "numpyro_dgp": {},
    "numpyro_dgp, softplus": {"softplus": True},
    "numpyro_dgp, natural": {"natural": True},
    "gpflux": {},
    "gpflux, XLA": {"xla": True},
    "gpytorch": {},
}
LEVELS = {"kin8nm": -0.15, "protein": -1.25}


def log_density(y: np.ndarray, means: np.ndarray, variances: np.ndarray) -> float:
    """Mean over rows of the log density of a mixture of normals, moments (S, N)."""
    means, variances = means.astype(float), variances.astype(float)
    logs = -0.5 * (np.log(2 * np.pi * variances) + (y - means) ** 2 / variances)
    return float(np.mean(np.logaddexp.reduce(logs, axis=0) - np.log(len(logs))))


def minibatches(num: int, size: int) -> Iterator[np.ndarray]:
    """Rows, a new order for every pass."""
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(num)
        yield from (order[i : i + size] for i in range(0, num - size + 1, size))


def work(name: str, problem: Path) -> None:
    """Serve requests on stdin: do some steps and say how long they took, or measure the density of test rows."""
    train = importlib.import_module(f"implementations.{IMPLEMENTATIONS[name.split(',')[0]][0]}").train
    print("ready", flush=True)
    data = np.load(problem)
    X, y = data["X"], data["y"]
    rows = minibatches(len(X), int(data["batch"]))
    training = None
    for line in sys.stdin:
        request = json.loads(line)
        if "steps" in request:
            batches = [(X[i], y[i]) for i in itertools.islice(rows, request["steps"])]
            start = time.perf_counter()
            if training is None:
                training = train(data["Z"], int(data["layers"]), str(data["dtype"]), len(X), **RUNS[name])
            for batch in batches:
                loss = training.update(*batch)
            float(loss)  # waits for it
            reply = time.perf_counter() - start
        else:
            reply = log_density(data["y_test"], *training.predict(data["X_test"], request["draws"]))
        print(json.dumps(reply), flush=True)


def write_problem(options: argparse.Namespace, problem: Path) -> int:
    """Standardised rows and inducing inputs for the workers; returns the number of training rows."""
    import jax

    import numpyro_dgp as dgp

    jax.config.update("jax_platforms", "cpu")  # an accelerator is for the workers
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import regression

    split = regression.split_data(*regression.load(str(options.data)), 0, "B", options.test)
    X, y, X_test, y_test = (np.asarray(a) for a in split[:4])
    Z = dgp.initial.kmeans(X, options.num_inducing)
    settings = {"batch": min(options.batch, len(X)), "layers": options.layers, "dtype": options.dtype}
    np.savez(problem, X=X, y=y, X_test=X_test, y_test=y_test, Z=Z, **settings)
    return len(X)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="an .npz file with X and y")
    parser.add_argument("--level", type=float, help=f"mean log density of test rows, standard units; {LEVELS}")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--every", type=int, default=50, help="steps between two measurements")
    parser.add_argument("--steps", type=int, default=5000, help="at most")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--test", type=int, default=2000, help="test rows at most")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--curves", action="store_true", help="print every measurement")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a small model, to see that it runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker, options.data)
    if options.smoke:
        options.num_inducing, options.batch, options.every, options.steps, options.test = 10, 100, 5, 20, 100
    level = LEVELS.get(options.data.stem) if options.level is None else options.level
    if level is None:
        parser.error(f"--level: expected one of your own for {options.data.stem}, known are {LEVELS}")
    names = installed(options.only)
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.npz"
        num = write_problem(options, problem)
        print(
            f"{options.data.stem}: {num} rows, level {level}; {options.layers} layers, M = {options.num_inducing}, "
            f"batch {options.batch}, {options.dtype}; {device()}",
            flush=True,
        )
        workers, imports = {}, {}
        try:
            for name in names:
                start = time.perf_counter()
                workers[name] = start_worker(__file__, name, "--data", str(problem))
                workers[name].stdout.readline()
                imports[name] = time.perf_counter() - start
            found = race(workers, level, options)
        finally:
            for worker in workers.values():
                worker.kill()
    columns = "", "log density", "steps", "seconds", "with start", "ms per step", "import, s", "compile, s"
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, (compilation, seconds, steps, density) in found.items():
        reached = density >= level
        start = imports[name] + compilation
        times = f"{seconds:.2f} | {seconds + start:.2f}" if reached else "not reached |"
        step = 1000 * seconds / steps
        print(f"| {name} | {density:.3f} | {steps} | {times} | {step:.1f} | {imports[name]:.1f} | {compilation:.1f} |")


def race(
    workers: dict[str, subprocess.Popen[str]], level: float, options: argparse.Namespace
) -> dict[str, tuple[float, float, int, float]]:
    """Of each: seconds to compile, seconds of steps, how many, and the log density after them."""
    found = {name: (ask(worker, {"steps": 1}), 0.0, 0, -np.inf) for name, worker in workers.items()}
    for _ in range(0, options.steps, options.every):
        for name, worker in workers.items():
            compilation, seconds, steps, density = found[name]
            if density < level:
                seconds += ask(worker, {"steps": options.every})
                steps, density = steps + options.every, ask(worker, {"draws": options.draws})
                found[name] = compilation, seconds, steps, density
                if options.curves:
                    print(f"{name}: {steps} steps, {seconds:.2f} s, {density:.4f}", flush=True)
    return found


if __name__ == "__main__":
    main()
