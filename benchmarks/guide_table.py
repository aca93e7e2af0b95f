"""The best bound of every guide on one program: which couplings matter (Chamberlin, 2016, section 4.10).

``python benchmarks/guide_table.py --out FILE.jsonl`` runs on a step and a sum of sinusoids, with ``--data DIRECTORY``
also on yacht and energy (arrays X, y). One line per fit is appended to FILE.jsonl, fits found there are not repeated,
and the tables are printed. Layers have process noise between them, so that every guide applies.

With fixed hyperparameters the bounds of all guides are below one number, the log evidence of the program, and the
distance is the divergence of the guide from the posterior. The evidence lies between two annealed estimates, the upper
one from draws by NUTS; NUTS itself has no bound, and is compared by its log density of test rows. With learned
hyperparameters (a point each, under their priors) a guide also chooses the model that suits it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import scipy.optimize
from implementations.guide_tables import SYNTHETIC, draw, table
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS, SVI

import numpyro_dgp as dgp
from numpyro_dgp import guides as G  # noqa: N812
from numpyro_dgp.algebra.whitening import inverse_cholesky
from numpyro_dgp.bounds.markov_two_layers import HiddenLayer, MarkovLayer, markov_bound
from numpyro_dgp.bounds.nested_compression import NestedLayer, nested_bound
from numpyro_dgp.optim import NaturalGradient, log_linear, minimize

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import regression
import step_function

ROWS = 200  # training rows at most
GUIDES: dict[str, Callable[[Any], G.Guide]] = {
    "InducingPoint": G.InducingPoint,
    "InducingPoint, Diagonal": lambda m: G.InducingPoint(m, inducing=G.Diagonal()),
    "GivenInducing": lambda m: per_layer(m, G.GivenInducing()),
    "GivenInducing, free": lambda m: per_layer(m, G.GivenInducing("free")),
    "GivenInducing, rank 3": lambda m: per_layer(m, G.GivenInducing(3)),
    "JointOutputs": lambda m: per_layer(m, G.JointOutputs()),
    "Markov, free": lambda m: markov(m, G.GivenInducing("free")),  # by its closed form
    "Markov, free, drawn": lambda m: markov(m, G.GivenInducing("free")),
    "Markov, free, 16 draws": lambda m: markov(m, G.GivenInducing("free")),
    "GivenBelow": lambda m: per_layer(m, G.GivenBelow()),
    "MeanField, Full": lambda m: G.MeanField(m, inducing=G.Full()),
    "MeanField": G.MeanField,
    "Collapsed": G.Collapsed,
    "Collapsed, GivenInducing": lambda m: G.Collapsed(m, hidden=G.GivenInducing()),
    "nested": G.InducingPoint,  # its q(v), for predictions
    "latent noise, VI": G.InducingPoint,
    "latent noise, IW 10": lambda m: G.ImportanceWeighted(m, num_samples=10),
}
# Their q(v) is no Gaussian with parameters of its own: by Adam alone.
BY_ADAM: dict[str, Callable[[Any], G.Guide]] = {
    "InducingPoint, Adam": G.InducingPoint,
    "InducingPoint, LowRank 5": lambda m: G.InducingPoint(m, inducing=G.LowRank(5)),
    "InducingPoint, mixture of 2": lambda m: G.InducingPoint(m, sites={"f0": G.MixtureOfGaussians(2)}),
    "InducingPoint, flow": lambda m: G.InducingPoint(m, inducing=G.Flow()),
    "GlobalInducing": lambda m: G.GlobalInducing(m, num_inducing=20),
    "GlobalInducing, 16 draws": lambda m: G.GlobalInducing(m, num_inducing=20),
    "GlobalInducing and GivenInducing": lambda m: G.GlobalInducing(m, num_inducing=20, sites={"h0": G.GivenInducing()}),
    "GlobalInducing and GivenInducing, 16 draws": lambda m: G.GlobalInducing(
        m, num_inducing=20, sites={"h0": G.GivenInducing()}
    ),
    "GivenInducing, Adam": lambda m: per_layer(m, G.GivenInducing()),
    "GivenInducing, mixture of 2": lambda m: G.MeanField(
        m, inducing=G.Full(), hidden=G.GivenInducing(), sites={"f0": G.MixtureOfGaussians(2)}
    ),
    "GivenInducing, flow": lambda m: G.MeanField(m, inducing=G.Flow(), hidden=G.GivenInducing()),
}
GUIDES |= BY_ADAM


class Layer(NamedTuple):
    """Inducing inputs (M, D), mean function and outputs of one layer."""

    Z: jax.Array
    mean: dgp.means.Mean
    outputs: int | None


class Problem(NamedTuple):
    """Training and test rows in standard units, and the layers of the program."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array
    layers: list[Layer]

    def hyperparameters(self) -> dict[str, dist.Distribution]:
        """Priors, by name."""
        found: dict[str, dist.Distribution] = {"noise": dist.LogNormal(math.log(0.1), 1.0)}
        for i, layer in enumerate(self.layers):
            D = layer.Z.shape[1]
            found[f"variance{i}"] = dist.LogNormal(0.0, 1.0)
            found[f"lengthscale{i}"] = dist.LogNormal(0.5 * math.log(D), 0.7).expand([D]).to_event(1)
        return found | {f"process{i}": dist.LogNormal(math.log(0.1), 0.7) for i in range(len(self.layers) - 1)}

    def kernel(self, values: dict[str, Any], i: int) -> dgp.kernels.Kernel:
        return dgp.kernels.RBF(values[f"variance{i}"], values[f"lengthscale{i}"])


