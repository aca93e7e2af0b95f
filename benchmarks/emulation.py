"""Emulators of deterministic codes from small designs: Gaussian processes, deep ones, and their mixture.

``python benchmarks/emulation.py`` draws Latin hypercubes of 10 D and 30 D points for the functions of
``simulators.py``, fits, and scores on 500 others. Records are appended to ``--results``, a line for each fit; what is
there is not fitted again, and ``--table`` prints the table. Outputs are in units of the standard deviation of the
training outputs, and so are RMSE and CRPS. ``--data FILE ...`` takes rows of real sets in place of the functions
(``.npz`` with X and y, or tables whose last column is y: ``implementations/data_files.py``), inputs in the unit cube of
the training rows.

A method is a generator of ``(name, posterior)`` with ``predict``, from a design and the depths: add it to ``METHODS``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from implementations import data_files
from implementations import emulation_tables as tables
from numpyro.infer import MCMC, NUTS, SVI, init_to_median
from scipy.special import ndtr
from scipy.stats import qmc
from simulators import SIMULATORS

import numpyro_dgp as dgp
from numpyro_dgp.depth.weighted_posterior import Depth, arguments_of, weighed_by_evidence
from numpyro_dgp.optim import NaturalGradient, log_linear

jax.config.update("jax_enable_x64", True)
KEY = jax.random.key(0)
MOST_POINTS = 100
EXACT, NOISY = 1e-4, 0.1
"""Medians of the noise a priori: of codes without noise, and of others."""
NUM_DRAWS, NUM_RUNS = 400, 4
STEPS = 5000
DEPTHS = (1, 2, 3)
WEIGHING = {"least_gain": 1.0, "layer_odds": 0.25, "least_odds": 0.05}
"""Defaults of ``fit_best``: the first of stacking, the others of weights by the evidence."""
LAYERS = {1: "one layer", 2: "two layers", 3: "three layers"}


class Design(NamedTuple):
    """Training and test points of the unit cube, outputs in units of the training outputs, and the median that the
    standard deviation of the noise has a priori."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: np.ndarray
    noise: float


def make_design(name: str, per_dim: int, seed: int, noise: float = 0.0, num_test: int = 500) -> Design:
    code, rng = SIMULATORS[name], np.random.default_rng([seed, per_dim])
    points = min(per_dim * code.dims, MOST_POINTS)
    X, X_test = (qmc.LatinHypercube(code.dims, rng=rng).random(n) for n in (points, num_test))
    y, y_test = code.run(X), code.run(X_test)
    mean, unit = y.mean(), y.std()
    y, y_test = ((values - mean) / unit + noise * rng.normal(size=len(values)) for values in (y, y_test))
    return Design(jnp.asarray(X), jnp.asarray(y), jnp.asarray(X_test), y_test, NOISY if noise else EXACT)


def rows_of(X: np.ndarray, y: np.ndarray, per_dim: int, seed: int, num_test: int = 500) -> Design:
    """Training and test rows of a set, drawn at random."""
    points, rng = min(per_dim * X.shape[1], MOST_POINTS), np.random.default_rng([seed, per_dim])
    train, test = np.split(rng.permutation(len(y))[: points + num_test], [points])
    low, width = X[train].min(0), np.ptp(X[train], 0)
    X, y = (X - low) / np.where(width > 0, width, 1.0), (y - y[train].mean()) / y[train].std()
    return Design(jnp.asarray(X[train]), jnp.asarray(y[train]), jnp.asarray(X[test]), y[test], NOISY)


def family(X: jax.Array, y: jax.Array, noise: float = EXACT, **program: Any) -> Callable[[int], Callable[..., None]]:
    """The programs of the package, for inputs in the unit cube."""
    return dgp.design.emulator_family(X, y, bounds=[[0.0, 1.0]] * X.shape[1], noise=noise, **program)


def depth_of(text: str) -> Depth:
    """2, or 2x1 for two layers whose hidden one has one column."""
    layers, *columns = map(int, text.split("x"))
    return (layers, *columns) if columns else layers


