"""Comparison of several posteriors of one program."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import MCMC, SVI
from numpyro.infer.svi import SVIRunResult

from numpyro_dgp._checks import expect, expect_kind, expected, require_count, require_key
from numpyro_dgp._compiled import Compiled
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.analysis.program import run_on_shapes
from numpyro_dgp.diagnostics.arviz import opened, to_arviz
from numpyro_dgp.diagnostics.calibration import coverage, pit
from numpyro_dgp.diagnostics.evidence import evidence as evidence_of
from numpyro_dgp.diagnostics.ratios import block_of, mapped
from numpyro_dgp.diagnostics.reliability import khat, loo
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import fit, split_arguments
from numpyro_dgp.likelihoods.outcomes import NoMomentsError
from numpyro_dgp.predict.posterior import Posterior

if TYPE_CHECKING:
    from pandas import DataFrame
    from xarray import DataTree

__all__ = ["Comparison", "compare"]

Candidate: TypeAlias = Callable[..., Any] | tuple[Callable[..., Any], SVIRunResult] | Posterior

# Draws of the bound that its standard error is taken from.
_BOUND_DRAWS = 200
# Shares of unreliable leave-one-out weights above which a score is unreliable, and above which a posterior ranks last.
MANY_UNRELIABLE = 0.1
_MOST_UNRELIABLE = 0.5


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The result of :func:`compare`.

    Args:
        table: one row per posterior. ``bound`` and its standard error ``bound_se``; ``khat``; ``loo`` and ``loo_se``,
            and ``high_k``, the share of the data whose leave-one-out weights are unreliable; on test data
            ``test_log_density`` (per datum), ``rmse`` and ``coverage``; ``seconds`` (compilation included) and
            ``parameters`` of the fit, and ``converged``: from the middle of its steps to their end the loss fell by no
            more than a nat or two standard errors. With ``evidence=True`` the lower bound ``evidence`` of
            ``dgp.diagnostics.evidence`` from that guide, its standard error ``evidence_se``, ``gap``, which is
            ``evidence`` minus ``bound``, and with chains the upper bound ``evidence_upper``; ``verdict`` says whether
            the two bounds show that the posterior is within one nat of that guide (:func:`certify` finds such a
            guide). NaN where a column does not apply.
        ranking: the posteriors of the same program, best first, with what they are ranked by; ``None`` for a single
            one. Those most of whose leave-one-out weights are unreliable come last, the others in the order of
            ``test_log_density``, where there are test data, then of ``bound`` and of ``khat``; chains, which have no
            bound, come before guides without test data. Leave-one-out scores are shown, with the columns of
            ``arviz_stats.compare``, for posteriors in which at most a tenth of the weights is unreliable, if there are
            several; they decide nothing, since those of all guides estimate the same number.
        loo: ArviZ's ``ELPDData`` by name.
        trees: what ``to_arviz`` made, by name.
        posteriors: for predictions, by name.
        level: of the intervals behind ``coverage``.
    """

    table: DataFrame
    ranking: DataFrame | None
    loo: dict[str, Any]
    trees: dict[str, DataTree]
    posteriors: dict[str, Posterior]
    level: float

    __repr__ = brief


