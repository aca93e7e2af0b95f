"""Why ``fit_best`` was behind a process of largest likelihood, and why depth had no weight: in plain NumPy.

``python benchmarks/emulation_causes.py priors`` compares priors of the hyperparameters of one Matern process: the
hyperparameters of largest posterior density, and draws of the posterior by importance sampling, beside the largest
likelihood in the box of ``emulation.py``. ``... depth`` draws from the posteriors of one and two layers by sequential
Monte Carlo with elliptical slice moves, and compares weights by evidence with weights by stacking, by leave-one-out
densities in closed form given each draw. Nothing of the package is used. Designs have seeds of 1000 and up and are not
those of ``emulation.py``, whose settings were chosen by these. Records go to ``--results``, a line for each design.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
from scipy.special import gammaln, logsumexp
from scipy.stats import norm, qmc
from simulators import SIMULATORS

NOISE = math.log(1e-4)
Array = np.ndarray


def make(name: str, seed: int, num_test: int = 300) -> tuple[Array, Array, Array, Array]:
    code, rng = SIMULATORS[name], np.random.default_rng([seed, 10])
    X, X_test = (qmc.LatinHypercube(code.dims, rng=rng).random(n) for n in (10 * code.dims, num_test))
    y, y_test = code.run(X), code.run(X_test)
    return X, (y - y.mean()) / y.std(), X_test, (y_test - y.mean()) / y.std()


def matern(a: Array, b: Array, scales: Array) -> Array:
    """Correlations of rows (..., N, D) and (..., M, D) with lengthscales (..., D)."""
    a, b = a / scales[..., None, :], b / scales[..., None, :]
    square = (a * a).sum(-1)[..., :, None] + (b * b).sum(-1)[..., None, :] - 2 * a @ np.swapaxes(b, -1, -2)
    r = math.sqrt(5) * np.sqrt(np.maximum(square, 0))
    return (1 + r + r * r / 3) * np.exp(-r)


def cholesky(K: Array) -> Array:
    """Of every matrix, NaN where there is none."""
    try:
        return np.linalg.cholesky(K)
    except np.linalg.LinAlgError:
        if K.ndim == 2:
            return np.full_like(K, np.nan)
        return np.stack([cholesky(k) for k in K])


def jitter(rows: int) -> float:
    return max(2 * rows * np.finfo(float).eps, 1e-10)


def gaussian(y: Array, mean: Array, K: Array) -> Array:
    """Log densities of y under N(mean, K), minus infinity where K has no root."""
    L = cholesky(np.where(np.isfinite(K), K, 0.0))
    bad = ~np.isfinite(L).all((-1, -2))
    L[bad] = np.eye(len(y))
    white = np.linalg.solve(L, (y - mean[:, None])[..., None])[..., 0]
    found = -0.5 * (white * white).sum(-1) - np.log(np.diagonal(L, axis1=-2, axis2=-1)).sum(-1)
    return np.where(bad, -np.inf, found - 0.5 * len(y) * math.log(2 * math.pi))


def scores(means: Array, variances: Array, y: Array) -> tuple[float, float]:
    """RMSE of the mean, and CRPS of the mixture."""

    def expected(m: Array, s: Array) -> Array:
        return m * (2 * norm.cdf(m / s) - 1) + 2 * s * norm.pdf(m / s)

    s = np.sqrt(variances)
    pairs = np.mean([expected(means - a, np.sqrt(s * s + b * b)) for a, b in zip(means, s, strict=True)], (0, 1))
    crps = (expected(y - means, s).mean(0) - pairs / 2).mean()
    return float(np.sqrt(np.mean((means.mean(0) - y) ** 2))), float(crps)


class Layers:
    """One or more layers, integrated over the last, in numbers z that are standard normal before the data.

    z has noise, mean, variance, lengthscales (D); for every inner layer variance and lengthscales; whitened values
    (N, D) of every inner layer. Hyperparameters are log-normal; inner layers are the identity and a process.
    """

    def __init__(
        self, X: Array, y: Array, depth: int, variance: tuple[float, float], scales: tuple[float, float], inner: Any
    ) -> None:
        self.X, self.y, self.depth = X, y, depth
        self.N, self.D = X.shape
        self.variance, self.scales, self.inner, self.inner_scales = variance, scales, inner, (math.log(0.5), 1.5)
        self.hyper = 3 + self.D + (depth - 1) * (1 + self.D)
        self.size = self.hyper + (depth - 1) * self.N * self.D

    def numbers(self, z: Array) -> tuple[Array, ...]:
        """Noise, mean, variance and lengthscales of the last layer."""
        value = [np.exp(NOISE + 2 * z[:, 0]), z[:, 1], np.exp(self.variance[0] + self.variance[1] * z[:, 2])]
        return (*value, np.exp(self.scales[0] + self.scales[1] * z[:, 3 : 3 + self.D]))

    def layers(self, z: Array) -> list[tuple[Array, Array, Array, Array]]:
        """Inputs, root of the correlations, standard deviation and lengthscales of all inner layers; the last entry has
        the inputs of the last layer only."""
        h, found = np.broadcast_to(self.X, (len(z), *self.X.shape)), []
        for i in range(self.depth - 1):
            at = 3 + self.D + i * (1 + self.D)
            deviation = np.exp(0.5 * (self.inner[0] + self.inner[1] * z[:, at]))[:, None, None]
            scales = np.exp(self.inner_scales[0] + self.inner_scales[1] * z[:, at + 1 : at + 1 + self.D])
            L = cholesky(matern(h, h, scales) + jitter(self.N) * np.eye(self.N))
            found.append((h, L, deviation, scales))
            h = h + deviation * (L @ self.white(z, i))
        return [*found, (h, h, h, h)]

    def white(self, z: Array, layer: int) -> Array:
        at = self.hyper + layer * self.N * self.D
        return z[:, at : at + self.N * self.D].reshape(-1, self.N, self.D)

    def covariance(self, z: Array, h: Array) -> Array:
        noise, _, variance, scales = self.numbers(z)
        extra = (noise**2 + jitter(self.N) * variance)[:, None, None]
        return variance[:, None, None] * matern(h, h, scales) + extra * np.eye(self.N)

    def log_likelihood(self, z: Array) -> Array:
        return gaussian(self.y, z[:, 1], self.covariance(z, self.layers(z)[-1][0]))

    def predict(self, z: Array, X: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        noise, mean, variance, scales = self.numbers(z)
        layers, new = self.layers(z), np.broadcast_to(X, (len(z), *X.shape))
        for i, (h, L, deviation, inner_scales) in enumerate(layers[:-1]):
            A = np.linalg.solve(L, matern(h, new, inner_scales))
            spread = np.sqrt(np.maximum(1 - (A * A).sum(1), 0))[..., None]
            moved = np.swapaxes(A, 1, 2) @ self.white(z, i)
            new = new + deviation * (moved + spread * rng.normal(size=moved.shape))
        h = layers[-1][0]
        L, y = cholesky(self.covariance(z, h)), (self.y - mean[:, None])[..., None]
        A = np.linalg.solve(L, variance[:, None, None] * matern(h, new, scales))
        means = mean[:, None] + (np.swapaxes(A, 1, 2) @ np.linalg.solve(L, y))[..., 0]
        return means, np.maximum(variance[:, None] - (A * A).sum(1), 1e-14) + noise[:, None] ** 2

    def left_out(self, z: Array) -> Array:
        """Log densities of every observation given the others, by truncated importance weights of the draws."""
        Q = np.linalg.inv(self.covariance(z, self.layers(z)[-1][0]))
        precision = np.diagonal(Q, axis1=1, axis2=2)
        residual = (Q @ (self.y - z[:, 1:2])[..., None])[..., 0]
        each = 0.5 * np.log(precision / (2 * math.pi)) - 0.5 * residual**2 / precision
        log_weights = np.minimum(-each - logsumexp(-each, axis=0) + math.log(len(z)), 0.5 * math.log(len(z)))
        return logsumexp(log_weights + each, axis=0) - logsumexp(log_weights, axis=0)

    def blocks(self) -> list[Array]:
        inner = [np.arange(self.hyper, self.size)] * 2 + [np.arange(3 + self.D, self.hyper)]
        scales = [np.array([3 + d]) for d in range(self.D)]
        return [np.arange(self.hyper), np.arange(3), *scales, *(inner if self.depth > 1 else [])]


def slice_move(
    target: Layers, z: Array, value: Array, beta: float, block: Array, rng: np.random.Generator
) -> tuple[Array, Array]:
    """An elliptical slice move of some numbers of all draws: Murray et al. (2010)."""
    moves = np.isin(np.arange(z.shape[1]), block)
    across, height = rng.normal(size=z.shape), beta * value + np.log(rng.uniform(size=len(z)))
    angle = rng.uniform(0, 2 * math.pi, len(z))
    low, high, todo = angle - 2 * math.pi, angle.copy(), np.arange(len(z))
    z_new, value_new = z.copy(), value.copy()
    for _ in range(25):
        point = z[todo] * np.cos(angle[todo])[:, None] + across[todo] * np.sin(angle[todo])[:, None]
        point = np.where(moves, point, z[todo])
        found = target.log_likelihood(point)
        taken = beta * found > height[todo]
        z_new[todo[taken]], value_new[todo[taken]] = point[taken], found[taken]
        todo = todo[~taken]
        if not len(todo):
            break
        below = angle[todo] < 0
        low[todo[below]], high[todo[~below]] = angle[todo[below]], angle[todo[~below]]
        angle[todo] = rng.uniform(low[todo], high[todo])
    return z_new, value_new


def populate(target: Layers, count: int, sweeps: int, rng: np.random.Generator) -> tuple[Array, float]:
    """Draws of the posterior and the log evidence: Jasra et al. (2011)."""
    z = rng.normal(size=(count, target.size))
    value, beta, log_evidence = target.log_likelihood(z), 0.0, 0.0

    def log_weights(step: float) -> Array:
        return step * np.where(np.isfinite(value), value, -1e300)

    def share(step: float) -> float:
        weights = np.exp(log_weights(step) - log_weights(step).max())
        return float(weights.sum() ** 2 / (weights**2).sum() / count)

    while beta < 1:
        low, high = 0.0, 1 - beta
        for _ in range(40 if share(high) < 0.5 else 0):
            low, high = ((low + high) / 2, high) if share((low + high) / 2) > 0.5 else (low, (low + high) / 2)
        step = low if share(1 - beta) < 0.5 else 1 - beta
        log_evidence += float(logsumexp(log_weights(step))) - math.log(count)
        weights = np.exp(log_weights(step) - logsumexp(log_weights(step)))
        chosen = np.searchsorted(np.cumsum(weights), (np.arange(count) + rng.uniform()) / count).clip(0, count - 1)
        z, value, beta = z[chosen], value[chosen], min(1.0, beta + step)
        for _ in range(sweeps if beta < 1 else 2 * sweeps):
            for block in target.blocks():
                z, value = slice_move(target, z, value, beta, block, rng)
    return z, log_evidence


def stacked(log_densities: Array, steps: int = 5000) -> Array:
    densities = np.exp(log_densities - log_densities.max(1, keepdims=True))
    weights = np.full(densities.shape[1], 1 / densities.shape[1])
    for _ in range(steps):
        weights = weights * (densities / (densities @ weights)[:, None]).mean(0)
    return weights / weights.sum()


def depth(name: str, seed: int, count: int, inner: tuple[float, float]) -> dict[str, Any]:
    """One and two layers, and mixtures of the two by several weights."""
    X, y, X_test, y_test = make(name, seed)
    predictions, evidence, left_out, result = [], [], [], {}
    for layers in (1, 2):
        rng = np.random.default_rng(seed)
        target = Layers(X, y, layers, (1.0, 6.0), (0.5 * math.log(X.shape[1]), 2.0), inner)
        z, log_evidence = populate(target, count, 2, rng)
        predictions.append(target.predict(z, X_test, rng))
        evidence.append(log_evidence)
        left_out.append(target.left_out(z))
        result[f"{layers} layers"] = scores(*predictions[-1], y_test)
    for way, log_weights in (
        ("evidence", np.array(evidence)),
        ("stacking", np.log(stacked(np.stack(left_out, 1)) + 1e-300)),
    ):
        share = float(np.exp(log_weights[1] - logsumexp(log_weights)))
        deep = round(share * count)
        both = [np.concatenate([a[: count - deep], b[:deep]]) for a, b in zip(*predictions, strict=True)]
        result[way], result[f"weight by {way}"] = scores(*both, y_test), share
    return {"log_evidence": evidence} | result


def _normal(x: Array, mean: float, deviation: float) -> Array:
    return norm.logpdf(x, mean, deviation).reshape(len(x), -1).sum(1)


def _student(x: Array, mean: float, scale: float) -> Array:
    """Three degrees of freedom."""
    each = math.log(2 / (math.pi * math.sqrt(3))) - math.log(scale) - 2 * np.log1p(((x - mean) / scale) ** 2 / 3)
    return each.reshape(len(x), -1).sum(1)


# Of the logarithms of variance and lengthscales; u has mean, log variance, log noise, log lengthscales.
Prior = Callable[[Array, int], Array]
PRIORS: dict[str, Prior] = {
    "narrow": lambda u, D: _normal(u[:, 1], 1.0, 3.0) + _normal(u[:, 3:], math.log(0.5 * math.sqrt(D)), 1.5),
    "twice as wide": lambda u, D: _normal(u[:, 1], 1.0, 6.0) + _normal(u[:, 3:], math.log(0.5 * math.sqrt(D)), 3.0),
    "wide, longer": lambda u, D: _normal(u[:, 1], 1.0, 6.0) + _normal(u[:, 3:], math.log(math.sqrt(D)), 2.0),
    "Student-t": lambda u, D: _student(u[:, 1], 1.0, 3.0) + _student(u[:, 3:], math.log(math.sqrt(D)), 1.0),
}


class Process:
    """The joint density of one layer, in batches of hyperparameters u."""

    def __init__(self, X: Array, y: Array, prior: Prior | None) -> None:
        self.X, self.y, self.prior = X, y, prior

    def covariance(self, u: Array) -> Array:
        variance = np.exp(u[:, 1])
        extra = np.exp(2 * u[:, 2]) + jitter(len(self.X)) * variance
        return variance[:, None, None] * matern(self.X, self.X, np.exp(u[:, 3:])) + extra[:, None, None] * np.eye(
            len(self.X)
        )

    def __call__(self, u: Array) -> Array:
        found = gaussian(self.y, u[:, 0], self.covariance(u))
        if self.prior is not None:
            found = found + self.prior(u, self.X.shape[1]) + _normal(u[:, :1], 0, 1) + _normal(u[:, 2:3], NOISE, 2.0)
        return np.where(np.isfinite(found), found, -np.inf)

    def predict(self, u: Array, X: Array) -> tuple[Array, Array]:
        variance, L = np.exp(u[:, 1]), cholesky(self.covariance(u))
        A = np.linalg.solve(L, variance[:, None, None] * matern(self.X, X, np.exp(u[:, 3:])))
        means = u[:, :1] + (np.swapaxes(A, 1, 2) @ np.linalg.solve(L, (self.y - u[:, :1])[..., None]))[..., 0]
        return means, np.maximum(variance[:, None] - (A * A).sum(1), 1e-14) + np.exp(2 * u[:, 2:3])

    def maximum(self, box: tuple[Array, Array], rng: np.random.Generator) -> Array:
        """The best of five maxima from the best of 300 points, with slopes by differences."""
        D, (low, high) = self.X.shape[1], box

        def with_slope(x: Array, h: float = 1e-5) -> tuple[float, Array]:
            steps = h * np.eye(len(x))
            values = -self(np.concatenate([x[None], x + steps, x - steps]))
            values = np.where(np.isfinite(values), values, 1e8)
            return values[0], (values[1 : 1 + len(x)] - values[1 + len(x) :]) / (2 * h)

        common = np.column_stack([np.zeros(300), rng.uniform(-1, 6, 300), rng.uniform(-12, -3, 300)])
        scales = rng.uniform(-2.5, 2.0, (300, 1)) + rng.normal(0, 0.7, (300, D))
        u = np.clip(np.concatenate([common, scales], 1), low, high)
        limits: Any = list(zip(low, high, strict=True))
        found = [
            scipy.optimize.minimize(
                with_slope, u[i], jac=True, method="L-BFGS-B", bounds=limits, options={"maxiter": 200}
            )
            for i in np.argsort(-self(u))[:5]
        ]
        return min(found, key=lambda r: r.fun).x

    def draws(self, start: Array, rng: np.random.Generator, count: int = 100) -> Array:
        """By importance sampling from a Student-t that has the moments of the draws before; five rounds."""
        n, mean, root = len(start), start, 0.3 * np.eye(len(start))
        for round_ in range(5):
            t = rng.normal(size=(4000, n)) / np.sqrt(rng.chisquare(5, 4000) / 5)[:, None]
            u = mean + t @ root.T
            proposal = gammaln((5 + n) / 2) - (5 + n) / 2 * np.log1p((t * t).sum(1) / 5) - np.log(np.diag(root)).sum()
            log_weights = np.concatenate([self(part) for part in np.array_split(u, 20)]) - proposal
            tempered = log_weights * (0.3 if round_ < 2 else 1.0)
            weights = np.exp(tempered - logsumexp(tempered))
            if round_ == 4:
                return u[rng.choice(len(u), count, p=weights)]
            mean = weights @ u
            root = scipy.linalg.cholesky((u - mean).T @ ((u - mean) * weights[:, None]) + 1e-3 * np.eye(n), lower=True)
        raise AssertionError


def priors(name: str, seed: int) -> dict[str, Any]:
    """Largest likelihood in a box, largest posterior density, and draws of the posterior."""
    X, y, X_test, y_test = make(name, seed)
    D, logs = X.shape[1], np.log
    box = np.r_[0.0, logs(1e-3), logs(1e-5), np.full(D, logs(1e-2))], np.r_[0.0, logs(1e4), 0.0, np.full(D, logs(1e2))]
    all_ = (
        np.r_[-50.0, logs(1e-8), logs(1e-9), np.full(D, logs(1e-3))],
        np.r_[50.0, logs(1e9), 0.0, np.full(D, logs(1e4))],
    )
    likelihood = Process(X, y, None)
    best = likelihood.maximum(box, np.random.default_rng(seed))
    result = {"largest likelihood": scores(*likelihood.predict(best[None], X_test), y_test)}
    for label, prior in PRIORS.items():
        rng, process = np.random.default_rng(seed), Process(X, y, prior)
        best = process.maximum(all_, rng)
        result[f"largest density, {label}"] = scores(*process.predict(best[None], X_test), y_test)
        result[f"posterior, {label}"] = scores(*process.predict(process.draws(best, rng), X_test), y_test)
    return result


def summary(records: list[dict[str, Any]], reference: str) -> Iterator[str]:
    """Mean log ratios of RMSE and CRPS to a method, with standard errors over designs."""
    for code in dict.fromkeys(r["code"] for r in records):
        mine = [r for r in records if r["code"] == code]
        for method in [
            m for m, value in mine[0].items() if isinstance(value, list) and len(value) == 2 and m != "log_evidence"
        ]:
            ratios = np.array([np.log(np.divide(r[method], r[reference])) for r in mine])
            error = ratios.std(0, ddof=1) / math.sqrt(len(mine)) if len(mine) > 1 else np.full(2, np.nan)
            shown = " ".join(f"{m:+.3f} ({e:.3f})" for m, e in zip(ratios.mean(0), error, strict=True))
            yield f"{code:12s} {len(mine)} {method:32s} {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["priors", "depth"])
    parser.add_argument("--codes", nargs="+", default=["booth", "branin", "sine", "forrester", "step", "hartmann3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1000, 1001, 1002])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--inner", nargs=2, type=float, default=[0.01, 2.5], help="median, spread of inner variances")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    records = []
    for seed in arguments.seeds:
        for code in arguments.codes:
            clock, inner = time.perf_counter(), (math.log(arguments.inner[0]), arguments.inner[1])
            found = priors(code, seed) if arguments.what == "priors" else depth(code, seed, arguments.draws, inner)
            records.append(json.loads(json.dumps({"code": code, "seed": seed} | found)))
            print(records[-1], f"{time.perf_counter() - clock:.0f} s", flush=True)
            if arguments.results is not None:
                with open(arguments.results, "a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
    print("\n".join(summary(records, "largest likelihood" if arguments.what == "priors" else "1 layers")))


if __name__ == "__main__":
    main()