def exact_gp(design: Design, depths: tuple[Depth, ...]) -> Iterator[tuple[str, Any]]:
    """One layer with the largest posterior density of the logarithms of hyperparameters, the best of two starts."""
    model = family(design.X, design.y, design.noise)(1)
    guide = dgp.guides.Collapsed(model)
    svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
    found = []
    for scale in (0.3, 1.5):
        start = {"log_lengthscale0_auto_loc": jnp.full(design.X.shape[1], math.log(scale))}
        found.append(
            dgp.optim.minimize(svi, KEY, design.X, design.y, max_steps=300, init_params=start, progress_bar=False)
        )
    best = min(found, key=lambda minimum: minimum.losses[-1])
    yield "GP", dgp.Posterior(model, guide.on(design.X, design.y), best.params)


class _Sklearn:
    """A fitted ``GaussianProcessRegressor`` with the method ``predict`` of a posterior."""

    def __init__(self, process: Any) -> None:
        self.process = process

    def predict(self, key: Any, X: Any, **_: Any) -> dgp.densities.Mixture:
        mean, deviation = self.process.predict(np.asarray(X), return_std=True)
        return dgp.densities.Mixture(mean[None], np.square(deviation)[None])


def sklearn_gp(design: Design, depths: tuple[Depth, ...]) -> Iterator[tuple[str, Any]]:
    """Scikit-learn's process with an anisotropic Matern kernel, the best of three starts."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    D = design.X.shape[1]
    kernel = ConstantKernel(1.0, (1e-3, 1e4)) * Matern(np.full(D, 0.5), (1e-2, 1e2), nu=2.5)
    process = GaussianProcessRegressor(
        kernel + WhiteKernel(1e-6, (1e-10, 1.0)), n_restarts_optimizer=2, random_state=0, alpha=1e-10
    )
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lengthscales at the end of their range
        yield "GP, scikit-learn", _Sklearn(process.fit(np.asarray(design.X), np.asarray(design.y)))


def by_depth(
    design: Design, depths: tuple[Depth, ...], *, one_layer: str, num_draws: int, num_runs: int, **weighing: float
) -> Iterator[tuple[str, Any]]:
    """``fit_best``, the same fits weighed by their evidence, and its parts with draws."""
    options: dict[str, Any] = {"least_gain": weighing["least_gain"], "one_layer": one_layer}
    options |= {"num_draws": num_draws, "num_runs": num_runs}
    best = dgp.fit_best(family(design.X, design.y, design.noise), KEY, design.X, design.y, depths=depths, **options)
    print(best)
    how = "" if depths == DEPTHS else f", layers {depths}"
    how += ", one layer by draws" * (one_layer == "draws") + f", {num_draws} draws" * (num_draws != NUM_DRAWS)
    how += f", num_runs {num_runs}" * (num_runs != NUM_RUNS)
    how += "".join(f", {name} {weighing[name]:g}" for name in WEIGHING if weighing[name] != WEIGHING[name])
    yield "fit_best" + how, best
    by_evidence = weighed_by_evidence(best.parts, weighing["layer_odds"], weighing["least_odds"])
    yield "fit_best by evidence" + how, by_evidence
    for depth, part in best.parts.items():
        if part.posterior.samples and (depths == DEPTHS or isinstance(depth, tuple)):
            columns = f", {depth[1]} hidden" if isinstance(depth, tuple) else ""
            yield LAYERS[arguments_of(depth)[0]] + columns + how, part.posterior


def by_guide(
    design: Design, depths: tuple[Depth, ...], *, name: str, make: Callable[..., Any], **program: Any
) -> Iterator[tuple[str, Any]]:
    """A guide of two and more layers, by natural gradients for the last layer and Adam, from noise of a tenth."""
    for depth in depths:
        if depth > 1:
            model = family(design.X, design.y, design.noise, **program)(depth)
            guide = make(model)
            adam = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(optax.cosine_decay_schedule(0.02, STEPS)))
            collapsed = isinstance(guide, dgp.guides.Collapsed)
            optimizer = adam if collapsed else NaturalGradient(guide, log_linear(1e-4, 0.1, 40), adam)
            svi, start = SVI(model, guide, optimizer, dgp.ELBO()), {"log_noise_auto_loc": jnp.array(math.log(0.1))}
            result = dgp.fit(svi, KEY, STEPS, design.X, design.y, init_params=start, progress_bar=False)
            shown = guide.on(design.X, design.y) if collapsed else guide
            yield f"{LAYERS[depth]}, {name}", dgp.Posterior(model, shown, result.params)


def by_nuts(design: Design, depths: tuple[Depth, ...]) -> Iterator[tuple[str, Any]]:
    """NUTS with the last layer integrated, two chains from the medians of the prior."""
    for depth in depths:
        if depth > 1:
            model = family(design.X, design.y, design.noise)(depth)
            kernel = NUTS(dgp.for_mcmc(model), init_strategy=init_to_median, target_accept_prob=0.9, max_tree_depth=8)
            mcmc = MCMC(
                kernel, num_warmup=150, num_samples=150, num_chains=2, chain_method="sequential", progress_bar=False
            )
            mcmc.run(KEY, design.X, design.y)
            yield f"{LAYERS[depth]}, NUTS", dgp.Posterior(model, samples=mcmc.get_samples())


SHALLOW = "GP", "GP, scikit-learn"
"""Methods that do not look at the depths."""
METHODS: dict[str, Callable[..., Iterator[tuple[str, Any]]]] = {
    "GP": exact_gp,
    "GP, scikit-learn": sklearn_gp,
    "fit_best": by_depth,
    "InducingPoint": partial(by_guide, name="InducingPoint", make=dgp.guides.InducingPoint),
    "GivenInducing": partial(
        by_guide,
        name="GivenInducing",
        make=partial(dgp.guides.MeanField, inducing=dgp.guides.Full(), hidden=dgp.guides.GivenInducing()),
        process_noise=1e-3,
    ),
    "Collapsed": partial(
        by_guide,
        name="Collapsed, RBF",
        make=partial(dgp.guides.Collapsed, hidden=dgp.guides.GivenInducing()),
        process_noise=1e-3,
        last_kernel=dgp.kernels.RBF,  # with expectations in closed form
        follow=False,  # inducing values of hidden layers are integrated
    ),
    "NUTS": by_nuts,
}


def scores(posterior: Any, design: Design) -> dict[str, float]:
    """RMSE, CRPS of the mixture over draws, and coverage of central intervals of 90 %."""
    mixture = posterior.predict(jax.random.key(5), design.X_test)
    y, means, deviations = design.y_test, np.asarray(mixture.means), np.sqrt(np.asarray(mixture.variances))
    lower, upper = np.asarray(dgp.densities.Mixture(jnp.asarray(means), jnp.asarray(deviations**2)).interval(0.9))
    return {
        "rmse": float(np.sqrt(np.mean((means.mean(0) - y) ** 2))),
        "crps": float(crps(y, means, deviations).mean()),
        "coverage": float(np.mean((lower <= y) & (y <= upper))),
    }


def crps(y: np.ndarray, means: np.ndarray, deviations: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Of mixtures of Gaussians (S, N), in closed form: Grimit et al. (2006). Weights (S,) are equal by default."""
    weights = np.full(len(means), 1 / len(means)) if weights is None else weights

    def expected(m: np.ndarray, s: np.ndarray) -> np.ndarray:  # E|N(m, s^2)|
        return m * (2 * ndtr(m / s) - 1) + s * np.exp(-0.5 * np.square(m / s)) * math.sqrt(2 / math.pi)

    first = weights @ expected(y - means, deviations)
    pairs = [
        weights @ expected(means - m, np.sqrt(deviations**2 + s**2)) for m, s in zip(means, deviations, strict=True)
    ]
    return first - weights @ np.array(pairs) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codes", nargs="+", default=list(SIMULATORS), choices=list(SIMULATORS))
    parser.add_argument("--data", type=Path, nargs="+", help="real sets, in place of the codes")
    parser.add_argument("--methods", nargs="+", default=list(METHODS)[:3], choices=list(METHODS))
    parser.add_argument("--per-dim", type=int, nargs="+", default=[10], help="points for each input")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation, in that of the training outputs")
    depths_help = "numbers of layers, and 2x1 for two with one hidden column"
    parser.add_argument("--depths", type=depth_of, nargs="+", default=list(DEPTHS), help=depths_help)
    for name, default in WEIGHING.items():
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=default, help="of fit_best")
    parser.add_argument("--one-layer", default="mode", choices=("mode", "draws"), help="how fit_best predicts by it")
    parser.add_argument("--draws", type=int, default=NUM_DRAWS, help="of each part of fit_best")
    parser.add_argument(
        "--runs", type=int, default=NUM_RUNS, help="of Monte Carlo, of programs with a weight by the first"
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "emulation.jsonl")
    parser.add_argument("--table", action="store_true", help="print the table and stop")
    arguments = parser.parse_args()

    def done() -> list[dict[str, Any]]:
        lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
        return [json.loads(line) for line in lines]

    sources: dict[str, tuple[int, Callable[[int, int], Design]]] = {
        name: (SIMULATORS[name].dims, partial(make_design, name, noise=arguments.noise)) for name in arguments.codes
    }
    if arguments.data:
        sets = {path.stem: data_files.load(path) for path in arguments.data}
        sources = {name: (X.shape[1], partial(rows_of, X, y)) for name, (X, y) in sets.items()}
    cases = [
        (p, s, c, m)
        for p in arguments.per_dim
        for s in arguments.seeds
        for c in sorted(sources, key=lambda c: sources[c][0])  # those of one shape share what is compiled
        for m in arguments.methods
    ]
    for per_dim, seed, code, method in [] if arguments.table else cases:
        dims, make = sources[code]
        points = min(per_dim * dims, MOST_POINTS)
        case = code, points, arguments.noise
        weighing = {name: getattr(arguments, name) for name in WEIGHING}
        weighing |= {"one_layer": arguments.one_layer, "num_draws": arguments.draws, "num_runs": arguments.runs}
        options = weighing if method == "fit_best" else {}
        depths = [list(depth) if isinstance(depth, tuple) else depth for depth in arguments.depths]
        by = {"by": method} | ({} if method in SHALLOW else {"depths": depths}) | options
        if any((tables.case_of(r), r["seed"]) == (case, seed) and by.items() <= r.items() for r in done()):
            continue
        design = make(per_dim, seed)
        clock = time.perf_counter()
        for name, posterior in METHODS[method](design, tuple(arguments.depths), **options):
            seconds = round(time.perf_counter() - clock, 1)
            record = {"code": code, "points": points, "noise": arguments.noise, "seed": seed} | by
            record |= {"method": name, "version": dgp.__version__}
            if hasattr(posterior, "weights"):
                record["weights"] = list(posterior.weights.values())
                record["log_evidence"] = [part.log_evidence for part in posterior.parts.values()]
                record["held_out"] = list(posterior.held_out.values())
            record |= scores(posterior, design) | {"seconds": seconds}
            print(record, flush=True)
            with open(arguments.results, "a") as file:
                file.write(json.dumps(record) + "\n")
    found = done()
    print(tables.table(found), tables.by_code(found), sep="\n\n")
    for name in dict.fromkeys(r["method"] for r in found if r["method"].startswith("fit_best, layers (")):
        print("", name, tables.by_code(found, name), sep="\n")
    for score in ("rmse", "crps"):
        for other in ("GP", "GP, scikit-learn", "fit_best, version before"):
            if any(r["method"] == other for r in found):
                print("", tables.relative(found, score, other), sep="\n")
    for score in ("rmse", "crps"):
        print("", tables.ranks(found, score), sep="\n")
    print("", tables.differences(found, "crps", "fit_best", "GP"), sep="\n")


if __name__ == "__main__":
    main()
