"""The guides of ``guide_table.py`` and how each is fitted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from implementations.guide_programs import Problem, program
from implementations.guide_scores import describe, score
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp import guides as G  # noqa: N812
from numpyro_dgp.math.whitening import inverse_cholesky
from numpyro_dgp.optim import NaturalGradient, log_linear, minimize

GUIDES: dict[str, Callable[[Any], G.Guide]] = {
    "InducingPoint": G.InducingPoint,
    "InducingPoint, Diagonal": lambda m: G.InducingPoint(m, inducing=G.Diagonal()),
    "GivenInducing": lambda m: per_layer(m, G.GivenInducing()),
    "GivenInducing, free": lambda m: per_layer(m, G.GivenInducing("free")),
    "GivenInducing, rank 3": lambda m: per_layer(m, G.GivenInducing(3)),
    "JointOutputs": lambda m: per_layer(m, G.JointOutputs()),
    "Markov, free": G.Markov,  # by its closed form
    "Markov, free, drawn": lambda m: markov(m, G.GivenInducing("free")),
    "Markov, free, 16 draws": lambda m: markov(m, G.GivenInducing("free")),
    "GivenBelow": lambda m: per_layer(m, G.GivenBelow()),
    "MeanField, Full": lambda m: G.MeanField(m, inducing=G.Full()),
    "MeanField": G.MeanField,
    "Collapsed": G.Collapsed,
    "Collapsed, GivenInducing": lambda m: G.Collapsed(m, hidden=G.GivenInducing()),
    "Collapsed, marginal": lambda m: G.Collapsed(m, hidden_density="marginal"),
    "Collapsed, GivenInducing, marginal": lambda m: G.Collapsed(m, hidden=G.GivenInducing(), hidden_density="marginal"),
    "nested": G.Nested,
    "latent noise, VI": G.InducingPoint,
    "latent noise, IW 10": lambda m: G.ImportanceWeighted(m, num_samples=10),
}
# Their q(v) is no Gaussian with parameters of its own: by Adam alone.
BY_ADAM: dict[str, Callable[[Any], G.Guide]] = {
    "InducingPoint, Adam": G.InducingPoint,
    "InducingPoint, LowRank 5": lambda m: G.InducingPoint(m, inducing=G.LowRank(5)),
    "InducingPoint, mixture of 2": lambda m: G.InducingPoint(m, sites={"f0": G.MixtureOfGaussians(2)}),
    "InducingPoint, flow": lambda m: G.InducingPoint(m, inducing=G.Flow()),
    "GlobalInducing": lambda m: G.InducingPoint(m, inducing=G.GlobalInducing(20)),
    "GlobalInducing, 16 draws": lambda m: G.InducingPoint(m, inducing=G.GlobalInducing(20)),
    "GlobalInducing and GivenInducing": lambda m: G.InducingPoint(
        m, inducing=G.GlobalInducing(20), sites={"h0": G.GivenInducing()}
    ),
    "GlobalInducing and GivenInducing, 16 draws": lambda m: G.InducingPoint(
        m, inducing=G.GlobalInducing(20), sites={"h0": G.GivenInducing()}
    ),
    "GivenInducing, Adam": lambda m: per_layer(m, G.GivenInducing()),
    "GivenInducing, mixture of 2": lambda m: G.MeanField(
        m, inducing=G.Full(), hidden=G.GivenInducing(), sites={"f0": G.MixtureOfGaussians(2)}
    ),
    "GivenInducing, flow": lambda m: G.MeanField(m, inducing=G.Flow(), hidden=G.GivenInducing()),
}
GUIDES |= BY_ADAM


def per_layer(model: Callable[..., None], rule: dgp.extend.Rule) -> G.Guide:
    """``rule`` for every hidden layer, a full Gaussian for every q(v)."""
    return G.MeanField(model, inducing=G.Full(), hidden=rule)


def markov(model: Callable[..., None], rule: dgp.extend.Rule) -> G.Guide:
    """``rule`` for every hidden layer, and a q(v) that follows the v of the layer below."""
    return G.MeanField(model, inducing=G.MarkovInducing(), hidden=rule, sites={"f0": G.Full()})


def starts(svi: SVI, p: Problem, num: int) -> Any:
    """Initial states, stacked: the default one, and others with inner functions and hidden values moved at random.

    Free weights of inducing values begin at zero, which is mean field; in the last of the states they begin at the
    model's.
    """
    states, base = [], svi.get_params(svi.init(jax.random.key(0), p.X, p.y))
    for k in range(num):
        rng, moved = np.random.default_rng(k), {}
        for name, value in base.items():
            inner = name.startswith("f") and name.endswith("auto_loc") and value.ndim == 2
            size = 0.5 if inner else 0.1 if name.endswith(("auto_loc", "auto_shift")) and name.startswith("h") else 0.0
            moved[name] = value + (k > 0) * size * rng.normal(size=value.shape)
            if k == num - 1 and name.endswith("auto_weights") and value.shape[-1] == len(p.layers[0].Z):
                moved[name] = jnp.broadcast_to(own_weights(p, int(name[1]), value.ndim), value.shape)
        states.append(svi.init(jax.random.key(k), p.X, p.y, init_params=moved))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def own_weights(p: Problem, i: int, ndim: int) -> jax.Array:
    """The model's weights (N, 1, M) of whitened inducing values at unit kernels, or diagonal ones (N, P, P, M)."""
    layer, x = p.layers[i], p.X
    for below in p.layers[:i]:
        x = below.mean(x)
    kernel = dgp.kernels.RBF(1.0, jnp.sqrt(1.0 * x.shape[1]))
    A = kernel(x, layer.Z) @ inverse_cholesky(kernel.gram(layer.Z)).T
    return A[:, None] if ndim == 3 else A[:, None, None] * jnp.eye(layer.outputs)[:, :, None]


