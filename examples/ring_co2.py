"""Exact regression and counts on regular grids: atmospheric CO2, sunspots, coal-mining disasters.

``python examples/ring_co2.py`` fits three series by ``dgp.rings.RingNormal``, a Gaussian process on a ring whose log
evidence costs O(N log N) and, for what is not observed on the ring, the cube of the number of those points:

- weekly CO2 with gaps, hyperparameters by SVI (their mode, then Laplace's approximation), the last eight years and a
  tenth of the other weeks held out;
- yearly sunspot numbers, hyperparameters by NUTS on the log evidence, the last 30 years held out;
- yearly disasters in British coal mines, a log-Gaussian Cox process, its function and hyperparameters by NUTS.

It prints a table of held-out log densities and coverages and ArviZ summaries, and writes figures to ``--out``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import operator
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.scipy.special import logsumexp
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation
from numpyro.infer.initialization import init_to_median

import numpyro_dgp as dgp
from numpyro_dgp import plots

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Disasters a year, 1851 to 1961 (Jarrett, 1979); two years are missing.
COAL = """4 5 4 0 1 4 3 4 0 6 3 3 4 0 2 6 3 3 5 4 5 3 1 4 4 1 5 5 3 4 2 5 2 2 3 4 2 1 3 - 2 1 1 1 1 3 0 0 1 0 1 1 0 0 3
1 0 3 2 2 0 1 1 1 0 1 0 1 0 0 0 2 1 0 0 0 1 1 0 2 3 3 1 - 2 1 1 1 1 2 4 2 0 0 1 4 0 0 0 1 0 0 0 0 0 1 0 0 1 0 1"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wave(dgp.kernels.Kernel):
    r"""Oscillations of a slowly changing form: :math:`\sigma^2 e^{-r^2 / 2\ell^2} \cos(2\pi r / p)`, one input.

    A kernel of one's own. Its spectral density is two Gaussians, one at each sign of the frequency.
    """

    variance: Any
    lengthscale: Any
    period: Any

    def evaluate(self, X1: jax.Array, X2: jax.Array) -> jax.Array:
        angle = 2 * math.pi * (X1[..., :, None, 0] - X2[..., None, :, 0]) / self.period
        return self._envelope().evaluate(X1, X2) * jnp.cos(angle)

    def diagonal(self, X: jax.Array) -> jax.Array:
        return self._envelope().diagonal(X)

    def spectral_density(self, omega: jax.Array) -> jax.Array:
        carrier = 2 * math.pi / self.period
        return 0.5 * sum(self._envelope().spectral_density(omega + s * carrier) for s in (-1, 1))

    def _envelope(self) -> dgp.kernels.RBF:
        return dgp.kernels.RBF(self.variance, self.lengthscale)


def positive(name: str, typical: float, spread: float = 1.0) -> Any:
    """A positive hyperparameter whose logarithm is normal around that of a typical value."""
    return numpyro.sample(name, dist.LogNormal(math.log(typical), spread))


def score(name: str, y: np.ndarray, means: jax.Array, variances: jax.Array, rows: np.ndarray) -> str:
    """A line of the table, for a mixture over draws of the hyperparameters; means and variances (S, M)."""
    prediction = dgp.densities.Mixture(means[:, rows], variances[:, rows])
    error, sd = y - prediction.mean, jnp.sqrt(prediction.variance)
    log_density = logsumexp(dist.Normal(prediction.means, jnp.sqrt(prediction.variances)).log_prob(y), 0)
    cells = jnp.sqrt(jnp.square(error).mean()), (log_density - math.log(len(means))).mean()
    coverage = 100 * float((abs(error) < 1.96 * sd).mean())
    return f"{name:40s}{len(y):6d}{float(cells[0]):9.3f}{float(cells[1]):13.3f}{coverage:11.1f} %"


