"""What ``benchmarks/mcmc.py`` samples: programs with their data, what the data identify in them, and their scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from implementations import mcmc_dense
from implementations.guide_programs import Problem, problem, program
from implementations.mcmc_target import Target, Values, mean_at, mixture_scores, posterior_scores
from numpyro import handlers

import numpyro_dgp as dgp

TEST_POINTS = 20


def step_data(rows: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """A step in two input columns with noise."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (rows, 2))
    y = np.sign(X[:, 0] + 0.5 * X[:, 1]) + 0.1 * rng.normal(size=rows)
    return jnp.asarray(X), jnp.asarray(y)


def step(rows: int, num_inducing: int, seed: int) -> Target:
    """A step in two input columns, two layers of a Matern-5/2 kernel, one hidden column."""
    X, y = step_data(rows, seed)
    test = step_data(500, seed + 1)
    first, last = dgp.initial.layers(X, widths=[1], num_inducing=num_inducing)
    priors = {"noise": dist.LogNormal(-2.0, 1.0), "inner": dist.LogNormal(0.0, 1.0), "outer": dist.LogNormal(0.0, 1.0)}

    def model(X: jax.Array, y: Any = None) -> None:
        values = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
        f = dgp.gp("f", dgp.kernels.Matern52(1.0, values["inner"]), dgp.Points(first.Z), outputs=1, mean=first.mean)
        g = dgp.gp("g", dgp.kernels.Matern52(1.0, values["outer"]), dgp.Points(last.Z))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, values["noise"])), obs=y)

    layers = [
        mcmc_dense.Layer(lambda v, a, b: mcmc_dense.matern52(a / v["inner"], b / v["inner"]), first.mean, 1),
        mcmc_dense.Layer(lambda v, a, b: mcmc_dense.matern52(a / v["outer"], b / v["outer"])),
    ]
    return Target(
        model,
        (X, y),
        tuple(priors),
        mean_at(model, test[0][:TEST_POINTS]),
        partial(posterior_scores, model, test),
        gaussian=("f", "h"),
        dense=mcmc_dense.two_layers((X, y), test, priors, layers, TEST_POINTS),
    )


def guide_table(name: str, num: int, num_inducing: int, data: Path | None) -> Target:
    """The program of ``benchmarks/guide_table.py``: two layers with process noise between them, two hidden columns."""
    p = problem(name, 2, 2, data, num, num_inducing)
    p = p._replace(X=p.X[:num], y=p.y[:num])
    model, test, columns = program(p, None), (p.X_test, p.y_test), ("lengthscale1",)
    priors = p.hyperparameters()
    layers = [
        mcmc_dense.Layer(partial(_rbf_of, p, 0), p.layers[0].mean, 2, "process0"),
        mcmc_dense.Layer(partial(_rbf_of, p, 1)),
    ]
    return Target(
        model,
        (p.X, p.y),
        tuple(priors),
        mean_at(model, p.X_test[:TEST_POINTS]),
        partial(posterior_scores, model, test),
        gaussian=("f0", "h0"),
        dense=mcmc_dense.two_layers((p.X, p.y), test, priors, layers, TEST_POINTS)._replace(exchangeable=columns),
        exchangeable=columns,
    )


def _rbf_of(p: Problem, i: int, values: Values, a: jax.Array, b: jax.Array) -> jax.Array:
    scale = values[f"lengthscale{i}"]
    return values[f"variance{i}"] * mcmc_dense.rbf(a / scale, b / scale)


def latent(rows: int, num_inducing: int, seed: int) -> Target:
    """A Gaussian process of an input and a latent variable per datum: two branches that cross.

    The latent variable can be reflected; identified are means and standard deviations of y with it integrated.
    """

    def make_data(rows: int, seed: int) -> tuple[jax.Array, jax.Array]:
        rng = np.random.default_rng(seed)
        x = rng.uniform(-1, 1, rows)
        y = rng.choice([-1.0, 1.0], rows) * x + 0.05 * rng.normal(size=rows)
        return jnp.asarray(x)[:, None], jnp.asarray(y)

    X, y = make_data(rows, seed)
    test = make_data(200, seed + 1)
    side = max(2, round(num_inducing**0.5))
    grid = np.meshgrid(np.linspace(-1, 1, side), np.linspace(-2.5, 2.5, side))
    Z = jnp.asarray(np.stack(grid, -1).reshape(-1, 2))
    priors = {"noise": dist.LogNormal(-2.0, 1.0), "scale": dist.LogNormal(0.0, 0.7).expand([2]).to_event(1)}

    def model(X: jax.Array, y: Any = None) -> None:
        values = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
        f = dgp.gp("f", dgp.kernels.RBF(1.0, values["scale"]), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            x = dgp.latent("w", X, dim=1)
            numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, values["noise"])), obs=y)

    nodes, weights = np.polynomial.hermite_e.hermegauss(32)
    weights = jnp.asarray(weights / weights.sum())
    x_test = jnp.linspace(-1, 1, TEST_POINTS)[:, None]
    pairs = jnp.stack([jnp.tile(x_test, (1, 32)), jnp.broadcast_to(nodes, (TEST_POINTS, 32))], -1)

    def moments(f: jax.Array) -> jax.Array:
        """Mean and standard deviation over the latent variable of function values (TEST_POINTS, 32)."""
        mean = f @ weights
        return jnp.concatenate([mean, jnp.sqrt(jnp.square(f - mean[:, None]) @ weights)])

    def function(values: Values) -> jax.Array:
        with handlers.seed(rng_seed=0), handlers.substitute(data={"f": values["f"]}):
            f = dgp.gp("f", dgp.kernels.RBF(1.0, values["scale"]), dgp.Points(Z))
        return moments(f(pairs.reshape(-1, 2)).mean.reshape(TEST_POINTS, 32))

    return Target(
        model,
        (X, y),
        tuple(priors),
        function,
        partial(posterior_scores, model, test),
        gaussian=("w",),
        dense=mcmc_dense.latent_variable((X, y), test, priors, pairs, moments),
    )