def compare(
    model: Callable[..., Any],
    guides: Mapping[str, Candidate],
    data: tuple[Any, ...],
    *,
    key: Array,
    test: tuple[Any, ...] | None = None,
    mcmc: MCMC | None = None,
    optim: Any = None,
    num_steps: int = 2000,
    num_samples: int = 500,
    local_samples: int = 20,
    level: float = 0.9,
    evidence: bool = False,
    progress_bar: bool = True,
) -> Comparison:
    r"""Fit several guides of one program, and compare them with each other and with MCMC.

    How to read it. ``ranking`` has the posteriors in order. ``bound`` ranks guides of one program with the same
    hyperparameters, or points for them; bounds of guides with distributions of hyperparameters are lower by their
    divergence. ``loo`` and the columns of test data can be compared between all guides and with chains. ``khat`` and
    ``high_k`` show whether ``loo`` is reliable. All are estimates: differences of about one standard error mean
    nothing.

    With ``evidence=True`` the ``gap`` of a guide is a lower estimate of its divergence from the posterior, at its
    values of ``numpyro.param`` hyperparameters. A guide with points for hyperparameters with priors has no such
    divergence, and its gap may be negative.

    Args:
        model: the program.
        guides: by name, a guide to be fitted, a pair of guide and ``SVIRunResult`` from ``dgp.fit`` or ``svi.run``, or
            a ``dgp.Posterior``.
        data: positional arguments of the program, the observations last.
        key: PRNG key.
        test: other data, in the same form.
        mcmc: an MCMC object that has run, on ``dgp.for_mcmc(model)`` and ``data``.
        optim: for the fits; Adam with a step size falling from 0.02 to zero by default.
        num_steps: of the fits.
        num_samples: draws from each posterior.
        local_samples: K of ``to_arviz``.
        level: of the central predictive intervals whose coverage is counted.
        evidence: whether to run :func:`~numpyro_dgp.diagnostics.evidence` from every guide, which takes 4000 gradients
            in each of 32 runs, three times with chains and otherwise twice. The draws of ``mcmc`` give the upper bound
            where the program has no ``numpyro.param``, which chains and fits might have at other values.
        progress_bar: show a progress bar for every fit.

    Returns:
        A :class:`Comparison`: tables, trees and posteriors by name.

    Raises:
        ValueError: no guides and no chains, names used twice, data that are not a tuple with observations, candidates
            of another type, fits of another program, or errors of ``fit`` and ``to_arviz``.

    Warns:
        UserWarning: with ``evidence=True`` for guides that ``evidence`` does not support, such as ``Collapsed``.

    Example:
        >>> import jax, optax
        >>> import numpyro_dgp as dgp
        >>> from numpyro_dgp.diagnostics import compare
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model)
        >>> result = compare(model, {"Gaussian": guide}, (X, y), key=jax.random.key(0), num_steps=2,
        ...                  optim=dgp.optim.NaturalGradient(guide, 1.0, optax.adam(0.01)))
        >>> bool(result.table.loc["Gaussian", "khat"] < 0.7)
        True
    """
    chains = _require_arguments(model, guides, data, test, mcmc, level)
    expect_kind(evidence, bool, "evidence to be True or False")
    require_key(key)
    for name, count in {"num_steps": num_steps, "num_samples": num_samples, "local_samples": local_samples}.items():
        require_count(name, count, "the default")
    fit_key, bound_key, draw_key, test_key = jax.random.split(key, 4)
    chain = None if mcmc is None else mcmc.get_samples()
    settings = data, optim, num_steps, progress_bar
    fits = {name: _fit_of(model, name, candidate, *settings) for name, candidate in guides.items()}
    posteriors: dict[str, Posterior] = {}
    rows: dict[str, dict[str, Any]] = {}
    trees: dict[str, DataTree] = {}
    for i, (name, fitted) in enumerate(fits.items()):
        posterior, losses, seconds = fitted(jax.random.fold_in(fit_key, i))
        rows[name] = {"seconds": seconds, "parameters": _size(posterior), "converged": has_converged(losses)}
        posteriors[name] = opened(posterior).posterior
        trees[name] = to_arviz(
            posterior, draw_key, *data, num_samples=num_samples, local_samples=local_samples, losses=losses
        )  # type: ignore[assignment]
        rows[name] |= bounds_of([posterior], bound_key, data)[0] | {"khat": khat(trees[name])}
        if evidence:
            rows[name] |= _evidence(name, posterior, jax.random.fold_in(bound_key, i), data, chain, rows[name]["bound"])
    if mcmc is not None and chains is not None:
        posteriors["mcmc"], rows["mcmc"] = chains, {}
        trees["mcmc"] = to_arviz(mcmc, draw_key, *data, num_samples=num_samples, local_samples=local_samples)  # type: ignore[assignment]
    scores = {name: loo(tree) for name, tree in trees.items()}
    for name, score in scores.items():
        rows[name] |= {"loo": float(score.elpd), "loo_se": float(score.se)}
        rows[name]["high_k"] = float((score.pareto_k > score.good_k).mean())
    if test is not None:
        for name in rows:
            rows[name] |= _on_test(posteriors[name], test_key, test, num_samples, level)
    table = _table(rows)
    return Comparison(table, _ranking(table, scores), scores, trees, posteriors, level)


