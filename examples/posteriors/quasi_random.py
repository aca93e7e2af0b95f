r"""Quasi-random numbers for hidden layers: the particles of a row cover its distribution evenly.

Particle s of S has at every row n the standard normal numbers

.. math:: z_{sn} = \Phi^{-1}\bigl((t_s + u_n) \bmod 1\bigr), \qquad u_n \sim \mathrm{Uniform}[0, 1]^d

with the points :math:`t_1 \dots t_S` of Sobol's sequence in d dimensions, one for every number that is drawn for a row.
Each :math:`z_{sn}` is standard normal, so that averages over particles stay unbiased; for smooth functions of few
numbers their error falls nearly like 1/S, and not like :math:`1 / \sqrt S`. What this cannot beat is
``dgp.ELBO()`` with one particle in every step, the cheapest way to fit.

``python examples/posteriors/quasi_random.py`` fits programs of two and three layers with one and with two columns in
between to a step, and prints the variance of independent estimates, relative to that of ``dgp.ELBO(S)``: of the bound,
and of its gradient by all parameters, summed. Below one is better; the cost of a step is the same.

Source: Cranley and Patterson (1976) for the shifts; Buchholz et al. (2018) for variational inference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.scipy.special import ndtri
from numpyro.infer import SVI, elbo
from numpyro.primitives import Messenger
from scipy.stats.qmc import Sobol

import numpyro_dgp as dgp


class EvenlyOverParticles(Messenger):
    """Draws the independent Gaussian numbers of single rows for one particle of several.

    Args:
        fn: a guide.
        key: of the shifts, the same for all particles.
        particle: its number s.
        num_particles: S, a power of two.
    """

    def __init__(self, fn: Callable[..., Any], key: jax.Array, particle: Any, num_particles: int) -> None:
        super().__init__(fn)
        self.key, self.particle, self.num_particles = key, particle, num_particles

    def __enter__(self) -> Any:
        self.used = 0  # dimensions of the sequence
        return super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        fn = msg["fn"]
        if msg["type"] != "sample" or msg["is_observed"] or msg["value"] is not None or not msg["cond_indep_stack"]:
            return
        if not isinstance(getattr(fn, "base_dist", fn), dist.Normal | dgp.extend.FunctionValues):
            return
        columns = int(np.prod(fn.event_shape))
        sequence = Sobol(self.used + columns, scramble=False).random(self.num_particles)[:, self.used :]
        t = jnp.asarray(sequence, jnp.result_type(float))[self.particle].reshape(fn.event_shape)
        u = jax.random.uniform(jax.random.fold_in(self.key, self.used), fn.shape())
        small = jnp.finfo(u.dtype).eps
        z = ndtri(jnp.clip((t + u) % 1, small, 1 - small))  # the inverse of Phi
        msg["value"] = fn.mean + jnp.sqrt(fn.variance) * z
        self.used += columns


class EvenELBO(elbo.ELBO):
    """``dgp.ELBO(num_particles)`` with quasi-random numbers, for guides with one draw of a latent in a particle.

    All else that is drawn, such as a minibatch, is the same in all particles.
    """

    def loss_with_mutable_state(
        self, rng_key: Any, param_map: Any, model: Any, guide: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        key, shift_key = jax.random.split(rng_key)

        def particle(number: jax.Array) -> jax.Array:
            even = EvenlyOverParticles(guide, shift_key, number, self.num_particles)
            return dgp.ELBO().loss(key, param_map, model, even, *args, **kwargs)

        losses = self.vectorize_particles_fn(particle, jnp.arange(self.num_particles))
        return {"loss": losses.mean(), "mutable_state": None}


def make_model(X: jax.Array, depth: int, width: int) -> Callable[..., None]:
    """A deep GP with layers of ``width`` columns between."""
    starts = dgp.initial.layers(X, [width] * (depth - 1), 15)

    def model(X: Any, y: Any = None) -> None:
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        h = X
        for i, start in enumerate(starts):
            last = i == depth - 1
            kernel, points = dgp.kernels.RBF(1.0, start.lengthscale), dgp.Points(start.Z)
            f = dgp.gp(f"f{i}", kernel, points, outputs=None if last else width, mean=start.mean)
            with numpyro.plate("data", len(X)):
                if last:
                    numpyro.sample("y", dgp.Likelihood(f(h), lambda v: dist.Normal(v, noise)), obs=y)
                else:
                    h = numpyro.sample(f"h{i}", f(h))

    return model


def variances(objective: Any, params: Any, model: Any, guide: Any, data: Any, repeats: int) -> np.ndarray:
    """Of the bound, and of its gradient summed over parameters."""

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(lambda p: objective.loss(key, p, model, guide, *data))(params)
        return value, jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(gradient)])

    values, gradients = jax.lax.map(one, jax.random.split(jax.random.key(5), repeats))
    return np.array([values.var(), gradients.var(0).sum()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.particles, options.steps, options.repeats = [2], 3, 4
    rng = np.random.default_rng(0)
    x = jnp.array(np.sort(rng.uniform(-1, 1, 60)))
    data = jnp.stack([x, x**2], 1), jnp.sign(x) + 0.1 * jnp.array(rng.normal(size=60))
    print("| layers | columns | of | " + " | ".join(f"S = {s}" for s in options.particles) + " |")
    print("|---" * (3 + len(options.particles)) + "|")
    for depth, width in ((2, 1), (2, 2), (3, 1), (3, 2)):
        model = make_model(data[0], depth, width)
        guide = dgp.guides.InducingPoint(model)
        svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
        params = dgp.fit(svi, jax.random.key(0), options.steps, *data, progress_bar=False).params
        ratios = []
        for number in options.particles:
            both = (
                variances(o, params, model, guide, data, options.repeats) for o in (EvenELBO(number), dgp.ELBO(number))
            )
            even, plain = both
            ratios.append(even / plain)
        for name, row in zip(("bound", "gradient"), zip(*ratios, strict=True), strict=True):
            print(f"| {depth} | {width} | {name} | " + " | ".join(f"{r:.2f}" for r in row) + " |", flush=True)


if __name__ == "__main__":
    main()