def begun_at(svi: SVI, p: Problem, fits: list[dict[str, jax.Array]]) -> Any:
    """Initial states, stacked, at the parameters of other fits where a guide has them."""
    states = [svi.init(jax.random.key(k), p.X, p.y, init_params=dict(params)) for k, params in enumerate(fits)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def by_steps(svi: SVI, p: Problem, states: Any, steps: int) -> list[dict[str, jax.Array]]:
    """Parameters after ``steps`` updates from every state, all at once."""

    @jax.jit
    def train(states: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, s: jax.vmap(lambda t: svi.update(t, p.X, p.y)[0])(s), states)

    found = jax.vmap(svi.get_params)(train(states))
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


def by_quasi_newton(svi: SVI, p: Problem, states: Any, steps: int) -> list[dict[str, jax.Array]]:
    found = jax.vmap(svi.get_params)(states)
    params = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    run = partial(minimize, svi, jax.random.key(0), p.X, p.y, max_steps=steps, progress_bar=False)
    return [run(init_params=start).params for start in params]


def fit_markov(
    model: Callable[..., None], p: Problem, steps: int, num: int
) -> tuple[list[dict[str, jax.Array]], list[dict[str, jax.Array]]]:
    """q(u | u below) and q(h | u) by L-BFGS from the optimum without the dependence of u on u; and what the same
    optimiser reaches from there without it, in as many steps."""
    apart, coupled = (
        SVI(model, guide, optax.sgd(0.0), dgp.ELBO()) for guide in (G.Markov(model, inducing=G.Full()), G.Markov(model))
    )
    begun = by_quasi_newton(apart, p, starts(apart, p, num), steps)
    return tuple(by_quasi_newton(svi, p, begun_at(svi, p, begun), steps) for svi in (coupled, apart))


def fit(p: Problem, name: str, fixed: dict[str, Any] | None, steps: int, num: int) -> dict[str, Any]:
    """Bounds of every start with their standard errors; k-hat, size and scores on test rows of the best one."""
    model = program(p, fixed, latent=name.startswith("latent"))
    guide = GUIDES[name](model)
    began, apart = time.perf_counter(), {}
    if isinstance(guide, G.Collapsed | G.Markov | G.Nested):  # in closed form
        svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
        exact = lambda q, guide=guide: -float(svi.loss.loss(jax.random.key(0), q, model, guide, p.X, p.y))  # noqa: E731
        if name == "Markov, free":
            params, without = fit_markov(model, p, steps, num)
            apart = {"apart": [exact(q, G.Markov(model, inducing=G.Full())) for q in without]}
        else:
            params = by_quasi_newton(svi, p, starts(svi, p, num), steps)
        bounds, errors = [exact(q) for q in params], [0.0] * num
    else:
        last = steps // 4  # the size of natural steps is held, then falls
        gamma = optax.join_schedules([log_linear(1e-3, 0.1, 50), log_linear(0.1, 1e-3, last)], [steps - last])
        rate = optax.cosine_decay_schedule(0.03, steps)
        loss = dgp.ELBO(16 if name.endswith("16 draws") else 1)
        adam = optax.adam(rate)
        svi = SVI(model, guide, adam if name in BY_ADAM else NaturalGradient(guide, gamma, adam), loss)
        states = starts(svi, p, num)
        if name.endswith("flow"):  # drawn, and noisy: it begins at the fit of its Gaussian
            gaussian = SVI(model, GUIDES[name.replace("flow", "Adam")](model), adam, loss)
            svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.001, steps)), dgp.ELBO(16))
            states = begun_at(svi, p, by_steps(gaussian, p, starts(gaussian, p, num), steps))
        params = by_steps(svi, p, states, steps)

        @jax.jit
        def evaluate(q: dict[str, jax.Array], keys: jax.Array) -> jax.Array:
            bound = lambda key: -dgp.ELBO().loss(key, q, model, guide, p.X, p.y)  # noqa: E731
            return jax.lax.map(bound, keys, batch_size=50)

        draws = [np.asarray(evaluate(q, jax.random.split(jax.random.key(9), 1000))) for q in params]
        bounds, errors = ([float(f(d)) for d in draws] for f in (np.mean, lambda d: np.std(d) / math.sqrt(len(d))))
    chosen = params[int(np.nanargmax(bounds))]
    found = {"bounds": bounds, "errors": errors, "seconds": time.perf_counter() - began} | apart
    posterior = dgp.Posterior(model, guide.on(p.X, p.y), chosen)
    found |= score(posterior, p) | describe(posterior, p)
    if fixed is None:
        found["learned"] = {n: np.asarray(chosen[f"{n}_auto_loc"]).tolist() for n in p.hyperparameters()}
    return found
