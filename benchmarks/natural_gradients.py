"""Natural gradients against Adam, gradient descent and L-BFGS: the experiments of Salimbeni (2020), section 3.4.

``python benchmarks/natural_gradients.py --data DIRECTORY`` runs all cases on energy, concrete and bike from DIRECTORY
(arrays X, y) and scikit-learn's breast cancer set; ``--case`` picks some. It prints one table per case, writes the
curves to ``--out`` and the numbers behind them beside it. Every method takes the same minibatches; compilation (except
that of L-BFGS) and the evaluation of the bound are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
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

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import regression

NUM_INDUCING = 100
CASES = (("energy", "normal"), ("cancer", "bernoulli"), ("concrete", "student-t"))
RATES = (0.003, 0.01, 0.03, 0.1)
INITIAL = (("variance", 1.0), ("noise", 0.3))  # of the model of digits
positive = dist.constraints.positive


class Curve(NamedTuple):
    """The bound per datum over a fit."""

    steps: list[int]
    seconds: list[float]
    bounds: list[float]

    def last(self) -> float:
        """Mean of the last five, against the noise of minibatches; minus infinity for a fit that failed."""
        return float(np.nan_to_num(np.mean(self.bounds[-5:]), nan=-math.inf))

    def reaches(self, level: float) -> tuple[float, float]:
        """Seconds and steps until the bound is at least ``level``; infinity where it never is."""
        hits = [(s, n) for n, s, b in zip(self.steps, self.seconds, self.bounds, strict=True) if b >= level]
        return hits[0] if hits else (math.inf, math.inf)


def targets(name: str, data: Path) -> tuple[jax.Array, jax.Array]:
    """Standardised training inputs and targets of one set."""
    if name == "cancer":
        from sklearn.datasets import load_breast_cancer

        X, y = load_breast_cancer(return_X_y=True)
        return jnp.asarray(dgp.initial.Standardizer.fit(X)(X)), jnp.asarray(y, jnp.int32)
    split = regression.split_data(*regression.load(str(data / f"{name}.npz")), 0, "B")
    return jnp.asarray(split.X, float), jnp.asarray(split.y, float)


def program(
    X: jax.Array, likelihood: str, depth: int = 1, learn: bool = True, noise: float = 0.1
) -> Callable[..., None]:
    """One or two layers; hyperparameters and inducing inputs learned, or fixed at their starting values."""
    starts = dgp.initial.layers(X, [min(X.shape[1], 30)] * (depth - 1), min(NUM_INDUCING, len(np.unique(X, axis=0))))

    def hyperparameter(name: str, start: Any) -> Any:
        start = jnp.asarray(start, X.dtype)
        return numpyro.sample(name, dist.LogNormal(jnp.log(start), 1.0).to_event(start.ndim)) if learn else start

    def model(X: jax.Array, y: jax.Array, batch: int | None = None) -> None:
        functions = []
        for i, (Z, mean, lengthscale) in enumerate(starts):
            kernel = dgp.kernels.Matern52(
                hyperparameter(f"variance{i}", 1.0), hyperparameter(f"scale{i}", jnp.full(Z.shape[1], lengthscale))
            )
            outputs = None if i == depth - 1 else starts[i + 1].Z.shape[1]
            functions.append(dgp.gp(f"f{i}", kernel, dgp.Points(Z, learn=learn), outputs=outputs, mean=mean))
        sigma = None if likelihood == "bernoulli" else hyperparameter("noise", noise)
        conditional: Callable[[jax.Array], dist.Distribution] = {
            "normal": lambda v: dist.Normal(v, sigma),
            "student-t": lambda v: dist.StudentT(4.0, v, sigma),
            "bernoulli": lambda v: dist.Bernoulli(logits=v),
        }[likelihood]
        with numpyro.plate("data", len(X), subsample_size=batch) as rows:
            h = X[rows]
            for i, f in enumerate(functions[:-1]):
                h = numpyro.sample(f"h{i}", f(h))
            numpyro.sample("y", dgp.Likelihood(functions[-1](h), conditional), obs=y[rows])

    return model


def train(
    svi: SVI, X: jax.Array, y: jax.Array, steps: int, batch: int | None, every: int, particles: int = 20
) -> Curve:
    """Seconds count the steps only; the bound is over all data, with ``particles`` draws of hidden layers."""
    full = dgp.ELBO(particles)

    @jax.jit
    def advance(state: Any, X: jax.Array, y: jax.Array) -> Any:
        return jax.lax.fori_loop(0, every, lambda _, s: svi.update(s, X, y, batch)[0], state)

    @jax.jit
    def bound(state: Any, X: jax.Array, y: jax.Array) -> jax.Array:
        return -full.loss(jax.random.key(1), svi.get_params(state), svi.model, svi.guide, X, y) / len(X)

    state = svi.init(jax.random.key(0), X, y, batch)
    jax.block_until_ready(advance(state, X, y))
    curve = Curve([0], [0.0], [float(bound(state, X, y))])
    while curve.steps[-1] < steps:
        start = time.perf_counter()
        state = jax.block_until_ready(advance(state, X, y))
        curve.seconds.append(curve.seconds[-1] + time.perf_counter() - start)
        curve.steps.append(curve.steps[-1] + every)
        curve.bounds.append(float(bound(state, X, y)))
    return curve


def fit(model: Callable[..., None], optimizer: Any, *data: Any, **options: Any) -> Curve:
    """``optimizer`` is an optax one, or makes a NaturalGradient from the guide."""
    guide = dgp.guides.InducingPoint(model)
    chosen = optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(guide)
    return train(SVI(model, guide, chosen, dgp.ELBO()), *data, **options)


def best(curves: dict[Any, Curve]) -> tuple[Any, Curve]:
    """The one with the highest bound at its end."""
    return max(curves.items(), key=lambda item: item[1].last())


def natural(rate: float, ramp: int = 5, size: float = 0.1) -> Callable[[Any], NaturalGradient]:
    """The ramp of section 3.4.2 beside Adam."""
    return lambda guide: NaturalGradient(guide, log_linear(1e-4, size, ramp), optax.adam(rate))


def falling(rate: float, size: float, steps: int) -> Callable[[Any], NaturalGradient]:
    """Step size and learning rate fall by a cosine, after a short ramp of the former."""
    sizes = optax.warmup_cosine_decay_schedule(1e-4, size, 10, steps, 0.01)
    return lambda guide: NaturalGradient(guide, sizes, optax.adam(optax.cosine_decay_schedule(rate, steps)))


def stochastic(data: Path, steps: int, learn: bool) -> dict[str, dict[str, Curve]]:
    """Minibatches of 256. Learning rates and step sizes are the best of several, for every method.

    Where hyperparameters are learned, also with rates that fall by a cosine: Adam over all steps, natural gradients
    over a sixth of them.
    """
    found: dict[str, dict[str, Curve]] = {}
    options = {"batch": 256, "every": max(steps // 100, 1)}
    for name, likelihood in CASES:
        X, y = targets(name, data)
        model = program(X, likelihood, learn=learn)

        def run(optimizer: Any, steps: int = steps, model: Any = model, data: Any = (X, y)) -> Curve:
            return fit(model, optimizer, *data, steps=steps, **options)

        rate, adam = best({r: run(optax.adam(r)) for r in RATES})
        slow, descent = best({r: run(optax.sgd(r)) for r in (1e-5, 1e-4, 1e-3)})
        curves = {f"Adam {rate}": adam, f"gradient descent {slow:g}": descent}
        if learn:
            beside, step = best({r: run(natural(r)) for r in RATES})
            curves[f"natural gradient, Adam {beside}"] = step
            peak, long = best({r: run(optax.adam(optax.cosine_decay_schedule(r, steps))) for r in RATES[1:]})
            curves[f"Adam {peak}, cosine"] = long
            few = steps // 6
            size, short = best({g: run(falling(0.1, g, few), few) for g in (0.2, 0.5)})
            curves[f"natural gradient {size}, Adam 0.1, cosine"] = short
        else:
            size, step = best({g: run(natural(rate, size=g)) for g in (0.01, 0.03, 0.1)})
            curves[f"natural gradient {size}"] = step
        found[f"{name}, {likelihood}" + (", hyperparameters learned" if learn else "")] = curves
    return found


def deterministic(data: Path, steps: int) -> dict[str, dict[str, Curve]]:
    """All data in every step, hyperparameters fixed."""
    found: dict[str, dict[str, Curve]] = {}
    for name, likelihood in CASES:
        X, y = targets(name, data)
        model = program(X, likelihood, learn=False)
        options = {"steps": steps, "batch": None, "every": 1}
        rate, adam = best({r: fit(model, optax.adam(r), X, y, **options) for r in RATES})
        slow, descent = best({r: fit(model, optax.sgd(r), X, y, **options) for r in (1e-5, 1e-4, 1e-3)})
        steps_of = {
            s: fit(model, lambda guide, s=s: NaturalGradient(guide, s, optax.sgd(0.0)), X, y, **options)
            for s in (0.1, 0.3, 1.0)
        }
        level = max(c.last() for c in steps_of.values()) - 1e-3
        size, step = min(steps_of.items(), key=lambda item: item[1].reaches(level))
        curves = {f"natural gradient {size}": step, f"Adam {rate}": adam, f"gradient descent {slow:g}": descent}
        searched = lambda guide: NaturalGradient(guide, 1.0, optax.sgd(0.0), line_search=True)  # noqa: E731
        curves["natural gradient, line search"] = fit(model, searched, X, y, **options)
        svi = SVI(model, dgp.guides.InducingPoint(model), optax.sgd(0.0), dgp.ELBO())
        start = time.perf_counter()
        losses = minimize(svi, jax.random.key(0), X, y, max_steps=steps, progress_bar=False).losses
        seconds = np.linspace(0, time.perf_counter() - start, len(losses))
        curves["L-BFGS"] = Curve(list(range(len(losses))), list(seconds), list(-losses / len(X)))
        found[f"{name}, {likelihood}, all data"] = curves
    return found


def ill_conditioned(data: Path, steps: int) -> dict[str, dict[str, Curve]]:
    """Targets that are nearly a function of the inputs, as in section 3.4.4.

    Energy with a noise fixed at 0.003 and all data in every step; bike with learned hyperparameters and minibatches.
    """
    X, y = targets("energy", data)
    model = program(X, "normal", learn=False, noise=0.003)
    options = {"steps": steps, "batch": None, "every": max(steps // 500, 1)}
    energy = {f"Adam {r}": fit(model, optax.adam(r), X, y, **options) for r in RATES}
    options |= {"steps": 10, "every": 1}
    step = fit(model, lambda guide: NaturalGradient(guide, 1.0, optax.sgd(0.0)), X, y, **options)
    energy["natural gradient 1.0"] = step
    X, y = targets("bike", data)
    model = program(X, "normal")
    options = {"steps": steps, "batch": 256, "every": max(steps // 100, 1)}
    bike = {f"Adam {r}": fit(model, optax.adam(r), X, y, **options) for r in RATES}
    cosines = {r: fit(model, optax.adam(optax.cosine_decay_schedule(r, steps)), X, y, **options) for r in RATES}
    peak, cosine = best(cosines)
    bike[f"Adam {peak}, cosine"] = cosine
    bike["natural gradient 0.1, Adam 0.03, cosine"] = fit(model, falling(0.03, 0.1, steps), X, y, **options)
    return {"energy, noise 0.003, all data": energy, "bike, hyperparameters learned": bike}


def two_layers(data: Path, steps: int) -> dict[str, dict[str, Curve]]:
    """Which layers take natural steps, hyperparameters fixed, as in section 3.4.6."""
    X, y = targets("energy", data)
    options = {"steps": steps, "batch": 256, "every": max(steps // 100, 1)}
    model = program(X, "normal", depth=2, learn=False)
    rate, adam = best({r: fit(model, optax.adam(r), X, y, **options) for r in RATES})
    return {
        "energy, two layers": {
            f"Adam {rate}": adam,
            "natural gradient, last layer": fit(model, natural(rate, 40), X, y, **options),
            "natural gradient, all layers": fit(
                model,
                lambda guide: NaturalGradient(guide, log_linear(1e-4, 0.01, 40), optax.sgd(0.0), sites="all"),
                X,
                y,
                **options,
            ),
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


def gplvm(steps: int, latents: int) -> dict[str, dict[str, Curve]]:
    """100 digits 1 with latent inputs only (section 4.4), against the collapsed bound by L-BFGS.

    The bound has many optima. Each of four starts, principal components and three times the same with noise, serves
    all methods; both stochastic ones take the same rates.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = digits.data[digits.target == 1][:100]
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
        curves = {f"Adam {r}, cosine": run(optax.adam(optax.cosine_decay_schedule(r, steps))) for r in RATES[1:]}
        curves |= {f"natural gradient 0.3, Adam {r}, cosine": run(held(r, 0.3, steps)) for r in RATES[1:]}
        curves["collapsed bound, L-BFGS"] = Curve(list(range(len(exact))), seconds, exact.tolist())
        return curves

    name = f"digits 1, {'one latent' if latents == 1 else f'{latents} latents'}"
    return summary(name, [from_start(components + 0.1 * shift) for shift in noise])


