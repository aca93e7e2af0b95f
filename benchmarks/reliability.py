"""What happens to fits that are killed, interrupted, run twice at once or lack a disk, as a table.

``python benchmarks/reliability.py --kills 100`` runs small fits in processes of their own, with a checkpoint every few
steps, kills them with SIGKILL at random times until they are through, and compares the result bit for bit with that of
a fit without interruption. Needs Linux. ``--smoke`` does each once.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI

import numpyro_dgp as dgp
from numpyro_dgp.inference.parameter_files import read_arrays

X = np.linspace(-1, 1, 60, dtype=np.float32)[:, None]
Y = np.sin(4 * X[:, 0])
EVERY = 20
FUNCTIONS = ("fit", "fit_stream")
DRAWS = 10
"""Of one piece of a chain, after which its state is saved."""
BUDGET = 16
"""Evaluations of a search."""


def program(X: jax.Array, y: jax.Array | None = None) -> None:
    f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.4), dgp.Points(jnp.linspace(-1, 1, 8, dtype=jnp.float32)[:, None]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)


def run(function: str, steps: int, file: Path | None) -> dict[str, np.ndarray]:
    """A fit by ``dgp.fit`` or ``dgp.fit_stream``: its losses and parameters. A chain of NUTS: its draws. A search by
    ``design.loop``: its points and values."""
    if function == "chain":
        return chain(steps // 20, file)
    if function == "loop":
        return search(BUDGET, file)
    model = program if function == "fit" else dgp.minibatch(program, data=len(X))
    svi = SVI(model, dgp.guides.InducingPoint(model), optax.adam(0.01), dgp.ELBO())
    options = {"checkpoint": file and dgp.Checkpoint(file, every=EVERY), "progress_bar": False}
    if function == "fit":
        result = dgp.fit(svi, jax.random.key(0), steps, X, Y, **options)
    else:
        result = dgp.fit_stream(svi, jax.random.key(0), steps, dgp.Stream((X, Y), 20, block=5), **options)
    return {"losses": np.asarray(result.losses)} | {k: np.asarray(v) for k, v in result.params.items()}


def chain(pieces: int, file: Path | None) -> dict[str, np.ndarray]:
    """A chain in pieces, whose state and draws are saved after each of them."""
    mcmc = MCMC(NUTS(dgp.for_mcmc(program)), num_warmup=50, num_samples=DRAWS, progress_bar=False)
    state, draws = pickle.loads(file.read_bytes()) if file and file.exists() else (None, [])
    while len(draws) < pieces:
        mcmc.post_warmup_state = state
        mcmc.run(jax.random.PRNGKey(0) if state is None else state.rng_key, X, Y)
        state = jax.device_get(mcmc.last_state)
        draws = [*draws, np.asarray(mcmc.get_samples()["f"])]
        if file:
            part = file.with_suffix(".part")
            part.write_bytes(pickle.dumps((state, draws)))
            part.replace(file)
    return {"f": np.concatenate(draws)}


def search(budget: int, file: Path | None) -> dict[str, np.ndarray]:
    """A sequential search, which saves its record after every evaluation."""

    def acquisition(posterior: dgp.Posterior, seen: dgp.design.Seen, key: jax.Array) -> Callable[..., jax.Array]:
        return dgp.design.LogExpectedImprovement(posterior.using(num_samples=1), key, best=seen.best)

    settings = {"initial": 4, "num_steps": 100, "refit_steps": 50, "num_candidates": 64, "num_starts": 2}
    search = dgp.design.Search(program, dgp.guides.InducingPoint, [[-1.0, 1.0]], acquisition, **settings)
    simulator = lambda x: float(np.sin(4 * x[0]))  # noqa: E731
    found = dgp.design.loop(search, simulator, jax.random.key(0), budget=budget, path=file, progress_bar=False)
    return {"X": found.record.X, "y": found.record.y} | {k: np.asarray(v) for k, v in found.record.params.items()}


def work(function: str, steps: int, file: str, out: str) -> None:
    """One fit in this process; says when it begins."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background has its children ignore
    print("begin", flush=True)
    np.savez(out, **run(function, steps, Path(file) if file else None))


