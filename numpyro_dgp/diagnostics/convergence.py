"""Have the chains converged? R-hat and effective sizes of what the data identify, beside those of all sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpyro.infer import MCMC

from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.diagnostics.arviz import Source, as_posterior
from numpyro_dgp.diagnostics.identified import LOG_DENSITY, identified, site_kinds, sites_of_draws
from numpyro_dgp.inference.mcmc import centred_program
from numpyro_dgp.predict import Posterior

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Convergence", "convergence"]

# Of a chain, in ArviZ's estimates.
_LEAST = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Convergence:
    """The result of :func:`convergence`.

    Args:
        table: one row per site and quantity: its ``kind``, whether the data identify it, how many ``numbers`` it has,
            the largest ``r_hat`` of these and, where superchains are given, the largest ``r_hat_nested``, the smallest
            ``ess_bulk`` and ``ess_tail``.
        values: of the identified quantities, (chains, draws, ...) by name, for plots of them.

    Example:
        >>> import jax, numpyro, numpyro_dgp as dgp
        >>> import numpyro.distributions as dist
        >>> def model(y=None):
        ...     m = numpyro.sample("m", dist.Normal(0.0, 1.0))
        ...     numpyro.sample("y", dist.Normal(m, 1.0), obs=y)
        >>> draws = dgp.Posterior(model, samples={"m": jax.random.normal(jax.random.key(0), (400,))})
        >>> found = dgp.diagnostics.convergence(draws, 0.0, num_chains=4)
        >>> found.r_hat < 1.05, found.ess > 200, found.values["m"].shape
        (True, True, (4, 100))
    """

    table: DataFrame
    values: dict[str, np.ndarray]

    __repr__ = brief

    @property
    def r_hat(self) -> float:
        """The largest R-hat of what is identified; NaN where one of these quantities never moved."""
        return float(self.table.r_hat[self.table.identified].max(skipna=False))

    @property
    def ess(self) -> float:
        """The smallest bulk effective size of what is identified."""
        return float(self.table.ess_bulk[self.table.identified].min(skipna=False))


def convergence(
    source: Source,
    *args: Any,
    test: tuple[Any, ...] | None = None,
    num_chains: int | None = None,
    superchains: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Convergence:
    r"""R-hat and effective sample sizes of chains, of what the data identify and of every site.

    Hidden layers can be reflected and their outputs permuted without changing the density of the data. Chains in
    different reflections have large R-hat at the sites of inducing values and hidden values, for ever, while they
    agree about everything that can be observed. Identified are

    - hyperparameters, the sites that all data share and that belong to no layer, on the unconstrained scale;
    - the function under every observed site: at the data, given the hidden values of the draw; and at the inputs
      ``test``, :math:`E[f(\bar h) \mid v]` with every hidden layer at its mean given its inducing values and the layer
      below. Both have no random numbers beside those of the chain; hidden values and latents that a chain does not
      have, as under :class:`SGHMC`, are at their means;
    - the log density of the data given a draw.

    R-hat is the larger of the rank-normalised split R-hat and that of folded draws; bulk and tail effective sizes are
    those of ArviZ.

    Limits. Vectors of hyperparameters of outputs that can be permuted, such as one lengthscale per output of a hidden
    layer, and weights that are multiplied with a layer, change with the layer: their rows count as identified, and it
    takes a look to see why they disagree. Deterministic sites of the program count as not identified. A small R-hat
    says that chains agree, not that they have found all modes.

    **Many short chains.** R-hat of chains of a few draws is far above one although their average is a good
    estimate. Nested R-hat compares superchains, groups of chains that started at one point: its value above one is
    the error of the average within a group, and what the start still contributes.

    Args:
        source: an MCMC object that has run, or ``dgp.Posterior(model, samples=draws)``.
        *args: arguments of the program, observations included, as in the run.
        test: arguments of the program at other inputs, without observations.
        num_chains: of the draws of a ``Posterior``, which lie one chain after the other; one by default.
        superchains: how many groups of chains there are, if chains in a row belong together, or the number of the group
            of every chain.
        **kwargs: keyword arguments of the program.

    Returns:
        A :class:`Convergence`: the table, and the identified quantities of every draw.

    Raises:
        ValueError: a source without draws or of fewer than four per chain, numbers of chains that do not fit, draws
            of other data or of another program, groups of different sizes or only one, and what ``dgp.Posterior``
            refuses of ``test``.

    Example:
        >>> import jax, numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> import numpyro_dgp as dgp
        >>> def model(X, y=None):
        ...     noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 4)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)
        >>> X = jnp.linspace(0, 1, 12)[:, None]
        >>> mcmc = MCMC(NUTS(dgp.for_mcmc(model)), num_warmup=50, num_samples=50, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), X, jnp.sin(X[:, 0]))
        >>> found = dgp.diagnostics.convergence(mcmc, X, jnp.sin(X[:, 0]), test=(X[:3],))
        >>> print(found.table[["kind", "identified", "numbers"]])
                                           kind  identified  numbers
        noise                    hyperparameter        True        1
        function at y                  function        True       12
        function at y, test            function        True        3
        log density of the data     log density        True        1
        f                              inducing       False        4

    Source: Vehtari et al. (2021); Margossian et al. (2024) for nested R-hat.
    """
    posterior, chains = _chains(source, num_chains)
    groups = _groups(superchains, chains)
    if test is not None and not isinstance(test, tuple):
        raise ValueError(
            f"convergence: expected test=(X_test,), the arguments of the program without observations, got "
            f"{type(test).__name__}"
        )
    kinds = site_kinds(sites_of_draws(posterior, args, kwargs))
    found = identified(posterior, args, kwargs, test)

    def by_chain(values: Any) -> np.ndarray:
        return np.asarray(values).reshape(chains, -1, *np.shape(values)[1:])

    quantities = {**found.hyperparameters, **found.functions, LOG_DENSITY: found.log_density}
    values = {name: by_chain(value) for name, value in quantities.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        kind = "hyperparameter" if name in found.hyperparameters else "function"
        rows[name] = {"kind": "log density" if name == LOG_DENSITY else kind, "identified": True}
        rows[name] |= _estimates(value, groups)
    for name, draws in (posterior.samples or {}).items():
        if name not in rows:
            rows[name] = {"kind": kinds.get(name, "coordinates"), "identified": False}
            rows[name] |= _estimates(by_chain(draws), groups)

    import pandas

    return Convergence(pandas.DataFrame.from_dict(rows, orient="index"), values)


def _chains(source: Source, num_chains: int | None) -> tuple[Posterior, int]:
    """The draws of all chains with the program that has hidden values as sites, and the number of chains."""
    posterior = as_posterior(source)
    if posterior.samples is None:
        raise ValueError(
            "convergence: expected chains, an MCMC object or dgp.Posterior(model, samples=draws), got a fit with a "
            "guide, whose draws are independent: dgp.diagnostics.khat says how good they are"
        )
    chains = source.num_chains if isinstance(source, MCMC) else 1 if num_chains is None else num_chains
    if num_chains not in (None, chains):
        raise ValueError(f"convergence: expected num_chains of the MCMC object, {chains}, got {num_chains}")
    total = len(next(iter(posterior.samples.values()), ()))
    if not isinstance(chains, int) or chains < 1 or total % chains or total < _LEAST * chains:
        raise ValueError(
            f"convergence: expected chains of one length, {_LEAST} draws at least, got {total} draws in all and "
            f"num_chains={chains!r}"
        )
    model = source.sampler.model if isinstance(source, MCMC) else source.model
    return Posterior(centred_program(model), params=posterior.params, samples=posterior.samples), chains


def _groups(superchains: int | Sequence[int] | None, chains: int) -> np.ndarray | None:
    """The number of the group of every chain."""
    if superchains is None:
        return None
    if isinstance(superchains, int) and superchains > 0 and chains % superchains == 0:
        ids = np.repeat(np.arange(superchains), chains // superchains)
    else:
        ids = np.unique(np.asarray(superchains), return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(ids)
    if isinstance(superchains, bool) or len(ids) != chains or len(sizes) < 2 or len(set(sizes)) > 1:
        raise ValueError(
            f"convergence: expected superchains of one size, two at least, for {chains} chains, got {superchains!r}: "
            "their number, or the group of every chain, [0, 0, 1, 1]"
        )
    return ids


def _estimates(values: np.ndarray | Array, groups: np.ndarray | None) -> dict[str, Any]:
    """The worst of the numbers of a quantity (chains, draws, ...), those aside that are the same in all draws."""
    from arviz_stats.base import array_stats

    flat = np.asarray(values, float).reshape(*values.shape[:2], -1)
    found: dict[str, Any] = {"numbers": flat.shape[-1]}
    moving = np.ptp(flat, axis=(0, 1)) != 0  # NaN among them
    flat = np.moveaxis(flat[..., moving], -1, 0)
    known = flat.size > 0 and bool(np.isfinite(flat).all())
    found["r_hat"] = array_stats.rhat(flat).max() if known else np.nan
    if groups is not None:
        found["r_hat_nested"] = array_stats.rhat_nested(flat, groups).max() if known else np.nan
    found["ess_bulk"] = array_stats.ess(flat).min() if known else np.nan
    found["ess_tail"] = array_stats.ess(flat, method="tail", prob=(0.05, 0.95)).min() if known else np.nan
    return found