def _require_arguments(model: Any, guides: Any, data: Any, test: Any, mcmc: Any, level: Any) -> Posterior | None:
    """Raise for invalid arguments; returns the posterior of the chains, if given."""
    expect(callable(model), "a program, a function", type(model).__name__)
    same = test is None or (isinstance(test, tuple) and isinstance(data, tuple) and len(test) == len(data))
    expect(
        isinstance(data, tuple) and len(data) >= 2 and same,
        "data=(X, y), the program's arguments with the observations last, and test= of the same length",
        f"{type(data).__name__} and {type(test).__name__}",
        "pass further settings by functools.partial",
    )
    named = isinstance(guides, Mapping)
    if not named or (not guides and mcmc is None) or (mcmc is not None and "mcmc" in guides):
        raise expected(
            'guides={"name": guide}, none of them called "mcmc", or mcmc=',
            sorted(guides) or "neither" if named else type(guides).__name__,
        )
    expect(mcmc is None or isinstance(mcmc, MCMC), "mcmc to be a numpyro.infer.MCMC that has run", type(mcmc).__name__)
    chains = None if mcmc is None else opened(mcmc).posterior
    expect(isinstance(level, float) and 0 < level < 1, "a level between 0 and 1", repr(level), "0.9 is usual")
    return chains


class _Fit(NamedTuple):
    """A posterior, the losses of its fit (or ``None``) and the seconds it took here (NaN if it was fitted before)."""

    posterior: Posterior
    losses: Any
    seconds: float


def _fit_of(
    model: Callable[..., Any],
    name: str,
    candidate: Candidate,
    data: tuple[Any, ...],
    optim: Any,
    num_steps: int,
    progress_bar: bool,
) -> Callable[[Array], _Fit]:
    """From a key to the fit of a candidate: one that is there, or one that the call makes."""
    if isinstance(candidate, Posterior):
        expect(candidate.guide is not None, "fits in guides=", "draws of MCMC", "pass the MCMC object as mcmc=")
        return lambda key: _Fit(candidate, None, np.nan)
    if isinstance(candidate, tuple) and len(candidate) == 2 and hasattr(candidate[1], "params"):
        fitted, found = candidate
        return lambda key: _Fit(Posterior(model, adapted(fitted).on(*data), found.params), found.losses, np.nan)
    expect(
        callable(candidate) and not isinstance(candidate, type),
        f"guides[{name!r}] to be a guide, a pair of guide and SVIRunResult, or a dgp.Posterior",
        type(candidate).__name__,
    )
    guide: Any = candidate
    steps = optax.adam(optax.cosine_decay_schedule(0.02, num_steps)) if optim is None else optim

    def run(key: Array) -> _Fit:
        start = time.perf_counter()
        result = fit(SVI(model, guide, steps, ELBO()), key, num_steps, *data, progress_bar=progress_bar)
        posterior = Posterior(model, adapted(guide).on(*data), result.params)
        return _Fit(posterior, result.losses, time.perf_counter() - start)

    return run


def has_converged(losses: Any) -> Any:
    """Whether the last tenth of the losses is as low as the one after their middle; NaN where that is not known."""
    found = np.asarray([] if losses is None else losses, float)
    size = len(found) // 10
    if size < 10:
        return np.nan
    middle, end = found[5 * size : 6 * size], found[-size:]
    error = np.sqrt((middle.var() + end.var()) / size)  # of the difference of two means
    return bool(middle.mean() - end.mean() <= max(1.0, 2 * error))


def bounds_of(posteriors: Sequence[Posterior], key: Array, data: tuple[Any, ...]) -> list[dict[str, float]]:
    """The bounds of fits of one guide and their standard errors, by one compiled program."""
    (model, guide), (arrays, rebuild) = (posteriors[0].model, posteriors[0].guide), split_arguments(data, {})

    @Compiled
    def run(params: dict[str, Any], keys: Array, arrays: list[Array]) -> Array:
        args, kwargs = rebuild(arrays)
        return mapped(
            lambda k: -ELBO().loss(k, params, model, guide, *args, **kwargs), keys, len(keys), block_of(arrays)
        )

    draws = [run(dict(posterior.params), jax.random.split(key, _BOUND_DRAWS), arrays) for posterior in posteriors]
    return [{"bound": float(d.mean()), "bound_se": float(d.std() / len(d) ** 0.5)} for d in draws]


