r"""Weights of fitted programs: stacking of held-out predictions, or the evidence.

Which programs of a family are fitted: by their number of layers, or by it and the columns of their hidden layers.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from numpyro_dgp._checks import expect, is_count, require_finite
from numpyro_dgp._typing import Array

__all__ = ["Depth", "arguments_of", "as_depths", "evidence_weights", "key_of", "stacking_weights"]

_STEPS = 100_000


def stacking_weights(log_densities: Any, *, least_gain: float | None = None, tol: float = 1e-6) -> np.ndarray:
    r"""The weights whose mixture predicts held-out observations best.

    .. math:: \max_w \; \tfrac1N \sum_n \log \sum_k w_k\, p_k(y_n \mid y_{-n}), \qquad w_k \ge 0,\; \sum_k w_k = 1

    It is a concave problem. Each step multiplies :math:`w_k` by
    :math:`g_k = \tfrac1N \sum_n p_k(y_n) / \sum_j w_j p_j(y_n)`, the gradient, which never lowers the mean. What is
    missing to the maximum is at most :math:`\log \max_k g_k`, since the logarithm is concave, and the steps stop there.

    With few rows the maximum follows their noise. By the rule of one standard error a program takes part only if

    .. math:: \sum_n \delta_{nk} \ge c \Bigl[\textstyle\sum_n (\delta_{nk} - \bar\delta_k)^2\Bigr]^{1/2},
              \qquad \delta_{nk} = \log p_k(y_n \mid y_{-n}) - \log p_1(y_n \mid y_{-n}).

    Args:
        log_densities: of held-out observations, by each program (N, K), the simplest first.
        least_gain: c, standard errors that a program has to be better by than the first; by default none has to.
        tol: nats per observation that the maximum may be missed by.

    Returns:
        Weights (K,).

    Raises:
        ValueError: no matrix, or one with numbers that are not finite.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.depth.depth_weights import stacking_weights
        >>> print(stacking_weights(np.log([[0.9, 0.1], [0.1, 0.9]])), stacking_weights(np.log([[0.9, 0.1]])).round(3))
        [0.5 0.5] [1. 0.]
        >>> print(stacking_weights(np.log([[0.9, 0.1], [0.1, 0.9]]), least_gain=1.0))
        [1. 0.]

    Source: Yao et al. (2018b), section 3; Breiman et al. (1984), chapter 3, for one standard error.
    """
    found = np.asarray(log_densities, float)
    expect(
        found.ndim == 2 and found.size,
        "log densities of shape (N, K), a row for each held-out observation",
        f"shape {found.shape}",
        "np.stack([posterior.log_density(key, y, X) for posterior in posteriors], -1)",
    )
    require_finite("log densities of stacking_weights", found, "a fit whose predictions are NaN cannot be weighed")
    gain = found - found[:, :1]  # delta_nk
    # sd sqrt(N) = [sum (delta - mean)^2]^1/2
    least = -math.inf if least_gain is None else least_gain * gain.std(0) * math.sqrt(len(gain))
    counted = gain.sum(0) >= least
    # A factor of all densities of a row leaves the maximum where it is.
    densities = np.exp(found[:, counted] - found[:, counted].max(1, keepdims=True))
    weights = np.full(counted.sum(), 1 / counted.sum())
    for _ in range(_STEPS):
        slope = (densities / (densities * weights).sum(1, keepdims=True)).mean(0)  # g_k
        if np.log(slope.max()) <= tol:
            break
        weights = weights * slope  # sum_k w_k g_k = 1
    every = np.zeros(len(counted))
    every[counted] = weights / weights.sum()
    return every


def evidence_weights(log_evidence: Any, log_prior: Any = 0.0, least_odds: float = 0.0) -> np.ndarray:
    r"""The posterior probabilities of programs in Occam's window.

    .. math:: w_k \propto \begin{cases} q_k & \text{if } q_k \ge c\, \max_j q_j \text{ and } q_k \ge \max_{j < k} q_j \\
              0 & \text{otherwise} \end{cases}, \qquad q_k = \pi_k\, p_k(y)

    The window leaves out programs that are improbable beside the most probable one, and those that are less probable
    than a simpler one.

    Args:
        log_evidence: :math:`\log p_k(y)`, with all that is learned integrated (K,); each program contains those before
            it.
        log_prior: :math:`\log \pi_k`, but for a constant (K,); by default all are equally probable.
        least_odds: c; 0, the default, for no window: all programs have a weight.

    Returns:
        Weights (K,).

    Raises:
        ValueError: numbers that are not finite.

    Example:
        >>> from numpyro_dgp.depth.depth_weights import evidence_weights
        >>> print(evidence_weights([-10.0, -12.0]).round(3))
        [0.881 0.119]
        >>> print(evidence_weights([-10.0, -9.0, -9.5], least_odds=0.05).round(3))
        [0.269 0.731 0.   ]

    Source: Madigan and Raftery (1994), for both rules of the window; Yao et al. (2018b), for weights beside stacking.
    """
    found = np.asarray(log_evidence, float)
    require_finite("log_evidence of evidence_weights", found, "a fit whose evidence is NaN cannot be weighed")
    found = found + log_prior
    odds = np.exp(found - found.max())  # q_k / max_j q_j
    least = np.maximum(least_odds, np.maximum.accumulate(odds)) if least_odds else 0.0  # max(c, max_j<=k q_j)
    weights = np.where(odds < least, 0.0, odds)
    return weights / weights.sum()


Depth = int | tuple[int, int]
"""A number of layers, or a pair: it, and the columns of hidden layers."""


def as_depths(depths: Any) -> tuple[Depth, ...]:
    """Depths in a tuple, the shallowest first.

    Args:
        depths: numbers of layers, pairs of these with columns, or one number.

    Raises:
        ValueError: none, something else among them, one with fewer layers than the one before, or one twice.
    """
    given = tuple(depths) if np.iterable(depths) else (depths,)
    numbers = [tuple(d) if np.iterable(d) else (d,) for d in given]
    known = all(len(d) in (1, 2) and all(is_count(n) for n in d) for d in numbers)
    expect(
        given and known and len(set(numbers)) >= len(numbers) and numbers == sorted(numbers, key=lambda d: d[0]),
        (
            "depths as ascending numbers of layers, or pairs of such a number and the columns of hidden "
            "layers among them"
        ),
        repr(given),
        "depths=(1, 2, 3), or depths=(1, (2, 1), 2)",
    )
    return tuple(int(d[0]) if len(d) == 1 else (int(d[0]), int(d[1])) for d in numbers)


def arguments_of(depth: Depth) -> tuple[int, ...]:
    """What the family is called with: layers, and columns if these are given.

    Args:
        depth: of a program.
    """
    return depth if isinstance(depth, tuple) else (depth,)


def key_of(key: Array, depth: Depth) -> Array:
    """A key for each program.

    Args:
        key: for all.
        depth: of the program.
    """
    layers, *columns = arguments_of(depth)
    return jax.random.fold_in(key, layers + 1000 * sum(columns))
