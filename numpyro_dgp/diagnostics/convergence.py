r"""R-hat and effective sample sizes of the quantities that the data identify, and of all sites.

The identified quantities of a posterior sample are computed without random numbers.

Hidden layers can be reflected, and their outputs permuted, without changing the density of the data: chains in
different reflections disagree about inducing values and hidden values, and agree about

- hyperparameters :math:`\theta`, on the unconstrained scale;
- the function under every observed site at the data, :math:`E[f(h_n) \mid v, h_n]` with the values of the draw;
- at other inputs :math:`E[f(\bar h_*) \mid v]`, where :math:`\bar h_*` are the means of the hidden layers given their
  inducing values, each at the mean of the layer below; an exact layer is conditioned on its values at the data;
- :math:`\log p(y \mid \theta, v, h)`, the log density of all observed sites.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.primitives import Messenger

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import ALL_ROWS, require
from numpyro_dgp.analysis.program import ProgramFacts
from numpyro_dgp.analysis.sites import Message, Trace, declared_kind, is_likelihood, site_kind, total_log_prob, unwrap
from numpyro_dgp.diagnostics.arviz import Source, opened
from numpyro_dgp.diagnostics.local_sites import site_kinds
from numpyro_dgp.diagnostics.ratios import map_draws
from numpyro_dgp.functions.function_values import ProcessValues
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.likelihoods.outcomes import NoMomentsError, moments
from numpyro_dgp.mcmc.for_mcmc import centred_program
from numpyro_dgp.predict.draws import trace_over_all_rows
from numpyro_dgp.predict.posterior import Posterior

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Convergence", "Identified", "LOG_DENSITY", "convergence", "identified", "sites_of_draws"]

LOG_DENSITY = "log density of the data"


class Identified(NamedTuple):
    """Quantities of every draw.

    Args:
        hyperparameters: by site, unconstrained (S, ...).
        functions: at observed sites (S, N...), by a description.
        log_density: of the data (S,).
    """

    hyperparameters: dict[str, Array]
    functions: dict[str, Array]
    log_density: Array


class _Conditioned(NamedTuple):
    """An exact process at a site of the data, and its values there."""

    values: ProcessValues
    given: Array

    def mean(self, x: Array) -> Array:
        function: Any = self.values.function
        return function.given(self.values.inputs, self.given, self.values.noise)(x).mean

    def mean_at_data(self) -> Array:
        """The mean at its own inputs, given its values with noise there."""
        if self.values.noise is None:
            return self.given
        # E[f | y] = y - s^2 (k(X, X) + s^2 I)^-1 (y - m(X))
        residual = self.values.precision_times(self.given - self.values.loc)
        return self.given - jnp.square(self.values.noise) * residual


class _AtMeans(Messenger):
    """Gives sites their values in a draw, and their means to those without.

    Args:
        fn: the program.
        draw: values by site.
        exact: exact processes with values at the data, by site.
        program: its structure at other inputs, where only sites that all data share have values in the draw; ``None``
            at the data.
        predicted: the plates of the predicted sites.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        draw: Mapping[str, Array],
        exact: Mapping[str, _Conditioned],
        program: ProgramFacts | None = None,
        predicted: tuple[frozenset[str], ...] = (),
    ) -> None:
        self.draw, self.exact, self.program, self.predicted = draw, exact, program, predicted
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or msg["is_observed"] or msg["value"] is not None:
            return
        name, fn = msg["name"], unwrap(msg["fn"])
        if name in self.exact:
            mean = self.exact[name].mean(fn.inputs)  # type: ignore[attr-defined]
            msg["value"] = jnp.broadcast_to(mean, msg["fn"].shape())
        elif name in self.draw and (self.program is None or self.program.is_given(msg, self.predicted)):
            if jnp.shape(self.draw[name]) != msg["fn"].shape():
                raise expected(
                    f"{name!r} to have the shape {jnp.shape(self.draw[name])} of its draws at the inputs test= too",
                    msg["fn"].shape(),
                    "leave test= out",
                )
            msg["value"] = self.draw[name]
        elif site_kind(msg) != "observed" and not msg["fn"].is_discrete:
            loc = _mean(msg["fn"])
            msg["value"] = None if loc is None else jnp.broadcast_to(loc, msg["fn"].shape())


