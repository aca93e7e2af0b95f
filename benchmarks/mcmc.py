"""MCMC on a deep GP: NUTS on the bare program, with its last layer integrated, in the coordinates of a fitted guide,
and Gibbs sampling.

``python benchmarks/mcmc.py`` samples a program of two layers with 20 inducing points each, on a step in two input
columns: Matern-5/2 kernels, LogNormal priors on the noise and on the lengthscale of each layer, double precision. All
chains start from the same fit, and the seconds are those of sampling, without the fit and the compilation.

Hidden layers can be reflected without changing the density of the data. R-hat and the smallest effective sample size
are therefore those of what the data identify: the hyperparameters, and the means of f(h) at 20 test inputs, each
through the means of the hidden values there.

A draw of ``dgp.Gibbs`` is a sweep. Its leapfrogs and gradients are all its evaluations of the density, most of them
without a gradient.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS, SVI, init_to_sample, init_to_value
from numpyro.infer.mcmc import MCMCKernel

import numpyro_dgp as dgp

HYPERPARAMETERS = ("noise", "inner", "outer")


def make_data(rows: int, seed: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (rows, 2))
    y = np.sign(X[:, 0] + 0.5 * X[:, 1]) + 0.1 * rng.normal(size=rows)
    return jnp.asarray(X), jnp.asarray(y)


def make_model(X: jax.Array, inducing: int) -> tuple[Callable[..., None], Callable[..., jax.Array]]:
    """The program, and the mean of its output at inputs, given values of its sites."""
    first, last = dgp.initial.layers(X, widths=[1], num_inducing=inducing)

    def functions() -> tuple[Any, Any, jax.Array]:
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        inner = dgp.kernels.Matern52(1.0, numpyro.sample("inner", dist.LogNormal(0.0, 1.0)))
        outer = dgp.kernels.Matern52(1.0, numpyro.sample("outer", dist.LogNormal(0.0, 1.0)))
        f = dgp.gp("f", inner, dgp.Points(first.Z), outputs=1, mean=first.mean)
        return f, dgp.gp("g", outer, dgp.Points(last.Z)), noise

    def model(X: jax.Array, y: Any = None) -> None:
        f, g, noise = functions()
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)

    def mean(values: dict[str, jax.Array], X: jax.Array) -> jax.Array:
        f, g, _ = handlers.substitute(handlers.seed(functions, 0), data=values)()
        return g(f(X).mean).mean

    return model, mean


def measure(
    kernel: MCMCKernel,
    counts: tuple[str, ...],
    data: tuple[jax.Array, jax.Array],
    draws: int,
    chains: int,
    vectorized: bool,
    identified: Callable[[dict[str, jax.Array]], dict[str, jax.Array]],
) -> dict[str, float]:
    """Seconds of a compiled run, steps by the fields ``counts``, and what the chains are worth."""

    def run(key: jax.Array, X: jax.Array, y: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        mcmc = MCMC(kernel, num_warmup=draws, num_samples=draws, progress_bar=False)
        mcmc.run(key, X, y, extra_fields=(*counts, "diverging"))
        return mcmc.get_samples(), mcmc.get_extra_fields()

    keys = jax.random.split(jax.random.key(1), chains)
    if vectorized:
        compiled = jax.jit(jax.vmap(run, (0, None, None))).lower(keys, *data).compile()
        began = time.perf_counter()
        all_chains = jax.block_until_ready(compiled(keys, *data))
        seconds = time.perf_counter() - began
        found = [jax.tree.map(lambda a, i=i: a[i], all_chains) for i in range(chains)]
    else:
        compiled = jax.jit(run).lower(keys[0], *data).compile()
        began = time.perf_counter()
        found = [jax.block_until_ready(compiled(key, *data)) for key in keys]
        seconds = time.perf_counter() - began
    values = [identified(samples) for samples, _ in found]
    together = [np.stack([np.asarray(v[name]) for v in values]) for name in values[0]]
    ess = min(float(effective_sample_size(v).min()) for v in together)
    steps = sum(float(fields[name].sum()) for _, fields in found for name in counts)
    return {
        "leapfrogs": steps / (draws * chains),
        "r_hat": max(float(split_gelman_rubin(v).max()) for v in together),
        "ess": ess,
        "seconds": seconds,
        "per_gradient": ess / steps,
        "divergences": sum(int(fields["diverging"].sum()) for _, fields in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[60, 200])
    parser.add_argument("--inducing", type=int, default=20)
    parser.add_argument("--draws", type=int, default=200, help="as many in warm-up")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--vectorized", action="store_true", help="all chains at once, in place of one by one")
    parser.add_argument("--steps", type=int, default=3000, help="of the fit")
    parser.add_argument("--samplers", nargs="+", help="names of the table; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.inducing, options.draws, options.steps = [12], 4, 10, 20
    numpyro.enable_x64()
    print(f"{jax.devices()[0].device_kind}\n")
    print("| rows | sampler | leapfrogs per draw | R-hat | smallest ESS | ESS per second | ESS per 1000 gradients |"
          " divergences | seconds |\n|---|" + "---|" * 8)  # fmt: skip
    for rows in options.rows:
        data = make_data(rows, options.seed)
        test = make_data(20, options.seed + 1)[0]
        model, mean = make_model(data[0], options.inducing)
        guide = dgp.guides.InducingPoint(model, other=dgp.guides.Normal())
        optimiser = optax.adam(optax.cosine_decay_schedule(0.02, options.steps))
        svi = SVI(model, guide, optimiser, dgp.ELBO())
        params = svi.run(jax.random.key(0), options.steps, *data, progress_bar=False).params
        median = init_to_value(values=guide.median(params, *data))
        samplers = {
            "bare": (dgp.for_mcmc(model, collapse=False), median),
            "collapsed": (dgp.for_mcmc(model, collapse=True), median),
            "guide": (dgp.for_mcmc(model, params, guide=guide, collapse=False), init_to_sample()),
            "collapsed, guide": (dgp.for_mcmc(model, params, guide=guide, collapse=True), init_to_sample()),
        }
        identified = jax.jit(
            lambda samples, mean=mean, test=test: {
                "test": jax.lax.map(lambda values: mean(values, test), samples),
                **{name: jnp.log(samples[name]) for name in HYPERPARAMETERS},
            }
        )
        kernels = {name: NUTS(program, init_strategy=start) for name, (program, start) in samplers.items()}
        kernels["Gibbs"] = dgp.Gibbs(model, init_strategy=median)
        for name, kernel in kernels.items():
            if options.samplers and name not in options.samplers:
                continue
            counts = ("num_steps",) if isinstance(kernel, NUTS) else ("evaluations", "gradients")
            r = measure(kernel, counts, data, options.draws, options.chains, options.vectorized, identified)
            print(
                f"| {rows} | {name} | {r['leapfrogs']:.0f} | {r['r_hat']:.2f} | {r['ess']:.0f} | "
                f"{r['ess'] / r['seconds']:.2f} | {1000 * r['per_gradient']:.2f} | {r['divergences']} | "
                f"{r['seconds']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