def summarise(title: str, posterior: dict[str, np.ndarray], kind: str = "all") -> None:
    """ArviZ's summary of draws of scalars (chains, draws); ``kind="stats"`` for draws that are not from chains."""
    import arviz_base
    import arviz_stats

    table = arviz_stats.summary(arviz_base.from_dict({"posterior": posterior}), kind=kind, round_to=3)
    print(f"\n{title}\n{table.to_string()}\n", flush=True)


# --- carbon dioxide

DECADE = 10.0


def co2_series(smoke: bool) -> tuple[dgp.rings.Ring, np.ndarray, np.ndarray, np.ndarray]:
    """The ring, the values on it (NaN where there are none), and which are for training and for interpolation."""
    from statsmodels.datasets import co2

    values = co2.load_pandas().data["co2"]
    weekly = values.to_numpy()[: 52 * 6 if smoke else None]
    # 56 years are 2922 weeks exactly (and 7 years nearly 365): the season goes round the ring in step.
    years, size = (7, 365) if smoke else (56, 2922)
    begin = values.index[0].year + values.index[0].day_of_year / 365.25
    y = np.full(size, np.nan)
    y[: len(weekly)] = weekly
    last = len(weekly) - (52 if smoke else 8 * 52)
    block = np.arange(size) // 8  # eight weeks at a time, one block in ten
    inside = (block % 10 == 5) & (np.arange(size) < last)
    return dgp.rings.Ring(begin, begin + years, size), y, (np.arange(size) < last) & ~inside, inside


def co2_terms(decade: bool) -> dict[str, dgp.kernels.Kernel]:
    """A season with two harmonics, and variations over half a decade, a year and weeks."""
    stable = positive("season_lengthscale", 20.0, 0.5)
    season = Wave(positive("season1", 2.0) ** 2, stable, 1.0) + Wave(positive("season2", 0.7) ** 2, stable, 0.5)
    terms: dict[str, dgp.kernels.Kernel] = {"season": season}
    if decade:  # no longer than about a third of what the ring has to spare beyond the data
        terms["decade"] = dgp.kernels.RBF(positive("decade", 1.0) ** 2, positive("decade_lengthscale", 4.5, 0.1))
    terms["years"] = dgp.kernels.RBF(positive("years", 0.5) ** 2, positive("years_lengthscale", 1.0, 0.5))
    terms["weeks"] = dgp.kernels.Matern32(positive("weeks", 0.3) ** 2, positive("weeks_lengthscale", 0.1, 0.5))
    return terms


def co2_model(ring: dgp.rings.Ring, observed: np.ndarray, y: Any = None, decade: bool = True) -> None:
    """A quadratic trend, the terms of the kernel, noise."""
    t = (ring.points()[:, 0] - 1980.0) / DECADE
    level = numpyro.sample("level", dist.Normal(340.0, 20.0))
    slope = numpyro.sample("slope", dist.Normal(13.0, 5.0))
    bend = numpyro.sample("bend", dist.Normal(1.0, 1.0))
    numpyro.deterministic("trend", level + slope * t + bend * t**2)
    kernel = reduce(operator.add, co2_terms(decade).values())
    loc = (level + slope * t + bend * t**2)[observed]
    series = dgp.rings.RingNormal(kernel, ring, positive("noise", 0.3), np.asarray(observed), loc)
    numpyro.sample("y", series, obs=y)


def spectra(model: Any, values: dict[str, jax.Array], y: jax.Array, ring: dgp.rings.Ring, *args: Any) -> plt.Figure:
    """Power of the terms of the kernel and of 200 draws of the whole function given the data, at one set of values."""
    program = numpyro.handlers.substitute(numpyro.handlers.seed(model, 0), data=values)
    series = numpyro.handlers.trace(program).get_trace(ring, *args, y)["y"]["fn"]
    noise = jnp.sqrt(series.noise_variance)

    @jax.jit
    @jax.vmap
    def draw(key: jax.Array) -> jax.Array:
        """A draw from the prior, and what it takes to explain the data (Matheron's rule)."""
        prior_key, noise_key = jax.random.split(key)
        f = series.process.sqrt(jax.random.normal(prior_key, series.white_shape))
        error = noise * jax.random.normal(noise_key, y.shape)
        return f + series.posterior(y - f[series.present] - error)[0]

    terms = numpyro.handlers.substitute(numpyro.handlers.seed(co2_terms, 0), data=values)("decade" in values)
    draws = draw(jax.random.split(jax.random.key(2), 200))
    figure = plots.ring_spectra(ring, terms, values=draws, noise=noise, unit="year")
    figure.axes[0].set(ylabel="power, squared parts per million")
    return figure


