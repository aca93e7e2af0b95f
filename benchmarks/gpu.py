"""Every measurement that an accelerator is for, in one command and one table.

``python benchmarks/gpu.py`` times, on JAX's default device, training steps of two to five layers, natural steps, many
fits at once by ``jax.vmap``, gradients of NUTS's potential for one chain and for many, predictions, and a ring. Times
are medians of several calls, each of many steps in one compiled loop. *buffers* is what XLA allocates beside the
arguments. *difference* is the largest difference, relative to the largest number, from the same program on the host's
CPU: of the loss and of the parameters after a step (of a ring, one along the gradient: Adam's first step is as long
for a derivative that is zero but for rounding). It is computed when all times are known, or alone with
``--only-differences``. ``--smoke`` runs small sizes; it needs no accelerator.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from numpyro.infer.util import initialize_model

sys.path.insert(0, str(Path(__file__).parent))
from implementations import ours
from train_step import make_data

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient

STEP = Callable[[Any], tuple[Any, jax.Array]]


class Work(NamedTuple):
    """A step that is repeated: from a state to the next one and a number."""

    name: str
    step: STEP
    state: Any


def fits(
    layers: int, batch: int, dtype: str, natural: bool = False, inducing: int = 100
) -> tuple[SVI, tuple[jax.Array, ...]]:
    svi, data = ours.make(*make_data(batch, num_inducing=inducing), layers, dtype)
    if natural:
        svi = SVI(svi.model, svi.guide, NaturalGradient(svi.guide, 0.1, optax.adam(0.01)), svi.loss)
    return svi, data


def training(
    layers: int, batch: int, dtype: str, *, natural: bool = False, copies: int = 1, inducing: int = 100
) -> Work:
    """Steps of one fit, or of several with keys of their own at the same time."""
    svi, data = fits(layers, batch, dtype, natural, inducing)
    name = f"{'natural step' if natural else 'step'}, {layers} layers, {batch} rows"
    name += f", {inducing} inducing points" if inducing != 100 else ""
    if copies == 1:
        return Work(name, lambda state: svi.update(state, *data), jax.jit(svi.init)(jax.random.key(0), *data))
    keys = jax.random.split(jax.random.key(0), copies)
    states = jax.jit(jax.vmap(lambda key: svi.init(key, *data)))(keys)

    def several(state: Any) -> tuple[Any, jax.Array]:
        state, losses = jax.vmap(lambda one: svi.update(one, *data))(state)
        return state, losses.mean()

    return Work(f"{copies} fits, {name}", several, states)


def two_layers(Z: jax.Array) -> Callable[..., None]:
    def model(X: jax.Array, y: jax.Array | None = None) -> None:
        scale = numpyro.sample("scale", dist.LogNormal(0.7, 0.3))
        f = dgp.gp("f", dgp.kernels.RBF(1.0, scale), dgp.Points(Z), outputs=Z.shape[1], mean=dgp.means.IdentityMean())
        g = dgp.gp("g", dgp.kernels.Matern52(1.0, scale), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)

    return model


def moved(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Means of guides away from zero, where predictions and many derivatives are zero and their rounding is all."""

    def away(name: str, value: jax.Array) -> jax.Array:
        wave = 0.3 * jnp.cos(jnp.arange(value.size, dtype=value.dtype))
        return value + wave.reshape(value.shape) if name.endswith("loc") else value

    return {name: away(name, value) for name, value in params.items()}


def chains(rows: int, inducing: int, dtype: str, count: int) -> Work:
    """Steps along the gradient of NUTS's potential, of ``count`` chains at the same time."""
    X, y, Z = (jnp.asarray(a, dtype) for a in make_data(rows, num_inducing=inducing))
    found = initialize_model(jax.random.key(0), dgp.for_mcmc(two_layers(Z)), model_args=(X, y))
    slope = jax.value_and_grad(found.potential_fn)

    def step(z: Any) -> tuple[Any, jax.Array]:
        energy, g = jax.vmap(slope)(z)
        return jax.tree.map(lambda a, b: a - 1e-5 * b, z, g), energy.mean()

    z = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), found.param_info.z)
    return Work(f"gradient of NUTS, {count} chain{'s' * (count > 1)}, 2 layers, {rows} rows", step, z)


