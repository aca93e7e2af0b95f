"""One training step with numpyro_dgp."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints
from numpyro.infer import SVI

import numpyro_dgp as dgp


def make_model(Z: np.ndarray, width: int, num_layers: int, dtype: str) -> Callable[..., None]:
    """RBF layers with identity means, everything learned."""

    def model(X: jax.Array, y: jax.Array) -> None:
        def positive(name: str, value: float, shape: tuple[int, ...] = ()) -> jax.Array:
            return numpyro.param(name, jnp.full(shape, value, dtype), constraint=constraints.positive)

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
                    mean=None if last else dgp.means.Identity(),
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
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    return svi, (jnp.asarray(X, dtype), jnp.asarray(y, dtype))


def build(X: np.ndarray, y: np.ndarray, Z: np.ndarray, num_layers: int, dtype: str) -> Callable[[], float]:
    """A function that does one Adam step on the minibatch (X, y) and returns the loss before it."""
    jax.config.update("jax_enable_x64", dtype == "float64")
    svi, data = make(X, y, Z, num_layers, dtype)
    state = [svi.init(jax.random.key(0), *data)]
    update = jax.jit(svi.update)

    def step() -> float:
        state[0], loss = update(state[0], *data)
        return float(loss)

    return step