class Fits:
    """Fits in processes of their own, in one folder, and what they should give."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps

    @functools.cache  # noqa: B019, one object of this class for a whole run
    def whole(self, function: str) -> tuple[dict[str, np.ndarray], float]:
        """The result of a fit without interruption, and its seconds."""
        start = time.perf_counter()
        _, error = self.start(function, None, f"{function}-whole.npz").communicate()
        return self.result(f"{function}-whole.npz", error), time.perf_counter() - start

    def start(self, function: str, file: Path | None, out: str) -> subprocess.Popen:
        """A process that has begun to fit."""
        arguments = ["--work", function, str(self.steps), str(file or ""), str(self.folder / out)]
        command = [sys.executable, __file__, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.readline()
        return process

    def result(self, out: str, error: str) -> dict[str, np.ndarray]:
        if not (self.folder / out).exists():
            raise RuntimeError(error)
        with np.load(self.folder / out) as found:
            return dict(found)

    def same(self, function: str, out: str, error: str) -> bool:
        found, (expected, _) = self.result(out, error), self.whole(function)
        return found.keys() == expected.keys() and all(np.array_equal(found[k], expected[k]) for k in found)


def steps_in(file: Path) -> int:
    if not file.exists():
        return 0
    if file.name.startswith("loop"):
        return len(dgp.design.Record.load(file).y)
    if file.name.startswith("chain"):
        return len(pickle.loads(file.read_bytes())[1])
    return len(read_arrays("reliability", file, "")["losses"])


def kills(fits: Fits, function: str, count: int) -> str:
    """SIGKILL at random times, resume, until ``count`` kills have hit; every finished fit is compared."""
    _, seconds = fits.whole(function)
    clock, done, finished, identical, useful, left = random.Random(0), 0, 0, 0, 0, 0
    while done < count or not finished:
        file = fits.folder / f"{function}-killed-{finished}.npz"
        process = fits.start(function, file, "killed.npz")
        if done < count:
            try:
                process.wait(clock.uniform(0, 0.7 * seconds))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                done += 1
                useful += steps_in(file) > 0
                continue
        _, error = process.communicate()
        finished += 1
        identical += fits.same(function, "killed.npz", error)
        left += len(list(fits.folder.glob(f"{file.name}.*")))
    hits = f"{done} kills, {useful} of them after the first save"
    return f"{hits}; {identical} of {finished} finished fits identical; {left} files left behind"


def interrupt(fits: Fits, function: str) -> str:
    error, attempt = "", 0
    while not error.strip():  # a fit that ended before the signal came is done again
        attempt += 1
        if attempt > 50:
            raise RuntimeError(f"{function}: all of 50 fits ended before the signal came, give more --steps")
        file = fits.folder / f"{function}-interrupted-{attempt}.npz"
        process = fits.start(function, file, "interrupted.npz")
        while steps_in(file) == 0 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    _, second = fits.start(function, file, "interrupted.npz").communicate()
    same = "identical" if fits.same(function, "interrupted.npz", second) else "NOT identical"
    return f"{error.strip().splitlines()[-1].replace(str(fits.folder) + '/', '')}; resumed: {same}"


def two_at_once(fits: Fits, function: str) -> str:
    file = fits.folder / f"{function}-twice.npz"
    first = fits.start(function, file, "first.npz")
    while not Path(f"{file}.lock").exists() and first.poll() is None:
        time.sleep(0.01)
    _, refused = fits.start(function, file, "second.npz").communicate()
    _, error = first.communicate()
    same = "identical" if fits.same(function, "first.npz", error) else "NOT identical"
    return f"second: {'refused with one sentence' if 'one fit at a time' in refused else refused[-200:]}; first: {same}"


def truncations(fits: Fits) -> str:
    whole = (fits.folder / "fit-twice.npz").read_bytes()
    file, said, other = fits.folder / "cut.npz", 0, 0
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        try:
            read_arrays("fit", file, "remove it")
        except ValueError as error:
            said += "expected a file of arrays" in str(error)
        except Exception:
            other += 1
    return f"{said} of {len(whole)} lengths: an error in words; {other} other errors"


def unwritable(fits: Fits) -> str:
    (fits.folder / "in-the-way").write_text("")
    try:
        run("fit", 10**9, fits.folder / "in-the-way" / "fit.npz")
    except ValueError as error:
        return "refused before the first step" if "that can be written" in str(error) else str(error)
    return "NOT refused"


def vanishing(fits: Fits) -> str:
    """The folder of the checkpoint is removed again and again while the fit runs."""
    folder, stop = fits.folder / "vanishing", threading.Event()

    def remove() -> None:
        while not stop.is_set():
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.005)

    thread = threading.Thread(target=remove)
    thread.start()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = run("fit", fits.steps, folder / "fit.npz")
        finally:
            stop.set()
            thread.join()
    same = all(np.array_equal(found[k], v) for k, v in fits.whole("fit")[0].items())
    return f"the fit ends, {'identical' if same else 'NOT identical'}; {len(said)} warnings of writes that failed"


def full_disk(fits: Fits) -> str:
    file = fits.folder / "full.npz"
    run("fit", EVERY, file)
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run("fit", 2 * EVERY, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    kept = "the old file is kept" if file.read_bytes() == before else "the old file is LOST"
    return f"{kept}; a warning names the step: {any(f'after step {2 * EVERY}' in str(w.message) for w in said)}"


def resident() -> float:
    """Megabytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(count: int, forget: bool, shapes: bool) -> str:
    """Many fits in this process, each of a program of its own, of one number of rows or each of another: growth per
    fit after the first tenth."""
    sizes = []
    for fit in range(count):
        model = lambda X, y=None: program(X, y)  # noqa: E731
        svi = SVI(model, dgp.guides.InducingPoint(model), optax.adam(0.01), dgp.ELBO())
        rows = 20 + fit if shapes else len(X)
        x = np.linspace(-1, 1, rows, dtype=np.float32)
        dgp.fit(svi, jax.random.key(0), 100, x[:, None], np.sin(4 * x), progress_bar=False)
        if forget:
            jax.clear_caches()
        gc.collect()
        sizes.append(resident())
    first = count // 10
    return f"{sizes[first]:.0f} MB after {first + 1} fits, {sizes[-1]:.0f} MB after {count}: " + (
        f"{(sizes[-1] - sizes[first]) / max(1, count - 1 - first):.2f} MB a fit"
    )