def identified(
    posterior: Posterior, args: tuple[Any, ...], kwargs: dict[str, Any], test: tuple[Any, ...] | None
) -> Identified:
    """What the data identify of all draws.

    Args:
        posterior: a program whose hidden values are sites, and draws of it.
        args: arguments of the program, observations included.
        kwargs: its keyword arguments.
        test: arguments of the program at other inputs, without observations.

    Raises:
        ValueError: draws of other data or of another program; ``test`` that ``Posterior`` cannot predict.
    """
    call = None if test is None else posterior.call(test, {})
    fixed = jax.random.key(0)  # for sites of other rows that have no mean: the same numbers for every draw
    samples = dict(posterior.samples or {})
    total = len(next(iter(samples.values())))

    def one(_: Array, draw: dict[str, Array], arguments: Any, keywords: Any, block: int) -> Identified:
        sites = _run(posterior, draw, fixed, arguments[0], keywords)
        kinds = site_kinds(sites)
        hyperparameters = {
            name: biject_to(site["fn"].support).inv(site["value"]) if not site["fn"].is_discrete else site["value"]
            for name, site in sites.items()
            if name in draw and kinds[name] == "hyperparameter"
        }
        observed = [site for site in sites.values() if site["type"] == "sample" and site["is_observed"]]
        exact = _exact(sites)
        functions = {f"function at {site['name']}": _function(site, exact) for site in observed}
        if call is not None:
            program = posterior.seeded(posterior.model, fixed)
            program = _AtMeans(program, draw, exact, call.program, call.plates)
            there = trace_over_all_rows(program, arguments[1], {})
            names = [n for site in observed if (n := site["name"]) in there and not there[n]["is_observed"]]
            functions |= {f"function at {name}, test": _function(there[name], {}) for name in names}
        density = sum((total_log_prob(site) for site in observed), jnp.zeros(()))
        return Identified(hyperparameters, {n: f for n, f in functions.items() if f is not None}, density)

    return map_draws(one, fixed, total, samples, (args, test), kwargs, 1)


