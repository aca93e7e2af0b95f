"""The figures of docs/diagnostics.md: two guides and NUTS on one program, and the calibration of their predictions."""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import numpyro_dgp as dgp
from numpyro_dgp import diagnostics, plots


def truth(key, X):
    return jnp.sin(2 * X[:, 0]) + 0.3 * jax.random.normal(key, X.shape[:1])


def model(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 0.7), dgp.Points(jnp.linspace(-2, 2, 10)[:, None]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, noise)), obs=y)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    X, X_test = jnp.linspace(-2, 2, 40)[:, None], jnp.linspace(-1.9, 1.9, 1000)[:, None]
    y, y_test = truth(jax.random.key(0), X), truth(jax.random.key(1), X_test)
    mcmc = MCMC(NUTS(dgp.for_mcmc(model)), num_warmup=500, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(5), X, y)
    guides = {
        "Gaussian": dgp.guides.InducingPoint(model, other=dgp.guides.Normal()),
        "diagonal": dgp.guides.InducingPoint(model, inducing=dgp.guides.Diagonal(), other=dgp.guides.Normal()),
    }
    found = dgp.diagnostics.compare(
        model, guides, (X, y), key=jax.random.key(0), test=(X_test, y_test), mcmc=mcmc, num_steps=args.steps,
        num_samples=1000,
    )  # fmt: skip
    print(found.table.round(3).to_string())
    print(found.ranking.to_string())
    plots.comparison(found).savefig(args.out / "comparison.png", dpi=110)
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True, layout="constrained")
    for ax, (name, posterior) in zip(axes, found.posteriors.items(), strict=True):
        draws = posterior.using(num_samples=1000).sample(jax.random.key(3), X_test)
        plots.calibration(diagnostics.pit(draws, y_test, jax.random.key(4)), ax=ax)
        ax.set_title(name)
    figure.savefig(args.out / "calibration.png", dpi=110)


if __name__ == "__main__":
    main()