def processes(fits: Fits, count: int) -> str:
    running = [fits.start(FUNCTIONS[i % 2], fits.folder / f"parallel-{i}.npz", f"out-{i}.npz") for i in range(count)]
    errors = [process.communicate()[1] for process in running]
    same = sum(fits.same(FUNCTIONS[i % 2], f"out-{i}.npz", error) for i, error in enumerate(errors))
    return f"{same} of {count} identical"


def threads(fits: Fits, count: int) -> str:
    found: list[str] = []
    expected, _ = fits.whole("fit")

    def one() -> None:
        try:
            result = run("fit", fits.steps, None)
        except Exception as error:
            found.append(type(error).__name__)
        else:
            same = all(np.array_equal(result[k], v) for k, v in expected.items() if k in result)
            found.append("identical" if same and result.keys() == expected.keys() else "wrong")

    running = [threading.Thread(target=one) for _ in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return ", ".join(f"{found.count(kind)} {kind}" for kind in sorted(set(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each function")
    parser.add_argument("--fits", type=int, default=100, help="in one process, for memory")
    parser.add_argument("--steps", type=int, default=20_000, help="of a fit that is killed")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--only", nargs="+", help="rows whose names contain one of these")
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        function, steps, file, out = arguments.work
        return work(function, int(steps), file, out)
    if arguments.smoke:
        arguments.kills, arguments.fits, arguments.steps, arguments.parallel = 1, 3, 400, 2
    with tempfile.TemporaryDirectory() as name:
        fits = Fits(Path(name), arguments.steps)
        rows: dict[str, Callable[[], str]] = {}
        for f in FUNCTIONS:
            rows[f"SIGKILL at random times, `{f}`"] = lambda f=f: kills(fits, f, arguments.kills)
            rows[f"SIGINT, `{f}`"] = lambda f=f: interrupt(fits, f)
            rows[f"two processes on one checkpoint, `{f}`"] = lambda f=f: two_at_once(fits, f)
        rows["SIGKILL at random times, a chain of NUTS in pieces"] = lambda: kills(fits, "chain", arguments.kills)
        rows["SIGKILL at random times, `design.loop`"] = lambda: kills(fits, "loop", arguments.kills)
        rows["a checkpoint cut off at every byte"] = lambda: truncations(fits)
        rows["a path that cannot be written"] = lambda: unwritable(fits)
        rows["the folder vanishes while the fit runs"] = lambda: vanishing(fits)
        rows["a full disk"] = lambda: full_disk(fits)
        for shapes, of in ((False, "of 60 rows"), (True, "of as many different numbers of rows")):
            for forget, after in ((False, ""), (True, ", `jax.clear_caches()` after each")):
                what = f"{arguments.fits} fits {of} in one process{after}"
                rows[what] = lambda shapes=shapes, forget=forget: memory(arguments.fits, forget, shapes)
        rows[f"{arguments.parallel} processes in parallel"] = lambda: processes(fits, arguments.parallel)
        rows[f"{arguments.parallel} threads in parallel"] = lambda: threads(fits, arguments.parallel)
        print("| what | result |\n|---|---|", flush=True)
        for what, measure in rows.items():
            if not arguments.only or any(word in what for word in arguments.only):
                print(f"| {what} | {measure()} |", flush=True)


if __name__ == "__main__":
    main()
