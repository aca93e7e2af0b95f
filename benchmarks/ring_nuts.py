"""NUTS on a latent process at the points of a ring: this package's form against dense Gaussians of the same size.

``python benchmarks/ring_nuts.py`` draws counts from a log-Gaussian Cox process at 64 points and samples the function
with its variance and lengthscale from the posterior, 500 + 500 steps, in four forms of the same model:

- ring: ``dgp.rings.RingNormal`` under ``dgp.for_mcmc``, standard normal numbers at the frequencies;
- dense, whitened: the Cholesky factor of the covariance times standard normal numbers;
- circulant, stock: NumPyro's ``CirculantNormal`` as it is written, the function itself sampled;
- dense, stock: ``MultivariateNormal`` likewise.

The table has seconds without compilation, gradients, and what counts: milliseconds per effective sample of the
hardest quantity.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

import numpyro_dgp as dgp
from numpyro_dgp.rings.spectra import periodised, spectrum


def make_models(size: int) -> dict[str, Callable[..., None]]:
    """The four programs; the kernel has a nugget everywhere, so that all of them are in double precision."""
    ring = dgp.rings.Ring(0.0, float(size), size)
    points = ring.points()

    def kernel() -> dgp.kernels.Kernel:
        sd = numpyro.sample("sd", dist.LogNormal(0.0, 0.5))
        return dgp.kernels.Matern32(sd**2, numpyro.sample("lengthscale", dist.LogNormal(math.log(6.0), 0.4)))

    def counts(f: jax.Array, y: Any) -> None:
        numpyro.sample("y", dist.Poisson(jnp.exp(1 + f)).to_event(1), obs=y)

    def gram(k: dgp.kernels.Kernel) -> jax.Array:
        return periodised(k, ring, points, points) + 1e-6 * jnp.eye(size)

    def on_ring(y: Any = None) -> None:
        counts(numpyro.sample("f", dgp.rings.RingNormal(kernel(), ring, noise=1e-3)), y)

    def dense_white(y: Any = None) -> None:
        L = jnp.linalg.cholesky(gram(kernel()))
        white = numpyro.sample("white", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
        counts(numpyro.deterministic("f", L @ white), y)

    def circulant(y: Any = None) -> None:
        half = spectrum(kernel(), ring)[: size // 2 + 1] + 1e-6
        counts(numpyro.sample("f", dist.CirculantNormal(jnp.zeros(size), covariance_rfft=half)), y)

    def dense(y: Any = None) -> None:
        counts(numpyro.sample("f", dist.MultivariateNormal(0.0, gram(kernel()))), y)

    return {
        "ring (for_mcmc)": dgp.for_mcmc(on_ring),
        "dense, whitened": dense_white,
        "circulant, stock": circulant,
        "dense, stock": dense,
    }


def measure(model: Callable[..., None], y: jax.Array, warmup: int, num: int, seed: int) -> dict[str, float]:
    """Seconds of a compiled run, gradients, and the smallest effective sample size."""

    @jax.jit
    def run(key: jax.Array, y: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        mcmc = MCMC(NUTS(model), num_warmup=warmup, num_samples=num, progress_bar=False)
        mcmc.run(key, y, extra_fields=("num_steps", "diverging"))
        return mcmc.get_samples(), mcmc.get_extra_fields()

    key = jax.random.key(seed)
    compiled = run.lower(key, y).compile()
    start = time.perf_counter()
    samples, fields = jax.block_until_ready(compiled(key, y))
    seconds = time.perf_counter() - start
    sizes = [effective_sample_size(np.asarray(samples[k])[None]).min() for k in ("f", "sd", "lengthscale")]
    return {
        "seconds": seconds,
        "gradients": float(fields["num_steps"].mean()),
        "ess": float(min(sizes)),
        "divergences": int(fields["diverging"].sum()),
        "lengthscale": float(samples["lengthscale"].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64])
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--models", nargs="+", help="beginnings of names; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.sizes, arguments.warmup, arguments.samples = [16], 20, 20
    numpyro.enable_x64()
    print(f"{jax.devices()[0].device_kind}\n")
    print("| points | model | seconds | gradients per step | smallest ESS | ms per effective sample | divergences |"
          " mean lengthscale |\n|---|" + "---|" * 7)  # fmt: skip
    for size in arguments.sizes:
        rng = np.random.default_rng(arguments.seed)
        rate = np.exp(1 + np.sin(4 * np.pi * np.arange(size) / size))
        y = jnp.asarray(rng.poisson(rate), float)
        for name, model in make_models(size).items():
            if arguments.models and not name.startswith(tuple(arguments.models)):
                continue
            r = measure(model, y, arguments.warmup, arguments.samples, arguments.seed)
            print(
                f"| {size} | {name} | {r['seconds']:.2f} | {r['gradients']:.0f} | {r['ess']:.0f} | "
                f"{1000 * r['seconds'] / r['ess']:.1f} | {r['divergences']} | {r['lengthscale']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
