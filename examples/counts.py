"""Visits to the doctor: counts by Poisson and negative binomial regression, linear, with one layer and with two.

The RAND health insurance experiment (20 190 person-years, from statsmodels): visits in a year against the plan, health
and income. The log rate is a function of nine covariates. Visits vary much more than Poisson counts do, which a
negative binomial has a parameter for; the closed form for the one and Gauss-Hermite quadrature for the other are
``dgp.Likelihood``'s business. It prints log densities of held-out people and draws the distribution of counts and the
effect of what a visit costs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {0: "linear", 1: "GP", 2: "GP-GP"}
MODELS = [(depth, likelihood) for likelihood in ("Poisson", "negative binomial") for depth in NAMES]
COST, DISEASES = 0, 5  # columns: log of one plus the share of the cost that is one's own, chronic diseases


def load(seed: int, num_test: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Covariates and visits; training rows, then test rows."""
    from statsmodels.datasets import randhie

    table = randhie.load_pandas()
    X, y = table.exog.to_numpy(np.float32), table.endog.to_numpy(np.int32)
    order = np.random.default_rng(seed).permutation(len(X))
    test, train = np.split(order, [num_test])
    return X[train], y[train], X[test], y[test]


def make_model(X: np.ndarray, y: np.ndarray, depth: int, likelihood: str, num_inducing: int) -> Callable[..., None]:
    """The log rate: linear for no layers, else a Gaussian process of one or two layers."""
    width = 3
    starts = dgp.initial.layers(X, [width] * (depth - 1), num_inducing) if depth else []
    typical = math.log(y.mean())

    def model(X: Any, y: Any = None, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(typical, 1.0))
        concentration = numpyro.sample("concentration", dist.LogNormal(0.0, 1.0))
        functions = []
        for i, (Z, mean, lengthscale) in enumerate(starts):
            scales = numpyro.sample(
                f"lengthscale{i}", dist.LogNormal(math.log(lengthscale), 1.0).expand([Z.shape[1]]).to_event(1)
            )
            kernel = dgp.kernels.RBF(numpyro.sample(f"variance{i}", dist.LogNormal(-1.0, 1.0)), scales)
            outputs = None if i == depth - 1 else width
            functions.append(dgp.gp(f"f{i}", kernel, dgp.Points(Z, learn=True), outputs=outputs, mean=mean))
        if not functions:  # a linear function is a process too, with a linear kernel
            variance = numpyro.sample("variance", dist.LogNormal(-3.0, 1.0))
            functions.append(
                dgp.gp("f0", dgp.kernels.Linear(variance), dgp.Points(np.eye(X.shape[1], dtype=np.float32)))
            )

        def counts(v: jax.Array) -> dist.Distribution:
            rate = jnp.exp(level + v)
            return dist.Poisson(rate) if likelihood == "Poisson" else dist.NegativeBinomial2(rate, concentration)

        with numpyro.plate("people", len(X), subsample_size=batch_size) as rows:
            h = X[rows]
            for i, f in enumerate(functions[:-1]):
                h = numpyro.sample(f"h{i}", f(h))
            observed = dgp.Likelihood(functions[-1](h), counts)
            numpyro.sample("y", observed, obs=None if y is None else y[rows])

    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--num-inducing", type=int, default=50)
    parser.add_argument("--num-test", type=int, default=4000, help="people held out")
    parser.add_argument("--draws", type=int, default=50, help="for predictions")
    parser.add_argument("--out", type=Path, default=Path("counts_output"))
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few rows, to see that it runs")
    arguments = parser.parse_args()
    X, y, X_test, y_test = load(0, arguments.num_test)
    models = MODELS
    if arguments.smoke:
        X, y, X_test, y_test, models = X[:200], y[:200], X_test[:50], y_test[:50], MODELS[-1:]
        arguments.steps, arguments.batch, arguments.num_inducing, arguments.draws = 5, 50, 10, 3
    arguments.out.mkdir(parents=True, exist_ok=True)
    units = dgp.initial.Standardizer.fit(X)
    X, X_test, y = (jnp.asarray(a) for a in (units(X), units(X_test), y))

    levels = np.arange(16)
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    axes[0].bar(levels, [(y_test == n).mean() for n in levels], color="0.85", label="observed")
    print(f"{'model':28s}{'log density':>12s}{'':9s}{'RMSE':>6s}{'ELBO per row':>14s}")
    for depth, likelihood in models:
        model = make_model(np.asarray(X), np.asarray(y), depth, likelihood, arguments.num_inducing)
        guide = dgp.guides.InducingPoint(model)
        svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.02, arguments.steps)), dgp.ELBO())
        result = dgp.fit(svi, jax.random.key(0), arguments.steps, X, y, arguments.batch, progress_bar=False)
        posterior = dgp.Posterior(model, guide, result.params)
        density = np.asarray(
            posterior.using(num_samples=arguments.draws).log_density(jax.random.key(1), y_test, X_test)
        )
        mean = np.asarray(posterior.using(num_samples=arguments.draws).predict(jax.random.key(2), X_test).mean)
        bound = -float(result.losses[-max(1, arguments.steps // 10) :].mean()) / len(X)
        name = f"{NAMES[depth]}, {likelihood}"
        print(f"{name:28s}{density.mean():12.4f} ({density.std() / math.sqrt(len(density)):.4f})"
              f"{np.sqrt(np.mean((mean - y_test) ** 2)):6.2f}{bound:14.4f}", flush=True)  # fmt: skip
        if depth != 2:
            continue
        colour = {"Poisson": "C1", "negative binomial": "C0"}[likelihood]
        draws = np.asarray(posterior.using(num_samples=arguments.draws).sample(jax.random.key(3), X_test))
        axes[0].plot(levels, [(draws == n).mean() for n in levels], "o-", color=colour, ms=3, lw=1, label=name)
    # The last model: rates along the cost, for a healthy and an ill person, otherwise typical.
    cost = np.linspace(0, math.log1p(95), 60)
    functions = posterior.using(num_samples=max(arguments.draws, 2)).functions(jax.random.key(4))
    level = float(guide.median(result.params, X, y)["level"])
    for colour, quantile in (("C2", 0.1), ("C3", 0.9)):
        person = np.median(np.asarray(units.inverse(X)), 0)
        person[DISEASES] = np.quantile(np.asarray(units.inverse(X))[:, DISEASES], quantile)
        rows = np.tile(person, (len(cost), 1))
        rows[:, COST] = cost
        rates = np.exp(level + np.asarray(functions(units(rows))["y"]))
        low, middle, high = np.quantile(rates, [0.025, 0.5, 0.975], axis=0)
        axes[1].plot(np.expm1(cost), middle, color=colour, label=f"{person[DISEASES]:.0f} chronic diseases")
        axes[1].fill_between(np.expm1(cost), low, high, color=colour, alpha=0.25, lw=0)
    axes[0].set(xlabel="visits in a year", ylabel="part of the people", title="held-out people, and draws")
    axes[1].set(xlabel="own share of the cost (%)", ylabel="expected visits in a year",
                title="effect of the cost: median, 95 % interval")  # fmt: skip
    for ax in axes:
        ax.legend(frameon=False)
    figure.savefig(arguments.out / "counts.png", dpi=85)
    print(f"figure in {arguments.out}")


if __name__ == "__main__":
    main()
