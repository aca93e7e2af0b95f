r"""The predictive density of the training data, regularised: an objective that is no bound of the evidence.

.. math:: \mathcal{O} = \sum_n \log \frac1S \sum_{s=1}^S E_{q(f(h_n^{(s)}))}\, p(y_n \mid f(h_n^{(s)}))
          - \beta \sum_\ell \mathrm{KL}[q(v^\ell) \,\|\, p(v^\ell)]

``dgp.ELBO`` has the expectation outside of the logarithm. Here it is inside: the program is fitted by the density that
it will predict with, and the posterior variance of the function becomes a learned variance of y that depends on the
input. So q is a part of the predictor, and not a posterior: its bound, its evidence and its k-hat say nothing, more
data do not make it narrower in the way of Bayes' rule, and beta has to be chosen on data that were held out.

With one layer there is nothing to draw. With several the logarithm of an average over S draws is biased downwards, less
with more of them.

``python examples/posteriors/predictive_objective.py`` fits one layer to data whose noise grows with the input, by both
objectives, and beside them a program that has this noise, by ``dgp.ELBO()``.

Source: Jankowiak et al. (2020a), section 3.2, for one layer; Jankowiak et al. (2020b), section 3, for several, with
quadrature with learned nodes in place of the draws.
"""

from __future__ import annotations

import argparse
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


class PredictiveObjective(elbo.ELBO):
    """In place of ``dgp.ELBO()``, for programs of (X, y) in one observed site, all rows at once.

    Guides with a posterior of its own for every row (``MeanField``) have one that new rows do not have: take
    ``dgp.guides.InducingPoint``.

    Args:
        num_particles: the number of draws, S.
        regularisation: beta.
    """

    def __init__(self, num_particles: int = 1, regularisation: float = 1.0) -> None:
        super().__init__(num_particles)
        self.regularisation = regularisation

    def loss_with_mutable_state(
        self, rng_key: Any, param_map: Any, model: Any, guide: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        *inputs, y = args
        draw_key, other_key = jax.random.split(rng_key)
        posterior = dgp.Posterior(model, guide, param_map)
        # log 1/S sum_s E p(y_n | f(h_n^(s)))
        density = posterior.using(num_samples=self.num_particles).log_density(draw_key, y, *inputs, **kwargs)
        # sum_l KL[q(v^l) || p(v^l)]
        divergence = dgp.ELBO().loss(other_key, param_map, WithoutObservations(model), guide, *args, **kwargs)
        return {"loss": self.regularisation * divergence - density.sum(), "mutable_state": None}


Z = jnp.linspace(-1, 1, 10)[:, None]


def constant_noise(X: Any, y: Any = None) -> None:
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    f = dgp.gp("f", dgp.kernels.RBF(lengthscale=0.5), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)


def noise_function(X: Any, y: Any = None) -> None:
    """The logarithm of the noise is a function too."""
    f, g = (dgp.gp(name, dgp.kernels.RBF(lengthscale=0.5), dgp.Points(Z)) for name in "fg")
    with numpyro.plate("data", len(X)):
        likelihood = dgp.Likelihood((f(X), g(X)), lambda v, w: dist.Normal(v, jnp.exp(w - 2)))
        numpyro.sample("y", likelihood, obs=y)


def make_data(num: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """A sine with noise of 0.05 on the left and of 0.45 on the right."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(-1, 1, num))
    y = np.sin(3 * x) + (0.05 + 0.4 * (x > 0)) * rng.normal(size=num)
    return jnp.asarray(x[:, None], jnp.float32), jnp.asarray(y, jnp.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds = 5, 1
    rows: dict[str, Any] = {
        "`dgp.ELBO()`": (constant_noise, dgp.ELBO()),
        "`PredictiveObjective()`": (constant_noise, PredictiveObjective()),
        "`PredictiveObjective(regularisation=0.1)`": (constant_noise, PredictiveObjective(regularisation=0.1)),
        "`dgp.ELBO()` of a program with this noise": (noise_function, dgp.ELBO()),
    }
    print("| fit | test density | noise found at -0.5 | at 0.5 |\n|---|---|---|---|")
    for name, (model, objective) in rows.items():
        found = []
        for seed in range(options.seeds):
            data = make_data(80, seed)
            guide = dgp.guides.InducingPoint(model)
            svi = SVI(model, guide, optax.adam(0.02), objective)
            params = dgp.fit(svi, jax.random.key(seed), options.steps, *data, progress_bar=False).params
            posterior = dgp.Posterior(model, guide, params)
            X, y = make_data(2000, 100 + seed)
            density = posterior.using(num_samples=100).log_density(jax.random.key(1), y, X).mean()
            spread = posterior.predict(jax.random.key(2), jnp.array([[-0.5], [0.5]])).variance ** 0.5
            found.append([density, *spread])
        print(f"| {name} | " + " | ".join(f"{v:.2f}" for v in np.mean(found, 0)) + " |", flush=True)


if __name__ == "__main__":
    main()
