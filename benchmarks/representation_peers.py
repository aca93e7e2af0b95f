"""Representations of a function beside those of other packages, on the same rows at the same hyperparameters.

``python benchmarks/representation_peers.py`` needs ``pip install tinygp gpytorch gpboost`` and says what it leaves out
where one is missing. Double precision, compiled, medians of some calls, and the log evidence (or bound) less the exact
one:

- *state space*: a Matern-3/2 process at irregular times, evidence and gradient; tinygp's quasiseparable solver;
- *grid*: the same rows, the function held on a regular grid; structured kernel interpolation of GPyTorch, evidence and
  gradient;
- *neighbours*: pixels of a photograph, two columns; Vecchia's approximation of GPBoost, whose library gives the
  evidence without its gradient, so that the time is of the evidence alone, with the search of neighbours beside it;
- *basis*: the log density of a program with 40 and 200 sines, and its gradient; ``numpyro.contrib.hsgp``.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import representations
from numpyro.contrib.hsgp.approximation import hsgp_matern
from numpyro.infer.util import log_density

import numpyro_dgp as dgp

THETA = np.array([1.0, 1.0, 0.2])  # variance, lengthscale, noise


def median_ms(call: Callable[[], Any], repeats: int = 7) -> float:
    """Milliseconds of a call, without the first ones."""
    call()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(seconds))


def with_gradient(function: Callable[[Any], Any], at: Any) -> tuple[float, float]:
    """The value at a point, and milliseconds of it with its gradient, compiled."""
    compiled = jax.jit(jax.value_and_grad(function))
    return float(compiled(at)[0]), median_ms(lambda: compiled(at))


def row(what: str, rows: int, held: str, lost: float, ms: float) -> None:
    print(f"| {what} | {rows} | {held} | {lost:.2f} | {ms:.2f} |", flush=True)


def missing(package: str) -> bool:
    if importlib.util.find_spec(package):
        return False
    print(f"{package} is not installed: left out", file=sys.stderr)
    return True


def series(size: int) -> tuple[np.ndarray, np.ndarray]:
    """A draw of a Matern-3/2 process with noise at irregular times, four rows for each lengthscale."""
    t = np.sort(np.random.default_rng(0).uniform(0, size / 4, size))
    process = dgp.functions.StateSpaceNormal(dgp.kernels.Matern32(*THETA[:2]), jnp.asarray(t), THETA[2])
    return t, np.asarray(process.sample(jax.random.key(0)))


def exact_of_series(t: np.ndarray, y: np.ndarray) -> Callable[[Any], Any]:
    def evidence(theta: Any) -> Any:
        process = dgp.functions.StateSpaceNormal(dgp.kernels.Matern32(theta[0], theta[1]), jnp.asarray(t), theta[2])
        return process.log_prob(jnp.asarray(y))

    return evidence


def state_space(size: int) -> None:
    t, y = series(size)
    exact, ms = with_gradient(exact_of_series(t, y), THETA)
    row("state space", size, "`dgp.functions.StateSpaceNormal`", 0.0, ms)
    if missing("tinygp"):
        return
    import tinygp

    def evidence(theta: Any) -> Any:
        kernel = tinygp.kernels.quasisep.Matern32(scale=theta[1], sigma=jnp.sqrt(theta[0]))
        return tinygp.GaussianProcess(kernel, jnp.asarray(t), diag=theta[2] ** 2).log_probability(jnp.asarray(y))

    value, ms = with_gradient(evidence, THETA)
    row("state space", size, "tinygp, quasiseparable", value - exact, ms)


def grid(size: int, points: int) -> None:
    t, y = series(size)
    exact = float(exact_of_series(t, y)(THETA))
    problem = representations.Problem(t[:, None], y, t[:20, None], y[:20], dgp.kernels.Matern32, THETA, {})
    found = representations.with_values(problem, dgp.Grid(t[0] - 2.0, t[-1] + 2.0, points))
    row("grid", size, f"`dgp.Grid`, {points}", found.bound - exact, 1e3 * found.seconds)
    if missing("gpytorch"):
        return
    import gpytorch
    import torch

    x, target = torch.tensor(t)[:, None], torch.tensor(y)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = THETA[2] ** 2

    class Process(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, target, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            inner = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
            inner.outputscale, inner.base_kernel.lengthscale = THETA[0], THETA[1]
            self.covar_module = gpytorch.kernels.GridInterpolationKernel(inner, grid_size=points, num_dims=1)

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    process = Process().double()
    process.train()
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, process)

    def step() -> float:
        process.zero_grad()
        loss = -evidence(process(x), target) * size
        loss.backward()
        return float(loss.detach())

    for name, most in (("Cholesky", 10**6), ("conjugate gradients", 0)):
        with gpytorch.settings.max_cholesky_size(most):
            value = float(np.mean([-step() for _ in range(10)]))
            row("grid", size, f"GPyTorch, KISS, {points}, {name}", value - exact, median_ms(step))


def neighbours(size: int, num: int) -> None:
    problem = representations.photograph(size)
    X, y, theta = problem.X, problem.y, problem.theta
    exact = representations.without_values(problem, None).bound
    begin = time.perf_counter()
    near = dgp.Neighbours(X, num=num)
    search = 1e3 * (time.perf_counter() - begin)

    @jax.jit
    def evidence(theta: Any) -> Any:
        kernel = dgp.kernels.Matern32(theta[0], theta[1])
        return dgp.gp("f", kernel, near)(jnp.asarray(X), noise=theta[2]).log_prob(jnp.asarray(y))

    ms = median_ms(lambda: evidence(theta))
    row("neighbours", size, f"`dgp.Neighbours`, {num} (search {search:.0f} ms)", float(evidence(theta)) - exact, ms)
    if missing("gpboost"):
        return
    import gpboost

    for order in ("random", "none"):
        begin = time.perf_counter()
        settings = {"gp_approx": "vecchia", "num_neighbors": num, "vecchia_ordering": order, "seed": 0}
        process = gpboost.GPModel(gp_coords=X, cov_function="matern", cov_fct_shape=1.5, **settings)
        search = 1e3 * (time.perf_counter() - begin)
        parameters = np.array([theta[2] ** 2, theta[0], theta[1]])
        value = -process.neg_log_likelihood(cov_pars=parameters, y=y)

        def call(process: Any = process, parameters: Any = parameters) -> Any:
            return process.neg_log_likelihood(cov_pars=parameters, y=y)

        held = f"GPBoost, Vecchia, {num}, order {order} (search {search:.0f} ms)"
        row("neighbours", size, held, value - exact, median_ms(call))


def basis(size: int, number: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (size, 1))
    y = np.sin(6 * x[:, 0]) + 0.1 * rng.normal(size=size)
    x, y = jnp.asarray(x), jnp.asarray(y)
    priors = {"variance": dist.LogNormal(0.0, 1.0), "lengthscale": dist.LogNormal(-1.0, 1.0)}

    def ours(x: Any, y: Any) -> None:
        variance, lengthscale = (numpyro.sample(name, prior) for name, prior in priors.items())
        f = dgp.gp("f", dgp.kernels.Matern52(variance, lengthscale), dgp.Basis(-1.5, 1.5, number))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(numpyro.sample("v", f(x)), 0.1), obs=y)

    def theirs(x: Any, y: Any) -> None:
        variance, lengthscale = (numpyro.sample(name, prior) for name, prior in priors.items())
        v = hsgp_matern(x, 2.5, alpha=variance, length=lengthscale, ell=1.5, m=number)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(v, 0.1), obs=y)

    v = jnp.asarray(rng.normal(size=number))
    at = {"variance": jnp.asarray(1.3), "lengthscale": jnp.asarray(0.4)}
    values = []
    for held, model, site in (("`dgp.Basis`", dgp.for_mcmc(ours), "f"), ("NumPyro, hsgp", theirs, "beta")):

        def density(at: Any, model: Any = model) -> Any:
            return log_density(model, (x, y), {}, at)[0]

        value, ms = with_gradient(density, at | {site: v})
        values.append(value)
        row("basis", size, f"{held}, {number}", value - values[0], ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--only", choices=["state space", "grid", "neighbours", "basis"])
    arguments = parser.parse_args()
    smoke = arguments.smoke
    jax.config.update("jax_enable_x64", True)
    parts: dict[str, Callable[[], Any]] = {
        "state space": lambda: [state_space(size) for size in ((300,) if smoke else (1600, 100_000))],
        "grid": lambda: grid(*((200, 300) if smoke else (1600, 1600))),
        "neighbours": lambda: neighbours(*((200, 10) if smoke else (2000, 30))),
        "basis": lambda: [basis(*size) for size in ([(300, 20)] if smoke else [(10_000, 40), (10_000, 200)])],
    }
    print("| what | rows | held by | evidence - exact | ms |\n|---|---|---|---|---|")
    for name, run in parts.items():
        if arguments.only in (None, name):
            run()


if __name__ == "__main__":
    main()
