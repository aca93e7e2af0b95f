"""One and two layers by the optimal q(u), and explicit q(u) next to it: chapter 3 of Chamberlin (2016).

``python benchmarks/sources/chamberlin.py`` fits one and two layers to a step and to a sum of sinusoids by the collapsed
bound, from several starts, and prints the scores of 321 test rows (tables 3.1 and 3.2), next to those of a guide whose
hidden layer is drawn. All hyperparameters and inducing inputs are learned.

``--curves`` compares optimisers of the mean-field two-layer model (figures 3.8 to 3.13), prints a table and draws the
bound against passes over the data and seconds. Every method begins at the same hyperparameters and hidden values and
has the same objective, in which a hidden layer enters by E[log N(h; f(x), s^2)] as there. A pass is one evaluation of
the bound and its gradient on all data.
"""

from __future__ import annotations

import argparse
import json
import math
import re
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
from numpyro.infer import SVI, init_to_value

import numpyro_dgp as dgp
from numpyro_dgp import guides as G  # noqa: N812
from numpyro_dgp.densities import log_mean_exp
from numpyro_dgp.optim import NaturalGradient, minimize

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).parent.parent))
import step_function
from salimbeni_natural import Curve, held, train

START = {"noise": 0.1, "process": 0.1, "variance0": 1.0, "variance1": 1.0, "lengthscale0": 1.0, "lengthscale1": 1.0}
NUM_INDUCING = 15
FLAT = 1e4  # standard deviation of a prior that is one in effect, once its density at zero is divided out
RATES = (0.01, 0.03, 0.1)
NOISE = {"step": 0.05, "sinusoids": 0.1}  # the source does not say; these are the levels that its densities suggest
TESTED = 321
# Tables 3.1 and 3.2: sums over the test rows for one and two layers.
PUBLISHED = {"step": (227.17, 435.15), "sinusoids": (263.64, 286.02)}


def program(X: jax.Array, layers: int = 2, explicit: bool = False) -> Callable[..., None]:
    """One hidden column where there are two layers.

    For an explicit q(u) the hidden values are a latent with a flat prior, observed through f.
    """
    Z = jnp.linspace(X.min(), X.max(), NUM_INDUCING)[:, None]

    def model(X: jax.Array, y: Any = None, batch: None = None) -> None:
        names = START if layers == 2 else ("noise", "variance1", "lengthscale1")
        p = {n: numpyro.sample(n, dist.LogNormal(math.log(START[n]), 1.0)) for n in names}

        def layer(name: str, i: int, **options: Any) -> Any:
            kernel = dgp.kernels.RBF(p[f"variance{i}"], p[f"lengthscale{i}"])
            return dgp.gp(name, kernel, dgp.Points(Z, learn=True), **options)

        f = layer("f", 0, outputs=1, mean=dgp.means.IdentityMean()) if layers == 2 else None
        g = layer("g", 1)
        if explicit:
            numpyro.factor("flat", len(X) * math.log(math.sqrt(2 * math.pi) * FLAT))
        with numpyro.plate("data", len(X)):
            h = X
            if explicit:
                h = numpyro.sample("h", dist.Normal(jnp.zeros(1), FLAT).to_event(1))
                below = dgp.Likelihood(f(X), lambda v: dist.Normal(v, p["process"]).to_event(1))
                numpyro.sample("h given f", below, obs=h)
            elif f is not None:
                h = numpyro.sample("h", f(X, noise=p["process"]))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, p["noise"])), obs=y)

    return model


class Fit(NamedTuple):
    """Bound per training row; sums over the test rows of log densities and squared errors, in the units of y."""

    bound: float
    density: float
    squares: float


def start(X: jax.Array, seed: int) -> Any:
    """The values of ``START`` and h = x; of other seeds than 0, scaled by log-normal factors."""
    rng = np.random.default_rng(seed)
    factor = lambda: 1.0 if seed == 0 else math.exp(rng.normal())  # noqa: E731
    return init_to_value(values={n: v * factor() for n, v in START.items()} | {"h": factor() * X})


