"""NUTS and the inducing-point guide on one two-layer program: 20 inducing points a layer, 60 data.

The guide's fit starts the chain. One figure shows both posteriors of the function, means and 95 % intervals, and of the
hyperparameters; the table gives split R-hat and effective sample sizes, and how far the two posteriors lie apart.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS, SVI, init_to_value

import numpyro_dgp as dgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def make_data(num: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    x = np.sort(rng.uniform(-1.5, 1.5, num))
    y = np.tanh(6 * x) + 0.3 * np.sin(4 * x) + 0.1 * rng.normal(size=num)
    return jnp.asarray(x)[:, None], jnp.asarray(y)


def make_model(X: jax.Array, num_inducing: int):
    first, last = dgp.initial.layers(X, [1], num_inducing)

    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 0.5))
        inner = numpyro.sample("inner lengthscale", dist.LogNormal(0.0, 0.5))
        outer = numpyro.sample("outer lengthscale", dist.LogNormal(0.0, 0.5))
        f = dgp.gp("f", dgp.kernels.RBF(0.5, inner), dgp.Points(first.Z), outputs=1, mean=first.mean)
        g = dgp.gp("g", dgp.kernels.RBF(1.0, outer), dgp.Points(last.Z))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)

    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="of the guide's fit")
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("nuts_output"))
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    num_data, num_inducing = 60, 20
    if arguments.smoke:
        arguments.steps, arguments.warmup, arguments.samples, num_data, num_inducing = 20, 5, 10, 12, 4
    arguments.out.mkdir(parents=True, exist_ok=True)
    numpyro.enable_x64()
    X, y = make_data(num_data)
    model = make_model(X, num_inducing)
    keys = jax.random.split(jax.random.key(0), 5)

    guide = dgp.guides.InducingPoint(model, other=dgp.guides.Normal())
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.05, arguments.steps)), dgp.ELBO(num_particles=4))
    result = dgp.fit(svi, keys[0], arguments.steps, X, y)
    fitted = dgp.Posterior(model, guide, result.params)

    start = guide.sample_posterior(keys[1], result.params, X, y)
    start = {name: value for name, value in start.items() if name != "h"}  # NUTS has the whitened h_white instead
    kernel = NUTS(dgp.for_mcmc(model), init_strategy=init_to_value(values=start), target_accept_prob=0.9)
    mcmc = MCMC(kernel, num_warmup=arguments.warmup, num_samples=arguments.samples)
    mcmc.run(keys[2], X, y)
    samples = mcmc.get_samples()
    sampled = dgp.Posterior(model, samples=samples)

    grid = jnp.linspace(-1.8, 1.8, 200)
    hyper = ["noise", "inner lengthscale", "outer lengthscale"]
    draws = min(500, arguments.samples)
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), width_ratios=[3, 1, 1, 1], layout="constrained")
    medians = guide.quantiles(result.params, [0.025, 0.5, 0.975], X, y)
    curves = {}
    for colour, (name, posterior) in zip(("C0", "C1"), {"guide": fitted, "NUTS": sampled}.items(), strict=True):
        values = np.asarray(posterior.using(num_samples=draws).functions(keys[3])(grid[:, None])["y"])
        low, high = np.quantile(values, [0.025, 0.975], axis=0)
        curves[name] = values.mean(0), values.std(0)
        axes[0].plot(grid, values.mean(0), color=colour, label=name)
        axes[0].fill_between(grid, low, high, color=colour, alpha=0.2, lw=0)
    axes[0].plot(X[:, 0], y, ".", color="0.2", ms=4)
    axes[0].set(title="function: mean and 95 % interval", xlabel="x", ylabel="f(x)")
    axes[0].legend(frameon=False)
    for ax, name in zip(axes[1:], hyper, strict=True):
        chain = np.asarray(samples[name])
        for position, colour, (low, middle, high) in (
            (0, "C0", np.asarray(medians[name])),
            (1, "C1", np.quantile(chain, [0.025, 0.5, 0.975])),
        ):
            ax.errorbar([position], [middle], [[middle - low], [high - middle]], fmt="o", color=colour)
        ax.set(title=name, xticks=[0, 1], xticklabels=["guide", "NUTS"], xlim=(-0.5, 1.5))
    figure.savefig(arguments.out / "nuts_and_guide.png", dpi=110)

    print(f"{'site':20s}{'guide':>10s}{'NUTS':>10s}{'R-hat':>8s}{'ESS':>7s}")
    table = summary({name: samples[name][None] for name in hyper})
    for name in hyper:
        found = table[name]
        row = f"{name:20s}{float(medians[name][1]):10.3f}{float(found['median']):10.3f}"
        print(row + f"{float(found['r_hat']):8.3f}{float(found['n_eff']):7.0f}")
    (mean_a, sd_a), (mean_b, sd_b) = curves.values()
    print(f"function: mean |difference of means| / sd {np.mean(np.abs(mean_a - mean_b) / sd_b):.2f}, "
          f"mean ratio of sds {np.mean(sd_a / sd_b):.2f}")  # fmt: skip
    print(f"divergences: {int(mcmc.get_extra_fields()['diverging'].sum())}; figure in {arguments.out}")


if __name__ == "__main__":
    main()
