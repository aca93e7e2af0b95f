"""A program to sample, what is identified in it, and scores of draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from numpyro import handlers

import numpyro_dgp as dgp

Values: TypeAlias = dict[str, jax.Array]
SCORED = 500  # draws, evenly spaced over all chains


class Target(NamedTuple):
    """A program with its data.

    Args:
        model: the program.
        data: its arguments.
        hyperparameters: positive ones, compared by their logarithms.
        function: values of the function at test inputs, from the values of the sites: what reflections of hidden
            layers leave alone.
        score: from draws of the sites and a key, scores of test rows.
        gaussian: layers and values that have a Gaussian prior, for the blocks of ``dgp.mcmc.Gibbs``.
        start: values that chains start at (anywhere if empty); ``None`` for those of a fitted guide.
        dense: the same data under a program of NumPyro alone.
        exchangeable: hyperparameters with a number per hidden column. Columns can be exchanged, so that only the sorted
            numbers are identified.
    """

    model: Callable[..., Any]
    data: tuple[jax.Array, ...]
    hyperparameters: tuple[str, ...]
    function: Callable[[Values], jax.Array]
    score: Callable[[Values, jax.Array], dict[str, float]]
    gaussian: tuple[str, ...] = ()
    start: Values | None = None
    dense: Target | None = None
    exchangeable: tuple[str, ...] = ()

    def logarithms(self, samples: Values) -> dict[str, np.ndarray]:
        """Of the hyperparameters, those that are exchangeable in their order."""
        logs = {name: np.log(samples[name]) for name in self.hyperparameters}
        return {name: np.sort(v, axis=-1) if name in self.exchangeable else v for name, v in logs.items()}

    def thinned(self, samples: Values) -> Values:
        num = len(samples[self.hyperparameters[0]])
        rows = np.linspace(0, num - 1, min(num, SCORED)).astype(int)
        return {name: values[rows] for name, values in samples.items()}


def mean_at(model: Callable[..., Any], X: jax.Array) -> Callable[[Values], jax.Array]:
    """The mean of y at X through the means of the hidden values there."""

    def mean_of_hidden(site: dict[str, Any]) -> Any:
        return site["fn"].mean if site["type"] == "sample" and site["name"].startswith("h") else None

    def function(values: Values) -> jax.Array:
        shared = {name: value for name, value in values.items() if not name.startswith("h")}
        given = handlers.substitute(handlers.seed(model, 0), data=shared)
        trace = handlers.trace(handlers.substitute(given, substitute_fn=mean_of_hidden)).get_trace(X)
        return trace["y"]["fn"].mean

    return function


def posterior_scores(
    model: Callable[..., Any], test: tuple[jax.Array, jax.Array], samples: Values, key: jax.Array
) -> dict[str, float]:
    """Scores of ``dgp.Posterior`` at test inputs and outputs."""
    posterior = dgp.Posterior(model, samples=samples)
    density_key, moment_key = jax.random.split(key)
    num = len(next(iter(samples.values())))
    density = posterior.using(num_samples=num).log_density(density_key, test[1], test[0])
    found = posterior.using(num_samples=num).predict(moment_key, test[0])
    return _scores(np.asarray(density), found.mean, found.variance, test[1])


def mixture_scores(means: jax.Array, variances: jax.Array, y: jax.Array) -> dict[str, float]:
    """Scores of a mixture of normals with these moments (S, N)."""
    log_densities = norm.logpdf(y, means, jnp.sqrt(variances))
    density = jax.nn.logsumexp(log_densities, axis=0) - math.log(len(means))
    return _scores(np.asarray(density), means.mean(0), variances.mean(0) + means.var(0), y)


def _scores(density: np.ndarray, mean: jax.Array, variance: jax.Array, y: jax.Array) -> dict[str, float]:
    """Log density of test rows and its standard error over rows, root mean squared error, and the CRPS of the normal
    distribution with the predicted mean and variance."""
    deviation = jnp.sqrt(variance)
    z = (y - mean) / deviation
    crps = deviation * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    return {
        "density": float(density.mean()),
        "density_error": float(density.std() / math.sqrt(len(density))),
        "rmse": float(jnp.sqrt(jnp.square(y - mean).mean())),
        "crps": float(crps.mean()),
    }
