r"""Several runs of sequential Monte Carlo, with a share of the points each.

The points of one run descend from a few of those at its start. Where the target has modes that no move connects, they
end in one or two of these, and say too little of what is not known. Independent runs end in several.

Source: Verge et al. (2015), for runs as islands and their evidence; Yao et al. (2022), for runs that do not mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from scipy.special import logsumexp, softmax

from numpyro_dgp._typing import Array
from numpyro_dgp.inference.population import LogRatios, Population, each, populate

__all__ = ["evidence_of_runs", "independent_runs"]


def independent_runs(
    log_ratios: LogRatios,
    draw: Callable[[Any], Array],
    blocks: Array,
    key: Array,
    seeds: Any,
    num_points: int,
    sweeps: int,
    num_runs: int,
) -> Population:
    """The ends of R runs, with R as the first axis of all.

    Arguments but the last are those of :func:`populate`. Each run has its share of the points, rounded up, and of the
    draws at the start, in their order.

    Args:
        num_runs: R, if there are as many points and draws at the start.
    """
    count = len(jax.tree.leaves(seeds)[0])
    runs = min(num_runs, num_points, count)
    shares = jax.tree.map(lambda rows: rows[: count // runs * runs].reshape(runs, -1, *rows.shape[1:]), seeds)

    def run(given: tuple[Array, Any]) -> Population:
        return populate(log_ratios, given[0], given[1], draw, blocks, -(-num_points // runs), sweeps)

    return each(run, (jax.random.split(key, runs), shares), runs)


def evidence_of_runs(log_evidence: np.ndarray, variance: np.ndarray) -> tuple[float, float]:
    r"""The log evidence by all runs, and its standard error.

    The mean of estimates of the evidence is without bias if these are:

    .. math:: \hat Z = \tfrac1R \sum_r \hat Z_r, \qquad
              \operatorname{var} \log \hat Z \approx \sum_r w_r^2\, v_r + \frac{\sum_r (R\, w_r - 1)^2}{R\, (R - 1)},
              \qquad w_r = \hat Z_r / \textstyle\sum_s \hat Z_s

    Args:
        log_evidence: of each run, :math:`\log \hat Z_r` (R,).
        variance: of these, as runs see it themselves, :math:`v_r` (R,).
    """
    weights, runs = softmax(log_evidence), len(log_evidence)
    between = np.square(runs * weights - 1).sum() / max(runs * (runs - 1), 1)
    error = math.sqrt((np.square(weights) * variance).sum() + between)
    return float(logsumexp(log_evidence)) - math.log(runs), error
