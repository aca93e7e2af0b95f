r"""A sequential test that ranks of true values are uniform, with a bound on false alarms that holds at every time.

A posterior that is shifted by :math:`\delta` standard deviations and c times as wide as the right one, Gaussian, gives
the truth the distribution function :math:`u = \Phi((z - \delta) / c)` with :math:`z \sim N(0, 1)`, and its rank among S
draws the probabilities

.. math:: p_{\delta c}(r) = \Phi\bigl(\delta + c\, \Phi^{-1}(\tfrac{r + 1}{S + 1})\bigr)
          - \Phi\bigl(\delta + c\, \Phi^{-1}(\tfrac{r}{S + 1})\bigr),
          \qquad r = 0, \dots, S ,

up to the noise of S draws. They add up to one, so that the product of ratios :math:`(S + 1)\, p_{\delta c}(r_i)` has
the expectation one under uniform ranks, after any number of them: it is a test martingale. So is a mixture over
alternatives, and an average over quantities that depend on each other,

.. math:: E_n = \operatorname*{mean}_j\, \operatorname*{mean}_k\, \prod_{i \le n} (S + 1)\, p_k(r_{ij}) ,
          \qquad P(\sup_n E_n \ge 1 / \alpha) \le \alpha

by Ville's inequality. Under an alternative k the inverse of its product is one as well: that it ever falls below
:math:`\alpha` has at most the probability :math:`\alpha`.

Source: Ramdas et al. (2023); Vovk and Wang (2021) for averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, ndtr, ndtri

__all__ = ["ALTERNATIVES", "Verdict", "gross", "judge", "log_ratios", "log_wealth", "rank_probabilities"]

_SHIFTS = (-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0)
_WIDTHS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 2.0, 3.0)
ALTERNATIVES = np.array([(s, c) for s in _SHIFTS for c in _WIDTHS if (s, c) != (0.0, 1.0)])
"""Shifts and widths that are bet on, with equal stakes (K, 2)."""

_BINS = 5
"""Of ranks, whose frequencies are bet on too: distributions of ranks of any other shape."""


class Verdict(NamedTuple):
    """What ranks say so far.

    Args:
        alarm: the number of replications after which the alarm came; ``None`` for none.
        cleared: the number after which all deviations of :func:`gross` were excluded; ``None`` before.
        quantity: the name of the quantity with the strongest evidence in all ranks.
        entry: the index of its entry.
        deviation: how its posterior deviates.
        log_e: the logarithm of the largest :math:`E_n`.
    """

    alarm: int | None
    cleared: int | None
    quantity: str
    entry: tuple[int, ...]
    deviation: str
    log_e: float

    @property
    def where(self) -> str:
        """The quantity and the entry, as a message has them."""
        return f"{self.quantity!r}" + f"{list(self.entry)}" * bool(self.entry)


def rank_probabilities(num_samples: int, alternatives: np.ndarray) -> np.ndarray:
    """Probabilities of ranks 0 to S under shifts and widths (K, 2): (K, S + 1)."""
    shift, width = alternatives.T[..., None]
    edges = ndtri(np.linspace(0, 1, num_samples + 2))
    return np.diff(ndtr(shift + width * edges))  # p_dc(r)


def log_ratios(ranks: np.ndarray, num_samples: int, alternatives: np.ndarray) -> np.ndarray:
    """Logarithms of the products of ratios after each of R ranks (R, J), by alternative: (R, J, K)."""
    table = np.log((num_samples + 1) * np.maximum(rank_probabilities(num_samples, alternatives), 1e-300))
    return table.T[ranks].cumsum(0)


def _log_ratios_of_bins(ranks: np.ndarray, num_samples: int) -> np.ndarray:
    """The same for frequencies of bins, with a uniform prior on them (R, J, 1)."""
    bins = min(_BINS, num_samples + 1)
    of_rank = np.arange(num_samples + 1) * bins // (num_samples + 1)
    uniform = np.bincount(of_rank) / (num_samples + 1)
    hits = of_rank[ranks][..., None] == np.arange(bins)
    before = hits.cumsum(0) - hits
    rule = (before + 1) / (before.sum(-1, keepdims=True) + bins)  # Laplace's rule of succession
    return np.log((hits * rule / uniform).sum(-1, keepdims=True)).cumsum(0)


def log_wealth(ranks: np.ndarray, num_samples: int) -> np.ndarray:
    """The logarithm of what each bet has made of a stake of one, after each of R ranks (R, J): (R, J, K + 1)."""
    of_alternatives = log_ratios(ranks, num_samples, ALTERNATIVES)
    return np.concatenate([of_alternatives, _log_ratios_of_bins(ranks, num_samples)], -1)


def gross(tolerance: float) -> np.ndarray:
    r"""Shifts and widths (4, 2) that a test excludes before it ends early: too narrow and too wide by a factor
    :math:`\tau`, and shifts by :math:`\pm\sqrt2 \log \tau`, which are about as far from uniform ranks:
    :math:`\mathrm{KL} = \log^2 \tau` to second order.
    """
    shift = 2**0.5 * np.log(tolerance)
    return np.array([(0.0, 1 / tolerance), (0.0, tolerance), (-shift, 1.0), (shift, 1.0)])


def judge(ranks: Mapping[str, np.ndarray], num_samples: int, level: float, tolerance: float) -> Verdict:
    """The verdict on ranks by quantity (R, ...), of whole numbers from 0 to S, in their order.

    Quantities have equal stakes, and entries of a quantity too.

    Args:
        ranks: by quantity.
        num_samples: the number of draws, S.
        level: the probability of a false alarm, at most.
        tolerance: the factor of :func:`gross`.
    """
    columns = {name: np.asarray(rank).reshape(len(rank), -1) for name, rank in ranks.items()}
    together = np.concatenate(list(columns.values()), 1)
    stakes = np.concatenate([np.full(c.shape[1], 1 / c.shape[1] / len(columns)) for c in columns.values()])
    bets = log_wealth(together, num_samples)
    by_entry = logsumexp(bets, axis=-1) - np.log(bets.shape[-1])
    log_e = logsumexp(by_entry, axis=1, b=stakes)  # log E_n
    alarms = np.flatnonzero(log_e >= -np.log(level))
    ever = np.minimum.accumulate(log_ratios(together, num_samples, gross(tolerance)), 0)
    clear = np.flatnonzero((ever <= np.log(level)).all((1, 2)))
    worst = int((by_entry[-1] + np.log(stakes)).argmax())
    names = [(name, index) for name, rank in ranks.items() for index in np.ndindex(np.shape(rank)[1:])]
    return Verdict(
        alarm=int(alarms[0]) + 1 if len(alarms) else None,
        cleared=int(clear[0]) + 1 if len(clear) else None,
        quantity=names[worst][0],
        entry=names[worst][1],
        deviation=_described(int(bets[-1, worst].argmax())),
        log_e=float(log_e.max()),
    )


def _described(best: int) -> str:
    """The alternative that the ranks make most probable."""
    if best == len(ALTERNATIVES):
        return "has another shape"
    shift, width = ALTERNATIVES[best]
    parts = [
        f"is too {'narrow' if width < 1 else 'wide'}, about {width:g} times the right width," * bool(width != 1),
        f"is biased {'low' if shift < 0 else 'high'} by about {abs(shift):g} standard deviations," * bool(shift != 0),
    ]
    return " and ".join(filter(None, parts)).removesuffix(",")
