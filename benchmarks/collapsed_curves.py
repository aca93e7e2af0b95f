"""Optimal q(u) against explicit q(u): the training curves of Chamberlin (2016), chapter 3.

``python benchmarks/collapsed_curves.py`` fits the mean-field two-layer model to a step and to a sum of sinusoids with
all hyperparameters and inducing inputs learned, prints a table and draws the bound against passes over the data and
seconds. Every method begins at the same hyperparameters and hidden values and has the same objective, in which a
hidden layer enters by E[log N(h; f(x), s^2)] as there. A pass is one evaluation of the bound and its gradient
on all data.
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, init_to_value

import numpyro_dgp as dgp
from numpyro_dgp import guides as G  # noqa: N812
from numpyro_dgp.optim import NaturalGradient, minimize

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).parent / "sources"))
import step_function
from salimbeni_natural import Curve, held, train

START = {"noise": 0.1, "process": 0.1, "variance0": 1.0, "variance1": 1.0, "lengthscale0": 1.0, "lengthscale1": 1.0}
NUM_INDUCING = 15
FLAT = 1e4  # standard deviation of a prior that is one in effect, once its density at zero is divided out
RATES = (0.01, 0.03, 0.1)


def program(explicit: bool) -> Callable[..., None]:
    """One hidden column. For an explicit q(u) the hidden values are a latent with a flat prior, observed through f."""

    def model(X: jax.Array, y: jax.Array, batch: None = None) -> None:
        p = {n: numpyro.sample(n, dist.LogNormal(math.log(v), 1.0)) for n, v in START.items()}
        Z = jnp.linspace(X.min(), X.max(), NUM_INDUCING)[:, None]
        kernels = [dgp.kernels.RBF(p[f"variance{i}"], p[f"lengthscale{i}"]) for i in range(2)]
        f = dgp.gp("f", kernels[0], dgp.Points(Z, learn=True), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", kernels[1], dgp.Points(Z, learn=True))
        if explicit:
            numpyro.factor("flat", len(X) * math.log(math.sqrt(2 * math.pi) * FLAT))
        with numpyro.plate("data", len(X)):
            if explicit:
                h = numpyro.sample("h", dist.Normal(jnp.zeros(1), FLAT).to_event(1))
                below = dgp.Likelihood(f(X), lambda v: dist.Normal(v, p["process"]).to_event(1))
                numpyro.sample("h given f", below, obs=h)
            else:
                h = numpyro.sample("h", f(X, noise=p["process"]))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, p["noise"])), obs=y)

    return model


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
    start = init_to_value(values={**START, "h": X})
    optimal, explicit = program(False), program(True)

    def with_optimum(optimizer: Any) -> SVI:
        return SVI(optimal, G.Collapsed(optimal, init_loc_fn=start), optimizer, dgp.ELBO())

    def run(optimizer: Callable[[Any], Any], every: int) -> Curve:
        guide = G.MeanField(explicit, inducing=G.Full(), init_loc_fn=start)
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
    parser.add_argument("--steps", type=int, default=5000, help="of Adam and natural gradients")
    parser.add_argument("--functions", nargs="+", choices=list(step_function.FUNCTIONS), default=["step", "sinusoids"])
    parser.add_argument("--out", type=Path, default=Path("collapsed_curves_output"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_x64", True)
    found = {name: curves(name, arguments.num, arguments.steps) for name in arguments.functions}
    print(table(found))
    (arguments.out / "curves.md").write_text(table(found) + "\n")
    (arguments.out / "curves.json").write_text(json.dumps(found))
    draw(found, arguments.out / "collapsed_curves.png")


if __name__ == "__main__":
    main()
