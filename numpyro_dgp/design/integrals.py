"""Numbers that are integrals of a function, for every draw of the function and every randomisation of the points."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_dgp._checks import require_levels
from numpyro_dgp._shown import brief

__all__ = ["Integrals"]


class Integrals(NamedTuple):
    r"""Integrals of drawn functions by randomised points, with two errors.

    Of draw s with randomisation r there is an estimate :math:`T_{rs}`. What the data leave open of the function shows
    in the spread over s, what the number of points leaves open of the integral in the spread over r:

    .. math:: T_s = \tfrac1R \sum_r T_{rs}, \qquad
              \hat\sigma^2_\mathrm{integration} = \tfrac{1}{R (R - 1)} \sum_r (\bar T_{r\cdot} - \bar T)^2, \qquad
              \hat\sigma^2_\mathrm{emulator} = \operatorname{var}_s T_s
              - \tfrac{1}{R} \operatorname{var}_{rs} (T_{rs} - \bar T_{r\cdot} - T_s + \bar T) .

    The last term, with R - 1 times S - 1 degrees of freedom, is what the integration adds to the spread of draws: the
    two errors are components of a two-way analysis of variance. The emulator's falls with more data, the integration's
    with more points.

    Raises:
        ValueError: :meth:`interval` gets a level that is not between 0 and 1.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.design import Integrals
        >>> truth = np.array([0.2, 0.3, 0.4])  # of three functions
        >>> noise = 0.01 * np.random.default_rng(0).normal(size=(8, 3, 1))
        >>> found = Integrals(truth[:, None] + noise)
        >>> found.mean.round(2), found.emulator_error.round(2), found.integration_error.round(3)
        (array([0.3]), array([0.1]), array([0.002]))
    """

    values: np.ndarray
    """By randomisation and draw (R, S, ...)."""

    def __repr__(self) -> str:
        return brief(self)

    @property
    def draws(self) -> np.ndarray:
        """One for every draw of the function, averaged over randomisations (S, ...)."""
        return self.values.mean(0)

    @property
    def mean(self) -> np.ndarray:
        """Over draws (...)."""
        return self.values.mean((0, 1))

    @property
    def integration_error(self) -> np.ndarray:
        """Standard error of ``mean`` as an integral, over randomisations (...)."""
        return self.values.mean(1).std(0, ddof=1) / np.sqrt(len(self.values))

    @property
    def emulator_error(self) -> np.ndarray:
        """Standard deviation over draws of the function, without what integration adds; 0 for one function (...)."""
        R, S = self.values.shape[:2]
        if S == 1:
            return np.zeros(self.values.shape[2:])
        both = self.values - self.values.mean(1, keepdims=True) - self.draws + self.mean
        added = np.square(both).sum((0, 1)) / ((R - 1) * (S - 1)) / R
        return np.sqrt(np.maximum(self.draws.var(0, ddof=1) - added, 0))

    def interval(self, level: float = 0.9) -> np.ndarray:
        """The central interval with that share of the draws.

        Args:
            level: between 0 and 1.

        Returns:
            Lower and upper ends (2, ...).

        Raises:
            ValueError: a level that is not between 0 and 1.
        """
        require_levels("Integrals.interval", level)
        return np.quantile(self.draws, [0.5 - 0.5 * float(level), 0.5 + 0.5 * float(level)], axis=0)
