"""What ``guide_table.py`` says of a posterior: predictions of test rows, k-hat, size; and the reference by NUTS."""

from __future__ import annotations

import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from implementations.guide_programs import Problem, program
from numpyro.infer import MCMC, NUTS

import numpyro_dgp as dgp
from numpyro_dgp import guides as G  # noqa: N812
from numpyro_dgp.diagnostics import coverage, khat, pit, to_arviz


def score(posterior: dgp.Posterior, p: Problem, num: int = 500) -> dict[str, float]:
    """Mean log density of test rows with its standard error over rows, their continuous ranked probability score (of
    labels: the Brier score) and the coverage of central intervals of 90 per cent."""
    keys = jax.random.split(jax.random.key(5), 4)
    density = np.asarray(posterior.using(num_samples=num).log_density(keys[0], p.y_test, p.X_test))
    found = {"density": float(density.mean()), "density_error": float(density.std() / math.sqrt(len(density)))}
    draws = posterior.using(num_samples=num).sample(keys[1], p.X_test)
    found["crps"] = float(crps(np.asarray(draws, float), np.asarray(p.y_test, float)))
    if p.kind != "labels":
        found["coverage"] = float(coverage(pit(draws, p.y_test, keys[2]), [0.9]).share[0])
    return found


def crps(draws: np.ndarray, y: np.ndarray) -> np.floating[Any]:
    r"""Mean of :math:`E|Y_n - y_n| - \tfrac12 E|Y_n - Y_n'|` over rows, without bias from independent draws (S, N)."""
    S = len(draws)
    ranks = 2 * np.arange(1, S + 1)[:, None] - S - 1
    pairs = (ranks * np.sort(draws, 0)).sum(0) / (S * (S - 1))
    return np.mean(np.abs(draws - y).mean(0) - pairs)


def describe(posterior: dgp.Posterior, p: Problem) -> dict[str, float]:
    """Pareto's k-hat of what all rows share, on training rows, and the number of parameters."""
    tree = to_arviz(posterior, jax.random.key(7), p.X, p.y, num_samples=500)
    return {"khat": khat(tree), "parameters": sum(int(np.size(leaf)) for leaf in posterior.params.values())}


def from_prior(p: Problem) -> dict[str, jax.Array]:
    """Parameters at which the guide of inducing points is the prior, which favours none of the guides."""
    found = {}
    if p.kind == "latent":
        found |= {"w_auto_loc": jnp.zeros((len(p.X), 1)), "w_auto_scale": jnp.ones((len(p.X), 1))}
    for i, layer in enumerate(p.layers):
        shape = (len(layer.Z),) if layer.outputs is None else (layer.outputs, len(layer.Z))
        found[f"f{i}_auto_loc"] = jnp.zeros(shape)
        found[f"f{i}_auto_scale_tril"] = jnp.broadcast_to(jnp.eye(shape[-1]), (*shape, shape[-1]))
    return found


def reference(p: Problem, fixed: dict[str, Any] | None, draws: int, temperatures: int) -> dict[str, Any]:
    """NUTS, and for fixed hyperparameters the evidence from below and above."""
    model = program(p, fixed)
    began = time.perf_counter()
    kernel = NUTS(dgp.for_mcmc(model), target_accept_prob=0.9, max_tree_depth=8)
    mcmc = MCMC(kernel, num_warmup=draws, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(3), p.X, p.y)
    samples = mcmc.get_samples()
    found: dict[str, Any] = {"divergences": int(mcmc.get_extra_fields()["diverging"].sum())}
    found |= score(dgp.Posterior(model, samples=samples), p, min(500, draws))
    if fixed is None:
        quantiles = {n: np.quantile(samples[n], [0.025, 0.5, 0.975], axis=0) for n in p.hyperparameters()}
        found["quantiles"] = {n: q.tolist() for n, q in quantiles.items()}
    else:
        estimate = dgp.diagnostics.evidence(
            dgp.Posterior(model, G.InducingPoint(model), from_prior(p)), jax.random.key(0), p.X, p.y,
            samples=samples, num_temperatures=temperatures,
        )  # fmt: skip
        up, down = estimate.log_weights, -estimate.reverse_log_weights
        found |= {
            "lower": float(up.mean()),
            "lower_error": float(up.std() / math.sqrt(len(up))),
            "evidence": estimate.lower,
            "upper": float(down.mean()),
            "upper_error": float(down.std() / math.sqrt(len(down))),
            "evidence_down": estimate.upper,
        }
    return found | {"seconds": time.perf_counter() - began}