def fit(split: step_function.Split, layers: int, drawn: bool, seed: int, steps: int) -> Fit:
    """L-BFGS on the collapsed bound; for a hidden layer that is ``drawn``, natural gradients and Adam."""
    X, y, X_test, y_test = (jnp.asarray(a, float) for a in split[:4])
    X_test, y_test = X_test[:TESTED], y_test[:TESTED]
    model, keys = program(X, layers), jax.random.split(jax.random.key(seed), 3)
    begin = {"init_loc_fn": start(X, seed)}
    if drawn:
        guide: Any = G.InducingPoint(model, **begin)
        cosine = optax.cosine_decay_schedule(1.0, steps)
        natural = NaturalGradient(guide, lambda n: 0.1 * cosine(n), optax.adam(lambda n: 0.02 * cosine(n)))
        found: Any = dgp.fit(SVI(model, guide, natural, dgp.ELBO()), keys[0], steps, X, y, progress_bar=False)
    else:
        guide = G.Collapsed(model, **begin)
        found = minimize(model, guide, keys[0], X, y, max_steps=steps, progress_bar=False)
    losses = np.asarray(found.losses)[-100:] if drawn else found.losses[-1]
    # A single layer has one Gaussian.
    posterior = dgp.Posterior(model, guide.on(X, y), found.params).using(num_samples=1000 if layers > 1 else 1)
    mixture = posterior.predict(keys[1], X_test)
    unit = float(split.units_y.scale)
    densities = log_mean_exp(dist.Normal(mixture.means, jnp.sqrt(mixture.variances)).log_prob(y_test)) - math.log(unit)
    squares = jnp.square(unit * (mixture.mean - y_test))
    return Fit(-float(np.mean(losses)) / len(X), float(densities.sum()), float(squares.sum()))