def verdict(low: float, high: float, gap: float) -> str:
    """What bounds of a divergence say about the largest one that is wanted."""
    if high <= gap:
        return "close enough"
    return "too far" if low > gap else "undecided"


def _size(posterior: Posterior) -> int:
    """The number of parameters."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(dict(posterior.params)))


def learned_sites(model: Callable[..., Any], data: tuple[Any, ...]) -> list[str]:
    """The ``numpyro.param`` sites of a program."""
    return [name for name, site in run_on_shapes(model, data, {})[0].items() if site["type"] == "param"]


def _evidence(
    name: str, posterior: Posterior, key: Array, data: tuple[Any, ...], chain: dict[str, Array] | None, bound: float
) -> dict[str, Any]:
    """The evidence from a guide, and the gap of its bound; nothing, with a warning, where the guide gives none."""
    learned = learned_sites(posterior.model, data)
    try:
        found = evidence_of(posterior, key, *data, samples=None if learned else chain)
    except ValueError as error:
        warnings.warn(f"compare: no evidence from guides[{name!r}]: {error}", stacklevel=3)
        return {}
    return {
        "evidence": found.lower,
        "evidence_se": found.lower_se,
        "gap": found.lower - bound,  # below KL[q || p(. | y)], in expectation
        "evidence_upper": found.upper,
        "verdict": verdict(found.lower - bound, found.upper - bound, 1.0),
    }


def _on_test(
    posterior: Posterior, key: Array, test: tuple[Any, ...], num_samples: int, level: float
) -> dict[str, float]:
    *inputs, y = test
    if posterior.samples is not None:
        num_samples = min(num_samples, len(next(iter(posterior.samples.values()))))
    posterior = posterior.using(num_samples=num_samples)
    keys = jax.random.split(key, 4)
    log_density = posterior.log_density(keys[0], y, *inputs)
    mean: ArrayLike = np.nan
    with contextlib.suppress(NoMomentsError):  # labels have no mean
        mean = posterior.predict(keys[1], *inputs).mean
    draws = posterior.sample(keys[2], *inputs)
    ordered = posterior._predictor.range(inputs, {}).unordered is None  # intervals of labels of classes mean nothing
    share = coverage(pit(draws, y, keys[3]), [level]).share[0] if ordered else np.nan
    return {
        "test_log_density": float(log_density.mean()),
        "rmse": float(jnp.sqrt(jnp.square(mean - y).mean())),
        "coverage": float(share),
    }


def _table(rows: dict[str, dict[str, float]]) -> DataFrame:
    import pandas

    order = ["bound", "bound_se", "evidence", "evidence_se", "evidence_upper", "gap", "verdict", "khat", "loo",
             "loo_se", "high_k", "test_log_density", "rmse", "coverage", "seconds", "parameters",
             "converged"]  # fmt: skip
    table = pandas.DataFrame.from_dict(rows, orient="index")
    return table[[name for name in order if name in table.columns]]


def _ranking(table: DataFrame, scores: dict[str, Any]) -> DataFrame | None:
    """The rows of the table in order, and the leave-one-out scores of those that are reliable."""
    if len(table) < 2:
        return None
    by = ["test_log_density", "bound", "khat", "high_k"]
    found = table.reindex(columns=by)
    order = found.fillna({"bound": np.inf, "khat": -np.inf})
    order["unreliable"] = found["high_k"] > _MOST_UNRELIABLE
    keys = ["unreliable", "test_log_density", "bound", "khat"]
    found = found.loc[order.sort_values(keys, ascending=[True, False, False, True], kind="stable").index]
    found = found[[name for name in by if name in table]]
    found.insert(0, "rank", range(len(found)))
    sound = {name: score for name, score in scores.items() if table.loc[name, "high_k"] <= MANY_UNRELIABLE}
    if len(sound) < 2:
        return found
    import arviz_stats

    with warnings.catch_warnings():  # arviz-stats for Python 3.11 warns about the next version of pandas
        warnings.filterwarnings("ignore", message="The inplace keyword")
        return found.join(arviz_stats.compare(sound).drop(columns="rank"))
