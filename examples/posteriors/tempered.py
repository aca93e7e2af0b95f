r"""Tempered training (KL warm-up): divergences that count little at first.

.. math:: \mathcal L_t = \sum_n E_q \log p(y_n \mid f(h_n)) - \beta_t \sum_\ell \mathrm{KL}[q(v^\ell) \,\|\, p(v^\ell)]

With :math:`\beta_t` that rises to one, layers find a use before their divergence prices them out, and the fit ends with
the bound itself. Losses of steps with another temperature are no bounds.

The sum of the divergences is the negative bound of the program whose observations count nothing, so that both parts of
the objective come from ``dgp.ELBO()``. The temperature is an argument of each step.

``python examples/posteriors/tempered.py`` fits two layers to a step from several starts, with warm-up and without, and
prints the bounds at the end.

Source: Sonderby et al. (2016), section 2.3.
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
from numpyro.infer import SVI, elbo
from numpyro.primitives import Messenger

import numpyro_dgp as dgp


class WithoutObservations(Messenger):
    """A program whose observations count nothing, so that its negative bound is the sum of the divergences."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["fn"] = msg["fn"].mask(False)


class TemperedELBO(elbo.ELBO):
    """In place of ``dgp.ELBO(num_particles)``; ``svi.update(state, X, y, temperature=0.1)`` is a step."""

    def loss_with_mutable_state(
        self, rng_key: Any, param_map: Any, model: Any, guide: Any, *args: Any, temperature: Any = 1.0, **kwargs: Any
    ) -> dict[str, Any]:
        objective = dgp.ELBO(self.num_particles)
        loss = objective.loss(rng_key, param_map, model, guide, *args, **kwargs)  # - E log p + KL
        divergence = objective.loss(rng_key, param_map, WithoutObservations(model), guide, *args, **kwargs)  # KL
        return {"loss": loss + (temperature - 1) * divergence, "mutable_state": None}  # - E log p + beta KL


def fit(svi: SVI, key: jax.Array, steps: int, schedule: Callable[[Any], Any], *data: Any, **init: Any) -> Any:
    """State and losses of a fit whose temperature follows a schedule, such as ``optax.linear_schedule(0, 1, 500)``."""

    def step(state: Any, number: jax.Array) -> Any:
        return svi.update(state, *data, temperature=schedule(number))

    return jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(steps)))(svi.init(key, *data, **init))


def deep(X: Any, y: Any = None) -> None:
    """Two layers with one column between them."""
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    Z = jnp.linspace(-1, 1, 12)[:, None]
    f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.5), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 0.5), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds = 5, 1
    x = jnp.linspace(-1, 1, 60)[:, None]
    y = jnp.sign(x[:, 0]) + 0.1 * jax.random.normal(jax.random.key(9), (60,))
    guide = dgp.guides.InducingPoint(deep)
    schedules: dict[str, Callable[[Any], Any]] = {
        "`dgp.ELBO()`": lambda step: 1.0,
        "warm-up over a quarter": optax.linear_schedule(0.0, 1.0, options.steps // 4),
        "warm-up over a half": optax.linear_schedule(0.0, 1.0, options.steps // 2),
    }
    print("| fit | bound at the end, by start |\n|---|---|")
    for name, schedule in schedules.items():
        bounds = []
        for seed in range(options.seeds):
            svi = SVI(deep, guide, optax.adam(optax.cosine_decay_schedule(0.02, options.steps)), TemperedELBO())
            state, _ = fit(svi, jax.random.key(seed), options.steps, schedule, x, y)
            final = jax.jit(lambda params: dgp.ELBO(400).loss(jax.random.key(0), params, deep, guide, x, y))
            bounds.append(-float(final(svi.get_params(state))))
        print(f"| {name} | " + ", ".join(f"{value:.1f}" for value in np.sort(bounds)) + " |", flush=True)


if __name__ == "__main__":
    main()
