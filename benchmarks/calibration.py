"""The figure and the table of ranks in docs/results/guides.md: are two guides and NUTS calibrated?

Simulation-based calibration of a two-layer program with eight data: parameters and data from the program itself, then
the rank of the truth among the draws of each posterior. And probability integral transforms of held-out rows of
scikit-learn's diabetes set, under two layers fitted to the other half. Two minutes on one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI

import numpyro_dgp as dgp
from numpyro_dgp import plots
from numpyro_dgp.diagnostics import coverage, pit, sbc, uniformity

X = jnp.linspace(-1, 1, 8)[:, None]
Z = dgp.Points(jnp.linspace(-1, 1, 4)[:, None])
SITES = ("noise", "scale", "f", "g")


def program(X: Any, y: Any = None) -> None:
    """Both functions are drawn: the observations have the density that guides and chains see."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scale), Z, outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 0.7), Z)
    with numpyro.plate("data", len(X)):
        v = numpyro.sample("v", g(numpyro.sample("h", f(X))))
        numpyro.sample("y", dist.Normal(v, noise), obs=y)


def guides(model: Callable[..., Any]) -> dict[str, dgp.guides.Guide]:
    """A full Gaussian for the values of each layer, and independent ones; hyperparameters have a Gaussian each."""
    normal = dgp.guides.Normal()
    return {
        "full": dgp.guides.InducingPoint(model, other=normal),
        "diagonal": dgp.guides.InducingPoint(model, inducing=dgp.guides.Diagonal(), other=normal),
    }


def falling(steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(0.03, steps))


def converged(steps: int, repeats: int = 4) -> None:
    """Is it the optimiser? The median of the noise and the bound after ``steps`` and after five times as many."""
    print("| true noise | noise | bound | noise, five times the steps | bound |")
    for i in range(repeats):
        truth = handlers.trace(handlers.seed(program, jax.random.key(100 + i))).get_trace(X)
        cells = [float(truth["noise"]["value"])]
        for number in (steps, 5 * steps):
            svi = SVI(program, guides(program)["full"], falling(number), dgp.ELBO())
            result = svi.run(jax.random.key(0), number, X, truth["y"]["value"], progress_bar=False)
            cells += [float(jnp.exp(result.params["noise_auto_loc"])), -float(result.losses[-100:].mean())]
        print("| " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)


def ranked(values: dict[str, Any]) -> dict[str, Any]:
    """The values of all sites, inducing values of both layers too."""
    return {name: values[name] for name in SITES}


