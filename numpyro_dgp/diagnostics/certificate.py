r"""A certificate that a guide is close to the posterior, or the check that it failed.

For a guide q with the bound :math:`\mathcal L`,

.. math:: \mathrm{KL}[q \,\|\, p(\cdot \mid y)] = \log p(y) - \mathcal L \le U - \mathcal L ,

with an upper bound U of the log evidence. U comes from draws of the posterior, which a sequential Monte Carlo run from
the prior gives, by annealing back to the guide; annealing from the guide gives a lower bound. Both are the same number
for all guides of a program, so that one pair of bounds decides about a whole ladder of guides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from numpyro.infer import SVI
from scipy.special import softmax

from numpyro_dgp._checks import expect, expect_kind, require_count, require_key
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.program import inspect_program, run_on_shapes
from numpyro_dgp.analysis.sites import site_kind, unwrap
from numpyro_dgp.depth.integrated_fit import Density, Ended, fit_integrated
from numpyro_dgp.diagnostics.comparison import bounds_of, has_converged, learned_sites, verdict
from numpyro_dgp.diagnostics.evidence import Evidence, evidence
from numpyro_dgp.diagnostics.local_sites import is_value, local_sites, site_kinds
from numpyro_dgp.diagnostics.pareto import pareto_shape
from numpyro_dgp.diagnostics.rank_test import judge
from numpyro_dgp.diagnostics.ratios import drawing, summed_over_data
from numpyro_dgp.diagnostics.replications import joined, replicate
from numpyro_dgp.functions.site_distribution import declared
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.guides.collapsed.collapsed_guide import Collapsed
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.presets import InducingPoint
from numpyro_dgp.guides.rules.global_inducing import GlobalInducing
from numpyro_dgp.guides.rules.pointwise import Normal
from numpyro_dgp.guides.rules.structured import GivenInducing
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import fit
from numpyro_dgp.optim.natural import NaturalGradient, log_linear
from numpyro_dgp.predict.posterior import Posterior

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Certificate", "certify"]

_RUNS = 4
"""Of the sampler from the prior."""
_POINTS, _SWEEPS = 128, 8
"""Points of each of these at a temperature, and sweeps of each chain."""
_ANNEALED, _LEAPFROGS, _FIRST, _MORE = 32, 8, 250, 4
"""Annealed runs in each direction, gradients at each temperature, temperatures of the first attempt, and how many times
as many the next one has."""
_WEIGHTS, _LOCAL = 500, 20
"""Draws for Pareto's k, and of the variables of single data for each of them."""
_LEVEL = 0.01
"""The probability that calibrated refits are taken for others."""
_CROSSED = 0.1
"""The share of the gap by which the upper bound may be below the lower one: no decision depends on less."""
_ERRORS = 2.0
"""Standard errors that are added to an estimate on the side that is less favourable to the guide."""