def predict(model: Any, samples: dict[str, jax.Array], y: jax.Array, *args: Any) -> tuple[jax.Array, jax.Array]:
    """Means and variances of noisy values on the whole ring (S, M), one row per draw of the hyperparameters."""

    @jax.jit
    def one(values: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        program = numpyro.handlers.seed(numpyro.handlers.substitute(model, data=values), 0)
        sites = numpyro.handlers.trace(program).get_trace(*args, y)
        mean, variance = sites["y"]["fn"].posterior(y)
        return sites["trend"]["value"] + mean, variance + jnp.square(sites["noise"]["value"])

    return jax.lax.map(one, samples)


def fit_co2(out: Path, steps: int, draws: int, smoke: bool, decade: bool) -> list[str]:
    """Mode and curvature of the log evidence, then predictions averaged over draws of the hyperparameters."""
    ring, y, early, inside = co2_series(smoke)
    known = ~np.isnan(y)
    train, inside = early & known, inside & known
    later = known & ~early & ~inside
    model = partial(co2_model, decade=decade)
    guide = AutoLaplaceApproximation(model, init_loc_fn=init_to_median(num_samples=50))
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.05, steps)), Trace_ELBO())
    result = svi.run(jax.random.key(0), steps, ring, train, jnp.asarray(y[train]), progress_bar=False)
    samples = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(max(draws, 1000),))
    samples.pop("trend")
    title = "CO2 (ppm, years; the trend per decade), Laplace's approximation"
    summarise(title, {k: np.asarray(v)[None] for k, v in samples.items()}, kind="stats")
    picked = {k: v[:draws] for k, v in samples.items()}
    means, variances = predict(model, picked, jnp.asarray(y[train]), ring, train)
    first_year = later & (np.cumsum(later) <= 52)
    lines = [
        score("CO2, weeks in between (ppm)", y[inside], means, variances, inside),
        score("CO2, forecast, first year", y[first_year], means, variances, first_year),
        score("CO2, forecast, all years", y[later], means, variances, later),
    ]
    middle = {k: jnp.median(v) for k, v in samples.items()}
    spectra(model, middle, jnp.asarray(y[train]), ring, train).savefig(out / "ring_spectra.png", dpi=110)
    x = np.asarray(ring.points()[:, 0])
    prediction = dgp.densities.Mixture(means, variances)
    mean, sd = np.asarray(prediction.mean), np.sqrt(np.asarray(prediction.variance))
    begin, end = x[early | inside].max(), x[known].max()
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=[1.2, 1], layout="constrained")
    for ax, (low, high) in zip(axes, ((x[0], end), (begin - 3, end)), strict=True):
        shown = (x >= low) & (x <= high)
        ax.fill_between(x[shown], (mean - 2 * sd)[shown], (mean + 2 * sd)[shown], color="C0", alpha=0.3, lw=0)
        ax.plot(x[shown], mean[shown], color="C0", lw=0.8, label="mean, 2 sd")
        for mask, colour, label in ((train, "0.2", "training"), (inside | later, "C1", "held out")):
            ax.plot(x[mask & shown], y[mask & shown], ".", color=colour, ms=2, label=label)
        ax.axvline(begin, color="0.5", lw=0.8, ls="--")
        ax.set(xlabel="year", ylabel="CO2 (parts per million)")
    axes[0].legend(frameon=False, markerscale=4)
    axes[1].set(title="forecast")
    figure.savefig(out / "ring_co2.png", dpi=110)
    plt.close(figure)
    return lines


