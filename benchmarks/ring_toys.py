"""The toy experiments of Tebbutt (2016), chapters 1 and 3: means, covariances, how many inducing points are enough.

``python benchmarks/ring_toys.py`` prints two tables and writes three figures to ``--out``:

- ``ring_means.png``: the posterior mean by conjugate gradients and by AdaGrad (figures 3.2 and 3.3);
- ``ring_covariances.png``: convergence, posterior variances and their divergence from the exact ones for the
  covariance families (figures 3.4 to 3.8);
- ``ring_enough.png``: the gap of M regular inducing points (after figure 1.1, by ``subsampled.Subsampled``).

The toy (section 3.1.1): 750 data in three clusters, 75 inducing points on [-15, 15], an RBF kernel with variance and
lengthscale one, noise variance 0.1. Everything is in double precision. The nugget is 1e-6 of the variance, to which
W K W and the diagonal of sites are sensitive.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import scipy.optimize
from numpyro.distributions import kl_divergence

import numpyro_dgp as dgp
from numpyro_dgp.rings.circulant import even_part, hartley
from numpyro_dgp.rings.every_pth import Subsampled
from numpyro_dgp.rings.features import RingFeatures
from numpyro_dgp.rings.ring_beliefs import RingBelief, RingPrior
from numpyro_dgp.rings.spectra import Ring, periodised, spectrum

matplotlib.use("Agg")
import matplotlib.pyplot as plt

M, BLOCKS, NOISE = 75, ((75,),), 0.1**0.5
CLUSTERS = ((-10.0, -5.0), (-3.0, 3.0), (6.0, 10.0))
KERNEL, RING = dgp.kernels.RBF(), Ring(-15.0, 15.0, 75)


class Toy(NamedTuple):
    """Data on the ring, their whitened covariances with the inducing values (N, M), and the prior of those."""

    x: jax.Array
    y: jax.Array
    A: jax.Array
    prior: RingPrior

    @property
    def precision(self) -> jax.Array:
        """Of the optimal q(v)."""
        return jnp.eye(M) + self.A.T @ self.A / NOISE**2

    def gap(self, q: RingBelief) -> jax.Array:
        """Nats by which the bound with the covariance of q is below the one with the best covariance."""
        return self.loss(q, self.A) - 0.5 * jnp.linalg.slogdet(self.precision)[1]

    def loss(self, q: RingBelief, A: jax.Array) -> jax.Array:
        """What the bound loses by the covariance of q; from some of the rows of A, without bias."""
        data = 0.5 * q.feature_variance(A).sum() / NOISE**2 * len(self.A) / len(A)
        return data + kl_divergence(q, self.prior)


def make_toy(intervals: tuple[tuple[float, float], ...], seed: int) -> Toy:
    """750 data, equally many in every interval, from the process on the ring."""
    rng = np.random.default_rng(seed)
    x = np.sort(np.concatenate([rng.uniform(a, b, 750 // len(intervals)) for a, b in intervals]))[:, None]
    L = np.linalg.cholesky(periodised(KERNEL, RING, x, x) + NOISE**2 * np.eye(750))
    features = RingFeatures.of(KERNEL, RING, nugget=1e-6)
    A = features.whitened(jnp.asarray(x))
    return Toy(jnp.asarray(x), jnp.asarray(L @ rng.normal(size=750)), A, RingPrior((M,), features.spectrum, BLOCKS))


# --- optima of the families, each by what suits it


def newton(Q: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The minimum of w' Q w / 2 - sum log w: damped Newton steps converge from anywhere."""
    for _ in range(5000):
        g, H = Q @ w - 1 / w, Q + np.diag(w**-2)
        step = np.linalg.solve(H, g)
        size = np.sqrt(g @ step)
        w = w - step / (1 + size * (size > 0.25))
        if size < 1e-6:
            return w
    raise RuntimeError("no convergence")