@dataclasses.dataclass(frozen=True, eq=False)
class Certificate:
    """The result of :func:`certify`.

    ``print(certificate)`` writes it as a paragraph.

    Args:
        guide: name of the first guide of the ladder that is close enough; ``None`` if none is.
        posterior: its fit, for predictions; ``None`` if none is.
        gap: the largest divergence that was asked for, in nats.
        reasons: why no guide was certified; empty if one was.
        table: one row per guide that was tried: ``bound`` and ``bound_se``; ``gap_low`` and ``gap_high``, between which
            its divergence from the posterior is; ``khat``; ``starts``, by how much the bounds of its starts differ;
            ``converged``, as in :func:`compare`; and ``verdict``.
        evidence: lower and upper bound of the log evidence by annealing.
        between: bounds of the log evidence, with two standard errors on either side; the lower one is the greater of
            those by annealing from the guide and by the sampler.
        draws: of the posterior by the sampler, as a posterior for predictions.
        draws_gap: the largest divergence of such a draw from the posterior, in nats; infinite if the sampler is not to
            be trusted. Where it is small and no guide is certified, predict by the draws.
        num_data: how many observations there are.
        refits: fits to simulated data by which the calibration of the guide was tested.
    """

    guide: str | None
    posterior: Posterior | None
    gap: float
    reasons: tuple[str, ...]
    table: DataFrame
    evidence: Evidence
    between: tuple[float, float]
    draws: Posterior
    draws_gap: float
    num_data: int
    refits: int = 0

    __repr__ = brief

    def __str__(self) -> str:
        """What was found, as a paragraph."""
        low, high = self.between
        known = f"The log evidence of the {self.num_data} observations is between {low:.1f} and {high:.1f} nats"
        if self.guide is None:
            instead = f" Draws of the sampler, in draws, are at most {self.draws_gap:.2f} nats from the posterior."
            return f"Not certified: {'; '.join(self.reasons)}. {known}.{instead * (self.draws_gap <= self.gap)}"
        row = self.table.loc[self.guide]
        tried = list(self.table.index[: self.table.index.get_loc(self.guide)])
        cheaper = f" Cheaper guides are further away: {', '.join(tried)}." if tried else ""
        calibrated = f" In {self.refits} refits to data drawn given these, ranks of the truth are uniform."
        return (
            f"Certified: the divergence of {self.guide} from the posterior is at most {max(row.gap_high, 0.0):.2f} "
            f"nats, where {self.gap:g} were asked for. {known}, by annealing from the guide and from draws of the "
            f"posterior; the bound of the guide is {row.bound:.1f} ({row.bound_se:.1f}). Pareto's k of its weights is "
            f"{row.khat:.2f}, and the bounds of its starts differ by {row.starts:.1f} nats."
            f"{calibrated * bool(self.refits)}{cheaper}"
        )


