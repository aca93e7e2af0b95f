"""``dgp.Neighbours``: two layers at thousands of data, two columns of inputs.

``python benchmarks/neighbours.py`` prints, for each number of neighbours: seconds to find them, of one log density, of
one with its gradient, of one bound and its gradient (``SparseFactor``), and of a sweep of ``Gibbs`` whose trajectories
have three steps at most; and peak memory. ``--quality`` compares one layer with the exact process at a size where it
can be had, by the order of the data, which are a draw of it: the evidence, and predictions at 500 new inputs; then the
best Gaussian posteriors of several kinds beside the evidence.

Time is that of compiled programs; compilation is left out. Each number of neighbours has a process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from numpyro.infer.util import log_density

import numpyro_dgp as dgp


def data(size: int) -> tuple[np.ndarray, np.ndarray]:
    """A surface with a step, in two columns, with noise."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(size, 2))
    clean = np.sin(5 * X[:, 0]) * np.cos(3 * X[:, 1]) + np.sign(X[:, 0] + 0.5 * X[:, 1])
    return X, clean + 0.1 * rng.normal(size=size)


def two_layers(X: Any, near: Any) -> Callable[..., Any]:
    """A program of two layers with two columns each; the outer one has no values of its own."""

    def model(y: Any = None) -> None:
        scales = numpyro.sample("scales", dist.LogNormal(jnp.log(0.5), 0.5).expand([2]).to_event(1))
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 0.5))
        f = dgp.gp("f", dgp.kernels.Matern52(0.1, scales[0]), near, outputs=2, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", dgp.kernels.Matern52(1.0, scales[1]), near)
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", g(h, noise=noise), obs=y)

    return model


def timed(function: Callable[..., Any], *arguments: Any, repeats: int = 5) -> float:
    """The least seconds of a call of a compiled function."""
    compiled, seconds = jax.jit(function).lower(*arguments).compile(), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def sweeps(kernel: Any, y: Any, start: dict[str, Any], count: int) -> tuple[float, float]:
    """Seconds of one sweep, and densities and gradients in it, the mean of several."""
    state = kernel.init(jax.random.key(0), 0, start, (y,), {})
    step = jax.jit(lambda state: kernel.sample(state, (y,), {})).lower(state).compile()
    state, calls = jax.block_until_ready(step(state)), 0
    begin = time.perf_counter()
    for _ in range(count):
        state = step(state)
        calls += int(state.evaluations + state.gradients)
    return (time.perf_counter() - begin) / count, calls / count


def costs(size: int, num: int, single: bool, count: int) -> None:
    """Print one row of the table of costs."""
    X, y = data(size)
    start = time.perf_counter()
    near = dgp.Neighbours(X, num)
    finding = time.perf_counter() - start
    dtype = jnp.float32 if single else jnp.float64
    X, y = jnp.asarray(X, dtype), jnp.asarray(y, dtype)
    model = two_layers(X, near)
    program = dgp.for_mcmc(model)
    z = {"scales": jnp.full(2, 0.5, dtype), "noise": jnp.asarray(0.1, dtype)}
    z["h_white"] = 0.1 * jax.random.normal(jax.random.key(0), (size, 2), dtype)

    def density(z: Any) -> Any:
        return log_density(numpyro.handlers.seed(program, 0), (y,), {}, z)[0]

    guide = dgp.guides.InducingPoint(model, exact=dgp.guides.SparseFactor())
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    state = svi.init(jax.random.key(0), y)
    row = [timed(density, z), timed(jax.value_and_grad(density), z), timed(lambda s: svi.update(s, y), state)]
    unconstrained = {name: value if name == "h_white" else jnp.log(value) for name, value in z.items()}
    fixed = dgp.mcmc.Gibbs(model, rest=dgp.mcmc.BlockNUTS(step_size=0.01, max_tree_depth=2))
    found = sweeps(fixed, y, unconstrained, count)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    cells = [f"{a:.2f}" for a in (finding, *row, *found, memory)]
    print(f"| {size} | {num} | {dtype.__name__} | " + " | ".join(cells) + " |", flush=True)


def quality(size: int) -> None:
    """Print how far densities and predictions are from those of the exact process."""
    X, _ = data(size + 500)
    new, X = X[size:], X[:size]
    kernel, noise = dgp.kernels.Matern52(1.0, 0.5), 0.1
    white = dgp.kernels.White(noise**2)
    exact = dgp.gp("f", kernel, None)(X, noise=noise)
    y = exact.sample(jax.random.key(0))
    evidence = exact.log_prob(y)
    predicted = dgp.gp("f", kernel + white, None).condition(X, y)(new)
    print(
        "| neighbours | order | evidence less the exact one | means, RMS difference | deviations, largest difference |"
    )
    print("|---|---|---|---|---|")
    for num in (5, 10, 25, 50):
        for order in ("maxmin", "random", "coordinate"):
            near = dgp.Neighbours(X, num, order)
            gap = dgp.gp("f", kernel, near)(X, noise=noise).log_prob(y) - evidence
            found = dgp.gp("f", kernel + white, near).condition(X, y)(new)
            ratio = jnp.sqrt(found.variance / predicted.variance) - 1
            cells = (
                f"{gap:.2f}",
                f"{jnp.sqrt(jnp.square(found.mean - predicted.mean).mean()):.4f}",
                f"{abs(ratio).max():.4f}",
            )
            print(f"| {num} | {order} | " + " | ".join(cells) + " |", flush=True)


def gaps(size: int = 120, num: int = 8) -> None:
    """Print by how much the best posteriors of three kinds are below the evidence, for a Gaussian likelihood.

    The divergence of N(t, R R') from N(m, A^-1) is least, column by column of R, at A_ss^-1 e_1 divided by the root of
    its first entry, for the rows s of the column that may differ from zero, the diagonal first.
    """
    near = dgp.Neighbours(np.random.default_rng(0).uniform(size=(size, 2)), num)
    prior = dgp.gp("f", dgp.kernels.Matern52(1.0, 0.3), near)(near.X)
    L = np.array(jax.vmap(lambda e: prior.correlated(e[None])[0], out_axes=1)(jnp.eye(size)))
    of_v, of_u = np.eye(size) + L.T @ L / 0.1**2, np.linalg.inv(L @ L.T) + np.eye(size) / 0.1**2
    print("| posterior | nats below the evidence |\n|---|---|")
    children = [np.flatnonzero((near.sets.neighbours == j).any(1) & (np.arange(size) != j)) for j in range(size)]
    alone = [np.zeros(0, int)] * size
    for name, A, below in (("SparseFactor", of_v, children), ("Diagonal", of_v, alone), ("single u", of_u, alone)):
        R = np.zeros((size, size))
        for j, rows in enumerate(below):
            s = np.r_[j, rows]
            first = np.linalg.inv(A[np.ix_(s, s)])[:, 0]
            R[s, j] = first / np.sqrt(first[0])
        gap = 0.5 * (np.sum(A @ R * R) - size - np.linalg.slogdet(A)[1]) - np.log(np.diag(R)).sum()
        print(f"| {name} | {gap:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8000, help="rows")
    parser.add_argument("--num", type=int, nargs="+", default=[10, 25, 50], help="neighbours")
    parser.add_argument("--single", action="store_true", help="single precision")
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--quality", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", not args.single)
    if args.quality:
        quality(args.size)
        return gaps()
    if len(args.num) == 1:
        return costs(args.size, args.num[0], args.single, args.sweeps)
    print(f"{jax.devices()[0]}, {os.cpu_count()} cores")
    print(
        "| rows | neighbours | precision | finding them, s | density, s | and gradient, s | bound and gradient, s | "
        "sweep, s | densities and gradients in it | memory, GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    options = ["--single"] * args.single + ["--size", str(args.size), "--sweeps", str(args.sweeps)]
    for num in args.num:
        subprocess.run([sys.executable, __file__, "--num", str(num), *options], check=True)
    return None


if __name__ == "__main__":
    main()