def optima(toy: Toy) -> dict[str, RingBelief]:
    """The best member of each family."""
    prior, precision = toy.prior, np.asarray(toy.precision)
    zero, one = jnp.zeros(M), jnp.ones(M)
    H, root = np.asarray(hartley(jnp.eye(M), BLOCKS)), np.asarray(prior.spectrum) ** -0.5
    scaled = root[:, None] * precision * root

    @jax.jit
    def quadratic(gain: jax.Array) -> jax.Array:
        return jax.hessian(lambda w: toy.loss(RingBelief(prior, zero, outer=w, gain=gain), toy.A))(one) - jnp.eye(M)

    gain = 1 / jnp.sqrt(even_part(jnp.diagonal(toy.precision), BLOCKS))
    w = newton(np.asarray(quadratic(one)), np.full(M, 0.3))
    both, g = np.ones(M), gain
    for _ in range(60):  # alternately, each optimum exact
        both = newton(np.asarray(quadratic(g)), both)
        left = H @ np.diag(both) @ H
        g = 1 / jnp.sqrt(even_part(jnp.asarray(np.diagonal(left @ scaled @ left)) * prior.spectrum, BLOCKS))

    def product(logs: jax.Array) -> RingBelief:
        outer, gain, inner = jnp.exp(logs).reshape(3, M)
        return RingBelief(prior, zero, outer=outer, gain=gain, inner=inner)

    start = np.log(np.concatenate([both, np.asarray(g), np.ones(M)]))
    objective = jax.jit(jax.value_and_grad(lambda logs: toy.loss(product(logs), toy.A)))
    found = scipy.optimize.minimize(lambda x: [np.asarray(a) for a in objective(x)], start, jac=True,
                                    method="L-BFGS-B", options={"maxiter": 500, "maxfun": 1000})  # fmt: skip
    return {
        "independent values": RingBelief(
            prior, zero, outer=jnp.asarray(np.diagonal(H @ scaled @ H) ** -0.5), powers=(0.5, 0)
        ),
        "ScaledPrior": RingBelief(prior, zero, outer=jnp.asarray(w)),
        "WhitenedSites": RingBelief(
            prior, zero, outer=jnp.asarray(np.diagonal(H @ precision @ H) ** -0.5), powers=(0, 0)
        ),
        "Circulant": RingBelief(prior, zero, gain=gain),
        "ScaledCirculant": RingBelief(prior, zero, outer=jnp.asarray(both), gain=g),
        "ScaledProduct": product(jnp.asarray(found.x)),
    }