def certify(
    model: Callable[..., Any],
    data: tuple[Any, ...],
    *,
    key: Array,
    gap: float = 1.0,
    guides: Mapping[str, Any] | None = None,
    num_steps: int = 3000,
    num_starts: int = 3,
    budget: int = 2_000_000,
    refits: int = 0,
    progress_bar: bool = False,
) -> Certificate:
    r"""Find the cheapest guide whose divergence from the posterior is small, or say why none can be trusted.

    .. math:: \mathrm{KL}[q \,\|\, p(\cdot \mid y)] = \log p(y) - \mathcal L(q) \le \mathrm{gap}

    1. Several runs of sequential Monte Carlo go from the prior to the posterior. They estimate the evidence and give
       draws of the posterior. Runs that disagree about the evidence have found different parts of the posterior, and
       there is no certificate.
    2. The ladder is climbed from its first guide. Each is fitted from its own start and from draws of different runs
       of the sampler, so that the fits can end in different parts; the best of them is kept.
    3. The log evidence is bounded from below by the estimate of the sampler and by annealing from the first guide to
       the posterior, and from above by annealing back from the draws (:func:`evidence`). The number of temperatures
       grows while these bounds do not decide whether a guide is close enough, until ``budget`` is spent.
    4. The first guide whose divergence is at most ``gap`` by the upper bound, with two standard errors on each side, is
       certified.
    5. Draws of the sampler are held against the upper bound too, for programs to which no guide is close: a draw of a
       run with the estimate :math:`\hat Z` is at most :math:`\log p(y) - \mathbb E \log \hat Z` from the posterior.
    6. With ``refits``, this guide is also fitted to data that are simulated given yours, by :func:`sbc`, and ranks of
       the true values are tested sequentially at a level of 0.01, as in ``dgp.testing.assert_calibrated``.

    Limits. The program is taken as it is: the certificate says nothing about whether it suits the data. Equivalent
    parts of the posterior count: a guide in one of two mirror images is :math:`\log 2` away at least. What the sampler
    and all starts miss stays unseen. The bounds hold with the probability of their errors, not with certainty. It is
    made for small programs, up to a few hundred rows and numbers; beyond them the bounds of the evidence do not close.

    Args:
        model: the program, whose hyperparameters are ``numpyro.sample`` sites or constants.
        data: its positional arguments, the observations last.
        key: PRNG key.
        gap: the largest divergence, in nats.
        guides: the ladder, by name, from cheap to rich. By default, of those that the program admits,
            ``InducingPoint``; ``Collapsed``; ``InducingPoint`` with ``GivenInducing()`` at hidden layers with process
            noise, with ``GlobalInducing`` for several layers or uncertain hyperparameters, and with both; each with
            ``other=Normal()``. A ladder that begins with ``Collapsed`` gets the first of these before it.
        num_steps: of each fit, by Adam with a step size that falls from 0.02 to zero and natural gradients for the
            last layer.
        num_starts: fits of each guide.
        budget: gradients of the log density that the bounds of the evidence may take.
        refits: simulated data sets that the certified guide is fitted to, two fits each; 50 show gross errors.
        progress_bar: show a progress bar for every fit.

    Returns:
        A :class:`Certificate`.

    Raises:
        ValueError: a gap or numbers that are not positive, data that are not a tuple with observations, a program with
            ``numpyro.param`` sites, and errors of :func:`evidence` and ``dgp.fit``.

    Example:
        >>> import jax, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> found = dgp.diagnostics.certify(model, (X, y), key=jax.random.key(0), num_steps=500, num_starts=1)
        >>> found.guide, bool(found.table.gap_high["InducingPoint"] < 1)
        ('InducingPoint', True)

    Source: Grosse et al. (2015) for bounds from both sides; Chopin (2002) for the sampler; Naesseth et al. (2018) for
    the divergence of its draws.
    """
    _require_arguments(model, data, gap, guides)
    for name, count in {"num_steps": num_steps, "num_starts": num_starts, "budget": budget}.items():
        require_count(name, count, "the default")
    if refits:
        require_count("refits", refits, "50")
    require_key(key)
    ladder = _ladder(model, data) if guides is None else dict(guides)
    if isinstance(next(iter(ladder.values())), Collapsed):  # which nothing can be annealed from
        ladder = {"InducingPoint": InducingPoint(model, other=Normal())} | ladder
    sample_key, fit_key, bound_key, anneal_key = jax.random.split(key, 4)
    sampled = fit_integrated(model, sample_key, data, _POINTS, _SWEEPS, _RUNS, False)
    assert sampled.ended is not None
    draws = _draws(sampled.ended, sample_key)
    bounds = _Bounds(anneal_key, data, draws, sampled.log_evidence - _ERRORS * sampled.error, budget)
    rows: dict[str, dict[str, Any]] = {}
    chosen: tuple[str, Posterior] | None = None
    for i, (name, guide) in enumerate(ladder.items()):
        keys = jax.random.split(jax.random.fold_in(fit_key, i), num_starts)
        svi = _svi(model, guide, data, num_steps)
        fits = [_fit(svi, data, k, draws if j else None, num_steps, progress_bar) for j, k in enumerate(keys)]
        each = bounds_of([posterior for posterior, _ in fits], bound_key, data)
        best = int(np.argmax([found["bound"] for found in each]))
        posterior, losses = fits[best]
        bounds.start_from(posterior)
        low, high = bounds.decide(each[best], gap)
        rows[name] = each[best] | {
            "gap_low": low,
            "gap_high": high,
            "khat": _khat(posterior, bound_key, data),
            "starts": float(np.ptp([found["bound"] for found in each])),
            "converged": has_converged(losses),
            "verdict": verdict(low, high, gap),
        }
        if high <= gap:
            chosen = name, posterior
            break
    reasons = []
    if chosen is not None and refits:
        uneven = _miscalibration(chosen[0], svi, fit_key, data, refits, num_steps)
        reasons += [uneven] if uneven else []
    runs = sampled.ended.log_evidence
    return _certificate(chosen, reasons, rows, bounds, sampled.posterior, runs, gap, refits)


