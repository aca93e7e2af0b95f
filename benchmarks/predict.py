"""Time prediction: 5000 posterior draws at 200 inputs through two layers, once compiled.

``python benchmarks/predict.py`` prints the median of several calls: for plain predictions, for a model with a latent
input per datum, for that one given draws of its inducing values, and for draws of whole functions.
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
from numpyro.infer import SVI

import numpyro_dgp as dgp


def make_posterior(latent: bool, num_inducing: int, dims: int) -> dgp.Posterior:
    """A two-layer model at its starting values, away from the special start of its inner layer."""
    Z = jnp.asarray(np.random.default_rng(0).normal(size=(num_inducing, dims)), jnp.float32)

    def model(X: Any, y: Any = None) -> None:
        padded = jnp.hstack([Z, Z[:, :1]]) if latent else Z
        mean = dgp.means.LinearMean(jnp.eye(padded.shape[1], dims))
        f = dgp.gp("f", dgp.kernels.RBF(lengthscale=2.0), dgp.Points(padded), outputs=dims, mean=mean)
        g = dgp.gp("g", dgp.kernels.RBF(lengthscale=2.0), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            x = dgp.latent("w", X, 1) if latent else X
            h = numpyro.sample("h", f(x))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)

    guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.Full(scale=0.5))
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    state = svi.init(jax.random.key(0), jnp.zeros((8, dims), jnp.float32), jnp.zeros(8, jnp.float32))
    return dgp.Posterior(model, guide, svi.get_params(state))


def median_time(call: Callable[[jax.Array], Any], repeats: int) -> float:
    """Seconds of one call, compiled before."""
    jax.block_until_ready(call(jax.random.key(0)))
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(jax.random.key(i)))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--inputs", type=int, default=200)
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--dims", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="few draws of a small model, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.draws, arguments.inputs, arguments.num_inducing, arguments.repeats = 20, 10, 10, 1
    print(
        f"{jax.devices()[0].device_kind}, float32; {arguments.inputs} inputs, M = {arguments.num_inducing}, "
        f"width {arguments.dims}"
    )
    X = jnp.asarray(np.random.default_rng(1).normal(size=(arguments.inputs, arguments.dims)), jnp.float32)
    for latent in (False, True):
        posterior = make_posterior(latent, arguments.num_inducing, arguments.dims)
        name = "two layers, a latent per datum" if latent else "two layers"
        seconds = median_time(
            lambda k, p=posterior: p.using(num_samples=arguments.draws).predict(k, X), arguments.repeats
        )
        print(f"{name:32s}predictions of {arguments.draws} draws: {seconds:.2f} s", flush=True)

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        """Inducing values, once for every draw, under the guide of the model with latents."""
        return posterior.guide.sample_posterior(key, posterior.params, X[:1], sample_shape=(arguments.draws,))

    given = dgp.Posterior(posterior.model, samples=draw(jax.random.key(0)))
    drawing = median_time(draw, arguments.repeats)
    seconds = median_time(lambda k: given.using(num_samples=arguments.draws).predict(k, X), arguments.repeats)
    print(f"{'':32s}with inducing values drawn: {seconds:.2f} s, and {drawing:.2f} s to draw them", flush=True)
    posterior = make_posterior(False, arguments.num_inducing, arguments.dims)
    seconds = median_time(lambda k: posterior.using(num_samples=100).functions(k)(X), arguments.repeats)
    print(f"{'two layers':32s}100 whole functions: {seconds:.2f} s")


if __name__ == "__main__":
    main()