# --- sunspots


def sunspot_model(ring: dgp.rings.Ring, observed: np.ndarray, y: Any = None) -> None:
    """The square root of the yearly number: a level, cycles of about eleven years, slow and fast variations, noise."""
    trend = numpyro.deterministic("trend", numpyro.sample("level", dist.Normal(6.5, 1.0)))
    cycles = Wave(
        positive("cycle", 2.5, 0.5) ** 2, positive("cycle_lengthscale", 15.0, 0.5), positive("period", 11.0, 0.1)
    )
    slow = dgp.kernels.RBF(positive("slow", 1.0, 0.5) ** 2, positive("slow_lengthscale", 30.0, 0.2))
    fast = dgp.kernels.RBF(positive("fast", 1.0, 0.5) ** 2, positive("fast_lengthscale", 1.5, 0.2))
    series = dgp.rings.RingNormal(cycles + slow + fast, ring, positive("noise", 0.5), np.asarray(observed), trend)
    numpyro.sample("y", series, obs=y)


def fit_sunspots(out: Path, warmup: int, num: int, draws: int, smoke: bool) -> list[str]:
    """NUTS on the log evidence; draws of the hyperparameters carry over to the forecast."""
    from statsmodels.datasets import sunspots

    table = sunspots.load_pandas().data.iloc[: 80 if smoke else None]
    years, y = table["YEAR"].to_numpy(float), np.sqrt(table["SUNACTIVITY"].to_numpy())
    ring, present = dgp.rings.regular(years, margin=120.0)
    held = 15 if smoke else 30
    train = present & (np.cumsum(present) <= len(y) - held)
    later = present & ~train
    mcmc = MCMC(NUTS(sunspot_model), num_warmup=warmup, num_samples=num, num_chains=2, chain_method="sequential",
                progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.key(0), ring, train, jnp.asarray(y[:-held]))
    chains = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items() if k != "trend"}
    summarise("Sunspots (square root of the number, years), NUTS", chains)
    picked = {k: jnp.asarray(v.reshape(-1)[:: max(1, v.size // draws)]) for k, v in chains.items()}
    means, variances = predict(sunspot_model, picked, jnp.asarray(y[:-held]), ring, train)
    first = later & (np.cumsum(later) <= 5)
    lines = [
        score("sunspots, forecast, first 5 years (root)", y[-held:][:5], means, variances, first),
        score(f"sunspots, forecast, {held} years (root)", y[-held:], means, variances, later),
    ]
    prediction = dgp.densities.Mixture(means, variances)
    mean, sd = np.asarray(prediction.mean), np.sqrt(np.asarray(prediction.variance))
    x = np.asarray(ring.points()[:, 0])
    shown = x <= years[-1] + 30
    figure, ax = plt.subplots(figsize=(11, 3.2), layout="constrained")
    band = [np.square(np.maximum(mean + s * sd, 0))[shown] for s in (-2, 0, 2)]
    ax.fill_between(x[shown], band[0], band[2], color="C0", alpha=0.3, lw=0)
    ax.plot(x[shown], band[1], color="C0", lw=1, label="median, 2 sd of the root")
    ax.plot(years[:-held], y[:-held] ** 2, ".", color="0.2", ms=4, label="training")
    ax.plot(years[-held:], y[-held:] ** 2, ".", color="C1", ms=4, label="held out")
    ax.axvline(years[-held] - 0.5, color="0.5", lw=0.8, ls="--")
    ax.set(xlabel="year", ylabel="yearly mean sunspot number")
    ax.legend(frameon=False, ncols=3, loc="upper left")
    figure.savefig(out / "ring_sunspots.png", dpi=110)
    plt.close(figure)
    return lines


# --- coal


def coal_model(ring: dgp.rings.Ring, counted: np.ndarray, counts: Any = None) -> None:
    """Counts with the rate exp(f), f a process on the ring; in two years nobody counted."""
    kernel = dgp.kernels.Matern32(positive("sd", 0.7, 0.5) ** 2, positive("lengthscale", 25.0, 0.4))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", dgp.rings.RingNormal(kernel, ring, loc=level))
    numpyro.sample("counts", dist.Poisson(jnp.exp(f[np.flatnonzero(counted)])).to_event(1), obs=counts)


def fit_coal(out: Path, warmup: int, num: int) -> None:
    """A log-Gaussian Cox process: NUTS on the whitened frequencies of the ring and the hyperparameters."""
    counts = np.array([math.nan if c == "-" else float(c) for c in COAL.split()])
    years = 1851.0 + np.arange(len(counts))
    ring, present = dgp.rings.regular(years, margin=150.0)
    counted = np.zeros_like(present)
    counted[: len(counts)] = ~np.isnan(counts)
    mcmc = MCMC(NUTS(dgp.for_mcmc(coal_model)), num_warmup=warmup, num_samples=num, num_chains=2,
                chain_method="sequential", progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.key(0), ring, counted, jnp.asarray(counts[~np.isnan(counts)]))
    chains = mcmc.get_samples(group_by_chain=True)
    f = np.asarray(chains["f"])[..., : len(years)]
    shown = {k: np.asarray(chains[k]) for k in ("sd", "lengthscale", "level")}
    shown |= {f"f({year})": f[..., year - 1851] for year in (1860, 1890, 1934, 1950)}
    summarise("Coal mines (log rate per year, years), NUTS", shown)
    low, middle, high = np.quantile(np.exp(f.reshape(-1, len(years))), [0.025, 0.5, 0.975], axis=0)
    figure, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
    ax.bar(years, np.nan_to_num(counts), width=0.9, color="0.8", label="disasters")
    ax.fill_between(years, low, high, color="C0", alpha=0.3, lw=0)
    ax.plot(years, middle, color="C0", lw=1.5, label="rate: median, 95 %")
    ax.plot(years[np.isnan(counts)], [0.1, 0.1], "x", color="C3", label="not counted")
    ax.set(xlabel="year", ylabel="disasters per year")
    ax.legend(frameon=False)
    figure.savefig(out / "ring_coal.png", dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["co2", "sunspots", "coal"], default=["co2", "sunspots", "coal"])
    parser.add_argument("--steps", type=int, default=300, help="of Adam, for CO2 (default: 300)")
    parser.add_argument("--warmup", type=int, default=500, help="of NUTS (default: 500)")
    parser.add_argument("--samples", type=int, default=1000, help="of NUTS per chain, two chains (default: 1000)")
    parser.add_argument("--draws", type=int, default=20, help="of hyperparameters in predictions (default: 20)")
    parser.add_argument("--no-decade", action="store_true", help="leave out the term of half a decade of CO2")
    parser.add_argument("--out", type=Path, default=Path("ring_output"))
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few rows, to see that it runs")
    arguments = parser.parse_args()
    smoke = arguments.smoke
    if smoke:
        arguments.steps, arguments.warmup, arguments.samples, arguments.draws = 20, 10, 10, 4
    arguments.out.mkdir(parents=True, exist_ok=True)
    numpyro.enable_x64()
    lines = [f"{'held out':40s}{'rows':>6s}{'RMSE':>9s}{'log density':>13s}{'95 % holds':>13s}"]
    if "co2" in arguments.only:
        lines += fit_co2(arguments.out, arguments.steps, arguments.draws, smoke, not arguments.no_decade)
    if "sunspots" in arguments.only:
        lines += fit_sunspots(arguments.out, arguments.warmup, arguments.samples, arguments.draws, smoke)
    if "coal" in arguments.only:
        fit_coal(arguments.out, arguments.warmup, arguments.samples)
    print("\n".join(lines))
    (arguments.out / "table.txt").write_text("\n".join(lines) + "\n")
    print(f"figures are in {arguments.out}")


if __name__ == "__main__":
    main()