def _certificate(
    chosen: tuple[str, Posterior] | None,
    reasons: list[str],
    rows: dict[str, dict[str, Any]],
    bounds: _Bounds,
    draws: Posterior,
    runs: np.ndarray,
    gap: float,
    refits: int = 0,
) -> Certificate:
    import pandas

    table = pandas.DataFrame.from_dict(rows, orient="index")
    assert bounds.found is not None
    low, high = bounds.interval
    doubts = [] if (doubt := _doubt(runs)) is None else [doubt]
    if bounds.crossed > _CROSSED * gap:
        doubts.append(
            f"the upper bound of the log evidence is {bounds.crossed:.2f} nats below the lower one: the sampler has "
            "not found all of the posterior"
        )
    draws_gap = math.inf
    if not doubts and np.isfinite(runs).all():  # U - E log Z
        draws_gap = high - float(runs.mean() - _ERRORS * runs.std(ddof=1) / len(runs) ** 0.5)
    reasons = doubts + reasons
    if chosen is None:
        reasons = [*reasons, *_of_ladder(table, low, high, gap, bounds.spent)]
    guide, posterior = (None, None) if reasons or chosen is None else chosen
    num_data = int(np.size(bounds.data[-1]))
    return Certificate(
        guide, posterior, gap, tuple(reasons), table, bounds.found, (low, high), draws, draws_gap, num_data, refits
    )


def _of_ladder(table: DataFrame, low: float, high: float, gap: float, spent: int) -> list[str]:
    """Why no guide of a ladder is close enough."""
    nearest = table.sort_values("gap_high").iloc[0]
    found = []
    if nearest.verdict == "undecided":
        found.append(
            f"the log evidence is between {low:.1f} and {high:.1f}, {high - low:.1f} nats apart after {spent} "
            "gradients, too far to say whether a guide is close enough: give a larger budget"
        )
    else:
        found.append(
            f"no guide is within {gap:g} nats of the posterior; the closest, {nearest.name}, is {nearest.gap_low:.1f} "
            f"to {nearest.gap_high:.1f} nats away"
        )
    if not nearest.converged:
        found.append(f"the fit of {nearest.name} has not converged: give more num_steps")
    apart = table[table.starts > max(gap, 1.0)]
    found += [f"starts of {name} end {row.starts:.1f} nats apart" for name, row in apart.iterrows()]
    return found


class _Bounds:
    """Bounds of the log evidence, as tight as a decision needs them.

    Args:
        key: PRNG key.
        data: arguments of the program.
        draws: from the posterior.
        lower: another lower bound.
        budget: gradients that they may take.
    """

    def __init__(self, key: Array, data: tuple[Any, ...], draws: dict[str, Array], lower: float, budget: int) -> None:
        self.key, self.data, self.draws, self.lower, self.budget = key, data, draws, lower, budget
        self.temperatures, self.spent = _FIRST, 0
        self.guide: Posterior | None = None
        self.found: Evidence | None = None

    def start_from(self, posterior: Posterior) -> None:
        """Anneal from the first guide that this is called with."""
        self.guide = self.guide or posterior

    def decide(self, bound: dict[str, float], gap: float) -> tuple[float, float]:
        """Between which numbers the divergence of a guide is."""
        error = _ERRORS * bound["bound_se"]

        def between() -> tuple[float, float]:
            low, high = self.interval
            return low - bound["bound"] - error, high - bound["bound"] + error

        if self.found is None:
            self._anneal()
        while verdict(*between(), gap) == "undecided" and self.spent + _MORE * self._cost <= self.budget:
            self.temperatures *= _MORE
            self._anneal()
        return between()

    @property
    def _ends(self) -> tuple[float, float]:
        """Bounds of the log evidence, with standard errors on either side."""
        found = self.found
        assert found is not None
        return max(self.lower, found.lower - _ERRORS * found.lower_se), found.upper + _ERRORS * found.upper_se

    @property
    def interval(self) -> tuple[float, float]:
        """Between which numbers the log evidence is."""
        low, high = self._ends
        return low, max(low, high)

    @property
    def crossed(self) -> float:
        """How far the upper bound is below the lower one, by chance or because draws miss a part of the posterior."""
        low, high = self._ends
        return low - high

    @property
    def _cost(self) -> int:
        return 3 * _ANNEALED * _LEAPFROGS * self.temperatures  # a trial, there and back

    def _anneal(self) -> None:
        assert self.guide is not None
        self.spent += self._cost
        self.found = evidence(
            self.guide, jax.random.fold_in(self.key, self.temperatures), *self.data,
            samples=self.draws, num_chains=_ANNEALED, num_temperatures=self.temperatures, num_leapfrogs=_LEAPFROGS,
        )  # fmt: skip