def problem(name: str, depth: int, width: int, data: Path | None, num: int, num_inducing: int) -> Problem:
    """The set ``name`` for ``depth`` layers with ``width`` hidden columns.

    The first hidden layer begins as the input, padded with zeros. With more inputs than hidden columns it begins as the
    linear regression of y, then principal directions. Other inducing inputs are a grid, or spread over where hidden
    values are.
    """
    if name in SYNTHETIC:
        split = step_function.make_data(name, num, 0.1, 0)
    else:
        split = regression.split_data(*regression.load(str(data / f"{name}.npz")), 0, "B")
    X, y, X_test, y_test = (jnp.asarray(a, float) for a in split[:4])
    X, y = X[:ROWS], y[:ROWS]
    D, rng = X.shape[1], np.random.default_rng(0)
    if D == 1:
        first, mean = np.linspace(X.min(), X.max(), num_inducing)[:, None], dgp.means.Linear(np.eye(1, width))
    else:
        slopes = np.linalg.lstsq(np.asarray(X), np.asarray(y), rcond=None)[0][:, None]
        W = np.hstack([slopes, dgp.means.principal_directions(X, width - 1)]) if width > 1 else slopes
        first, mean = dgp.initial.kmeans(X, num_inducing), dgp.means.Linear(W / np.std(X @ W, axis=0))
    if width == 1:
        inner = np.linspace(-3, 3, num_inducing)[:, None]
    else:
        inner = dgp.initial.kmeans(1.5 * rng.normal(size=(2000, width)), num_inducing)
    layers = [Layer(jnp.asarray(first), mean, width)]
    layers += [Layer(jnp.asarray(inner), dgp.means.Identity(), width) for _ in range(depth - 2)]
    return Problem(X, y, X_test, y_test, [*layers, Layer(jnp.asarray(inner), dgp.means.Zero(), None)])


def program(p: Problem, fixed: dict[str, Any] | None, latent: bool = False) -> Callable[..., None]:
    """Process noise is part of the hidden layers, or written as a latent variable per datum."""

    def model(X: Any, y: Any = None) -> None:
        values = fixed or {name: numpyro.sample(name, prior) for name, prior in p.hyperparameters().items()}
        functions = [
            dgp.gp(f"f{i}", p.kernel(values, i), dgp.Points(layer.Z), outputs=layer.outputs, mean=layer.mean)
            for i, layer in enumerate(p.layers)
        ]
        with numpyro.plate("data", len(X)):
            x = X
            for i, f in enumerate(functions[:-1]):
                s = values[f"process{i}"]
                if latent:
                    w = numpyro.sample(f"w{i}", dist.Normal(jnp.zeros(f.outputs), 1.0).to_event(1))
                    x = numpyro.sample(f"h{i}", f(x)) + s * w
                else:
                    x = numpyro.sample(f"h{i}", f(x, noise=s))
            numpyro.sample("y", dgp.Likelihood(functions[-1](x), lambda v: dist.Normal(v, values["noise"])), obs=y)

    return model


