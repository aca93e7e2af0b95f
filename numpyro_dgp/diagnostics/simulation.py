"""Simulation-based calibration: are posteriors right on average, over data that the program draws?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from numpyro_dgp._checks import expected, require_count
from numpyro_dgp._data import known_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.diagnostics.calibration import uniformity
from numpyro_dgp.diagnostics.replications import Inference, Quantities, joined, replicate

__all__ = ["Simulated", "sbc"]


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


def sbc(
    inference: Inference,
    key: Array,
    *args: Any,
    num_replications: int = 100,
    num_steps: int | None = None,
    simulator: Callable[..., Any] | None = None,
    quantities: Quantities | None = None,
    **kwargs: Any,
) -> Simulated:
    r"""Simulation-based calibration: ranks of true values in posteriors fitted to simulated data.

    .. math:: \phi^i \sim p(\phi), \quad y^i \sim p(y \mid \phi^i), \quad
              \phi^{is} \sim q^i(\phi), \qquad \mathrm{rank}^i = \#\{s : t(\phi^{is}, y^i) < t(\phi^i, y^i)\}

    If every :math:`q^i`, fitted to :math:`y^i`, is the posterior, ranks of any quantity t are uniform. For a q that is
    only too narrow or too wide they are symmetric about S/2 but not uniform; where they are not symmetric, q is biased
    on average over the prior. All replications share one compiled program, and run 25 at a time.

    **Quantities.** By default: sites that all data share, such as hyperparameters; the last function at eight rows, as
    ``"f(x) of y"`` (its mean given all latent sites); and ``"log density"``, that of the data. Inducing values of inner
    layers and hidden values are left out, because their signs and order are not identified.

    **At your data.** Called with observations, ``sbc(inference, key, X, y)``, it simulates given these: :math:`\phi^i
    \sim q(\phi \mid y)`, new data :math:`y^i` at the same rows, and :math:`q^i` is fitted to both. A replication then
    takes two fits. Arguments that are arrays must have a row for each observation.

    Limits. Uniform ranks are an average over data from the prior (or given yours): errors of opposite signs cancel. A
    ``dgp.Likelihood`` draws f(x) of every datum given the inducing values and fits a bound: with few inducing points
    this mismatch shows as well; ``collapse="marginal"`` has none. Sites with a point posterior (``Delta``) have ranks 0
    or S. Posterior samples of a chain must be nearly independent: use ``thinning=``.

    Args:
        inference: an ``SVI``, whose fits take ``num_steps`` steps and from whose guides S = 99 draws come; or an
            ``MCMC``, whose settings give the number of samples.
        key: PRNG key.
        *args: arguments of the program, without observations, or with all of them.
        num_replications: how many simulated data sets.
        num_steps: steps of each fit of an ``SVI``, 1000 by default.
        simulator: the program that data and true values come from, with the same arguments and sites; by default the
            program that is fitted.
        quantities: from values by site, data included, to a dict of what is ranked, as in
            ``lambda values: {"f": values["f"]}``.
        **kwargs: keyword arguments of the program. Observed sites have the names of the arguments for them.

    Returns:
        Ranks and p-values by quantity, as :class:`Simulated`.

    Raises:
        ValueError: no ``SVI`` or ``MCMC``; no PRNG key; a program with ``numpyro.param`` sites, with minibatches, or
            whose observed sites have other names than its arguments; observations beside arguments or layers that do
            not have rows; a simulator without one of the latent sites; posterior samples that are not finite.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> model, X, _ = dgp.testing.toy()
        >>> svi = numpyro.infer.SVI(model, dgp.guides.MeanField(model), optax.adam(0.1), dgp.ELBO())
        >>> found = dgp.diagnostics.sbc(svi, jax.random.key(0), X, num_replications=10, num_steps=50)
        >>> {name: ranks.shape for name, ranks in found.ranks.items()}
        {'f(x) of y': (10, 8), 'log density': (10,)}

    Source: Talts et al. (2018); Yao et al. (2018), algorithm 2, for guides; Modrak et al. (2023) for quantities that
    depend on the data; Sailynoja et al. (2025) for simulation given data.
    """
    num_samples, batches = replicate(
        inference, key, args, kwargs, num_replications=num_replications, num_steps=num_steps, simulator=simulator,
        quantities=quantities,
    )  # fmt: skip
    return Simulated.of(joined([batch.ranks for batch in batches]), num_samples)


def _symmetry(centred: np.ndarray) -> np.ndarray:
    from scipy.stats import wilcoxon

    columns = centred.reshape(len(centred), -1).T
    tests = [wilcoxon(column).pvalue if column.any() else 1.0 for column in columns]
    return np.array(tests, float).reshape(centred.shape[1:])