def _doubt(log_evidence: np.ndarray) -> str | None:
    """A sentence if runs of the sampler have found different parts of the posterior."""
    weights = softmax(log_evidence)
    if 1 / np.square(weights).sum() >= len(weights) / 2:  # the effective number of runs
        return None
    return (
        f"runs of the sampler differ by {np.ptp(log_evidence):.1f} nats in the log evidence: the posterior has parts "
        "that no move connects"
    )


def _draws(ended: Ended, key: Array) -> dict[str, Array]:
    """Values of all sites at draws of the sampler, runs in proportion to their evidence."""
    density = Density(ended.program, ended.args, key, ended.structure)
    flat = jax.vmap(lambda numbers: ravel_pytree(numbers)[0])(ended.numbers)
    of_run = len(flat) // len(ended.log_evidence)
    # systematic: evenly spaced ranks among runs of these widths
    edges = np.cumsum(softmax(ended.log_evidence))
    ranks = (np.arange(_ANNEALED) + 0.5) / _ANNEALED
    run = np.searchsorted(edges, ranks * edges[-1])
    inside = np.floor(np.modf(np.arange(_ANNEALED) * (math.sqrt(5) - 1) / 2)[0] * of_run).astype(int)

    def values(flat: Array) -> dict[str, Array]:
        sites = density.trace(density.constrained(flat), key)
        return {name: site["value"] for name, site in sites.items() if is_value(site)}

    return jax.jit(lambda rows: jax.lax.map(values, rows))(flat[run * of_run + inside])


def _khat(posterior: Posterior, key: Array, data: tuple[Any, ...]) -> float:
    """Pareto's k of the weights of a fit, as :func:`khat` has it."""
    known = local_sites(posterior, data, {})
    run = drawing(posterior, known, _WEIGHTS, _LOCAL, data, {}, kept=lambda of: (of.log_p - of.log_q, of.joint))
    ratio, joint = run(jax.random.split(key, _WEIGHTS), {})
    weights = np.asarray(ratio + summed_over_data(known, joint))
    return float(pareto_shape(weights))  # in their own precision, by which equal ones are known


def _miscalibration(name: str, svi: SVI, key: Array, data: tuple[Any, ...], refits: int, num_steps: int) -> str | None:
    """A sentence if fits to data that are simulated given these have ranks that are not uniform."""
    num_samples, batches = replicate(
        svi, key, data, {}, num_replications=refits, num_steps=num_steps, simulator=None, quantities=None
    )
    found = judge(joined([batch.ranks for batch in batches]), num_samples, _LEVEL, 2.0)
    if found.alarm is None:
        return None
    return (
        f"in refits of {name} to data drawn given these, the posterior of {found.where} "
        f"{found.deviation}, by ranks of the truth after {found.alarm} of them"
    )


def _svi(model: Callable[..., Any], guide: Any, data: tuple[Any, ...], num_steps: int) -> SVI:
    """Adam, with natural gradients for the last layer of guides that have a Gaussian there."""
    falling, rising = optax.cosine_decay_schedule(1.0, num_steps), log_linear(1e-4, 0.1, 40)
    adam = optax.adam(lambda i: 0.02 * falling(i))
    if isinstance(guide, Guide):
        natural = SVI(model, guide, NaturalGradient(guide, lambda i: rising(i) * falling(i), adam), ELBO())
        if _runs(lambda key: natural.update(natural.init(key, *data), *data)):
            return natural
    return SVI(model, guide, adam, ELBO())


