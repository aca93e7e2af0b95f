"""One layer with GPJax's whitened variational Gaussian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from implementations.training import RATE


def build(X: np.ndarray, y: np.ndarray, Z: np.ndarray, num_layers: int, dtype: str) -> Callable[[], float]:
    """A function that does one Adam step on the minibatch (X, y) and returns the loss before it."""
    if num_layers != 1:
        raise ValueError(f"gpjax: expected one layer, got {num_layers}")
    jax.config.update("jax_enable_x64", dtype == "float64")
    kernel = gpx.kernels.RBF(lengthscale=jnp.full(X.shape[1], 2.0, dtype), variance=jnp.asarray(1.0, dtype))
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=kernel)
    model = prior * gpx.likelihoods.Gaussian(obs_stddev=jnp.asarray(0.1, dtype))
    q = gpx.variational_families.WhitenedVariationalGaussian(model=model, inducing_inputs=jnp.asarray(Z, dtype))
    adam = optax.adam(RATE)
    state = [q, adam.init(eqx.filter(q, eqx.is_array))]

    @eqx.filter_jit
    def update(q: Any, memory: Any, data: Any) -> Any:
        loss, gradient = eqx.filter_value_and_grad(lambda q: -gpx.objectives.elbo(q, data))(q)
        change, memory = adam.update(gradient, memory, eqx.filter(q, eqx.is_array))
        return eqx.apply_updates(q, change), memory, loss

    data = gpx.Dataset(X=jnp.asarray(X, dtype), y=jnp.asarray(y[:, None], dtype))

    def step() -> float:
        state[0], state[1], loss = jax.block_until_ready(update(*state, data))
        return float(loss)

    return step
