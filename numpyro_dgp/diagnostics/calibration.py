"""Calibration of predictive intervals, of posteriors on data simulated from the program, and of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import SVI

from numpyro_dgp._checks import expect, expected, require_count, require_finite, require_key
from numpyro_dgp._data import known_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.inference.fit_start import require_svi

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["ClassCalibration", "Coverage", "Simulated", "class_calibration", "coverage", "pit", "uniformity", "vsbc"]


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


class Simulated(NamedTuple):
    """Ranks of the true values in posteriors fitted to data simulated from the program, by site.

    Raises:
        ValueError: :meth:`of` gets ranks outside of 0 to S, or fewer than five replications for each bin.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.diagnostics import Simulated
        >>> ranks = np.random.default_rng(0).integers(40, 60, 500)  # never near 0 or 99: q is too wide
        >>> tests = Simulated.of({"f": ranks}, num_samples=99)
        >>> bool(tests.uniform["f"] < 0.01), bool(tests.symmetry["f"] > 0.01)
        (True, True)
    """

    ranks: dict[str, np.ndarray]
    """Number of posterior draws below the truth (replications, ...), from 0 to S."""
    num_samples: int
    """The number of draws, S."""
    symmetry: dict[str, np.ndarray]
    """p-values of Wilcoxon's signed-rank test that they are symmetric: small where a marginal is biased (...)."""
    uniform: dict[str, np.ndarray]
    """p-values of a chi-square test that they are uniform: small too where a marginal is too narrow or wide (...)."""

    def __repr__(self) -> str:
        return brief(self)

    @classmethod
    def of(cls, ranks: Mapping[str, ArrayLike], num_samples: int, bins: int | None = None) -> Simulated:
        """The tests for ranks from elsewhere, such as chains run on simulated data.

        Args:
            ranks: by site (replications, ...), from 0 to S.
            num_samples: the number of draws, S.
            bins: of the chi-square test; by default 10, and fewer for fewer than 50 replications.

        Raises:
            ValueError: ranks outside of 0 to S, or fewer than five replications for each bin.

        Example:
            >>> rng = np.random.default_rng(0)
            >>> bool(Simulated.of({"f": rng.integers(0, 100, 500)}, 99).uniform["f"] > 0.05)
            True
        """
        require_count("num_samples", num_samples, "99")
        found = {name: known_numbers(f"ranks of {name!r}", rank) for name, rank in ranks.items()}
        if not found or not all(rank.size for rank in found.values()):
            raise expected(
                "ranks by site, a row per replication", [r.shape for r in found.values()], "{name: ranks (R, ...)}"
            )
        for name, rank in found.items():
            if not ((rank >= 0) & (rank <= num_samples)).all():
                raise expected(
                    f"ranks from 0 to {num_samples}",
                    f"{rank.min()} to {rank.max()} at site {name!r}",
                    "a rank is the number of the S draws that are below the truth",
                )
        count = min(len(rank) for rank in found.values())
        bins = min(10, max(1, count // 5)) if bins is None else bins
        symmetry = {name: _symmetry(rank - num_samples / 2) for name, rank in found.items()}
        # S + 1 ranks, each in its middle
        uniform = {name: uniformity((rank + 0.5) / (num_samples + 1), bins) for name, rank in found.items()}
        return cls(found, num_samples, symmetry, uniform)


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


def vsbc(
    svi: SVI,
    key: Array,
    *args: Any,
    num_replications: int = 100,
    num_steps: int = 1000,
    num_samples: int = 99,
    observed: Sequence[str] = ("y",),
    bins: int | None = None,
    **kwargs: Any,
) -> Simulated:
    r"""Variational simulation-based calibration: fits to data simulated from the program.

    .. math:: \phi^i \sim p(\phi), \quad y^i \sim p(y \mid \phi^i), \quad
              \phi^{is} \sim q^i(\phi), \qquad \mathrm{rank}^i_j = \#\{s : \phi^{is}_j < \phi^i_j\}

    If every :math:`q^i`, fitted to :math:`y^i`, were the posterior, ranks would be uniform. For a q that is only too
    narrow or too wide they are symmetric about S/2 but not uniform; where they are not symmetric, q is biased on
    average over the prior. (``vsbc_diagnostic`` of ``numpyro.infer.calibration``, which makes the fits, tests symmetry
    by a Kolmogorov-Smirnov test of the ranks against their mirror images. The two samples are one, and its p-values
    come out too small.)

    Limits. The average is over data from the prior: q may still be wrong for *your* data, and a prior
    with implausible data gives implausible fits. Every replication is a fit of ``num_steps`` steps, whether it has
    converged or not. Only marginals are tested, without correction for the number of sites. A ``dgp.Likelihood`` draws
    f(x) of every datum independently given the inducing values, and fits a bound: with few inducing points this
    mismatch shows too. Sites with a point posterior (``Delta``) have ranks 0 or S.

    Args:
        svi: the program, which draws the observed sites when called without them, with its guide, an optimiser and an
            objective.
        key: PRNG key.
        *args: arguments of the program, without observations.
        num_replications: how many fits.
        num_steps: steps of each fit.
        num_samples: S draws from each guide; with S + 1 a multiple of ``bins`` the test of uniformity is exact.
        observed: names of the observed sites, which are the program's arguments for them too.
        bins: of the chi-square test; by default 10, and fewer for fewer than 50 replications.
        **kwargs: keyword arguments of the program.

    Returns:
        Ranks and p-values by site, as :class:`Simulated`.

    Raises:
        ValueError: no ``SVI``, no PRNG key, or fewer than 10 replications; from NumPyro for other sites or numbers it
            cannot use.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> model, X, _ = dgp.testing.toy()
        >>> svi = numpyro.infer.SVI(model, dgp.guides.MeanField(model), optax.adam(0.1), dgp.ELBO())
        >>> found = dgp.diagnostics.vsbc(svi, jax.random.key(0), X, num_replications=10, num_steps=50)
        >>> found.ranks["f"].shape  # of 5 inducing values in every replication
        (10, 5)

    Source: Yao et al. (2018), algorithm 2; Talts et al. (2018) for ranks.
    """
    from numpyro.infer.calibration import vsbc_diagnostic

    require_svi(svi)
    require_key(key)
    expect(num_replications >= 10, "at least 10 replications", num_replications, "100 are usual")
    raw = jax.random.PRNGKey(jax.random.bits(key))  # NumPyro reshapes the keys, which fails for typed keys
    found = vsbc_diagnostic(
        raw, svi.model, svi.guide, svi.optim, svi.loss, *args, observed_sites=list(observed),
        num_simulations=num_replications, num_svi_steps=num_steps, num_samples=num_samples,
        **svi.static_kwargs | kwargs,
    )  # fmt: skip
    return Simulated.of(found.ranks, num_samples, bins)


def _range(values: np.ndarray) -> str:
    if not values.size or np.isnan(values).any():
        return "NaN" if values.size else "no values"
    return f"{values.min():.3g} to {values.max():.3g}"


def _symmetry(centred: np.ndarray) -> np.ndarray:
    from scipy.stats import wilcoxon

    columns = centred.reshape(len(centred), -1).T
    tests = [wilcoxon(column).pvalue if column.any() else 1.0 for column in columns]
    return np.array(tests, float).reshape(centred.shape[1:])


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
