"""A layer with up to 10 000 outputs: memory and time of a training step, each configuration in a new process.

``python benchmarks/many_outputs.py`` prints a table. The data are smooth fields: N rows, with values at P places on a
line. *mixed* has Q functions and a matrix of weights that starts at the principal functions of a kernel of the places,
a Kronecker product of low rank; *diagonal* and *full* have P functions with one kernel and a q(v) of P M or P M^2
numbers; *collapsed* has the optimal q(v) of these, with one covariance for all outputs. *buffers* is what XLA allocates
for a step beside its arguments, *peak* the resident memory of the process at its highest, Python and its libraries
included; *predict* is the second call of ``posterior.predict`` on 100 rows with a hundred draws, *one draw* that with
``num_samples=1``: this program draws nothing, so that a hundred draws are one, written a hundred times.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

KINDS = ("mixed", "diagonal", "full", "collapsed")


def measure(kind: str, rows: int, outputs: int, points: int, functions: int, steps: int) -> dict[str, float]:
    """One configuration in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    import optax
    from numpyro.infer import SVI

    import numpyro_dgp as dgp

    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.uniform(-1, 1, (rows, 2)), jnp.float32)
    places = np.linspace(0.0, 1.0, outputs)[:, None]
    waves = np.cos(np.pi * np.arange(5) * places).T
    y = np.sin(3 * np.asarray(X) @ rng.normal(size=(2, 5))) @ waves + 0.1 * rng.normal(size=(rows, outputs))
    y = jnp.asarray(y, jnp.float32)
    Z = jnp.asarray(rng.uniform(-1, 1, (points, 2)), jnp.float32)
    # The matrix of the places is P x P: from many places on, weights come from some of them, interpolated.
    few = places[:: max(1, outputs // 500)]
    some = dgp.initial.mixing(few, dgp.kernels.RBF(lengthscale=0.1), functions) if kind == "mixed" else None
    W = None if some is None else np.stack([np.interp(places[:, 0], few[:, 0], w) for w in some.T], 1)

    def model(X: Any, y: Any = None) -> None:
        positive = dist.constraints.positive
        noise = numpyro.param("noise", jnp.float32(0.3), constraint=positive)
        kernel = dgp.kernels.RBF(1.0, numpyro.param("lengthscale", jnp.float32(0.5), constraint=positive))
        f = dgp.gp("f", kernel, dgp.Points(Z), outputs=functions if kind == "mixed" else outputs)
        weights = None if W is None else numpyro.param("weights", jnp.asarray(W, jnp.float32))
        with numpyro.plate("data", len(X)):
            values = f(X) if weights is None else f(X).mix(weights)
            numpyro.sample("y", dgp.Likelihood(values, lambda v: dist.Normal(v, noise).to_event(1)), obs=y)

    guide = {
        "mixed": dgp.guides.InducingPoint,
        "full": dgp.guides.InducingPoint,
        "diagonal": lambda model: dgp.guides.InducingPoint(model, inducing=dgp.guides.Diagonal()),
        "collapsed": dgp.guides.Collapsed,
    }[kind](model)
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    state = jax.block_until_ready(svi.init(jax.random.key(0), X, y))
    step = jax.jit(svi.update, donate_argnums=0).lower(state, X, y).compile()
    state, first = jax.block_until_ready(step(state, X, y))
    start = time.perf_counter()
    for _ in range(steps):
        state, last = step(state, X, y)
    jax.block_until_ready(last)
    seconds = (time.perf_counter() - start) / steps
    params = svi.get_params(state)
    posterior = dgp.Posterior(model, guide.on(X, y) if kind == "collapsed" else guide, params)
    predicted = {}
    for draws in (1, 100):
        for _ in range(2):
            start = time.perf_counter()
            found = posterior.using(num_samples=draws, progress_bar=False).predict(jax.random.key(1), X[:100])
            jax.block_until_ready(found.variance)
            predicted[draws] = time.perf_counter() - start
        del found
    return {
        "step": 1e3 * seconds,
        "buffers": step.memory_analysis().temp_size_in_bytes / 2**20,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "predict": 1e3 * predicted[100],
        "one draw": 1e3 * predicted[1],
        "first": float(first) / (rows * outputs),
        "last": float(last) / (rows * outputs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--outputs", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--points", type=int, default=50, help="inducing points, M")
    parser.add_argument("--functions", type=int, default=20, help="functions that are mixed, Q")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return print(json.dumps(measure(**json.loads(arguments.worker))))
    print(f"N = {arguments.rows}, M = {arguments.points}, Q = {arguments.functions}; load {os.getloadavg()[0]:.1f}")
    columns = ("step ms", "buffers MiB", "peak GiB", "predict ms", "one draw ms", "loss / NP, first", "last")
    print(f"{'':11s}{'outputs':>8s}" + "".join(f"{c:>18s}" for c in columns))
    for kind in arguments.kinds:
        for outputs in arguments.outputs:
            names = ("rows", "points", "functions", "steps")
            request = {"kind": kind, "outputs": outputs} | {n: getattr(arguments, n) for n in names}
            command = [sys.executable, __file__, "--worker", json.dumps(request)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{kind:11s}{outputs:8d}  {done.stderr.strip().splitlines()[-1][:90]}", flush=True)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            print(f"{kind:11s}{outputs:8d}" + "".join(f"{v:18.2f}" for v in found.values()), flush=True)


if __name__ == "__main__":
    main()
