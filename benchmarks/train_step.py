"""Time one training step of a deep Gaussian process beside GPflux and GPyTorch, in one run; of one layer beside GPflow
and GPJax too.

``python benchmarks/train_step.py`` (after ``pip install ".[bench]"``) prints a table: medians in milliseconds and the
ratio to the fastest peer. Every implementation runs in a process of its own; the processes take turns, several rounds
each, so that a busy machine slows all of them alike. The model is the same: RBF kernels with lengthscales per column,
shared by a layer's outputs, identity means, learned inducing inputs, full Gaussians over whitened inducing values,
one sample of the hidden layers, Adam. ``start`` shows each one's first loss, which agrees up to that sample. Peers that
are not installed are left out.

On an accelerator, launching a step may take as long as the step: ``--loop 100`` runs a hundred in one compiled program
here, as ``dgp.fit`` does; peers do one at a time.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

# Module and options of ``build``; the package comes before a comma.
IMPLEMENTATIONS: dict[str, tuple[str, dict[str, bool]]] = {
    "numpyro_dgp": ("ours", {}),
    "gpflux": ("gpflux_peer", {}),
    "gpflux, XLA": ("gpflux_peer", {"xla": True}),
    "gpytorch": ("gpytorch_peer", {}),
    "gpflow": ("gpflow_peer", {}),
    "gpflow, XLA": ("gpflow_peer", {"xla": True}),
    "gpjax": ("gpjax_peer", {}),
}
SHALLOW = ("gpflow", "gpjax")  # packages without layers


def make_data(batch: int, dims: int = 8, num_inducing: int = 100) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets, inducing inputs."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(batch, dims))
    y = np.sin(X @ rng.normal(size=dims)) + 0.1 * rng.normal(size=batch)
    return X, y, rng.normal(size=(num_inducing, dims))


def work(name: str) -> None:
    """Serve requests on stdin: build a configuration, or time some steps of one."""
    module, options = IMPLEMENTATIONS[name]
    build = importlib.import_module(f"implementations.{module}").build
    step, steps = None, 1
    for line in sys.stdin:
        request = json.loads(line)
        if "layers" in request:
            steps = request["loop"] if name == "numpyro_dgp" else 1
            several = {} if steps == 1 else {"steps": steps}
            data = make_data(request["batch"], num_inducing=request["inducing"])
            step = build(*data, request["layers"], request["dtype"], **several, **options)
            reply: Any = step()
        else:
            reply = []
            stop = time.perf_counter() + request["seconds"]
            while time.perf_counter() < stop or len(reply) < 3:
                start = time.perf_counter()
                step()
                reply.append((time.perf_counter() - start) / steps)
        print(json.dumps(reply), flush=True)


def installed(names: list[str]) -> list[str]:
    """Those whose package is here; the package comes before a comma."""
    return [name for name in names if importlib.util.find_spec(name.split(",")[0])]


def device() -> str:
    """What JAX runs on, asked in another process: on an accelerator this one would take the memory."""
    program = "import jax; print(jax.devices()[0].device_kind)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    return f"{found}, {platform.processor() or platform.machine()}, Python {platform.python_version()}"


def start_worker(script: str, name: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of ``script`` that serves requests for one implementation."""
    return subprocess.Popen(
        [sys.executable, str(Path(script).resolve()), "--worker", name, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def ask(worker: subprocess.Popen[str], request: dict[str, Any]) -> Any:
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    reply = worker.stdout.readline()
    if not reply:
        raise RuntimeError(f"{worker.args[-1]} stopped at {request}: run it alone with --only to see why")
    return json.loads(reply)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one implementation in one round")
    parser.add_argument("--loop", type=int, default=1, help="steps of numpyro_dgp in one compiled call")
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--worker", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker)
    print(f"{device()}; milliseconds per step")
    columns = installed(arguments.only)
    print(f"{'dtype':9s}{'batch':>7s}{'layers':>7s}" + "".join(f"{n:>13s}" for n in columns) + f"{'ratio':>8s}  start")
    for dtype in arguments.dtype:
        for batch in arguments.batch:
            for layers in arguments.layers:
                names = [name for name in columns if layers == 1 or name.split(",")[0] not in SHALLOW]
                workers = {name: start_worker(__file__, name) for name in names}
                config = {"dtype": dtype, "batch": batch, "layers": layers, "loop": arguments.loop}
                config["inducing"] = arguments.num_inducing
                losses = {name: ask(worker, config) for name, worker in workers.items()}
                times: dict[str, list[float]] = {name: [] for name in names}
                for round in range(arguments.rounds + 1):
                    for name, worker in workers.items():
                        found = ask(worker, {"seconds": arguments.seconds if round else 0.1})
                        times[name] += found if round else []  # the first round warms up
                for worker in workers.values():
                    worker.kill()
                medians = {name: 1000 * float(np.median(found)) for name, found in times.items()}
                peers = [value for name, value in medians.items() if name != "numpyro_dgp"]
                ratio = f"{medians['numpyro_dgp'] / min(peers):8.2f}" if peers and "numpyro_dgp" in medians else " " * 8
                start = " ".join(f"{loss:.0f}" for loss in losses.values())
                cells = "".join(f"{medians[name]:13.2f}" if name in medians else " " * 13 for name in columns)
                print(f"{dtype:9s}{batch:7d}{layers:7d}{cells}{ratio}", start, flush=True)


if __name__ == "__main__":
    main()