NUGGET = 1e-6


def booth(grid: int, num_test: int) -> Target:
    """Booth's function without noise on a grid, two exact layers, and the priors of R deepgp: Gamma for squared
    lengthscales, and nearly flat for the logarithm of the variance, which is integrated there.

    Chains start where the inner layer is the identity.
    """

    def values_at(x: np.ndarray) -> np.ndarray:
        return np.where(x <= 0.58, np.sin(6 * np.pi * x) + np.cos(12 * np.pi * x), 5 * x - 4.9)

    x, x_test = np.linspace(0, 1, grid), np.linspace(0, 1, num_test)
    X, y, test = jnp.asarray(x)[:, None], jnp.asarray(values_at(x)), jnp.asarray(x_test)[:, None]
    priors = {
        "inner": dist.Gamma(1.5, 3.9 / 4),
        "outer": dist.Gamma(1.5, 3.9 / 6),
        "variance": dist.LogNormal(0.0, 10.0),
    }

    def model(X: jax.Array, y: Any = None) -> None:
        values = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
        inner = dgp.kernels.Matern52(1.0, jnp.sqrt(values["inner"]))
        outer = dgp.kernels.Matern52(values["variance"], jnp.sqrt(values["outer"]))
        h = numpyro.sample("h", dgp.gp("f", inner, inducing=None, outputs=1)(X))
        y_given_h = dgp.gp("g", outer, inducing=None)(h, noise=jnp.sqrt(NUGGET * values["variance"]))
        numpyro.sample("y", y_given_h, obs=y)

    def scaled(name: str) -> Callable[..., jax.Array]:
        return lambda v, a, b: mcmc_dense.matern52(a / jnp.sqrt(v[name]), b / jnp.sqrt(v[name]))

    outer = scaled("outer")
    layers = [
        mcmc_dense.Layer(scaled("inner"), outputs=1),
        mcmc_dense.Layer(lambda v, a, b: v["variance"] * outer(v, a, b)),
    ]

    def noise(v: Values) -> jax.Array:
        return jnp.sqrt(NUGGET * v["variance"])

    def at_means(values: Values, points: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mcmc_dense.predicted(layers, values, (X, values["h"], y), points, noise(values))

    def score(samples: Values, key: jax.Array) -> dict[str, float]:
        """Hidden values at test inputs are their means given those at the data, as is the default of R deepgp, and
        ``crps_estimate`` has its variance, an estimate given lengthscales and hidden values."""

        def estimated(values: Values) -> Values:
            unit = values | {"variance": jnp.ones(())}
            factor = mcmc_dense.root(outer(unit, values["h"], values["h"]), noise(unit))
            white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
            return values | {"variance": jnp.square(white).mean()}

        def scores(change: Callable[[Values], Values]) -> dict[str, float]:
            means, variances = jax.lax.map(lambda v: at_means(change(v), test), samples, batch_size=200)
            return mixture_scores(means, variances, jnp.asarray(values_at(x_test)))

        return scores(lambda values: values) | {"crps_estimate": scores(estimated)["crps"]}

    unit = {"inner": jnp.ones(()), "outer": jnp.full((), 0.3), "variance": jnp.ones(())}
    identity = 4 * (X - 0.5)
    root = mcmc_dense.root(layers[0].kernel(unit, X, X))
    white = jax.scipy.linalg.solve_triangular(root, identity, lower=True)
    between = jnp.asarray(np.sort(np.random.default_rng(0).uniform(0, 1, TEST_POINTS)))[:, None]

    def function(values: Values) -> jax.Array:
        return at_means(values, between)[0]

    dense_model = mcmc_dense.program(priors, layers, noise)
    dense = Target(dense_model, (X, y), tuple(priors), function, score, start=unit | {"h_white": white})
    return dense._replace(model=model, gaussian=("h",), dense=dense)
