"""One program on every representation of its function: what each loses against the exact process, and what it costs.

``python benchmarks/representations.py`` fits one layer at fixed hyperparameters to three sets: a draw of a rough
process, weekly carbon dioxide (from statsmodels, with its gaps), and pixels of a photograph (from scikit-learn, two
columns). Layers with weights or inducing values have their best Gaussian posterior (one natural step of length one);
the others their evidence. A row has the bound or evidence less the exact evidence, the mean log density of test rows
less the exact one, the root mean square of the difference of means in exact standard deviations of the test values,
milliseconds of the bound with its gradient by hyperparameters and posterior, and MiB that the compiled program needs.
``--deep`` fits two layers to a step instead, by Adam. All in double precision.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

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

    grey = load_sample_image("china.jpg").mean(-1)[60:360:6, 160:460:6]
    line = np.linspace(-1, 1, 50)
    X = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    y = (grey - grey.mean()).reshape(-1) / grey.std()
    rows = np.random.default_rng(0).permutation(len(X))[: size + size // 4]
    return _split(X[rows], y[rows], dgp.kernels.Matern32, np.array([1.0, 0.25, 0.2]), np.arange(len(rows)) % 5 == 2)


def _split(X: np.ndarray, y: np.ndarray, kernel: Kernel, theta: np.ndarray, test: np.ndarray) -> Problem:
    X_train, lengthscale = X[~test], float(theta[1])
    low, high = X.min(0) - 2 * lengthscale, X.max(0) + 2 * lengthscale
    ways: dict[str, Any] = {"exact": None}
    for number in (50, 200, 400):
        Z = dgp.initial.kmeans(X_train, number)
        ways[f"`Points`, {number}"] = dgp.Points(Z)
    sides = (50, 200, 400) if X.shape[-1] == 1 else ((10, 10), (20, 20), (30, 30))
    for size in sides:
        ways[f"`Grid`, {size}"] = dgp.Grid(low, high, size)
    for size in sides:
        ways[f"`Basis`, {size}"] = dgp.Basis(low, high, size)
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
    seconds = []
    for _ in range(6):
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

    found = dgp.Posterior(model, guide, params).predict(jax.random.key(1), X_test, progress_bar=False)
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
            return -dgp.StateSpaceNormal(kernel, X[:, 0], theta[2]).log_prob(y)
        return -dgp.gp("f", kernel, way)(X, noise=theta[2]).log_prob(y)

    kernel, noise = problem.kernel(*fixed[:2]), float(fixed[2])
    if way == "states":
        mean, variance = dgp.StateSpaceNormal(kernel, X[:, 0], noise).posterior(y, X_test[:, 0])
        variance = variance + noise**2
    else:
        found = dgp.gp("f", kernel + dgp.kernels.White(noise**2), way).condition(X, y)(X_test)
        mean, variance = found.mean, found.variance
    return Found(-float(loss(fixed)), np.asarray(mean), np.asarray(variance), *costs(loss, fixed))


def one_layer(sets: list[str], size: int) -> None:
    for name in sets:
        problem = SETS[name](size)
        N, D = problem.X.shape
        print(f"\n{name}: {N} rows, {len(problem.X_test)} for the test, {D} column(s)\n")
        print("| held by | bound - evidence | test density, nats a row | means, sd | ms | MiB |\n" + "|---" * 6 + "|")
        exact, density = None, 0.0
        for label, way in problem.ways.items():
            run = without_values if way is None or way == "states" or "Neighbours" in label else with_values
            found = run(problem, way)
            mine = dist.Normal(found.mean, np.sqrt(found.variance)).log_prob(problem.y_test).mean()
            if exact is None:
                exact, density = found, mine
            off = np.sqrt(np.mean(np.square(found.mean - exact.mean) / exact.variance))
            print(
                f"| {label} | {found.bound - exact.bound:.2f} | {mine - density:+.4f} | {off:.4f} | "
                f"{1e3 * found.seconds:.1f} | {found.memory:.0f} |",
                flush=True,
            )


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
            f = dgp.gp("f", dgp.kernels.Matern52(0.3, scales[0]), way(1.0), outputs=1, mean=dgp.means.Identity())
            g = dgp.gp("g", dgp.kernels.Matern52(1.0, scales[1]), way(2.0))
            with numpyro.plate("data", len(X)):
                h = numpyro.sample("h", f(X))
                numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)

        guide = dgp.guides.InducingPoint(model)
        svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.02, steps)), dgp.ELBO())
        dgp.fit(svi, jax.random.key(0), 1, X, y, progress_bar=False)
        begin = time.perf_counter()
        result = dgp.fit(svi, jax.random.key(0), steps, X, y, progress_bar=False)
        seconds = time.perf_counter() - begin
        posterior = dgp.Posterior(model, guide, result.params)
        density = posterior.log_density(jax.random.key(1), y_test, X_test, num_samples=200, progress_bar=False).mean()
        losses = result.losses[-steps // 10 :]
        print(f"| {label} | {-losses.mean():.1f} | {density:.3f} | {1e3 * seconds / steps:.2f} |", flush=True)


SETS = {"rough": rough, "CO2": carbon_dioxide, "photograph": photograph}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--size", type=int, default=1600, help="training rows")
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if options.deep:
        two_layers(options.steps)
    else:
        one_layer(options.sets, options.size)


if __name__ == "__main__":
    main()