def per_layer(model: Callable[..., None], rule: G.Rule) -> G.Guide:
    """``rule`` for every hidden layer, a full Gaussian for every q(v)."""
    return G.MeanField(model, inducing=G.Full(), hidden=rule)


def markov(model: Callable[..., None], rule: G.Rule) -> G.Guide:
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


def by_quasi_newton(svi: SVI, p: Problem, num: int, steps: int) -> list[dict[str, jax.Array]]:
    states = starts(svi, p, num)
    params = [svi.get_params(jax.tree.map(lambda a, k=k: a[k], states)) for k in range(num)]
    run = partial(minimize, svi, jax.random.key(0), p.X, p.y, max_steps=steps, progress_bar=False)
    return [run(init_params=start).params for start in params]


def tril(root: jax.Array) -> jax.Array:
    """Triangular roots with a positive diagonal, from matrices of free numbers."""
    return jnp.tril(root, -1) + jnp.exp(jnp.diagonal(root, axis1=-2, axis2=-1))[..., None] * jnp.eye(root.shape[-1])


def lbfgs(slope: Callable[[jax.Array], tuple[jax.Array, jax.Array]], x: np.ndarray, steps: int) -> Any:
    """Minimise a function of a vector that comes with its gradient."""
    objective = lambda x: tuple(np.asarray(a, float) for a in slope(jnp.asarray(x)))  # noqa: E731
    options = {"maxiter": steps, "maxfun": 2 * steps}
    return scipy.optimize.minimize(objective, x, jac=True, method="L-BFGS-B", options=options)


def fit_nested(p: Problem, fixed: dict[str, Any], num: int) -> list[dict[str, jax.Array]]:
    """Nested variational compression by L-BFGS: parameters of q(v) in the names of ``InducingPoint``, and the bound."""
    sizes = [(layer.outputs or 1, len(layer.Z)) for layer in p.layers]

    def layers(free: Any) -> list[NestedLayer]:
        built = []
        for i, (layer, (loc, root)) in enumerate(zip(p.layers, free, strict=True)):
            W = layer.mean.W if isinstance(layer.mean, dgp.means.Linear) else None
            W = jnp.eye(layer.outputs) if isinstance(layer.mean, dgp.means.Identity) else W
            noise = fixed.get(f"process{i}", fixed["noise"])
            built.append(NestedLayer(p.kernel(fixed, i), layer.Z, loc, tril(root), noise, W))
        return built

    def start(k: int) -> Any:
        rng = np.random.default_rng(k)
        scales = [0.01] * (len(sizes) - 1) + [1.0]
        return [
            ((k > 0) * 0.5 * rng.normal(size=size), np.tile(math.log(s) * np.eye(size[1]), (size[0], 1, 1)))
            for size, s in zip(sizes, scales, strict=True)
        ]

    _, unravel = ravel_pytree(start(0))
    loss = jax.jit(jax.value_and_grad(lambda x: -nested_bound(layers(unravel(x)), p.X, p.y[:, None])))
    fits = []
    for k in range(num):
        x = np.asarray(ravel_pytree(start(k))[0])
        found = lbfgs(loss, x, 1500)
        params = {"bound": jnp.asarray(-found.fun)}
        for i, layer in enumerate(layers(unravel(jnp.asarray(found.x)))):
            scalar = p.layers[i].outputs is None
            params[f"f{i}_auto_loc"] = layer.loc[0] if scalar else layer.loc
            params[f"f{i}_auto_scale_tril"] = layer.scale_tril[0] if scalar else layer.scale_tril
        fits.append(params)
    return fits


