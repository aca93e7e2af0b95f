"""Pareto's k of importance weights, and weights whose tail is smoothed; names that trees give such numbers."""

from __future__ import annotations

import numpy as np

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._typing import ArrayLike

__all__ = ["KHAT", "LEAST", "LOG_WEIGHT", "R_EFF", "pareto_shape", "smoothed"]

# With fewer weights the tail has fewer than five to fit.
LEAST = 25
# Log weights that are closer than this, in nats, may be equal up to rounding; others are not, however large they are.
_ROUNDING = 0.1
# Names in a tree: k-hat of a guide, an attribute; the effective over the actual number of draws, an attribute; and the
# log of the density that a posterior was fitted to over the one that its draws are of, a variable.
KHAT = "khat"
R_EFF = "reff"
LOG_WEIGHT = "log_weight"


def pareto_shape(log_weights: ArrayLike) -> np.ndarray:
    r"""Shape :math:`\hat k` of the generalised Pareto distribution that the largest weights follow.

    Args:
        log_weights: logarithms of importance weights (S, ...), S at least 25.

    Returns:
        One number for every column (...); minus infinity where all weights are equal up to rounding.

    Raises:
        ValueError: too few weights, NaN or positive infinity, or no finite weight.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.diagnostics import pareto_shape
        >>> u = np.random.default_rng(0).uniform(size=4000)
        >>> print(pareto_shape(-0.8 * np.log(u)).round(1))  # weights u^-0.8
        0.8

    Source: Vehtari et al. (2024), section 3.
    """
    return smoothed(log_weights)[1]


def smoothed(log_weights: ArrayLike, r_eff: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Weights whose largest values are those of the fitted Pareto distribution.

    Args:
        log_weights: as for :func:`pareto_shape`.
        r_eff: effective over actual number of draws, by which the tail is the longer.

    Returns:
        The logarithms of weights that add up to one (S, ...), and the shapes (...).
    """
    from arviz_stats.base import array_stats

    given = np.asarray(log_weights)
    values, eps = given.astype(float), np.finfo(given.dtype if given.dtype.kind == "f" else float).eps
    expect(
        values.ndim >= 1 and len(values) >= LEAST,
        f"at least {LEAST} weights",
        f"shape {values.shape}",
        "1000 is usual",
    )
    if np.isnan(values).any() or (values == np.inf).any() or not np.isfinite(values.max(0)).all():
        raise expected(
            "log weights, no NaN or infinity, some of them finite", "others", "are parameters of the fit finite?"
        )
    columns = values.reshape(len(values), -1)
    equal = np.ptp(columns, axis=0) <= np.minimum(np.sqrt(eps) * (1 + np.abs(columns).max(0)), _ROUNDING)
    found = [
        (np.full(len(w), -np.log(len(w))), -np.inf)
        if same
        else array_stats.psislw(-w, r_eff=r_eff)  # which takes -log w
        for same, w in zip(equal, columns.T, strict=True)
    ]
    shapes = np.array([shape for _, shape in found], float).reshape(values.shape[1:])
    return np.stack([w for w, _ in found], 1).reshape(values.shape), shapes
