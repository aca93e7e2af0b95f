"""Reliability of class probabilities: how often labels come true, by the probability that they had."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from numpyro_dgp._checks import expect, expected, require_count, require_finite
from numpyro_dgp._data import known_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import ArrayLike

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["ClassCalibration", "class_calibration"]


class ClassCalibration(NamedTuple):
    """Probabilities of labels in bins, and how often the labels came true.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.diagnostics import class_calibration
        >>> found = class_calibration(np.array([[0.2, 0.8]] * 10), np.array([1] * 7 + [0] * 3))
        >>> print(found.probability, found.share, found.num_data, found.ece.round(2))
        [0.8] [0.7] [10] 0.1
    """

    probability: np.ndarray
    """Mean probability in each bin that has data (bins,)."""
    share: np.ndarray
    """Share of its data whose label came true (bins,)."""
    error: np.ndarray
    """Standard error of the share if the probabilities were right (bins,)."""
    num_data: np.ndarray
    """Number of data in it (bins,)."""
    ece: np.ndarray
    """Expected calibration error, the mean distance of share and probability over the data."""
    ece_error: np.ndarray
    """Its standard error."""
    ece_by_chance: np.ndarray
    """What it would be on average if the probabilities were right; it is never negative."""

    def __repr__(self) -> str:
        return brief(self)

    @property
    def table(self) -> DataFrame:
        """One row per bin."""
        import pandas

        names = ["probability", "share", "error", "num_data"]
        return pandas.DataFrame({name: getattr(self, name) for name in names})


def class_calibration(probs: ArrayLike, y: ArrayLike, *, bins: int = 10, label: int | None = None) -> ClassCalibration:
    r"""Whether labels come true as often as their probabilities say, in bins of equal width.

    .. math:: \mathrm{ECE} = \sum_b \frac{N_b}{N} \Bigl| \frac{1}{N_b} \sum_{n \in b} (c_n - p_n) \Bigr|

    with p the probability of the most probable label, or of ``label``, and c = 1 where it came true. The standard
    errors are those of :math:`c_n \sim \mathrm{Bernoulli}(p_n)`.

    Limits. Right shares do not make good predictions: the frequency of each class, whatever the inputs, has them. Data
    of the fit are predicted too well: use held-out data. The error depends on the bins, and is above zero for few data
    though probabilities be right: compare with ``ece_by_chance``.

    Args:
        probs: of K labels (N, K), from ``posterior.probs`` or ``predict_proba``; or of label 1 (N,).
        y: labels (N,), from 0 to K - 1.
        bins: their number.
        label: the label whose probabilities are looked at; by default the most probable one of each datum.

    Returns:
        Bins with data, and the error, as :class:`ClassCalibration`.

    Raises:
        ValueError: shapes that do not fit together, probabilities outside of [0, 1], labels that are none.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.diagnostics import class_calibration
        >>> rng = np.random.default_rng(0)
        >>> p = rng.uniform(size=4000)
        >>> found = class_calibration(p, rng.uniform(size=4000) < p)
        >>> bool(found.ece < found.ece_by_chance + 3 * found.ece_error)
        True

    Source: Guo et al. (2017).
    """
    p, labels = known_numbers("probabilities", probs), known_numbers("labels y", y)
    require_count("bins", bins, "10")
    require_finite("probabilities", p, "check the fit: NaN in its losses?")
    expect(
        p.ndim in (1, 2) and labels.shape == p.shape[:1] and labels.size,
        "probabilities (N, K) and labels (N,)",
        f"{p.shape} and {labels.shape}",
        "class_calibration(posterior.probs(key, X), y)",
    )
    p = (np.stack([1 - p, p], 1) if p.ndim == 1 else p).astype(float)
    K = p.shape[1]
    if not ((p >= -1e-6) & (p <= 1 + 1e-6)).all() or not np.isin(labels, np.arange(K)).all():
        raise expected(
            f"probabilities between 0 and 1 and labels from 0 to {K - 1}",
            f"{p.min():.3g} to {p.max():.3g} and {labels.min():.6g} to {labels.max():.6g}",
            "columns are labels",
        )
    expect(label is None or label in range(K), f"label to be one of 0 to {K - 1}", repr(label), "leave it out")
    chosen = p.argmax(1) if label is None else np.full(len(p), label)
    p = np.clip(p[np.arange(len(p)), chosen], 0, 1)
    came_true = labels == chosen
    index = np.minimum((p * bins).astype(int), bins - 1)
    found = np.unique(index)
    # By bin: N_b, sum of p, sum of c, and sum of p (1 - p), the variance of the sum of c.
    sums = np.array([[v[index == b].sum() for b in found] for v in (np.ones(len(p)), p, came_true, p * (1 - p))])
    count, variance = sums[0], sums[3]
    ece = np.abs(sums[2] - sums[1]).sum() / len(p)  # sum_b |sum_n (c_n - p_n)| / N
    return ClassCalibration(
        sums[1] / count,
        sums[2] / count,
        np.sqrt(variance) / count,
        count.astype(int),
        ece,
        np.sqrt(variance.sum()) / len(p),
        np.sqrt(2 * variance / np.pi).sum() / len(p),  # E|N(0, s^2)| = sqrt(2 / pi) s
    )