def fit_markov(p: Problem, fixed: dict[str, Any] | None, num: int) -> list[dict[str, Any]]:
    """q(u | u below) and q(h | u) by L-BFGS: parameters in the names of the guide, the bound, and the bound without the
    dependence of u on u, which the same optimiser reaches from the same start in as many steps."""
    (first, last), width, N = p.layers, p.layers[0].outputs, len(p.X)
    shape, priors = (width, len(first.Z)), {} if fixed else p.hyperparameters()

    def values(free: Any) -> dict[str, Any]:
        return fixed or {n: jnp.exp(free[n]) for n in priors}

    def bound(free: Any) -> jax.Array:
        h, v = values(free), (free["loc0"], tril(free["root0"]))
        T, s = free["weights"], jnp.exp(free["scale"])
        hidden = HiddenLayer(p.kernel(h, 0), first.Z, *v, T, free["shift"], s, h["process0"], first.mean(p.X))
        U, W = free["transition"][None], tril(free["root1"])[None]
        above = MarkovLayer(p.kernel(h, 1), last.Z, U, free["loc1"][None], W, h["noise"])
        return markov_bound(hidden, above, p.X, p.y[:, None]) + sum(q.log_prob(h[n]).sum() for n, q in priors.items())

    def start(k: int) -> dict[str, Any]:
        rng, eye = np.random.default_rng(k), np.eye(shape[1])
        T = jnp.broadcast_to(own_weights(p, 0, 3), (N, *shape)) if k == num - 1 else jnp.zeros((N, *shape))
        shift = first.mean(p.X) + (k > 0) * 0.1 * rng.normal(size=(N, width))
        free = {"loc0": (k > 0) * 0.5 * rng.normal(size=shape), "root0": np.tile(math.log(0.01) * eye, (width, 1, 1))}
        free |= {"weights": T, "shift": shift, "scale": np.full((N, width), math.log(0.1))}
        free |= {"transition": np.zeros((len(last.Z), *shape)), "loc1": np.zeros(len(last.Z)), "root1": 0 * eye}
        medians = {n: jnp.median(q.sample(jax.random.key(0), (1000,)), 0) for n, q in priors.items()}
        return free | {n: jnp.log(m) for n, m in medians.items()}

    _, unravel = ravel_pytree(start(0))

    def loss(x: jax.Array, coupled: jax.Array) -> jax.Array:
        free = unravel(x)
        return -bound(free | {"transition": coupled * free["transition"]})

    slope = jax.jit(jax.value_and_grad(loss))

    def run(x: Any, coupled: float) -> Any:
        return lbfgs(lambda x: slope(x, coupled), x, 1000)

    fits = []
    for k in range(num):
        x = run(np.asarray(ravel_pytree(start(k))[0]), 0.0).x
        apart, found = run(x, 0.0), run(x, 1.0)
        free = unravel(jnp.asarray(found.x))
        params = {"f0_auto_loc": free["loc0"], "f0_auto_scale_tril": tril(free["root0"]), "f1_auto_loc": free["loc1"]}
        params |= {f"{n}_auto_loc": v for n, v in values(free).items() if n in priors}
        params["f1_auto_transition"] = free["transition"].reshape(len(last.Z), -1)
        params["f1_auto_scale_tril"] = tril(free["root1"])
        fits.append(params | {"bound": -found.fun, "apart": -apart.fun})
    return fits


def fit(p: Problem, name: str, fixed: dict[str, Any] | None, steps: int, num: int) -> dict[str, Any]:
    """Bounds of every start with their standard errors, and the best one's density of test rows."""
    model = program(p, fixed, latent=name.startswith("latent"))
    guide = GUIDES[name](model)
    began, apart = time.perf_counter(), {}
    if name == "nested":
        params = fit_nested(p, fixed or {}, num)
        bounds, errors = [float(q.pop("bound")) for q in params], [0.0] * num
    elif name == "Markov, free":
        params = fit_markov(p, fixed, num)
        bounds, errors = [float(q.pop("bound")) for q in params], [0.0] * num
        apart = {"apart": [float(q.pop("apart")) for q in params]}
    elif name.startswith("Collapsed"):
        svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
        params = by_quasi_newton(svi, p, num, steps)
        bounds = [-float(svi.loss.loss(jax.random.key(0), q, model, guide, p.X, p.y)) for q in params]
        errors = [0.0] * num
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
    found |= score(dgp.Posterior(model, guide.on(p.X, p.y), chosen), p)
    if fixed is None:
        found["learned"] = {n: np.asarray(chosen[f"{n}_auto_loc"]).tolist() for n in p.hyperparameters()}
    return found


