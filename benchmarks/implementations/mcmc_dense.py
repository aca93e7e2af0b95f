"""Deep Gaussian processes written by hand in NumPyro: dense covariances of all rows, Cholesky factors, and no inducing
points. Nothing here is of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from implementations.mcmc_target import Target, Values, mixture_scores
from jax.scipy.linalg import solve_triangular

JITTER = 1e-8
Covariance = Callable[[Values, jax.Array, jax.Array], jax.Array]
Triple = tuple[jax.Array, jax.Array, jax.Array]


class Layer(NamedTuple):
    """A covariance given hyperparameters, a mean function, the number of hidden columns (none for y), and the name of
    the standard deviation of process noise."""

    kernel: Covariance
    mean: Callable[[jax.Array], jax.Array] | None = None
    outputs: int | None = None
    noise: str | None = None

    def mean_at(self, x: jax.Array) -> Any:
        return 0.0 if self.mean is None else self.mean(x)


def squares(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.square(a[:, None] - b[None]).sum(-1)


def rbf(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.exp(-0.5 * squares(a, b))


def matern52(a: jax.Array, b: jax.Array) -> jax.Array:
    r = jnp.sqrt(5.0 * squares(a, b) + 1e-20)
    return (1 + r + r**2 / 3) * jnp.exp(-r)


def root(K: jax.Array, noise: Any = 0.0) -> jax.Array:
    scale = JITTER * jnp.diagonal(K).mean()
    return jnp.linalg.cholesky(K + (scale + noise**2) * jnp.eye(len(K)))


def hidden_root(layer: Layer, values: Values, X: jax.Array) -> jax.Array:
    return root(layer.kernel(values, X, X), values[layer.noise] if layer.noise else 0.0)


def program(
    priors: dict[str, dist.Distribution], layers: list[Layer], noise: Callable[[Values], jax.Array]
) -> Callable[..., None]:
    """Two layers: hidden values are a Cholesky factor times standard normal numbers, and y is given them a Gaussian."""

    def model(X: jax.Array, y: Any = None) -> None:
        values = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
        shape = len(X), layers[0].outputs
        white = numpyro.sample("h_white", dist.Normal(0.0, 1.0).expand(shape).to_event(2))
        h = numpyro.deterministic("h", layers[0].mean_at(X) + hidden_root(layers[0], values, X) @ white)
        factor = root(layers[1].kernel(values, h, h), noise(values))
        numpyro.sample("y", dist.MultivariateNormal(0.0, scale_tril=factor), obs=y)

    return model


def conditional(
    layer: Layer, values: Values, data: tuple[jax.Array, jax.Array, jax.Array], points: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Means and variances at points, given the factor of the covariance of values at inputs."""
    x, observed, factor = data
    weights = solve_triangular(factor, layer.kernel(values, x, points), lower=True)
    mean = layer.mean_at(points) + weights.T @ solve_triangular(factor, observed - layer.mean_at(x), lower=True)
    # Of kernels that are stationary, the variance is the same everywhere.
    return mean, jnp.maximum(layer.kernel(values, points[:1], points[:1])[0, 0] - jnp.square(weights).sum(0), 0.0)


def predicted(
    layers: list[Layer],
    values: Values,
    data: Triple,
    points: jax.Array,
    noise: jax.Array,
    white: jax.Array | float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Moments of y at points, through the means of the hidden values there, or draws by white numbers (points, P)."""
    X, h, y = data
    mean, variance = conditional(layers[0], values, (X, h, hidden_root(layers[0], values, X)), points)
    if layers[0].noise:
        variance = variance + values[layers[0].noise] ** 2
    inner = mean + jnp.sqrt(variance)[:, None] * white
    outer = root(layers[1].kernel(values, h, h), noise)
    mean, variance = conditional(layers[1], values, (h, y, outer), inner)
    return mean, variance + noise**2


def two_layers(
    data: tuple[jax.Array, jax.Array],
    test: tuple[jax.Array, jax.Array],
    priors: dict[str, dist.Distribution],
    layers: list[Layer],
    num: int,
) -> Target:
    """Two layers under Gaussian noise, a hyperparameter."""
    X, y = data

    def moments(values: Values, points: jax.Array, white: Any = 0.0) -> tuple[jax.Array, jax.Array]:
        return predicted(layers, values, (X, values["h"], y), points, values["noise"], white)

    def score(samples: Values, key: jax.Array) -> dict[str, float]:
        keys = jax.random.split(key, len(samples["noise"]))
        shape = len(test[0]), layers[0].outputs
        draw = jax.jit(
            lambda s, k: jax.lax.map(lambda a: moments(a[0], test[0], jax.random.normal(a[1], shape)), (s, k))
        )
        return mixture_scores(*draw(samples, keys), test[1])

    model = program(priors, layers, lambda values: values["noise"])
    return Target(model, data, tuple(priors), lambda values: moments(values, test[0][:num])[0], score)


def latent_variable(
    data: tuple[jax.Array, jax.Array],
    test: tuple[jax.Array, jax.Array],
    priors: dict[str, dist.Distribution],
    pairs: jax.Array,
    moments: Callable[[jax.Array], jax.Array],
) -> Target:
    """A function of an input and a latent variable, with moments of its values at pairs (points, nodes, 2)."""
    X, y = data
    layer = Layer(lambda v, a, b: rbf(a / v["scale"], b / v["scale"]))

    def inputs(values: Values) -> tuple[jax.Array, jax.Array]:
        x = jnp.concatenate([X, values["w"]], 1)
        return x, root(layer.kernel(values, x, x), values["noise"])

    def model(X: jax.Array, y: Any = None) -> None:
        values = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
        values["w"] = numpyro.sample("w", dist.Normal(0.0, 1.0).expand((len(X), 1)).to_event(2))
        numpyro.sample("y", dist.MultivariateNormal(0.0, scale_tril=inputs(values)[1]), obs=y)

    def at(values: Values, points: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, factor = inputs(values)
        return conditional(layer, values, (x, y, factor), points)

    def score(samples: Values, key: jax.Array) -> dict[str, float]:
        def draw(pair: tuple[Values, jax.Array]) -> tuple[jax.Array, jax.Array]:
            w = jax.random.normal(pair[1], (len(test[0]), 1))
            mean, variance = at(pair[0], jnp.concatenate([test[0], w], 1))
            return mean, variance + pair[0]["noise"] ** 2

        keys = jax.random.split(key, len(samples["noise"]))
        return mixture_scores(*jax.jit(lambda s, k: jax.lax.map(draw, (s, k)))(samples, keys), test[1])

    def function(values: Values) -> jax.Array:
        return moments(at(values, pairs.reshape(-1, 2))[0].reshape(pairs.shape[:2]))

    return Target(model, data, tuple(priors), function, score)