def table(found: dict[str, dict[str, Curve]]) -> str:
    """Final bounds, and when each method reaches the last one of Adam at its best rate, constant where there is one."""
    lines = ["| case | method | bound per datum | ms per step | steps to Adam's last bound | seconds, of Adam's |"]
    lines.append("|---|---|---|---|---|---|")
    for case, curves in found.items():
        adams = {name: curve for name, curve in curves.items() if name.startswith("Adam")}
        _, adam = best({name: curve for name, curve in adams.items() if "cosine" not in name} or adams)
        level = adam.last()
        for name, curve in curves.items():
            seconds, steps = curve.reaches(level)
            share = seconds / adam.seconds[-1]
            reached = f"{steps} | {share:.3f}" if math.isfinite(share) else "never |"
            cells = f"{curve.last():.4f} | {1e3 * curve.seconds[-1] / curve.steps[-1]:.2f}"
            lines.append(f"| {case} | {name} | {cells} | {reached} |")
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
        "stochastic": lambda a: stochastic(a.data, a.steps, False),
        "hyperparameters": lambda a: stochastic(a.data, a.steps, True),
        "deterministic": lambda a: deterministic(a.data, min(a.steps, 500)),
        "ill-conditioned": lambda a: ill_conditioned(a.data, a.steps),
        "two-layers": lambda a: two_layers(a.data, a.steps),
        "one-latent": lambda a: gplvm(4 * a.steps, 1),
        "two-latents": lambda a: gplvm(4 * a.steps, 2),
    }
    parser.add_argument("--data", type=Path, required=True, help="directory of .npz files")
    parser.add_argument("--case", nargs="+", choices=list(cases), default=list(cases))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("natural_gradients_output"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_x64", True)
    for case in arguments.case:
        found = cases[case](arguments)
        text = table(found)
        print(text, flush=True)
        (arguments.out / f"{case}.md").write_text(text + "\n")
        (arguments.out / f"{case}.json").write_text(json.dumps(found))
        draw(found, arguments.out / f"natural_{case}.png")


if __name__ == "__main__":
    main()
