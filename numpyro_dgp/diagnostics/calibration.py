"""Calibration of predictive intervals and of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from numpyro_dgp._checks import expect, expected, require_count, require_finite, require_key
from numpyro_dgp._data import known_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["ClassCalibration", "Coverage", "class_calibration", "coverage", "pit", "uniformity"]


class Coverage(NamedTuple):
    """Share of the data inside central predictive intervals.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.diagnostics import coverage
        >>> intervals = coverage(np.linspace(0, 1, 101), [0.5, 0.9])
        >>> print(intervals.levels, intervals.share.round(2), intervals.error.round(2))
        [0.5 0.9] [0.5 0.9] [0.05 0.03]
    """

    levels: np.ndarray
    """Nominal probabilities of the intervals (levels,)."""
    share: np.ndarray
    """Share of the data inside (levels,)."""
    error: np.ndarray
    """Standard error of the share if the intervals were right and the data independent (levels,)."""

    def __repr__(self) -> str:
        return brief(self)


def pit(draws: ArrayLike, y: ArrayLike, key: Array) -> np.ndarray:
    r"""Probability integral transform of observations, by predictive draws.

    .. math:: u_n = \frac{\#\{s : y_{sn} < y_n\} + U_n\, (1 + \#\{s : y_{sn} = y_n\})}{S + 1}, \qquad U_n \sim U(0, 1)

    Where the predictive distribution is right, u is uniform on (0, 1) for any S and for discrete y too. A histogram
    with a hump means predictions that are too wide, one like a bowl predictions that are too narrow, a slope bias.

    Limits. Uniform values are necessary and not sufficient: a prediction that ignores the inputs can have them. Data
    that the fit has seen lie too close to the middle: use held-out data, or ``arviz_stats.loo_pit``. Values need an
    order, as numbers, counts and ordered categories have. Labels of classes have none: the transform depends on how the
    classes are numbered, intervals of labels mean nothing, and arrays of integers may be labels or counts. For classes
    look at ``posterior.probs``: a class that has probability p is right in a share p of the rows.

    Args:
        draws: of y (S, N...), from ``posterior.sample``, in an order.
        y: observations (N...).
        key: PRNG key, for U.

    Returns:
        u (N...).

    Raises:
        ValueError: shapes that do not fit together, NaN, or no PRNG key.

    Example:
        >>> import jax
        >>> from numpyro_dgp.diagnostics import pit
        >>> key = jax.random.key(0)
        >>> u = pit(jax.random.normal(key, (99, 4000)), jax.random.normal(jax.random.key(1), (4000,)), key)
        >>> bool(abs(u.mean() - 0.5) < 0.02), bool(abs(u.var() - 1 / 12) < 0.005)
        (True, True)

    Source: Dawid (1984); Czado et al. (2009) for discrete data.
    """
    require_key(key)
    samples, values = known_numbers("draws of pit", draws), known_numbers("observations y", y)
    expect(
        samples.ndim and samples.shape[1:] == values.shape and samples.size,
        f"draws of shape (S, ...) over observations of shape {values.shape}",
        samples.shape,
        "take them from posterior.using(num_samples=1000).sample(key, X_test), draws along the first axis",
    )
    require_finite("draws", samples, "check the fit: NaN in its losses?")
    require_finite("observations y", values, "drop the rows with missing values")
    below, equal = (samples < values).sum(0), (samples == values).sum(0)
    return (below + np.asarray(jax.random.uniform(key, values.shape)) * (1 + equal)) / (len(samples) + 1)  # u_n


def coverage(u: ArrayLike, levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95)) -> Coverage:
    r"""Share of the data inside central predictive intervals, by their transforms:
    :math:`\#\{n : |u_n - \tfrac12| \le \tfrac{\alpha}{2}\} / N` at level :math:`\alpha`.

    Limits. Intervals can have the right coverage on average and still be wrong at every input: too wide where data are
    many, too narrow elsewhere. Coverage does not measure their width: look at the log density too.

    Args:
        u: from :func:`pit` (N...).
        levels: probabilities between 0 and 1.

    Returns:
        Levels, shares and standard errors, each (levels,).

    Raises:
        ValueError: values or levels outside the unit interval.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.diagnostics import coverage
        >>> coverage(np.linspace(0, 1, 1001), [0.9]).share.round(3)
        array([0.9])
    """
    values, of = np.ravel(known_numbers("transforms u", u)), np.atleast_1d(known_numbers("levels", levels))
    if of.ndim != 1 or not values.size or not ((values >= 0) & (values <= 1)).all() or not ((of > 0) & (of < 1)).all():
        raise expected(
            "u in [0, 1] and levels in (0, 1)",
            f"{_range(values)} and levels {of}",
            "u = dgp.diagnostics.pit(draws, y, key)",
        )
    # Values on the ends of an interval are inside, whatever their rounding.
    share = (np.abs(values[:, None] - 0.5) <= of / 2 * (1 + 1e-12)).mean(0)
    return Coverage(of, share, np.sqrt(of * (1 - of) / len(values)))  # binomial: sqrt(a (1 - a) / N)


def uniformity(u: ArrayLike, bins: int = 10) -> np.ndarray:
    """p-value of a chi-square test that the columns (N, ...) of values in [0, 1] are uniform: shape (...).

    It assumes independent rows. Take at least five rows for each bin.

    Args:
        u: values (N, ...).
        bins: of equal width.

    Returns:
        p-values (...).

    Raises:
        ValueError: fewer than five rows for each bin, or values outside of the unit interval.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.diagnostics import uniformity
        >>> rng = np.random.default_rng(0)
        >>> bool(uniformity(rng.uniform(size=500)) > 0.05), bool(uniformity(rng.beta(2, 2, size=500)) < 0.05)
        (True, True)
    """
    from scipy.stats import chi2

    require_count("bins", bins, "10")
    values = known_numbers("values of uniformity", u).astype(float)
    if not ((values >= 0) & (values <= 1)).all():
        raise expected("values in [0, 1]", _range(values), "u = dgp.diagnostics.pit(draws, y, key)")
    expect(
        values.ndim >= 1 and len(values) >= 5 * bins,
        f"at least {5 * bins} rows for {bins} bins",
        f"shape {values.shape}",
        "fewer bins",
    )
    columns = np.clip((values.reshape(len(values), -1) * bins).astype(int), 0, bins - 1)
    counts = np.stack([(columns == b).sum(0) for b in range(bins)])
    mean = len(values) / bins
    # sum_b (N_b - N / B)^2 / (N / B) is chi-square with B - 1 degrees of freedom.
    return chi2.sf(((counts - mean) ** 2 / mean).sum(0), bins - 1).reshape(values.shape[1:])


def _range(values: np.ndarray) -> str:
    if not values.size or np.isnan(values).any():
        return "NaN" if values.size else "no values"
    return f"{values.min():.3g} to {values.max():.3g}"


class ClassCalibration(NamedTuple):
    """Binned probabilities of labels, and the frequencies of the labels.

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

        columns = {"probability": self.probability, "share": self.share, "error": self.error, "num_data": self.num_data}
        return pandas.DataFrame(columns)


def class_calibration(probs: ArrayLike, y: ArrayLike, *, bins: int = 10, label: int | None = None) -> ClassCalibration:
    r"""Calibration of label probabilities: frequency against probability, in bins of equal width.

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