def sites_of_draws(posterior: Posterior, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """A trace of the program at a draw, on shapes only.

    Raises:
        ValueError: draws of other data or of another program.
    """
    found: list[Trace] = []
    arrays, rebuild = split_arguments(args, kwargs)
    draw = {name: jax.ShapeDtypeStruct(jnp.shape(v)[1:], jnp.result_type(v)) for name, v in posterior.samples.items()}  # type: ignore[union-attr]

    def run(key: Array, draw: dict[str, Array], arrays: list[Array]) -> Array:
        again, options = rebuild(arrays)
        with require(ALL_ROWS):
            found.append(_run(posterior, {}, key, again, options))
        return jnp.zeros(())

    jax.eval_shape(run, jax.random.key(0), draw, arrays)
    (sites,) = found
    expect(
        any(site["type"] == "sample" and site["is_observed"] for site in sites.values()),
        "a program that observes data",
        "none",
        "pass the arguments of the run, observations included",
    )
    for name, kind in site_kinds(sites).items():
        shape = jnp.shape(sites[name]["value"])
        expect(
            name in draw or kind not in ("hyperparameter", "inducing", "exact"),
            "draws of every site that all data share",
            f"none of {name!r}",
            "pass all of mcmc.get_samples()",
        )
        if name in draw and draw[name].shape != shape:
            raise expected(f"draws of {name!r} of shape {shape}", draw[name].shape, "pass the arguments of the chains")
    return sites


def _run(posterior: Posterior, draw: Mapping[str, Array], key: Array, args: Any, kwargs: Any) -> Trace:
    """The program at its data with the values of a draw; what a chain does not have (hidden values, under SGHMC) is at
    its mean."""
    program = handlers.substitute(posterior.seeded(posterior.model, key), data=dict(draw))
    return trace_over_all_rows(_AtMeans(program, {}, {}), args, kwargs)


def _exact(sites: Trace) -> dict[str, _Conditioned]:
    """The exact processes of a run by site, each with its values."""
    drawn = {name: site for name, site in sites.items() if site["type"] == "sample"}
    exact = {name: site for name, site in drawn.items() if declared_kind(site["fn"]) == "exact"}
    return {name: _Conditioned(unwrap(site["fn"]), site["value"]) for name, site in exact.items()}  # type: ignore[arg-type]


def _function(site: Message, exact: Mapping[str, _Conditioned]) -> Array | None:
    """The mean under an observed site, of the function where there is one and otherwise of y."""
    fn: Any = unwrap(site["fn"])
    if is_likelihood(fn):
        return fn.f_x.loc  # E[f(h_n) | v, h_n]
    if site["name"] in exact:
        return exact[site["name"]].mean_at_data()
    if isinstance(fn, ProcessValues):
        return site["value"]
    return None if isinstance(fn, dist.Unit) else _mean(site["fn"])


def _mean(fn: dist.Distribution) -> Array | None:
    try:
        return moments(fn)[0]
    except NoMomentsError:
        return None


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
        >>> import jax, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> draws = dgp.Posterior(model, samples={"f": jax.random.normal(jax.random.key(0), (400, 5))})
        >>> found = dgp.diagnostics.convergence(draws, X, y, num_chains=4)
        >>> found.r_hat < 1.05, found.ess > 200, found.values["function at y"].shape  # independent draws
        (True, True, (4, 100, 20))
    """

    table: DataFrame
    values: dict[str, np.ndarray]

    __repr__ = brief

    @property
    def r_hat(self) -> float:
        """The largest R-hat of identified quantities; NaN where one of them never moved."""
        return float(self.table.r_hat[self.table.identified].max(skipna=False))

    @property
    def ess(self) -> float:
        """The smallest bulk effective sample size of identified quantities."""
        return float(self.table.ess_bulk[self.table.identified].min(skipna=False))


def convergence(
    source: Source,
    *args: Any,
    test: tuple[Any, ...] | None = None,
    num_chains: int | None = None,
    superchains: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Convergence:
    r"""R-hat and effective sample sizes of chains, for the quantities that the data identify and for every site.

    Hidden layers can be reflected and their outputs permuted without changing the density of the data. Chains in
    different reflections have large R-hat at the sites of inducing values and hidden values, however long they are, but
    agree about the identified quantities:

    - hyperparameters, the sites that all data share and that belong to no layer, on the unconstrained scale;
    - the function under every observed site: at the data, given the hidden values of the draw; and at the inputs
      ``test``, :math:`E[f(\bar h) \mid v]` with every hidden layer at its mean given its inducing values and the layer
      below. Both have no random numbers except those of the chain; hidden values and latents that a chain does not
      have, as under :class:`SGHMC`, are at their means;
    - the log density of the data given a draw.

    R-hat is the larger of the rank-normalised split R-hat and that of folded draws; bulk and tail effective sizes are
    those of ArviZ.

    Limits. Vectors of hyperparameters of outputs that can be permuted, such as one lengthscale per output of a hidden
    layer, and weights that are multiplied with a layer, change with the layer: their rows are listed as identified,
    although they may disagree for this reason. Deterministic sites of the program are listed as not identified. A small
    R-hat shows that chains agree, not that they have found all modes.

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
            of other data or of another program, groups of different sizes or only one, and errors of ``dgp.Posterior``
            for ``test``.

    Example:
        >>> import jax, numpyro, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> kernel = numpyro.infer.NUTS(dgp.for_mcmc(model, collapse=False))
        >>> mcmc = numpyro.infer.MCMC(kernel, num_warmup=50, num_samples=50, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), X, y)
        >>> dgp.diagnostics.convergence(mcmc, X, y, test=(X[:3],)).table[["kind", "identified", "numbers"]]
                                        kind  identified  numbers
        function at y               function        True       20
        function at y, test         function        True        3
        log density of the data  log density        True        1
        f                           inducing       False        5

    Source: Vehtari et al. (2021); Margossian et al. (2024) for nested R-hat.
    """
    posterior, chains = _chains(source, num_chains)
    groups = _groups(superchains, chains)
    expect(
        test is None or isinstance(test, tuple), "test=(X_test,), arguments without observations", type(test).__name__
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
    origin = opened(source)
    posterior = origin.posterior
    if posterior.samples is None:
        raise expected(
            "chains, an MCMC object or dgp.Posterior(model, samples=draws)",
            "a fit with a guide, whose draws are independent",
            "dgp.diagnostics.khat measures their reliability",
        )
    chains = origin.num_chains if origin.mcmc is not None or num_chains is None else num_chains
    expect(num_chains in (None, chains), f"num_chains of the MCMC object, {chains}", num_chains)
    total = len(next(iter(posterior.samples.values()), ()))
    if not isinstance(chains, int) or chains < 1 or total % chains or total < _LEAST * chains:
        raise expected(
            f"chains of one length, {_LEAST} draws at least", f"{total} draws in all and num_chains={chains!r}"
        )
    return Posterior(centred_program(origin.program), params=posterior.params, samples=posterior.samples), chains


def _groups(superchains: int | Sequence[int] | None, chains: int) -> np.ndarray | None:
    """The number of the group of every chain."""
    if superchains is None:
        return None
    if isinstance(superchains, int) and superchains > 0 and chains % superchains == 0:
        ids = np.repeat(np.arange(superchains), chains // superchains)
    else:
        ids = np.unique(np.asarray(superchains), return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(ids)
    expect(
        not isinstance(superchains, bool) and len(ids) == chains and len(sizes) >= 2 and len(set(sizes)) <= 1,
        f"superchains of one size, two at least, for {chains} chains",
        repr(superchains),
        "their number, or the group of every chain, [0, 0, 1, 1]",
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
