"""Natural gradients against Adam, gradient descent and L-BFGS: the experiments of Salimbeni (2020), section 3.4.

``python benchmarks/sources/salimbeni_natural.py --data DIRECTORY`` runs all cases on energy, concrete, bike, kin8nm and
power from DIRECTORY (arrays X, y), scikit-learn's breast cancer set and digits, and a deterministic code; ``--case``
picks some, and ``--digits FILE.npz`` takes larger images, as ``digits.py`` does. It prints one table per case, writes
the curves to ``--out`` and the numbers behind them next to it. Every method takes the same minibatches; compilation
(except that of L-BFGS) and the evaluation of the bound are not counted. ``--smoke`` needs no data and takes a
few steps of one fit of each method, in two of the cases unless ``--case`` names others.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient, log_linear, minimize

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import digits
import regression

NUM_INDUCING = 100
CASES = (("energy", "normal"), ("cancer", "bernoulli"), ("concrete", "student-t"))
RATES = (0.003, 0.01, 0.03, 0.1)
LEVELS, EDGES = 51, np.linspace(-2.0, 2.0, 50)  # of the targets of figure 3.5
LIKELIHOODS: dict[str, Callable[[Any], Callable[[Any], dist.Distribution]]] = {  # the scale, then the function's value
    "normal": lambda s: lambda v: dist.Normal(v, s),
    "student-t": lambda s: lambda v: dist.StudentT(4.0, v, s),
    "beta": lambda s: lambda v: dist.Beta(jax.nn.sigmoid(v) / s**2, jax.nn.sigmoid(-v) / s**2),
    "ordinal": lambda s: lambda v: dist.OrderedLogistic(v / s, EDGES / s),
    "bernoulli": lambda _: lambda v: dist.Bernoulli(logits=v),
    "robust-max": lambda _: dgp.likelihoods.RobustMax,
}
SLOW = (1e-5, 1e-4, 1e-3)  # rates of gradient descent
WITHOUT_SCALE = ("bernoulli", "robust-max")
INITIAL = (("variance", 1.0), ("noise", 0.3))  # of the model of digits
positive = dist.constraints.positive


class Curve(NamedTuple):
    """The bound per datum over a fit, sizes found by a line search, and the mean log density of test rows."""

    steps: list[int]
    seconds: list[float]
    bounds: list[float]
    sizes: list[float] = []
    density: float = math.nan

    def last(self) -> float:
        """Mean of the last five, against the noise of minibatches; minus infinity for a fit that failed."""
        return float(np.nan_to_num(np.mean(self.bounds[-5:]), nan=-math.inf))

    def reaches(self, level: float) -> tuple[float, float]:
        """Seconds and steps until the bound is at least ``level``; infinity where it never is."""
        hits = [(s, n) for n, s, b in zip(self.steps, self.seconds, self.bounds, strict=True) if b >= level]
        return hits[0] if hits else (math.inf, math.inf)


def targets(name: str, data: Path | None) -> tuple[Any, Any, Any]:
    """Inputs and targets of a set in standard units, and its test rows as a pair; without ``data``, of scikit-learn."""
    if name == "cancer":
        from sklearn.datasets import load_breast_cancer

        X, y = load_breast_cancer(return_X_y=True)
        cut = len(X) * 9 // 10
        X, y = jnp.asarray(dgp.initial.Standardizer.fit(X[:cut])(X)), jnp.asarray(y, jnp.int32)
        return X[:cut], y[:cut], (X[cut:], y[cut:])
    split = regression.split_data(*regression.load(str(data / f"{name}.npz") if data else "diabetes"), 0, "B")
    X, y, X_test, y_test = (jnp.asarray(part, float) for part in split[:4])
    return X, y, (X_test, y_test)


def program(
    X: jax.Array,
    likelihood: str,
    depth: int = 1,
    learn: bool = True,
    noise: float = 0.1,
    classes: int | None = None,
    kernel: Callable[[Any, Any], dgp.kernels.Kernel] = dgp.kernels.Matern52,
    num_inducing: int = NUM_INDUCING,
) -> Callable[..., None]:
    """One or more layers; hyperparameters and inducing inputs learned, or fixed at their starting values."""
    starts = dgp.initial.layers(X, [min(X.shape[1], 30)] * (depth - 1), min(num_inducing, len(np.unique(X, axis=0))))

    def hyperparameter(name: str, start: Any) -> Any:
        start = jnp.asarray(start, X.dtype)
        return numpyro.sample(name, dist.LogNormal(jnp.log(start), 1.0).to_event(start.ndim)) if learn else start

    def model(X: jax.Array, y: jax.Array | None = None, batch: int | None = None) -> None:
        functions = []
        for i, (Z, mean, lengthscale) in enumerate(starts):
            scales = jnp.full(Z.shape[1], lengthscale)
            cover = kernel(hyperparameter(f"variance{i}", 1.0), hyperparameter(f"scale{i}", scales))
            outputs = classes if i == depth - 1 else starts[i + 1].Z.shape[1]
            functions.append(dgp.gp(f"f{i}", cover, dgp.Points(Z, learn=learn), outputs=outputs, mean=mean))
        scale = None if likelihood in WITHOUT_SCALE else hyperparameter("noise", noise)
        with numpyro.plate("data", len(X), subsample_size=batch) as rows:
            h = X[rows]
            for i, f in enumerate(functions[:-1]):
                h = numpyro.sample(f"h{i}", f(h))
            observed = dgp.Likelihood(functions[-1](h), LIKELIHOODS[likelihood](scale))
            numpyro.sample("y", observed, obs=None if y is None else y[rows])

    return model


def train(
    svi: SVI, X: Any, y: Any, steps: int, batch: int | None, every: int, particles: int = 20, test: Any = None
) -> Curve:
    """Seconds count the steps only; the bound is over all data, with ``particles`` draws of hidden layers.

    ``test`` has the rows, inputs and targets, whose density is measured at the end.
    """
    full = dgp.ELBO(particles)

    @jax.jit
    def advance(state: Any, X: jax.Array, y: jax.Array) -> Any:
        return jax.lax.fori_loop(0, every, lambda _, s: svi.update(s, X, y, batch)[0], state)

    @jax.jit
    def bound(state: Any, X: jax.Array, y: jax.Array) -> jax.Array:
        return -full.loss(jax.random.key(1), svi.get_params(state), svi.model, svi.guide, X, y) / len(X)

    state = svi.init(jax.random.key(0), X, y, batch)
    jax.block_until_ready(advance(state, X, y))
    curve = Curve([0], [0.0], [float(bound(state, X, y))], [])
    while curve.steps[-1] < steps:
        start = time.perf_counter()
        state = jax.block_until_ready(advance(state, X, y))
        curve.seconds.append(curve.seconds[-1] + time.perf_counter() - start)
        curve.steps.append(curve.steps[-1] + every)
        curve.bounds.append(float(bound(state, X, y)))
        if isinstance(svi.optim, NaturalGradient) and svi.optim.line_search:
            curve.sizes.append(float(state.optim_state[1].size))
    if test is None:
        return curve
    posterior = dgp.Posterior(svi.model, svi.guide, svi.get_params(state)).using(num_samples=20, progress_bar=False)
    return curve._replace(density=float(posterior.log_density(jax.random.key(2), test[1], test[0]).mean()))


def fit(model: Callable[..., None], optimizer: Any, *data: Any, **options: Any) -> Curve:
    """``optimizer`` is an optax one, or makes a NaturalGradient from the guide."""
    guide = dgp.guides.InducingPoint(model)
    chosen = optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(guide)
    return train(SVI(model, guide, chosen, dgp.ELBO()), *data, **options)


def best(curves: dict[Any, Curve]) -> tuple[Any, Curve]:
    """The one with the highest bound at its end."""
    return max(curves.items(), key=lambda item: item[1].last())


def natural(rate: float, ramp: int = 5, size: float = 0.1, initial: float = 1e-4) -> Callable[[Any], NaturalGradient]:
    """The ramp of section 3.4.2 beside Adam."""
    return lambda guide: NaturalGradient(guide, log_linear(initial, size, ramp), optax.adam(rate))


def alone(size: Any, **options: Any) -> Callable[[Any], NaturalGradient]:
    """Natural gradients while nothing else moves."""
    return lambda guide: NaturalGradient(guide, size, optax.set_to_zero(), **options)


def falling(rate: float, size: float, steps: int) -> Callable[[Any], NaturalGradient]:
    """Step size and learning rate fall by a cosine, after a short ramp of the former."""
    sizes = optax.warmup_cosine_decay_schedule(1e-4, size, 10, steps, 0.01)
    return lambda guide: NaturalGradient(guide, sizes, optax.adam(optax.cosine_decay_schedule(rate, steps)))


def stochastic(a: argparse.Namespace, learn: bool) -> dict[str, dict[str, Curve]]:
    """Minibatches of 256. Learning rates and step sizes are the best of several, for every method.

    Where hyperparameters are learned, also with rates that fall by a cosine: Adam over all steps, natural gradients
    over a sixth of them.
    """
    found: dict[str, dict[str, Curve]] = {}
    options = {"batch": 256, "every": max(a.steps // 100, 1), "particles": 1}
    for name, likelihood in CASES[: a.few]:
        X, y, _ = targets(name, a.data)
        model = program(X, likelihood, learn=learn)

        def run(optimizer: Any, steps: int = a.steps, model: Any = model, data: Any = (X, y)) -> Curve:
            return fit(model, optimizer, *data, steps=steps, **options)

        rate, adam = best({r: run(optax.adam(r)) for r in RATES[: a.few]})
        slow, descent = best({r: run(optax.sgd(r)) for r in SLOW[: a.few]})
        curves = {f"Adam {rate}": adam, f"gradient descent {slow:g}": descent}
        if learn:
            beside, step = best({r: run(natural(r)) for r in RATES[: a.few]})
            curves[f"natural gradient, Adam {beside}"] = step
            cosines = {r: optax.cosine_decay_schedule(r, a.steps) for r in RATES[1:][: a.few]}
            peak, long = best({r: run(optax.adam(cosine)) for r, cosine in cosines.items()})
            curves[f"Adam {peak}, cosine"] = long
            few = max(a.steps // 6, 11)
            size, short = best({g: run(falling(0.1, g, few), few) for g in (0.2, 0.5)[: a.few]})
            curves[f"natural gradient {size}, Adam 0.1, cosine"] = short
        else:
            size, step = best({g: run(natural(rate, size=g)) for g in (0.01, 0.03, 0.1)[: a.few]})
            curves[f"natural gradient {size}"] = step
        found[f"{name}, {likelihood}" + (", hyperparameters learned" if learn else "")] = curves
    return found


def deterministic(a: argparse.Namespace) -> dict[str, dict[str, Curve]]:
    """All data in every step, hyperparameters fixed: figure 3.2."""
    found: dict[str, dict[str, Curve]] = {}
    for name, likelihood in CASES[: a.few]:
        X, y, _ = targets(name, a.data)
        model = program(X, likelihood, learn=False)
        options = {"steps": min(a.steps, 500), "batch": None, "every": 1, "particles": 1}
        rate, adam = best({r: fit(model, optax.adam(r), X, y, **options) for r in RATES[: a.few]})
        slow, descent = best({r: fit(model, optax.sgd(r), X, y, **options) for r in SLOW[: a.few]})
        options["steps"] = min(a.steps, 50)
        steps_of = {s: fit(model, alone(s), X, y, **options) for s in (0.1, 0.3, 1.0)[: a.few]}
        level = max(c.last() for c in steps_of.values()) - 1e-3
        size, step = min(steps_of.items(), key=lambda item: item[1].reaches(level))
        curves = {f"natural gradient {size}": step, f"Adam {rate}": adam, f"gradient descent {slow:g}": descent}
        for coordinates in ("natural", "mean/sqrt")[: a.few]:
            searched = alone(1.0, line_search=True, coordinates=coordinates)
            curves[f"natural gradient, {coordinates}, line search"] = fit(model, searched, X, y, **options)
        svi = SVI(model, dgp.guides.InducingPoint(model), optax.sgd(0.0), dgp.ELBO())
        start = time.perf_counter()
        losses = minimize(svi, jax.random.key(0), X, y, max_steps=min(a.steps, 500), progress_bar=False).losses
        seconds = np.linspace(0, time.perf_counter() - start, len(losses))
        curves["L-BFGS"] = Curve(list(range(len(losses))), list(seconds), list(-losses / len(X)))
        found[f"{name}, {likelihood}, all data"] = curves
    return found


def ill_conditioned(a: argparse.Namespace) -> dict[str, dict[str, Curve]]:
    """Targets that are nearly a function of the inputs, as in section 3.4.4.

    Energy with a noise fixed at 0.003 and all data in every step; bike with learned hyperparameters and minibatches.
    """
    X, y, _ = targets("energy", a.data)
    model = program(X, "normal", learn=False, noise=0.003)
    options = {"steps": a.steps, "batch": None, "every": max(a.steps // 500, 1), "particles": 1}
    energy = {f"Adam {r}": fit(model, optax.adam(r), X, y, **options) for r in RATES[: a.few]}
    options |= {"steps": 10, "every": 1}
    energy["natural gradient 1.0"] = fit(model, alone(1.0), X, y, **options)
    X, y, _ = targets("bike", a.data)
    model = program(X, "normal")
    options = {"steps": a.steps, "batch": 256, "every": max(a.steps // 100, 1), "particles": 1}
    bike = {f"Adam {r}": fit(model, optax.adam(r), X, y, **options) for r in RATES[: a.few]}
    cosines = {r: optax.cosine_decay_schedule(r, a.steps) for r in RATES[: a.few]}
    peak, cosine = best({r: fit(model, optax.adam(c), X, y, **options) for r, c in cosines.items()})
    bike[f"Adam {peak}, cosine"] = cosine
    bike["natural gradient 0.1, Adam 0.03, cosine"] = fit(model, falling(0.03, 0.1, a.steps), X, y, **options)
    return {"energy, noise 0.003, all data": energy, "bike, hyperparameters learned": bike}


def simulator() -> tuple[np.ndarray, np.ndarray]:
    """In place of NAVAL: 16 smooth outputs of a code at 51 x 26 x 9 inputs (11934, 16), and the level of the first.

    The code is a random layer of 32 units, without noise, and most of the variance of its outputs is due to the last
    input, as to the speed of the ship there.
    """
    axes = np.meshgrid(*(np.linspace(-1, 1, n) for n in (LEVELS, 26, 9)), indexing="ij")
    rng = np.random.default_rng(0)
    inside, above, shift = rng.normal(size=(3, 32)), rng.normal(size=(32, 16)), rng.normal(size=32)
    inputs = np.stack(axes, -1).reshape(-1, 3) * [0.5, 0.5, 2.0]
    return np.tanh(inputs @ inside + shift) @ above, np.repeat(np.arange(LEVELS), 26 * 9)


def levels(a: argparse.Namespace) -> dict[str, dict[str, Curve]]:
    """51 levels that are a function of the inputs, by three likelihoods: figure 3.5.

    Levels are in standard units, at the centres of 51 bins of (0, 1), and 0 to 50. Hyperparameters are learned.
    """
    X, y = simulator()
    split = regression.split_data(X, y, 0, "B")
    X, X_test = jnp.asarray(split.X, float), jnp.asarray(split.X_test, float)
    parts = [np.rint(split.units_y.inverse(part)) for part in (split.y, split.y_test)]
    units: dict[str, Callable[[np.ndarray], Any]] = {
        "normal": split.units_y,
        "beta": lambda k: jnp.asarray((k + 0.5) / LEVELS),
        "ordinal": lambda k: jnp.asarray(k, jnp.int32),
    }
    found = {}
    for likelihood, scaled in list(units.items())[: a.few]:
        model, (y, y_test) = program(X, likelihood), map(scaled, parts)
        options = {"steps": a.steps, "batch": 256, "every": max(a.steps // 20, 1), "particles": 1}
        options["test"] = X_test, y_test
        curves = {f"Adam {r}": fit(model, optax.adam(r), X, y, **options) for r in RATES[1:][: a.few]}
        curves["natural gradient 0.1, Adam 0.01"] = fit(model, natural(0.01, 40), X, y, **options)
        found[f"51 levels, {likelihood}"] = curves
    return found


def larger(a: argparse.Namespace) -> dict[str, dict[str, Curve]]:
    """Larger sets with a Student-t likelihood, hyperparameters learned: figure 3.6."""
    found = {}
    for name in ("kin8nm", "power")[: a.few]:
        X, y, test = targets(name, a.data)
        options = {"steps": a.steps, "batch": 256, "every": max(a.steps // 20, 1), "particles": 1, "test": test}
        model = program(X, "student-t")
        rate, adam = best({r: fit(model, optax.adam(r), X, y, **options) for r in RATES[1:][: a.few]})
        step = fit(model, natural(rate, 40), X, y, **options)
        found[f"{name}, student-t"] = {f"Adam {rate}": adam, f"natural gradient 0.1, Adam {rate}": step}
    return found


def images(a: argparse.Namespace) -> dict[str, dict[str, Curve]]:
    """Digits by the robust-max likelihood in minibatches of 512: figure 3.7. The ramp takes two fifths of the steps."""
    X, y, X_test, y_test = (
        jnp.asarray(part.reshape(len(part), -1) if part.ndim > 1 else part)
        for part in (digits.load_file(a.digits) if a.digits else digits.load_digits(8, 0))
    )
    X, X_test = X.astype(float), X_test.astype(float)
    options = {"steps": a.steps, "batch": 512, "every": max(a.steps // 20, 1), "particles": 1}
    options["test"] = X_test, y_test
    model = program(X, "robust-max", classes=int(y.max()) + 1)
    curves = {f"Adam {r}": fit(model, optax.adam(r), X, y, **options) for r in RATES[1:][: a.few]}
    step = natural(0.01, max(a.steps * 2 // 5, 1), 0.02, 1e-6)
    curves["natural gradient 0.02, Adam 0.01"] = fit(model, step, X, y, **options)
    return {"digits, robust-max": curves}


def two_layers(a: argparse.Namespace) -> dict[str, dict[str, Curve]]:
    """Which layers take natural steps, hyperparameters fixed, as in section 3.4.6."""
    X, y, _ = targets("energy", a.data)
    options = {"steps": a.steps, "batch": 256, "every": max(a.steps // 100, 1)}
    model = program(X, "normal", depth=2, learn=False)
    rate, adam = best({r: fit(model, optax.adam(r), X, y, **options) for r in RATES[: a.few]})
    both = alone(log_linear(1e-4, 0.01, 40), sites="all")
    return {
        "energy, two layers": {
            f"Adam {rate}": adam,
            "natural gradient, last layer": fit(model, natural(rate, 40), X, y, **options),
            "natural gradient, all layers": fit(model, both, X, y, **options),
        }
    }


def held(rate: float, size: float, steps: int) -> Callable[[Any], NaturalGradient]:
    """Step size held for nine tenths of the steps, then falling to a hundredth: q(u) keeps pace with inputs that move,
    and averages over draws when they stand still. The learning rate falls by a cosine throughout."""
    last = steps // 10
    sizes = optax.join_schedules([optax.constant_schedule(size), log_linear(size, 0.01 * size, last)], [steps - last])
    return lambda guide: NaturalGradient(guide, sizes, optax.adam(optax.cosine_decay_schedule(rate, steps)))


def summary(name: str, starts: list[dict[str, Curve]]) -> dict[str, dict[str, Curve]]:
    """Of every method, the curve of medians over the starts, and that of the start that ends highest."""
    middle, highest = {}, {}
    for method in starts[0]:
        curves = [start[method] for start in starts]
        longest = max(curves, key=lambda c: len(c.bounds))
        bounds = [c.bounds + [c.bounds[-1]] * (len(longest.bounds) - len(c.bounds)) for c in curves]
        middle[method] = Curve(longest.steps, longest.seconds, np.median(bounds, 0).tolist())
        highest[method] = max(curves, key=Curve.last)
    return {f"{name}, median of {len(starts)} starts": middle, f"{name}, best": highest}


def gplvm(a: argparse.Namespace, latents: int) -> dict[str, dict[str, Curve]]:
    """100 digits 1 with latent inputs only (section 4.4), against the collapsed bound by L-BFGS.

    The bound has many optima. Each of four starts, principal components and three times the same with noise, serves
    all methods; both stochastic ones take the same rates.
    """
    from sklearn.datasets import load_digits

    ones = load_digits()
    pixels, steps = ones.data[ones.target == 1][:100], 4 * a.steps
    pixels = pixels[:, pixels.std(0) > 0]
    Y = jnp.asarray((pixels - pixels.mean()) / pixels.std())
    Y = Y - Y.mean(0)
    left = np.linalg.svd(np.asarray(Y), full_matrices=False)[0]
    components = left[:, :latents] * math.sqrt(len(Y))  # in units of their standard deviations
    noise = np.random.default_rng(0).normal(size=(4, *components.shape))
    noise[0] = 0
    Z = dgp.initial.kmeans(components, 25)

    def model(X: jax.Array, y: jax.Array, batch: None = None) -> None:
        variance, noise = (numpyro.param(n, jnp.array(v), constraint=positive) for n, v in INITIAL)
        scales = numpyro.param("scales", jnp.ones(latents), constraint=positive)
        f = dgp.gp("f", dgp.kernels.RBF(variance, scales), dgp.Points(jnp.asarray(Z), learn=True), outputs=y.shape[1])
        with numpyro.plate("data", len(y)):
            w = numpyro.sample("w", dist.Normal(jnp.zeros(latents), 1.0).to_event(1))
            numpyro.sample("y", dgp.Likelihood(f(w), lambda v: dist.Normal(v, noise).to_event(1)), obs=y)

    def from_start(start: np.ndarray) -> dict[str, Curve]:
        def run(optimizer: Any) -> Curve:
            guide = dgp.guides.InducingPoint(model, latent=dgp.guides.Normal(0.1, loc=start))
            chosen = optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(guide)
            svi = SVI(model, guide, chosen, dgp.ELBO())
            return train(svi, Y, Y, steps=steps, batch=None, every=max(steps // 100, 1))

        began = time.perf_counter()
        optimal = SVI(
            model, dgp.guides.Collapsed(model, latent=dgp.guides.Normal(0.1, loc=start)), optax.sgd(0.0), dgp.ELBO()
        )
        exact = -minimize(optimal, jax.random.key(0), Y, Y, max_steps=2 * steps, progress_bar=False).losses / len(Y)
        seconds = np.linspace(0, time.perf_counter() - began, len(exact)).tolist()
        curves = {
            f"Adam {r}, cosine": run(optax.adam(optax.cosine_decay_schedule(r, steps))) for r in RATES[1:][: a.few]
        }
        curves |= {f"natural gradient 0.3, Adam {r}, cosine": run(held(r, 0.3, steps)) for r in RATES[1:][: a.few]}
        curves["collapsed bound, L-BFGS"] = Curve(list(range(len(exact))), seconds, exact.tolist())
        return curves

    name = f"digits 1, {'one latent' if latents == 1 else f'{latents} latents'}"
    return summary(name, [from_start(components + 0.1 * shift) for shift in noise[: a.few]])


def table(found: dict[str, dict[str, Curve]]) -> str:
    """Bounds, and when each method reaches the last one of Adam at its best rate, constant where there is one."""
    lines = [
        "| case | method | bound per datum | test density | ms | steps to Adam's last bound | seconds, of Adam's |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, curves in found.items():
        adams = {name: curve for name, curve in curves.items() if name.startswith("Adam")}
        _, adam = best({name: curve for name, curve in adams.items() if "cosine" not in name} or adams)
        level = adam.last()
        for name, curve in curves.items():
            seconds, steps = curve.reaches(level)
            share = seconds / adam.seconds[-1]
            reached = f"{steps} | {share:.3f}" if math.isfinite(share) else "never |"
            cells = f"{curve.last():.4f} | {curve.density:.3f} | {1e3 * curve.seconds[-1] / curve.steps[-1]:.2f}"
            lines.append(f"| {case} | {name} | {cells} | {reached} |")
        for name, curve in curves.items():
            if curve.sizes:
                lines.append(f"{name}: sizes of the first steps {', '.join(f'{s:g}' for s in curve.sizes[:12])}")
    return "\n".join(lines)


def draw(found: dict[str, dict[str, Curve]], path: Path) -> None:
    """How far below the best bound, against steps (above) and seconds (below); one column per case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(4.8 * len(found), 7), squeeze=False, layout="constrained")
    for column, (case, curves) in zip(axes.T, found.items(), strict=True):
        best_bound = max(np.nanmax(c.bounds) for c in curves.values())
        least = 1e-3  # so that the best itself can be drawn
        for what, axis in zip(("steps", "seconds"), column, strict=True):
            for name, curve in curves.items():
                axis.plot(getattr(curve, what)[1:], best_bound + least - np.asarray(curve.bounds[1:]), label=name)
            axis.set(xscale="log", yscale="log", xlabel=what, ylabel="nats per datum below the best", title=case)
        column[0].legend(fontsize=7, loc="best")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = {
        "deterministic": deterministic,
        "stochastic": lambda a: stochastic(a, False),
        "hyperparameters": lambda a: stochastic(a, True),
        "levels": levels,
        "ill-conditioned": ill_conditioned,
        "larger": larger,
        "images": images,
        "two-layers": two_layers,
        "one-latent": lambda a: gplvm(a, 1),
        "two-latents": lambda a: gplvm(a, 2),
    }
    parser.add_argument("--data", type=Path, help="directory of .npz files")
    parser.add_argument("--digits", type=Path, help="file of full-size images, as of digits.py")
    parser.add_argument("--case", nargs="+", choices=list(cases))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("natural_gradients_output"))
    parser.add_argument("--smoke", action="store_true", help="three steps of one fit of each method, without data")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.data, arguments.steps, arguments.out = None, 3, Path(tempfile.mkdtemp())
    elif arguments.data is None:
        parser.error("expected --data DIRECTORY, or --smoke")
    arguments.few = 1 if arguments.smoke else None  # sets, rates and starts
    arguments.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_x64", True)
    for case in arguments.case or (["levels", "images"] if arguments.smoke else cases):
        found = cases[case](arguments)
        text = table(found)
        print(text, flush=True)
        (arguments.out / f"{case}.md").write_text(text + "\n")
        (arguments.out / f"{case}.json").write_text(json.dumps(found))
        draw(found, arguments.out / f"natural_{case}.png")


if __name__ == "__main__":
    main()
