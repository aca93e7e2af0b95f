"""Exact regression on a ring of a million points of which a tenth is missing at random: seconds, memory and errors.

``python benchmarks/ring_gaps.py [points] [kind]``, kind one of ``gaps``, ``noise`` (a noise of its own at every point,
and the same gaps) and ``all``. Prints a table in Markdown. Every row runs in a process of its own, whose peak memory is
reported; seconds are those of the second call, and of the first, which compiles.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_dgp as dgp

NOISE, LENGTHSCALE, MARGIN = 0.3, 10.0, 60.0


def series(points, kind):
    """A draw of the model, with a tenth missing and padding between the ends."""
    rng = np.random.default_rng(0)
    x = np.flatnonzero(rng.uniform(size=points) > 0.1).astype(float)
    ring, observed = dgp.rings.regular(x, MARGIN)
    noise = NOISE * np.exp(0.5 * rng.normal(size=len(x))) if kind == "noise" else NOISE
    f = np.asarray(dgp.rings.RingNormal(dgp.kernels.RBF(1.0, LENGTHSCALE), ring).sample(jax.random.key(0)))[observed]
    return ring, observed, noise, f, f + noise * rng.normal(size=len(x))


def timed(function, *args):
    """Seconds of the first and of the second call, and what came out."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        found = jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return seconds, found


def one(what, kind, points):
    """One row, as a dict."""
    ring, observed, noise, f, y = series(points, kind)
    y = jnp.asarray(y)

    def model(variance, lengthscale, scale):
        return dgp.rings.RingNormal(dgp.kernels.RBF(variance, lengthscale), ring, scale * noise, observed)

    hyper = (1.0, LENGTHSCALE, 1.0)
    if what == "log_prob and gradient":
        seconds, (value, slope) = timed(
            jax.jit(jax.value_and_grad(lambda h, y: model(*h).log_prob(y))), tuple(map(jnp.asarray, hyper)), y
        )
        found = f"{float(value):.2f}; slopes {', '.join(f'{float(s):.1f}' for s in slope)}"
    elif what == "log_prob and its error":
        seconds, (value, error) = timed(jax.jit(lambda h, y: model(*h).log_prob_and_error(y)), hyper, y)
        found = f"{float(value):.2f} +- {float(error):.2f}"
    else:
        fitted = model(*hyper)
        seconds, (mean, variance) = timed(jax.jit(fitted.posterior), y)
        z = (mean[observed] - f) / jnp.sqrt(variance[observed])
        found = f"mean square of standardised errors {float(jnp.square(z).mean()):.4f}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": seconds, "peak": peak, "found": found, "size": len(observed), "rows": int(observed.sum())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("points", nargs="?", type=int, default=1_000_000)
    parser.add_argument("kind", nargs="?", default="all", choices=["gaps", "noise", "all"])
    parser.add_argument("--row", help="for the processes of this script")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if args.row:
        print(json.dumps(one(args.row, args.kind, args.points)))
        return
    print("| | ring | data | first call, s | seconds | peak memory, GiB | found |\n|---|---|---|---|---|---|---|")
    for kind in ("gaps", "noise") if args.kind == "all" else (args.kind,):
        for what in ("log_prob and its error", "log_prob and gradient", "posterior mean and variances"):
            command = [sys.executable, __file__, str(args.points), kind, "--row", what]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"| {kind}: {what} | | | | | | {done.stderr.strip().splitlines()[-1]} |", flush=True)
                continue
            row = json.loads(done.stdout.strip().splitlines()[-1])
            print(
                f"| {kind}: {what} | {row['size']} | {row['rows']} | {row['seconds'][0]:.1f} | "
                f"{row['seconds'][1]:.1f} | {row['peak']:.2f} | {row['found']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
