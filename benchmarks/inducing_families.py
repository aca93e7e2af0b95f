"""Families of posteriors of inducing values, on two programs whose evidence is known by quadrature.

``python benchmarks/inducing_families.py`` fits every family to a posterior that is cut off on one side (two labels) and
to one with two modes that mirror each other (two observed squares), by Adam, and prints how far its bound is from the
evidence. There are two inducing values, so that the integral over both is a sum over a grid.
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
import optax
from numpyro.infer import SVI
from numpyro.infer.util import log_density

import numpyro_dgp as dgp
from numpyro_dgp import guides as G  # noqa: N812

X = jnp.array([[-0.5], [0.5]])

FAMILIES: dict[str, tuple[G.Rule, int]] = {  # with particles of a step
    "`Full()`": (G.Full(), 8),
    "`MixtureOfGaussians(2)`": (G.MixtureOfGaussians(2), 8),
    "`Flow(antithetic=True)`": (G.Flow(antithetic=True), 4),
    "`Diffusion()`": (G.Diffusion(), 8),
    "`Diffusion(steps=20, hidden=64)`": (G.Diffusion(steps=20, hidden=64), 8),
    "`Implicit()`": (G.Implicit(), 4),
}


def labels(X: Any, y: Any = None) -> None:
    f = dgp.gp("f", dgp.kernels.RBF(25.0, 1.0), dgp.Points(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Bernoulli(logits=v)), obs=y)


def squares(X: Any, y: Any = None) -> None:
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(jnp.square(v), 0.3)), obs=y)


PROGRAMS = {"cut off": (labels, jnp.array([1, 1])), "two modes": (squares, jnp.array([1.0, 1.0]))}


def evidence(model: Callable[..., None], y: jax.Array) -> float:
    line = jnp.linspace(-7, 7, 401)
    grid = jnp.stack(jnp.meshgrid(line, line), -1).reshape(-1, 2)
    densities = jax.vmap(lambda v: log_density(model, (X, y), {}, {"f": v})[0])(grid)
    return float(jax.nn.logsumexp(densities) + 2 * jnp.log(line[1] - line[0]))


def bound(
    model: Callable[..., None], y: jax.Array, rule: G.Rule, particles: int, steps: int, seed: int
) -> tuple[float, float, float]:
    """At the end of a fit, with its standard error, and seconds."""
    started = time.perf_counter()
    guide = G.InducingPoint(model, inducing=rule)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.01, steps))
    svi = SVI(model, guide, optimizer, dgp.ELBO(particles))
    params = dgp.fit(svi, jax.random.key(seed), steps, X, y, progress_bar=False).params
    seconds = time.perf_counter() - started
    loss = jax.jit(jax.vmap(lambda key: dgp.ELBO().loss(key, params, model, guide, X, y)))
    draws = -np.asarray(loss(jax.random.split(jax.random.key(seed + 1), 20_000)))
    return float(draws.mean()), float(draws.std() / math.sqrt(len(draws))), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print("| family | " + " | ".join(f"evidence - bound, {name}" for name in PROGRAMS) + " | seconds |")
    print("|---" * (len(PROGRAMS) + 2) + "|")
    truths = {name: evidence(*program) for name, program in PROGRAMS.items()}
    for family, (rule, particles) in FAMILIES.items():
        cells, seconds = [], []
        for name, (model, y) in PROGRAMS.items():
            found = [bound(model, y, rule, particles, options.steps, seed) for seed in range(options.seeds)]
            gaps = sorted(truths[name] - value for value, _, _ in found)
            error = max(e for _, e, _ in found)
            cells.append(", ".join(f"{gap:.3f}" for gap in gaps) + f" ({error:.3f})")
            seconds += [s for _, _, s in found]
        print(f"| {family} | " + " | ".join(cells) + f" | {np.median(seconds):.0f} |", flush=True)


if __name__ == "__main__":
    main()