def _runs(function: Callable[[Array], Any]) -> bool:
    """Whether a function of a key gets through on shapes."""
    try:
        jax.eval_shape(function, jax.random.key(0))
    except ValueError:
        return False
    return True


def _fit(
    svi: SVI,
    data: tuple[Any, ...],
    key: Array,
    draws: Mapping[str, Array] | None,
    num_steps: int,
    progress_bar: bool,
) -> tuple[Posterior, Array]:
    """A fit from the start of the guide or, with ``draws``, from means at one of them."""
    start = None
    if draws is not None:
        which = jax.random.randint(key, (), 0, _ANNEALED)
        params = svi.get_params(svi.init(key, *data))
        prefix = getattr(svi.guide, "prefix", "auto")
        means = {f"{name}_{prefix}_loc": values[which] for name, values in draws.items()}
        start = {n: m for n, m in means.items() if n in params and params[n].shape == m.shape}
    found = fit(svi, key, num_steps, *data, init_params=start, progress_bar=progress_bar)
    return Posterior(svi.model, adapted(svi.guide).on(*data), found.params), found.losses


def _ladder(model: Callable[..., Any], data: tuple[Any, ...]) -> dict[str, Any]:
    """Guides from cheap to rich, of those that the program admits."""

    def admitted(guide: Any) -> bool:
        return _runs(lambda key: ELBO().loss(key, {}, model, guide, *data))

    facts = inspect_program(model, data, {})
    found: dict[str, Any] = {"InducingPoint": InducingPoint(model, other=Normal())}
    collapsed = Collapsed(model, other=Normal())
    sites, *_ = run_on_shapes(model, data, {})
    hidden = {n: unwrap(s["fn"]) for n, s in sites.items() if s["type"] == "sample" and site_kind(s) == "hidden"}
    noisy = [name for name, fn in hidden.items() if declared(fn).noise is not None]
    given = {name: GivenInducing() for name in noisy}
    if admitted(collapsed):
        found["Collapsed"] = collapsed
    if noisy:
        found["GivenInducing"] = InducingPoint(model, other=Normal(), sites=given)
    uncertain = "hyperparameter" in site_kinds(sites).values()
    if facts.inner or uncertain:  # q(v) moves with the layers below, and with the hyperparameters
        rows = len(np.unique(np.asarray(data[0]), axis=0))
        spread = GlobalInducing(max(1, min(rows, 20)))
        several = InducingPoint(model, other=Normal(), inducing=spread)
        if admitted(several):
            found["GlobalInducing"] = several
            if noisy:
                both = InducingPoint(model, other=Normal(), inducing=spread, sites=given)
                found["GlobalInducing, GivenInducing"] = both
    return found


def _require_arguments(model: Any, data: Any, gap: Any, guides: Any) -> None:
    expect(callable(model), "a program, a function", type(model).__name__)
    expect(
        isinstance(data, tuple) and len(data) >= 2,
        "data=(X, y), the program's arguments with the observations last",
        type(data).__name__,
        "pass further settings by functools.partial",
    )
    number = isinstance(gap, float | int) and not isinstance(gap, bool)
    expect(number and 0 < gap < math.inf, "a positive gap, in nats", repr(gap), "1.0 is the default")
    expect_kind(guides, Mapping | None, "guides as a dict, from cheap to rich", 'guides={"mine": guide}')
    expect(guides is None or len(guides) > 0, "at least one guide", "none", "leave guides= out for the default ladder")
    learned = learned_sites(model, data)
    expect(
        not learned,
        "a program whose evidence is one number, with hyperparameters from numpyro.sample or constants",
        f"numpyro.param at {learned}",
        "give them priors, or write constants in their place",
    )
