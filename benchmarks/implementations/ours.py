"""Training with numpyro_dgp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from implementations.training import RATE, Training
from numpyro.distributions import constraints
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient, log_linear


def make_model(
    Z: np.ndarray,
    width: int,
    num_layers: int,
    dtype: str,
    constraint: constraints.Constraint = constraints.positive,
) -> Callable[..., None]:
    """RBF layers with identity means, everything learned; ``constraint`` is that of positive parameters."""

    def model(X: jax.Array, y: jax.Array | None = None) -> None:
        def positive(name: str, value: float, shape: tuple[int, ...] = ()) -> jax.Array:
            return numpyro.param(name, jnp.full(shape, value, dtype), constraint=constraint)

        noise = positive("noise", 0.1)
        layers = []
        for i in range(num_layers):
            kernel = dgp.kernels.RBF(positive(f"variance{i}", 1.0), positive(f"lengthscale{i}", 2.0, (width,)))
            last = i == num_layers - 1
            layers.append(
                dgp.gp(
                    f"f{i}",
                    kernel,
                    dgp.Points(Z.astype(dtype), learn=True),
                    outputs=None if last else width,
                    mean=None if last else dgp.means.IdentityMean(),
                )
            )
        with numpyro.plate("data", len(X)):
            h = X
            for i, f in enumerate(layers[:-1]):
                h = numpyro.sample(f"h{i}", f(h))
            numpyro.sample("y", dgp.Likelihood(layers[-1](h), lambda v: dist.Normal(v, noise)), obs=y)

    return model


def make(X: np.ndarray, y: np.ndarray, Z: np.ndarray, num_layers: int, dtype: str) -> tuple[SVI, tuple[jax.Array, ...]]:
    """The model with its guide, Adam and objective, and the data to give it."""
    model = make_model(Z, X.shape[1], num_layers, dtype)
    guide = dgp.guides.InducingPoint(model)
    svi = SVI(model, guide, optax.adam(RATE), dgp.ELBO())
    return svi, (jnp.asarray(X, dtype), jnp.asarray(y, dtype))


def build(
    X: np.ndarray, y: np.ndarray, Z: np.ndarray, num_layers: int, dtype: str, steps: int = 1
) -> Callable[[], float]:
    """A function that does Adam steps on the minibatch (X, y), in one compiled call, and returns the first loss."""
    jax.config.update("jax_enable_x64", dtype == "float64")
    svi, data = make(X, y, Z, num_layers, dtype)
    state = [jax.jit(svi.init)(jax.random.key(0), *data)]

    @jax.jit
    def update(state: Any, *data: jax.Array) -> tuple[Any, jax.Array]:
        state, loss = svi.update(state, *data)
        if steps > 1:
            state = jax.lax.fori_loop(1, steps, lambda _, s: svi.update(s, *data)[0], state)
        return state, loss

    def step() -> float:
        state[0], loss = jax.block_until_ready(update(state[0], *data))
        return float(loss)

    return step


def train(
    Z: np.ndarray, num_layers: int, dtype: str, num_data: int, natural: bool = False, softplus: bool = False
) -> Training:
    """The same model on minibatches, by Adam, and with ``natural`` by natural gradients for q(v) of the last layer.

    With ``softplus``, Adam sees the inverse softplus of positive parameters, as in the peers, not their logarithm.
    """
    jax.config.update("jax_enable_x64", dtype == "float64")
    constraint = constraints.softplus_positive if softplus else constraints.positive
    model = dgp.minibatch(make_model(Z, Z.shape[1], num_layers, dtype, constraint), data=num_data)
    guide = dgp.guides.InducingPoint(model)
    adam = optax.adam(RATE)
    optimiser = NaturalGradient(guide, log_linear(1e-4, 0.1, 40), adam) if natural else adam
    svi = SVI(model, guide, optimiser, dgp.ELBO())
    step, states = jax.jit(svi.update), []

    def update(X: Any, y: Any) -> jax.Array:
        data = jnp.asarray(X, dtype), jnp.asarray(y, dtype)
        if not states:
            states.append(jax.jit(svi.init)(jax.random.key(0), *data))
        states[0], loss = step(states[0], *data)
        return loss

    @partial(jax.jit, static_argnums=2)
    def moments(params: dict[str, jax.Array], X: jax.Array, num_draws: int) -> dgp.densities.Mixture:
        return dgp.Posterior(model, guide, params).using(num_samples=num_draws).predict(jax.random.key(1), X)

    def predict(X: np.ndarray, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
        means, variances = moments(svi.get_params(states[0]), jnp.asarray(X, dtype), num_draws)
        return np.asarray(means), np.asarray(variances)

    return Training(update, predict)