def halves() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Inputs and targets of the diabetes set for training and for testing, in units of the training half."""
    from sklearn.datasets import load_diabetes

    raw, target = load_diabetes(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(raw))
    train, test = order[: len(raw) // 2], order[len(raw) // 2 :]
    centre, units = raw[train].mean(0), raw[train].std(0)
    level, unit = target[train].mean(), target[train].std()
    rows = [jnp.asarray((raw[half] - centre) / units) for half in (train, test)]
    return rows[0], jnp.asarray((target[train] - level) / unit), rows[1], jnp.asarray((target[test] - level) / unit)


def transforms(steps: int, warmup: int, samples: int) -> dict[str, tuple[np.ndarray, float]]:
    """Transforms of the held-out rows and their mean log density, by posterior."""
    X, y, X_test, y_test = halves()
    first, last = dgp.initial.layers(X, widths=[2], num_inducing=15)

    def model(X: Any, y: Any = None) -> None:
        noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.5))
        scale = numpyro.sample("scale", dist.LogNormal(jnp.log(jnp.array([3.0, 1.0])), 0.5).to_event(1))
        f = dgp.gp("f", dgp.kernels.RBF(1.0, scale[0]), dgp.Points(first.Z), outputs=2, mean=first.mean)
        g = dgp.gp("g", dgp.kernels.RBF(1.0, scale[1]), dgp.Points(last.Z))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)

    posteriors = {}
    for name, guide in guides(model).items():
        svi = SVI(model, guide, falling(steps), dgp.ELBO())
        result = dgp.fit(svi, jax.random.key(0), steps, X, y, progress_bar=False)
        posteriors[name] = dgp.Posterior(model, guide, result.params)
    mcmc = MCMC(NUTS(dgp.for_mcmc(model)), num_warmup=warmup, num_samples=samples, progress_bar=False)
    mcmc.run(jax.random.key(1), X, y)
    posteriors["NUTS"] = dgp.Posterior(model, samples=mcmc.get_samples())
    keys = jax.random.split(jax.random.key(3), 3)
    return {
        name: (
            pit(posterior.using(num_samples=samples).sample(keys[0], X_test), y_test, keys[1]),
            float(posterior.using(num_samples=samples).log_density(keys[2], y_test, X_test).mean()),
        )
        for name, posterior in posteriors.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60, help="simulated data sets (default: 60)")
    parser.add_argument("--steps", type=int, default=800, help="of each fit (default: 800)")
    parser.add_argument("--warmup", type=int, default=200, help="of NUTS (default: 200)")
    parser.add_argument("--thinning", type=int, default=2, help="of NUTS on simulated data (default: 2)")
    parser.add_argument("--samples", type=int, default=200, help="of NUTS on the diabetes set (default: 200)")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    parser.add_argument("--smoke", action="store_true", help="a few short runs, to see that it works")
    args = parser.parse_args()
    if args.smoke:
        args.repeats, args.steps, args.warmup, args.thinning, args.samples = 10, 5, 5, 1, 20
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    found = {
        name: sbc(SVI(program, guide, falling(args.steps), dgp.ELBO()), jax.random.key(0), X,
                  num_replications=args.repeats, num_steps=args.steps, quantities=ranked)
        for name, guide in guides(program).items()
    }  # fmt: skip
    converged(args.steps)
    print(f"{time.perf_counter() - start:.0f} s for {2 * args.repeats} fits", flush=True)
    chain = MCMC(
        NUTS(dgp.for_mcmc(program), max_tree_depth=6), num_warmup=args.warmup, num_samples=args.thinning * 99,
        thinning=args.thinning, progress_bar=False,
    )  # fmt: skip
    found["NUTS"] = sbc(chain, jax.random.key(2), X, num_replications=args.repeats, quantities=ranked)
    print(f"{time.perf_counter() - start:.0f} s with {args.repeats} chains", flush=True)
    held_out = transforms(args.steps, args.warmup, args.samples)
    print(f"{time.perf_counter() - start:.0f} s in all\n")

    print("| | " + " | ".join(f"{site}: uniform" for site in SITES) + " | " + " | ".join(SITES) + " |")
    for name, simulated in found.items():
        values = {site: simulated.ranks[site].reshape(args.repeats, -1) for site in SITES}
        tests = [min(1.0, simulated.uniform[site].min() * values[site].shape[1]) for site in SITES]
        spread = [((ranks + 0.5) / (simulated.num_samples + 1)).std() * 12**0.5 for ranks in values.values()]
        cells = [f"{p:.1g}" for p in tests] + [f"{sd:.2f}" for sd in spread]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("uniform: smallest p-value times number of values; then standard deviations of ranks, 1 if uniform\n")
    print("| | log density | uniform, p | coverage of 50 % | of 90 % |")
    for name, (u, log_density) in held_out.items():
        inside = coverage(u, (0.5, 0.9)).share
        print(f"| {name} | {log_density:.3f} | {float(uniformity(u)):.2g} | {inside[0]:.2f} | {inside[1]:.2f} |")

    figure, axes = plt.subplots(3, len(SITES) + 1, figsize=(13, 6.6), layout="constrained")
    for row, (name, simulated) in zip(axes, found.items(), strict=True):
        plots.ranks(simulated, axes=dict(zip(SITES, row[:-1], strict=True)))
        plots.calibration(held_out[name][0], bins=10, ax=row[-1])
        row[-1].set(title="diabetes, held-out rows", ylim=(0, None))
        row[0].set_ylabel(f"{name}\nreplications")
        if name != list(found)[-1]:
            for ax in row:
                ax.set(xlabel="")
    figure.savefig(args.out / "calibration_ranks.png", dpi=100)


if __name__ == "__main__":
    main()