def adagrad(slope: Callable[..., jax.Array], start: jax.Array, rate: float, steps: int, every: int) -> jax.Array:
    """Parameters every ``every`` steps of Tebbutt (2016), algorithm 3.3, which descends ``slope(key, parameters)``."""

    def step(state: Any, key: jax.Array) -> tuple[Any, None]:
        x, total = state
        g = slope(key, x)
        total = total + g**2
        return (x - rate * g / jnp.sqrt(total), total), None

    def block(state: Any, keys: jax.Array) -> tuple[Any, jax.Array]:
        state, _ = jax.lax.scan(step, state, keys)
        return state, state[0]

    keys = jax.random.split(jax.random.key(0), (steps // every, every))
    return jax.jit(lambda: jax.lax.scan(block, (start, jnp.zeros_like(start)), keys)[1])()


def conjugate_gradients(apply: Callable[[jax.Array], jax.Array], b: jax.Array, steps: int) -> jax.Array:
    """The iterates (steps, M) of linear conjugate gradients from zero (algorithm 3.1)."""

    def step(state: Any, _: None) -> tuple[Any, jax.Array]:
        x, r, p = state
        Ap = apply(p)
        square = r @ r
        alpha = jnp.where(square > 0, square / (p @ Ap), 0)
        x, r = x + alpha * p, r - alpha * Ap
        return (x, r, r + jnp.where(square > 0, r @ r / square, 0) * p), x

    return jax.jit(lambda: jax.lax.scan(step, (jnp.zeros_like(b), b, b), None, steps)[1])()


def exact(toy: Toy, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the exact posterior on the ring."""
    K = np.asarray(periodised(KERNEL, RING, toy.x, toy.x)) + NOISE**2 * np.eye(len(toy.x))
    cross = np.asarray(periodised(KERNEL, RING, jnp.asarray(x[:, None]), toy.x))
    gain = np.linalg.solve(K, cross.T).T
    return gain @ np.asarray(toy.y), 1 - (gain * cross).sum(1)


# --- figures

GRID = np.linspace(-15, 15, 601)[:-1]
INSIDE = np.any([(a <= GRID) & (b >= GRID) for a, b in CLUSTERS], axis=0)


def shade(ax: Any) -> None:
    """Where there are data."""
    for a, b in CLUSTERS:
        ax.axvspan(a, b, color="0.93", lw=0)


def draw_means(toy: Toy, out: Path, epochs: int) -> None:
    """Figures 3.2 and 3.3: iterates in the coordinates u of Tebbutt (2016) and in whitened ones."""
    truth, _ = exact(toy, GRID)
    at_grid = RingFeatures.of(KERNEL, RING, nugget=1e-6).whitened(jnp.asarray(GRID[:, None]))
    root = jnp.sqrt(toy.prior.spectrum)

    def to_u(rows: jax.Array) -> jax.Array:
        """Rows on v as rows on u."""
        return hartley(rows / root, BLOCKS)

    G, s2 = to_u(toy.A), NOISE**2
    inverse = lambda u: hartley(hartley(u, BLOCKS) / toy.prior.spectrum, BLOCKS)  # noqa: E731

    def slope(key: jax.Array, u: jax.Array) -> jax.Array:
        rows = jax.random.choice(key, 750, (75,), replace=False)
        return -10 * (toy.y[rows] - G[rows] @ u) @ G[rows] / s2 + inverse(u)

    def slope_white(key: jax.Array, v: jax.Array) -> jax.Array:
        rows = jax.random.choice(key, 750, (75,), replace=False)
        return -10 * (toy.y[rows] - toy.A[rows] @ v) @ toy.A[rows] / s2 + v

    white = lambda v: v + (toy.A @ v) @ toy.A / s2  # noqa: E731
    found = {
        "AdaGrad, u": adagrad(slope, jnp.zeros(M), 1.0, 10 * epochs, 10) @ to_u(at_grid).T,
        "AdaGrad, whitened": adagrad(slope_white, jnp.zeros(M), 0.5, 10 * epochs, 10) @ at_grid.T,
        "CG, u": conjugate_gradients(lambda u: inverse(u) + (G @ u) @ G / s2, toy.y @ G / s2, epochs) @ to_u(at_grid).T,
        "CG, whitened": conjugate_gradients(white, toy.y @ toy.A / s2, epochs) @ at_grid.T,
    }
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), width_ratios=[1.6, 1, 1], layout="constrained")
    axes[0].plot(toy.x[:, 0], toy.y, ".", color="0.6", ms=2)
    for i, (name, means) in enumerate(found.items()):
        axes[0].plot(GRID, means[-1], color=f"C{i}", lw=1.2, label=name)
        for ax, where in zip(axes[1:], (INSIDE, ~INSIDE), strict=True):
            ax.semilogy(np.arange(1, epochs + 1), abs(means - truth)[:, where].mean(1), color=f"C{i}")
    axes[0].plot(GRID, truth, "k--", lw=1, label="exact")
    axes[0].legend(frameon=False, fontsize=8, ncols=2)
    axes[0].set(xlabel="x", ylabel="y", title=f"means after {epochs} passes over the data", ylim=(-4, 4.5))
    for ax, title in zip(axes[1:], ("where there are data", "where there are none"), strict=True):
        ax.set(xlabel="passes over the data", ylabel="mean |error of the mean|", title=title)
    figure.savefig(out / "ring_means.png", dpi=110)
    for name, means in found.items():
        errors = abs(means - truth)[-1]
        print(f"mean, {name}: error {errors[INSIDE].mean():.1e} at data, {errors[~INSIDE].mean():.1e} elsewhere")


def divergences(variance: jax.Array, truth: np.ndarray) -> jax.Array:
    """KL divergences of Gaussians with the same means."""
    ratio = variance / truth
    return 0.5 * (ratio - 1 - jnp.log(ratio))


def draw_covariances(toy: Toy, found: dict[str, RingBelief], out: Path, steps: int) -> None:
    """Figures 3.4 to 3.8."""
    _, truth = exact(toy, GRID)
    features = RingFeatures.of(KERNEL, RING, nugget=1e-6)
    x = jnp.asarray(GRID[:, None])
    at_grid, conditional = features.whitened(x), features.conditional_variance(x)
    variance = lambda q: conditional + q.feature_variance(at_grid).reshape(-1)  # noqa: E731
    zero = jnp.zeros(M)
    curves = {
        "Circulant": (lambda p: RingBelief(toy.prior, zero, gain=jnp.exp(p)), jnp.zeros(M), 2.0),
        "ScaledPrior": (lambda p: RingBelief(toy.prior, zero, outer=jax.nn.softplus(p)), jnp.full(M, 0.378), 0.5),
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), layout="constrained")
    for i, (name, (build, start, rate)) in enumerate(curves.items()):

        def slope(key: jax.Array, p: jax.Array, build: Any = build) -> jax.Array:
            row = jax.random.randint(key, (1,), 0, 750)
            return jax.grad(lambda p: toy.loss(build(p), toy.A[row]))(p)

        every = max(steps // 100, 1)
        path = adagrad(slope, start, rate, steps, every)
        ticks = every * np.arange(1, len(path) + 1)
        axes[0, 0].loglog(ticks, jax.lax.map(lambda p, b=build: toy.gap(b(p)), path), color=f"C{i}", label=name)
        axes[0, 0].axhline(toy.gap(found[name]), color=f"C{i}", ls="--", lw=1)
        last, best = float(toy.gap(build(path[-1]))), float(toy.gap(found[name]))
        print(f"AdaGrad, {name}: gap {last:.1f} after {steps} steps, optimum {best:.1f}")
        kls = jax.lax.map(lambda p, b=build: divergences(variance(b(p)), truth), path)
        for where, style in ((INSIDE, "-"), (~INSIDE, ":")):
            axes[0, 1].loglog(ticks, kls[:, where].mean(1), style, color=f"C{i}")
    axes[0, 0].set(xlabel="steps of AdaGrad, one datum each", ylabel="gap (nats)", title="optimum dashed")
    axes[0, 0].legend(frameon=False)
    axes[0, 1].set(xlabel="steps of AdaGrad, one datum each", ylabel="mean KL of marginals (nats)",
                   title="data: solid; none: dotted")  # fmt: skip
    for ax, names in zip(axes[1], (("Circulant", "ScaledPrior"), ("WhitenedSites", "ScaledCirculant")), strict=True):
        shade(ax)
        ax.semilogy(GRID, truth, "k--", lw=1, label="exact")
        for name in names:
            ax.semilogy(GRID, variance(found[name]), color={"Circulant": "C0", "ScaledPrior": "C1"}.get(
                name, "C2" if name == "WhitenedSites" else "C3"), label=name)  # fmt: skip
        ax.set(xlabel="x (shaded: data)", ylabel="posterior variance of f", ylim=(5e-4, 2))
        ax.legend(frameon=False, fontsize=8, loc="lower center", ncols=3)
    figure.savefig(out / "ring_covariances.png", dpi=110)


def table(toy: Toy, found: dict[str, RingBelief], everywhere: Toy, found_everywhere: dict[str, RingBelief]) -> str:
    """Both rankings: gaps with data everywhere and in three clusters, and errors of the variances in the clusters."""
    _, truth = exact(toy, GRID)
    features = RingFeatures.of(KERNEL, RING, nugget=1e-6)
    x = jnp.asarray(GRID[:, None])
    at_grid, conditional = features.whitened(x), features.conditional_variance(x)
    lines = ["| rule | gap, data everywhere | gap, three clusters | KL of variances at data | where there are none |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name, q in found.items():
        kls = divergences(conditional + q.feature_variance(at_grid).reshape(-1), truth)
        gaps = float(everywhere.gap(found_everywhere[name])), float(toy.gap(q))
        lines.append(
            f"| {name} | {gaps[0]:.1f} | {gaps[1]:.1f} | {kls[INSIDE].mean():.3f} | {kls[~INSIDE].mean():.3f} |"
        )
    return "\n".join(lines)


def draw_enough(out: Path, smoke: bool) -> str:
    """How many regular inducing points are enough: 40 data per lengthscale, on a ring of 63 lengthscales."""
    N = 252 if smoke else 2520
    length, noise = N / 40, NOISE
    periods = [p for p in range(1, N // 8) if N % p == 0]
    kernels = {
        k.__name__: k() for k in (dgp.kernels.RBF, dgp.kernels.Matern52, dgp.kernels.Matern32, dgp.kernels.Matern12)
    }
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
    lines = ["| kernel | points per lengthscale for 0.01 nats per lengthscale | for 0.001 |", "|---|---|---|"]
    for name, kernel in kernels.items():
        ring = Ring(0.0, length, N)
        gaps = np.array([float(Subsampled.of(kernel, ring, p).expected_gap(noise)) for p in periods]) / length
        density = N / np.array(periods) / length
        axes[0].loglog(density[1:], np.maximum(gaps[1:], 1e-12), ".-", label=name)
        enough = [min([d for d, g in zip(density, gaps, strict=True) if g < level]) for level in (0.01, 0.001)]
        cells = ["all 40" if e == density[0] else f"{e:.1f}" for e in enough]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    axes[0].set(
        xlabel="inducing points per lengthscale", ylabel="expected gap per lengthscale (nats)", ylim=(1e-9, None)
    )
    axes[0].legend(frameon=False, fontsize=8)
    ring, every = Ring(0.0, 12.0, 960), 60  # sixteen inducing points
    x = ring.points()[:, 0]
    for ax, lengthscale in zip(axes[1:], (1.5, 0.4), strict=True):
        kernel = dgp.kernels.RBF(1.0, lengthscale)
        white = np.random.default_rng(5).normal(size=(2, 960))
        y = hartley(jnp.sqrt(spectrum(kernel, ring)) * white[0], (ring.sizes,)) + noise * white[1]
        ax.plot(x, y, ".", color="0.8", ms=2)
        for every_, colour, label in ((1, "C3", "exact"), (every, "C0", "16 inducing points")):
            found = Subsampled.of(kernel, ring, every_)
            mean, variance = found.posterior(y, noise)
            ax.fill_between(x, mean - 2 * variance**0.5, mean + 2 * variance**0.5, color=colour, alpha=0.3, lw=0)
            ax.plot(x, mean, color=colour, lw=1, label=label)
        ax.plot(x[::every], np.full(16, -3.6), "k|", ms=8)
        gap = float(found.evidence(y, noise) - found.bound(y, noise))
        ax.set(xlabel="x", ylabel="y", title=f"lengthscale {lengthscale}: gap {gap:.3g} nats", ylim=(-4, 4))
        ax.legend(frameon=False, fontsize=8, loc="upper right")
    figure.savefig(out / "ring_enough.png", dpi=110)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=150, help="passes over the data for the means")
    parser.add_argument("--steps", type=int, default=10_000, help="steps on one datum each for the covariances")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("ring_toys_output"))
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.epochs, arguments.steps = 5, 100
    arguments.out.mkdir(parents=True, exist_ok=True)
    numpyro.enable_x64()
    print(draw_enough(arguments.out, arguments.smoke), flush=True)
    toy, everywhere = (make_toy(where, arguments.seed) for where in (CLUSTERS, ((-15.0, 15.0),)))
    draw_means(toy, arguments.out, arguments.epochs)
    found = optima(toy)
    draw_covariances(toy, found, arguments.out, arguments.steps)
    print(table(toy, found, everywhere, optima(everywhere)))


if __name__ == "__main__":
    main()
