"""The evidence of a deep GP from a fitted guide and from the prior, integrated or not, beside the bound of the guide.

``python benchmarks/evidence.py`` takes the program and the data of ``benchmarks/mcmc.py``: two layers with 20 inducing
points each on a step in two input columns, Matern-5/2 kernels, LogNormal priors on the noise and both lengthscales,
double precision. Draws for the upper bound come from two chains of NUTS on the program with its last layer integrated.

Seconds are those of ``dgp.diagnostics.evidence``, compilation included, and the chain's are in the last line.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from implementations.mcmc_programs import step
from implementations.mcmc_samplers import start_of
from numpyro.infer import MCMC, NUTS

import numpyro_dgp as dgp

# Mean and standard deviation of the logarithms of the hyperparameters under their priors.
PRIORS = {"noise": (-2.0, 1.0), "inner": (0.0, 1.0), "outer": (0.0, 1.0)}


def prior_params(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Parameters of the same shapes at which the guide is the prior."""
    found = {}
    for name, value in params.items():
        site, _, what = name.partition("_auto_")
        if site in PRIORS:
            mean, scale = PRIORS[site]
            found[name] = jnp.full_like(value, mean if what == "loc" else scale)
        else:
            found[name] = (
                jnp.zeros_like(value) if what == "loc" else jnp.broadcast_to(jnp.eye(len(value.T)), value.shape)
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--inducing", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000, help="of the fit")
    parser.add_argument("--draws", type=int, default=500, help="of each chain, after as many to warm up")
    parser.add_argument("--runs", type=int, default=32, help="in each direction")
    parser.add_argument("--temperatures", type=int, nargs="+", default=[250, 1000])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.inducing, options.steps, options.draws = 12, 4, 50, 10
        options.runs, options.temperatures = 4, [5]
    numpyro.enable_x64()
    target = step(options.rows, options.inducing, options.seed)
    model, data = target.model, target.data
    fit = start_of(target, options.steps)
    guide, params = fit.guide, fit.params
    bound = jax.jit(lambda key: -dgp.ELBO().loss(key, params, model, guide, *data))
    bounds = np.asarray(jax.lax.map(bound, jax.random.split(jax.random.key(1), 1000), batch_size=50))
    print(f"{jax.devices()[0].device_kind}, {options.rows} rows\n")
    print(f"bound of InducingPoint: {bounds.mean():.2f} ({bounds.std() / len(bounds) ** 0.5:.2f})\n", flush=True)

    began = time.perf_counter()
    kernel = NUTS(dgp.for_mcmc(model, collapse=True), init_strategy=fit.strategy)
    mcmc = MCMC(kernel, num_warmup=options.draws, num_samples=options.draws, num_chains=2, chain_method="sequential",
                progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.key(2), *data)
    samples = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    chain_seconds = time.perf_counter() - began

    print("| from | last layer | temperatures | below | effective | above | effective | seconds |")
    print("|---|" + "---|" * 7)
    starts = {"guide": params, "prior": prior_params(params)}
    for start, collapse, count in [(s, c, t) for s in starts for c in (True, False) for t in options.temperatures]:
        began = time.perf_counter()
        found = dgp.diagnostics.evidence(
            dgp.Posterior(model, guide, starts[start]), jax.random.key(3), *data,
            samples=samples, num_chains=options.runs, num_temperatures=count, collapse=collapse,
        )  # fmt: skip
        layer = "integrated" if collapse else "drawn"
        print(
            f"| {start} | {layer} | {count} | {found.lower:.2f} ({found.lower_se:.2f}) | "
            f"{found.lower_ess:.0f} | {found.upper:.2f} ({found.upper_se:.2f}) | {found.upper_ess:.0f} | "
            f"{time.perf_counter() - began:.0f} |",
            flush=True,
        )
    print(f"\nchains: {chain_seconds:.0f} seconds")


if __name__ == "__main__":
    main()
