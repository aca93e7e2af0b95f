r"""Runs that a program is fitted by, and their weights: of one that found another optimum than the rest, for one.

Where several hidden layers explain the data, each run of Monte Carlo ends at one or two of them. Their log evidence is
known to a few nats, in which they differ by more, and by the evidence mostly one run would count. Stacking asks which
mixture of them predicts rows that are left out best. By weights that are chosen so, the program looks better than it
is: where nothing speaks for it, the best of its runs may have as much as a simpler program and a little more. So the
density that it is judged by is a mean over runs in proportion to their evidence.

Source: Yao et al. (2022).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp, softmax

from numpyro_dgp._typing import Array
from numpyro_dgp.deepening.depth_weights import stacking_weights
from numpyro_dgp.deepening.integrated_fit import IntegratedFit, fit_integrated
from numpyro_dgp.deepening.left_out import left_out
from numpyro_dgp.inference.population_runs import evidence_of_runs, points_by_weights
from numpyro_dgp.predict import Posterior

__all__ = ["runs_by_evidence", "runs_by_rows_left_out", "with_further_runs"]


def with_further_runs(
    fit: IntegratedFit,
    model: Callable[..., Any],
    rng_key: Array,
    args: tuple[Any, ...],
    num_draws: int,
    num_sweeps: int,
    num_runs: int,
) -> IntegratedFit:
    """The same fit with the draws of further runs from the prior, which are independent of those that it has.

    A point of largest density has none, and stays alone.

    Args:
        fit: of the program.
        model: the program.
        rng_key: PRNG key.
        args: of the program, observations included.
        num_draws: of each run, as many as those have that there are.
        num_sweeps: of moves of each chain at each temperature.
        num_runs: in the end.
    """
    ended = fit.drawn
    if ended is None or len(ended.log_evidence) >= num_runs:
        return fit
    more = fit_integrated(model, rng_key, args, num_draws, num_sweeps, num_runs - len(ended.log_evidence), False)
    added = more.ended
    assert added is not None
    log_evidence = np.concatenate([ended.log_evidence, added.log_evidence])
    variance = np.concatenate([ended.variance, added.variance])
    samples, numbers = jax.tree.map(
        lambda *draws: jnp.concatenate(draws), (ended.samples, ended.numbers), (added.samples, added.numbers)
    )
    joined = dataclasses.replace(ended, log_evidence=log_evidence, variance=variance, samples=samples, numbers=numbers)
    evidence = *evidence_of_runs(log_evidence, variance), max(fit.temperatures, more.temperatures)
    return IntegratedFit(Posterior(model, samples=samples), *evidence, joined, numbers)


def runs_by_evidence(fit: IntegratedFit, num_draws: int) -> IntegratedFit:
    """The same fit, predicting by so many draws, of each run in proportion to its evidence."""
    return fit if fit.drawn is None else _by_runs(fit, softmax(fit.drawn.log_evidence), num_draws)


def runs_by_rows_left_out(
    fit: IntegratedFit, model: Callable[..., Any], rng_key: Array, args: tuple[Any, ...], num_draws: int
) -> tuple[IntegratedFit, np.ndarray]:
    """The same fit, predicting by so many draws, of each run in proportion to its weight by stacking, and the log
    densities of rows that are left out by runs in proportion to their evidence (N,).

    Args:
        fit: of the program.
        model: the program.
        rng_key: PRNG key.
        args: of the program, observations included.
        num_draws: to predict by.
    """
    ended = fit.drawn
    if ended is None:
        return fit, left_out(model, rng_key, args, fit.at)[:, 0]
    found = np.isfinite(ended.log_evidence)
    densities = left_out(model, rng_key, args, ended.numbers, len(found))[:, found]
    weights = np.zeros(len(found))
    weights[found] = stacking_weights(densities)
    return _by_runs(fit, weights, num_draws), logsumexp(densities, axis=1, b=softmax(ended.log_evidence[found]))


def _by_runs(fit: IntegratedFit, weights: np.ndarray, num_draws: int) -> IntegratedFit:
    ended = fit.ended
    assert ended is not None
    assert ended.samples is not None
    total = len(next(iter(ended.numbers.values())))
    chosen = points_by_weights(weights, num_draws, total)
    samples, at = ({name: value[chosen] for name, value in d.items()} for d in (ended.samples, ended.numbers))
    return fit._replace(posterior=Posterior(fit.posterior.model, samples=samples), at=at)