def depths(name: str, arguments: argparse.Namespace) -> list[str]:
    """Rows of the table: means and standard errors over data sets, of the start with the best bound."""
    rows = []
    for label, layers, drawn in (("GP", 1, False), ("two layers", 2, False), ("two layers, drawn", 2, True)):
        best = []
        for data in range(arguments.repeats):
            split = step_function.make_data(name, arguments.num, NOISE[name], data)
            found = [fit(split, layers, drawn, seed, arguments.steps) for seed in range(arguments.starts)]
            best.append(max(found, key=lambda one: one.bound))
            print(name, label, data, found, flush=True)
        values = np.array(best)
        errors = values.std(0, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else np.zeros(3)
        cells = [f"{m:.{d}f} ({e:.{d}f})" for m, e, d in zip(values.mean(0), errors, (3, 1, 2), strict=True)]
        rows.append(f"| {name} | {label} | {PUBLISHED[name][layers - 1]} | " + " | ".join(cells) + " |")
    return rows


def quasi_newton(svi: SVI, X: jax.Array, y: jax.Array, method: Any, steps: int) -> Curve:
    """Passes are spread evenly over the iterations; seconds are passes times those of one, without compilation."""
    found = minimize(svi, jax.random.key(0), X, y, method=method, max_steps=steps, progress_bar=False)
    passes = int(re.findall(r"(\d+) evaluations", found.report)[0])
    key, params = jax.random.key(0), found.params
    slope = jax.jit(jax.value_and_grad(lambda p, X, y: svi.loss.loss(key, p, svi.model, svi.guide, X, y)))
    jax.block_until_ready(slope(params, X, y))
    began = time.perf_counter()
    for _ in range(100):
        jax.block_until_ready(slope(params, X, y))
    one, spread = (time.perf_counter() - began) / 100, np.linspace(0, passes, len(found.losses))
    return Curve(np.round(spread).astype(int).tolist(), (one * spread).tolist(), (-found.losses / len(X)).tolist())


def curves(name: str, num: int, steps: int) -> dict[str, Curve]:
    split = step_function.make_data(name, num, 0.1, 0)
    X, y = (jnp.asarray(a, float) for a in split[:2])
    optimal, explicit = program(X), program(X, explicit=True)

    def with_optimum(optimizer: Any) -> SVI:
        return SVI(optimal, G.Collapsed(optimal, init_loc_fn=start(X, 0)), optimizer, dgp.ELBO())

    def run(optimizer: Callable[[Any], Any], every: int) -> Curve:
        guide = G.MeanField(explicit, inducing=G.Full(), init_loc_fn=start(X, 0))
        svi = SVI(explicit, guide, optimizer(guide), dgp.ELBO())
        return train(svi, X, y, steps=steps, batch=None, every=every, particles=200)

    def best(found: dict[float, Curve]) -> tuple[float, Curve]:
        return max(found.items(), key=lambda item: item[1].last())

    every = max(steps // 100, 1)
    found = {f"optimal q(u), {m}": quasi_newton(with_optimum(optax.sgd(0.0)), X, y, m, 500) for m in ("L-BFGS", "CG")}
    cosine = lambda rate: optax.adam(optax.cosine_decay_schedule(rate, steps))  # noqa: E731
    options = {"steps": steps, "batch": None, "every": every, "particles": 1}
    rate, curve = best({r: train(with_optimum(cosine(r)), X, y, **options) for r in RATES})
    found[f"optimal q(u), Adam {rate}"] = curve
    rate, curve = best({r: run(lambda _, r=r: cosine(r), every) for r in RATES})
    found[f"explicit q(u), Adam {rate}"] = curve
    for sites, label in ((("f", "g"), "q(u)"), (("f", "g", "h"), "q(u) and q(h)")):
        natural = {}
        for r in RATES:

            def optimizer(guide: Any, r: float = r, sites: Any = sites) -> NaturalGradient:
                return NaturalGradient(guide, held(r, 0.1, steps)(guide).schedule, cosine(r), sites=sites)

            natural[r] = run(optimizer, every)
        rate, curve = best(natural)
        found[f"explicit q(u), natural steps of {label}, Adam {rate}"] = curve
    return found


def table(found: dict[str, dict[str, Curve]]) -> str:
    """The last bound, and passes and seconds until a bound is within 0.05 nats per datum of the best of all."""
    lines = ["| function | method | bound per datum | passes | passes until near the best | seconds until then |"]
    lines.append("|---|---|---|---|---|---|")
    for name, methods in found.items():
        level = max(c.last() for c in methods.values()) - 0.05
        for method, curve in methods.items():
            seconds, passes = curve.reaches(level)
            near = f"{passes} | {seconds:.2f}" if math.isfinite(passes) else "never |"
            lines.append(f"| {name} | {method} | {curve.last():.4f} | {curve.steps[-1]} | {near} |")
    return "\n".join(lines)


def draw(found: dict[str, dict[str, Curve]], path: Path) -> None:
    """Bounds per datum against passes (above) and seconds (below)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(5 * len(found), 7.5), squeeze=False, layout="constrained")
    kinds = {"L-BFGS": "C0", "CG": "C1", "Adam": "C2"}
    for column, (name, methods) in zip(axes.T, found.items(), strict=True):
        top = max(c.last() for c in methods.values())
        for what, unit, axis in zip(("steps", "seconds"), ("passes over the data", "seconds"), column, strict=True):
            for method, curve in methods.items():
                first, how = method.split(", ", 1)
                colour = next((c for n, c in kinds.items() if how.startswith(n)), "C3" if "q(h)" in how else "C4")
                style = "-" if first.startswith("optimal") else "--"
                axis.plot(getattr(curve, what)[1:], curve.bounds[1:], style, color=colour, lw=1.3, label=method)
            axis.set(xscale="log", xlabel=unit, ylabel="bound per datum", ylim=(top - 2.0, top + 0.1), title=name)
    handles, labels = [], []
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            plain = re.sub(r"Adam [\d.]+", "Adam", label)
            if plain not in labels:
                handles, labels = [*handles, handle], [*labels, plain]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=100, help="training rows")
    parser.add_argument("--functions", nargs="+", choices=list(step_function.FUNCTIONS), default=["step", "sinusoids"])
    parser.add_argument("--steps", type=int, default=2000, help="at most, of each fit")
    parser.add_argument("--repeats", type=int, default=3, help="data sets of the table")
    parser.add_argument("--starts", type=int, default=4, help="of each fit of the table")
    parser.add_argument("--curves", action="store_true", help="compare optimisers")
    parser.add_argument("--out", type=Path, default=Path("chamberlin_output"), help="for the curves")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few rows, to see that it runs")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if arguments.smoke:
        arguments.num, arguments.steps, arguments.repeats, arguments.starts = 20, 5, 1, 1
        arguments.functions = ["step"]
    if not arguments.curves:
        lines = [
            "| function | model | density, source | bound per row | density | squared error |",
            "|---|---|---|---|---|---|",
        ]
        for name in arguments.functions:
            lines += depths(name, arguments)
        print("\n".join(lines))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = {name: curves(name, arguments.num, arguments.steps) for name in arguments.functions}
    print(table(found))
    (arguments.out / "curves.md").write_text(table(found) + "\n")
    (arguments.out / "curves.json").write_text(json.dumps(found))
    draw(found, arguments.out / "collapsed_curves.png")


if __name__ == "__main__":
    main()