def score(posterior: dgp.Posterior, p: Problem, num: int = 500) -> dict[str, float]:
    """Mean log density of test rows with its standard error over rows."""
    density = np.asarray(posterior.log_density(jax.random.key(5), p.y_test, p.X_test, num_samples=num))
    return {"density": float(density.mean()), "density_error": float(density.std() / math.sqrt(len(density)))}


def from_prior(p: Problem) -> dict[str, jax.Array]:
    """Parameters at which the guide of inducing points is the prior, which favours none of the guides."""
    found = {}
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
            model, G.InducingPoint(model), from_prior(p), jax.random.key(0), p.X, p.y,
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


def agreed(records: list[dict[str, Any]], case: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of the table where they are fixed: geometric means of what all guides learned, two digits.

    No guide chooses them alone. Once a fit has been made at some values, later ones take the same.
    """
    mine = [r for r in records if case.items() <= r.items()]
    for r in mine:
        if "fixed" in r:
            return {n: jnp.asarray(v) for n, v in r["fixed"].items()}
    learned = [r["learned"] for r in mine if "learned" in r]
    if not learned:
        raise ValueError(f"expected fits with learned hyperparameters of {case} first: run --hyperparameters learned")
    means = {n: np.exp(np.mean([np.log(q[n]) for q in learned], 0)) for n in learned[0]}
    return {n: jnp.asarray(np.vectorize(lambda x: float(f"{x:.2g}"))(v)) for n, v in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="one line of JSON per fit")
    parser.add_argument("--data", type=Path, help="directory of .npz files with X and y")
    parser.add_argument(
        "--sets", nargs="+", help="default: step, sinusoids, and yacht and energy where there is --data"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2, help="hidden columns")
    parser.add_argument("--num", type=int, default=60, help="training rows of the synthetic sets")
    parser.add_argument("--num-inducing", type=int, default=20)
    parser.add_argument("--hyperparameters", nargs="+", choices=("learned", "fixed"), default=["learned", "fixed"])
    parser.add_argument("--guides", nargs="+", choices=[*GUIDES, "NUTS"], default=["NUTS", *GUIDES])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1000, help="of NUTS, after as many to warm up")
    parser.add_argument("--temperatures", type=int, default=4000, help="of the estimates of the evidence")
    parser.add_argument("--print", action="store_true", help="only print the tables of what is there")
    parser.add_argument("--figure", type=Path, help="draw the gaps to the evidence into this file")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)

    def records() -> list[dict[str, Any]]:
        return [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []

    sets = arguments.sets or [*SYNTHETIC, *(["yacht", "energy"] if arguments.data else [])]
    jobs = [(s, h, g) for h in arguments.hyperparameters for s in sets for g in arguments.guides]
    for name, hyperparameters, guide in [] if arguments.print else jobs:
        case = {"set": name, "layers": arguments.layers, "width": arguments.width}
        key = case | {"num_inducing": arguments.num_inducing} | {"hyperparameters": hyperparameters, "guide": guide}
        impossible = {"JointOutputs": arguments.width == 1, "nested": hyperparameters == "learned"}
        impossible["Markov, free"] = arguments.layers != 2
        if impossible.get(guide) or any(key.items() <= r.items() for r in records()):
            continue
        p = problem(name, arguments.layers, arguments.width, arguments.data, arguments.num, arguments.num_inducing)
        fixed = agreed(records(), case) if hyperparameters == "fixed" else None
        if guide == "NUTS":
            found = {"draws": arguments.draws} | reference(p, fixed, arguments.draws, arguments.temperatures)
        else:
            found = {"steps": arguments.steps} | fit(p, guide, fixed, arguments.steps, arguments.starts)
        found = (
            key | ({} if fixed is None else {"fixed": {n: np.asarray(v).tolist() for n, v in fixed.items()}}) | found
        )
        with arguments.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(found, flush=True)
        jax.clear_caches()
    print(table(records(), ("NUTS", *GUIDES)))
    if arguments.figure:
        draw(records(), arguments.figure)


if __name__ == "__main__":
    main()