def prediction(rows: int, draws: int, dtype: str) -> Work:
    svi, data = fits(2, 1000, dtype)
    params = moved(svi.get_params(jax.jit(svi.init)(jax.random.key(0), *data)))
    posterior, X = dgp.Posterior(svi.model, svi.guide, params), jnp.asarray(make_data(rows)[0], dtype)

    def step(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = posterior.using(num_samples=draws).predict(key, X)
        return jax.random.split(key, 1)[0], found.means.mean()

    return Work(f"prediction, 2 layers, {rows} rows, {draws} draws", step, jax.random.key(0))


def ring(points: int, rows: int, dtype: str) -> Work:
    def model(X: jax.Array, y: jax.Array | None = None) -> None:
        scale = numpyro.param("scale", jnp.asarray(0.1, X.dtype), constraint=dist.constraints.positive)
        f = dgp.gp("f", dgp.kernels.Matern52(1.0, scale), dgp.Grid(-3.0, 3.0, points))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    X = jnp.asarray(np.random.default_rng(0).uniform(-2, 2, size=(rows, 1)), dtype)
    y = jnp.sin(3 * X[:, 0])
    svi = SVI(model, dgp.guides.InducingPoint(model, inducing=dgp.guides.Diagonal()), optax.sgd(1e-4), dgp.ELBO())
    start = svi.get_params(jax.jit(svi.init)(jax.random.key(0), X, y))
    state = jax.jit(partial(svi.init, init_params=moved(start)))(jax.random.key(0), X, y)
    return Work(f"step, ring of {points} points, {rows} rows", lambda state: svi.update(state, X, y), state)


def works(dtype: str, smoke: bool) -> Iterator[Work]:
    small, large, several = (50, 200, 2) if smoke else (1000, 10_000, 16)
    for layers in (2,) if smoke else (2, 5):
        for batch in (small, large):
            yield training(layers, batch, dtype)
    yield training(2, large, dtype, natural=True)
    yield training(2, small, dtype, copies=several)
    for count in (1, several):
        yield chains(small, small // 10, dtype, count)
    yield prediction(small // 5, 50 * small // 10, dtype)
    yield prediction(large, 20, dtype)
    yield ring(64 if smoke else 16_384, small, dtype)


def relative(found: Any, expected: Any) -> float:
    """The largest difference of two trees of arrays, relative to the largest number of each array."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            a, b = np.asarray(a, float), np.asarray(b, float)
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst


def many_steps(work: Work, loop: int) -> Callable[[Any], tuple[Any, jax.Array]]:
    """So many of them in one program."""

    def many(state: Any) -> tuple[Any, jax.Array]:
        shape = jax.eval_shape(work.step, state)[1]
        start = state, jnp.zeros(shape.shape, shape.dtype)
        return jax.lax.fori_loop(0, loop, lambda _, carry: work.step(carry[0]), start)

    return many


def seconds(compiled: Callable[[Any], Any], state: Any, repeats: int) -> float:
    """The median time of a call, after a first one that is not counted."""
    jax.block_until_ready(compiled(state))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(state))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def measure(work: Work, loop: int, repeats: int) -> str:
    """One line of the table, without its end."""
    start = time.perf_counter()
    compiled = jax.jit(many_steps(work, loop)).lower(work.state).compile()
    compiling = time.perf_counter() - start
    step = seconds(compiled, work.state, repeats) / loop
    memory = compiled.memory_analysis()
    buffers = "" if memory is None else f"{memory.temp_size_in_bytes / 2**30:.2f}"
    return f"| {work.name} | {1e3 * step:.3g} | {compiling:.1f} | {buffers} |"


def differences(works: list[Work]) -> list[str]:
    """The ends of their lines: what a step differs from the host's. Several threads compile; NumPyro traces by one."""
    if jax.default_backend() == "cpu":
        return ["" for _ in works]
    cpu = jax.devices("cpu")[0]
    there = [jax.jit(work.step).lower(work.state) for work in works]
    with jax.default_device(cpu):
        states = [jax.device_put(work.state, cpu) for work in works]
        here = [jax.jit(work.step).lower(state) for work, state in zip(works, states, strict=True)]
    with ThreadPoolExecutor(8) as threads:
        programs = list(threads.map(lambda lowered: lowered.compile(), there + here))
    found = [program(work.state) for program, work in zip(programs, works, strict=False)]
    expected = [program(state) for program, state in zip(programs[len(works) :], states, strict=True)]
    return [f"{relative(a, b):.1e}" for a, b in zip(found, expected, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--loop", type=int, default=50, help="steps in one compiled call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="rows whose names contain one of these")
    parser.add_argument("--only-differences", action="store_true", help="no times")
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--out", type=Path, help="file to append the table to")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.loop, arguments.repeats = 2, 1
    lines = []
    for dtype in arguments.dtype:
        jax.config.update("jax_enable_x64", dtype == "float64")
        lines += [
            f"{jax.devices()[0].device_kind}, {jax.default_backend()}, JAX {jax.__version__}, {dtype}",
            "",
            "| what | ms | compilation (s) | buffers (GiB) | difference |",
            "|---|---|---|---|---|",
        ]
        print("\n".join(lines[-4:]), flush=True)
        found, rows = [], []
        for work in works(dtype, arguments.smoke):
            if not arguments.only or any(word in work.name for word in arguments.only):
                found.append(work)
                untimed = f"| {work.name} | | | |"
                rows.append(untimed if arguments.only_differences else measure(work, arguments.loop, arguments.repeats))
                print(rows[-1], flush=True)
        ends = differences(found)
        lines += [f"{row} {end} |" for row, end in zip(rows, ends, strict=True)]
        print("\n".join(["", "differences: " + " ".join(ends)]) if any(ends) else "", flush=True)
        lines.append("")
    if arguments.out:
        with arguments.out.open("a") as file:
            file.write("\n".join(lines))


if __name__ == "__main__":
    main()
