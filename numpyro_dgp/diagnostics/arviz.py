"""Fits and chains in the format of ArviZ.

Masked observations are NaN in the data of a tree and have no log density.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_dgp._checks import expected, require_count, require_key
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.analysis.sites import Message, is_likelihood, masks_around, unwrap
from numpyro_dgp.diagnostics.local_sites import LocalSites, local_sites
from numpyro_dgp.diagnostics.pareto import KHAT, LEAST, LOG_WEIGHT, R_EFF, smoothed
from numpyro_dgp.diagnostics.ratios import Draws, draw, prior, summed_over_data
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.mcmc.for_mcmc import sampled_program
from numpyro_dgp.predict.posterior import Posterior

if TYPE_CHECKING:
    from xarray import DataTree

__all__ = ["Opened", "counted", "opened", "to_arviz", "with_gaps", "without_empty_rows"]


def counted(site: Message) -> Array | None:
    """The mask of an observed site, in the shape of its value; ``None`` where all entries are observed."""
    shape, inner = jnp.shape(site["value"]), cast(Any, unwrap(site["fn"]))
    masks = [jnp.reshape(fn._mask, jnp.shape(fn._mask) + (1,) * fn.event_dim) for fn in masks_around(site["fn"])]
    if is_likelihood(inner) and inner.observed is not None:
        masks.append(inner.observed)
    total = jnp.ones(shape, bool)
    for mask in masks:
        total = total & mask
    return jnp.broadcast_to(total, shape) if masks else None


def with_gaps(value: Array, mask: Array) -> Array:
    """Observations with NaN where they are masked; labels and counts are unchanged."""
    floating = jnp.issubdtype(jnp.result_type(value), jnp.floating)
    return jnp.where(mask, value, jnp.nan) if floating else value


def without_empty_rows(group: Any, name: str, dim: str, mask: Array) -> Any:
    """A dataset of log densities without the rows of a site that are not observed.

    Args:
        group: the dataset.
        name: of the site.
        dim: of its rows, the only plate that it has.
        mask: which of its entries count (N, ...).
    """
    rows = np.asarray(mask).reshape(len(mask), -1).any(1)
    return group if name not in group or rows.all() else group.isel({dim: np.flatnonzero(rows)})


Source: TypeAlias = Posterior | MCMC
# Log weights that are closer than this, in nats, are equal.
_SAME = 0.1
# Effective draws below which draws are not resampled.
_ENOUGH = 100


def to_arviz(
    source: Source | Mapping[str, Source],
    key: Array,
    *args: Any,
    num_samples: int = 500,
    local_samples: int = 20,
    losses: ArrayLike | Mapping[str, ArrayLike] | None = None,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> DataTree | dict[str, DataTree]:
    r"""Convert a fit, or chains of MCMC, to an ArviZ ``DataTree``.

    Groups:

    - ``posterior``: hyperparameters, inducing values, latents and hidden layers. Draws from a guide are one chain.
      Where a guide weighs its latents, one of their K draws is taken with probability proportional to its weight.
    - ``log_likelihood``: the normalised :math:`\log p(y_n \mid \phi_s)` of each datum, given a draw of the sites that
      all data share. The latents and hidden values of the datum are integrated by K importance samples from the guide
      (under MCMC from the model), :math:`\log \frac1K \sum_k p(y_n, w_n^{(k)} \mid \phi_s) / q(w_n^{(k)})`: leaving
      out a datum leaves out its latents too. The estimate is low by O(1/K). Of several observed sites in the same
      plates each has a variable, its density given the others of the datum, with which it shares the latents.
      **Resampling.** Stock calls of ArviZ take draws for posterior samples, and this group for the density of the data
      under them. So the draws are resampled, in every group, with the importance weights :math:`p(\phi_s)
      \prod_n p(y_n \mid \phi_s) / q(\phi_s)`, Pareto-smoothed; under chains, q is the density that was sampled (next
      but one). Weights that differ by less than a tenth of a nat leave the draws as they are. Copies of a draw are
      neighbours, so that ``arviz_stats.ess`` counts them once. Attributes of the group: ``khat`` of the weights,
      ``ess``, the effective number of draws, and its share ``reff``, for ``arviz_stats.loo(tree, reff=...)``, which
      takes one chain for independent draws.
    - ``log_likelihood_uncorrected``: its name where the weights are not usable, with Pareto k above
      :math:`\min(1 - 1 / \log_{10} S, 0.7)` or less than 100 effective draws. Draws stay as they are, its attribute
      ``reason`` says why, and ``arviz_stats.loo`` raises an error. ``dgp.diagnostics.loo`` takes both kinds of trees.
    - ``log_likelihood_target``: the same with the ``log_prob`` of the observed site, which the posterior was fitted
      to. It differs where a ``dgp.Likelihood`` has variance left given its inducing values.
    - ``log_prior``: log densities of the hyperparameters, a variable for every site that all data share and that
      belongs to no layer, in the coordinates of the site; for ``arviz_stats.psense_summary``. Absent where draws of a
      guide are not corrected.
    - ``posterior_predictive``: y drawn again, with new latents, as for new data.
    - ``prior``, ``prior_predictive``: the program before it saw data.
    - ``observed_data``, and ``constant_data``: the other arrays among the arguments of the program. Missing and masked
      entries are NaN, and rows in which nothing is observed are no rows of the groups of log densities.
    - ``sample_stats``: of chains, divergences and the other fields of the sampler, of which ``energy`` stays in the
      order of the chain; of a guide, ``lp``, the log joint density of data and shared sites with which it was fitted,
      and ``log_q``, their log density under the guide. Of resampled draws also ``log_weight``, from their density to
      the one of the fit.
    - ``fit``: the trace of the bound, and the ``numpyro.param`` sites of the program.

    Plates name the dimensions of data. Beside them ``<site>_output``, ``<site>_inducing`` and ``<site>_row`` are the
    outputs of a layer, its inducing values, and the inputs of an exact process.

    Args:
        source: a fit, as ``dgp.Posterior``; or the MCMC object, run on ``dgp.for_mcmc(model)``; or several by name.
        key: PRNG key.
        *args: arguments of the program, observations included.
        num_samples: S, draws from a guide and from the prior; chains are taken whole.
        local_samples: the number of draws, K.
        losses: of the fit, ``result.losses``; by name for several.
        coords: values of dimensions, ``{"data": names}``.
        dims: names of dimensions, ``{site: [...]}``, instead of those above.
        **kwargs: keyword arguments of the program.

    Returns:
        A tree, or a dict of them, as ``arviz.plot_forest`` and ``arviz.compare`` take it.

    Raises:
        ValueError: numbers of draws that are not positive integers, NaN data, a program that subsamples or observes
            nothing, observed sites in plates that overlap, a guide or draws of another program, or names and losses
            that fit nothing.

    Warns:
        UserWarning: chains in which hidden layers are separate sites; ``dgp.for_mcmc`` was forgotten. An ``arviz``
            before 1.0, which cannot read trees.

    Example:
        >>> import jax, optax
        >>> from numpyro.infer import SVI
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model)
        >>> result = SVI(model, guide, optax.adam(0.05), dgp.ELBO()).run(
        ...     jax.random.key(0), 300, X, y, progress_bar=False)
        >>> posterior = dgp.Posterior(model, guide, result.params)
        >>> tree = dgp.diagnostics.to_arviz(posterior, jax.random.key(1), X, y)
        >>> dict(tree.posterior.sizes)
        {'chain': 1, 'draw': 500, 'f_inducing': 5}
        >>> dict(tree.log_likelihood.sizes), tree.log_likelihood.attrs["khat"] < 0.7
        ({'chain': 1, 'draw': 500, 'data': 20}, True)

    Source: Vehtari et al. (2017) for log_likelihood; Merkle et al. (2019) for integrating latents there; Yao et al.
    (2018) for draws from a guide; Vehtari et al. (2024) for their weights; Kallioinen et al. (2024) for log_prior.
    """
    require_count("num_samples", num_samples, "the default")
    require_count("local_samples", local_samples, "the default")
    require_key(key)
    if isinstance(source, Mapping):
        if not source or not isinstance(losses, Mapping | None) or set(losses or {}) - set(source):
            raise expected(
                "several fits by name and losses={name: losses} of some",
                f"{sorted(source)} and {type(losses).__name__ if not isinstance(losses, Mapping) else sorted(losses)}",
            )
        of = losses or {}
        options: Any = {"num_samples": num_samples, "local_samples": local_samples, "coords": coords, "dims": dims}
        return {n: to_arviz(s, key, *args, losses=of.get(n), **options, **kwargs) for n, s in source.items()}  # type: ignore[misc]
    origin = opened(source)
    posterior = origin.posterior
    _warn_of_old_arviz()
    if losses is not None and (isinstance(losses, Mapping | str) or np.ndim(losses) != 1):
        raise expected("losses of shape (steps,)", type(losses).__name__, "pass losses=result.losses")
    known = local_sites(posterior, args, kwargs)
    _require_names(known, coords or {}, dims or {})
    if origin.mcmc is not None and known.centred:
        warnings.warn(
            f"to_arviz: expected chains of dgp.for_mcmc(model), got hidden layers {known.centred} as they are: "
            "such chains hardly move; look at their r-hat (arviz_stats.summary), or run "
            "MCMC(NUTS(dgp.for_mcmc(model)))",
            stacklevel=2,
        )
    draw_key, prior_key, trace_key = jax.random.split(key, 3)
    draws = draw(posterior, draw_key, num_samples, local_samples, args, kwargs)
    correction = _correction(origin, known, draws, jax.random.fold_in(draw_key, 1))
    before = prior(posterior, prior_key, num_samples, args, kwargs)
    observed, params, masks = _fixed(posterior, known, trace_key, args, kwargs)
    constant, names = _constants(posterior, known, observed, args, kwargs)
    observed |= {name: with_gaps(observed[name], mask) for name, mask in masks.items()}
    found = _Found(known, draws, correction, before, observed, constant, params, losses)
    tree = _tree(origin, found, coords, names | (dims or {}))  # type: ignore[operator]
    for name in dict.fromkeys(known.first.values()):
        beside = [y for y, first in known.first.items() if first == name]
        if len(known.frames[name]) == 1 and masks.keys() >= set(beside):
            mask = np.stack([np.reshape(masks[y], (len(masks[y]), -1)).any(1) for y in beside], 1)
            (row, *_), densities = (dims or {}).get(name, known.dims[name]), [n for n in tree if "log_lik" in n]
            for group in densities:
                tree[group] = tree[group].map_over_datasets(without_empty_rows, name, row, mask)
    return tree


def _warn_of_old_arviz() -> None:
    """Warn if the installed ArviZ cannot read the tree."""
    with suppress(metadata.PackageNotFoundError):
        found = metadata.version("arviz")
        if found.startswith("0."):
            warnings.warn(
                f"to_arviz: expected ArviZ 1 or its parts to read the tree, got arviz {found}, which cannot: "
                'arviz_plots.plot_trace does; on Python 3.11 pip install arviz-plots "matplotlib<3.11"',
                stacklevel=3,
            )


def _require_names(known: LocalSites, coords: Mapping[str, Any], dims: Mapping[str, Any]) -> None:
    """Raise for names of dimensions that nothing in the tree has, and for too many of them."""
    for name, given in dims.items():
        if name in known.dims and len(given) > len(known.dims[name]):
            raise expected(
                f"at most {len(known.dims[name])} names in dims[{name!r}], as in {known.dims[name]}",
                list(given),
                "chain and draw are named already",
            )
    sizes = {frame.name: frame.size for frames in known.frames.values() for frame in frames}
    found = {"chain", "draw", *(dim for of in (*known.dims.values(), *dims.values()) for dim in of)}
    unknown = sorted(set(coords) - found)
    if unknown:
        raise expected(f"coords for some of the dimensions {sorted(found)}", f"some for {unknown}")
    for name, values in coords.items():
        if len(values) != sizes.get(name, len(values)):
            raise expected(f"coords of {name!r} for each of its {sizes[name]} rows", f"{len(values)} values")


class Opened(NamedTuple):
    """A source of draws.

    Args:
        program: the program as it was given.
        posterior: the source itself, or the draws of all chains, with the program that the draws are of.
        mcmc: the chains, if it is these.
    """

    program: Callable[..., Any]
    posterior: Posterior
    mcmc: MCMC | None = None

    @property
    def num_chains(self) -> int:
        """How many chains there are; draws of a guide, and of a posterior, count as one."""
        return 1 if self.mcmc is None else self.mcmc.num_chains


def opened(source: Source) -> Opened:
    """A posterior, or chains that have run.

    Raises:
        ValueError: something else.
    """
    if isinstance(source, Posterior):
        return Opened(source.model, dataclasses.replace(source, model=sampled_program(source.model)))
    if not isinstance(source, MCMC) or source.last_state is None or source.sampler.model is None:
        raise expected(
            "dgp.Posterior(model, guide, result.params) or an MCMC object that has run",
            "one that has not" if isinstance(source, MCMC) else type(source).__name__,
            "call mcmc.run first, on a program",
        )
    model = source.sampler.model
    return Opened(model, Posterior(sampled_program(model), samples=source.get_samples()), source)


class _Found(NamedTuple):
    """The parts of a tree.

    Args:
        known: sites of single data.
        draws: of the posterior.
        correction: of these draws.
        before: latent sites and data drawn from the prior.
        observed: observed values.
        constant: other data.
        params: values of ``numpyro.param`` sites of the program.
        losses: of the fit.
    """

    known: LocalSites
    draws: Draws
    correction: _Correction
    before: tuple[dict[str, Array], dict[str, Array]]
    observed: dict[str, Array]
    constant: dict[str, Array]
    params: dict[str, Array]
    losses: ArrayLike | None


def _tree(origin: Opened, found: _Found, coords: Mapping[str, Any] | None, dims: dict[str, Any]) -> DataTree:
    import arviz_base
    from xarray import DataTree

    known, draws, correction, before, observed, constant, params, losses = found
    chosen, attributes = correction.chosen, correction.attributes
    draws = draws if chosen is None else jax.tree.map(lambda values: values[chosen], draws)

    def by_chain(values: Mapping[str, Array], chains: int = origin.num_chains) -> dict[str, np.ndarray]:
        return {n: np.asarray(v).reshape(chains, -1, *v.shape[1:]) for n, v in values.items()}

    of_guide = origin.posterior.guide is not None
    corrected = "reason" not in attributes
    log_likelihood = "log_likelihood" if corrected else "log_likelihood_uncorrected"
    groups: dict[str, Any] = {
        "posterior": by_chain(draws.values),
        log_likelihood: by_chain(draws.predictive),
        "log_likelihood_target": by_chain(draws.target),
        "log_prior": by_chain(draws.log_prior) if corrected or not of_guide else {},
        "posterior_predictive": by_chain(draws.replicated),
        "prior": by_chain(before[0], 1),
        "prior_predictive": by_chain(before[1], 1),
        "observed_data": {name: np.asarray(value) for name, value in observed.items()},
        "constant_data": {name: np.asarray(value) for name, value in constant.items()},
    }
    stats: dict[str, Array] = {}
    if of_guide:
        stats = {"lp": draws.log_p + summed_over_data(known, draws.joint), "log_q": draws.log_q}
    if chosen is not None:
        stats[LOG_WEIGHT] = summed_over_data(known, draws.joint) - summed_over_data(known, draws.normalised)
    groups["sample_stats"] = by_chain(stats)
    names = {name: list(of) for name, of in (known.dims | dims).items() if of}
    tree = arviz_base.from_dict(
        {name: group for name, group in groups.items() if group},
        sample_dims=["chain", "draw"],
        coords=coords,
        dims=names,
    )
    tree[log_likelihood].attrs.update(attributes)
    if of_guide and chosen is not None:
        tree["sample_stats"].attrs[KHAT] = correction.khat
    if origin.mcmc is not None:
        sampler = arviz_base.from_numpyro(origin.mcmc)["sample_stats"].to_dataset()
        for name, values in sampler.items():
            if chosen is not None and name != "energy":  # of which ArviZ takes differences between steps of the chain
                flat = values.to_numpy().reshape(-1, *values.shape[2:])
                sampler[name] = values.dims, flat[chosen].reshape(values.shape)
        tree["sample_stats"] = DataTree(sampler.assign(tree["sample_stats"].to_dataset() if chosen is not None else {}))
    trace = {} if losses is None else {"elbo": -np.asarray(losses)}
    of_fit = trace | {name: np.asarray(value) for name, value in params.items()}
    if of_fit:
        fit = arviz_base.dict_to_dataset(of_fit, sample_dims=[], dims={"elbo": ["step"]} if trace else None)
        tree["fit"] = DataTree(fit)
    return tree


class _Correction(NamedTuple):
    """From the draws of a source to draws of the prior times the normalised densities of the data.

    Args:
        chosen: the numbers of the draws to take, in order (S,); ``None`` where all stay.
        khat: of a guide, against the density that it was fitted to.
        attributes: of the group of log likelihoods: Pareto's k of the weights, the effective number of draws and its
            share; a reason where the draws cannot be corrected.
    """

    chosen: np.ndarray | None
    khat: float
    attributes: dict[str, Any]


def _correction(origin: Opened, known: LocalSites, draws: Draws, key: Array) -> _Correction:
    """Importance weights of draws, for chains prod_n p(y_n | phi) / p~(y_n | phi) and for guides p(phi, y) / q(phi)."""
    of_guide, chains = origin.posterior.guide is not None, origin.num_chains
    fitted, exact = summed_over_data(known, draws.joint), summed_over_data(known, draws.normalised)
    ratio = draws.log_p - draws.log_q if of_guide else -fitted
    log_weights = np.asarray(exact + ratio, float)
    total = len(log_weights)
    if total < LEAST or not np.isfinite(log_weights).all():
        k, r_eff, weights = np.array(np.inf), 1.0, np.ones(len(log_weights))
    else:
        r_eff = 1.0 if of_guide else _relative_size(known, draws, chains)
        weights, k = smoothed(log_weights, r_eff)
        weights = np.exp(weights - weights.max())
    kish = weights.sum() ** 2 / np.square(weights).sum()  # (sum w)^2 / sum w^2
    attributes: dict[str, Any] = {KHAT: float(k), "ess": float(kish * r_eff), R_EFF: float(r_eff)}
    if np.ptp(log_weights) <= _SAME:
        return _Correction(None, np.nan, attributes)
    good = min(1 - 1 / np.log10(total), 0.7) if total > 1 else 0.0
    if k >= good or kish < _ENOUGH:
        source = "a guide" if of_guide else "chains of log_likelihood_target"
        attributes["reason"] = (
            f"draws of {source}, whose importance weights to the posterior that ArviZ takes them for are not usable: "
            f"Pareto k {k:.2f} (below {good:.2f} is needed), {kish:.0f} effective draws ({_ENOUGH}). "
            "Call numpyro_dgp.diagnostics.loo(tree)"
        )
        return _Correction(None, np.nan, attributes)
    # Systematic draws in every chain, in their order: equally spaced levels of the summed weights, one random shift.
    levels = (np.arange(total // chains) + np.asarray(jax.random.uniform(key, (chains, 1)))) / (total // chains)
    summed = np.cumsum(weights.reshape(chains, -1), 1)
    inside = [np.searchsorted(of / of[-1], at) for of, at in zip(summed, levels, strict=True)]
    chosen = np.ravel(np.minimum(inside, total // chains - 1) + np.arange(0, total, total // chains)[:, None])
    attributes[R_EFF] = attributes["ess"] / total
    khat = smoothed(np.asarray(fitted + ratio, float))[1] if of_guide else np.nan
    return _Correction(chosen, float(khat), attributes)


def _relative_size(known: LocalSites, draws: Draws, chains: int) -> float:
    """The effective over the actual number of draws, an average over the values that all data share."""
    from arviz_stats.base import array_stats

    kinds = "hyperparameter", "inducing", "exact"
    shared = [np.asarray(values, float) for name, values in draws.values.items() if known.kinds.get(name) in kinds]
    moving = [values.reshape(chains, -1, values[0].size)[..., np.ptp(values, 0).ravel() != 0] for values in shared]
    flat = np.concatenate([np.zeros((chains, len(draws.log_p) // chains, 0)), *moving], -1)
    if not flat.size:
        return 1.0
    return float(min(1.0, array_stats.ess(np.moveaxis(flat, -1, 0), method="mean").mean() / flat[..., 0].size))


def _fixed(
    posterior: Posterior, known: LocalSites, key: Array, args: Any, kwargs: Any
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """Observed values, values of the program's ``numpyro.param`` sites, and which observed values count, where some do
    not."""
    arrays, rebuild = split_arguments(args, kwargs)

    @jax.jit  # which leaves out all the rest
    def run(arrays: list[Array]) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        again, options = rebuild(arrays)
        sites = handlers.trace(posterior.seeded(posterior.model, key)).get_trace(*again, **options)
        params = {name: site["value"] for name, site in sites.items() if site["type"] == "param"}
        masks = {name: mask for name in known.frames if (mask := counted(sites[name])) is not None}
        return {name: sites[name]["value"] for name in known.frames}, params, masks

    return run(arrays)


def _constants(
    posterior: Posterior, known: LocalSites, observed: dict[str, Array], args: Any, kwargs: Any
) -> tuple[dict[str, Array], dict[str, list[str]]]:
    """Array arguments other than the observations, by the names of the program's parameters, and their dimensions."""
    try:
        given = inspect.signature(posterior.model).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = {}
    flat = {**given, **given.get("kwargs", {}), **{f"arg{i}": value for i, value in enumerate(given.get("args", ()))}}
    constant: dict[str, Any] = {}
    for name, value in flat.items():
        if not isinstance(value, np.ndarray | jax.Array) or not value.ndim or name in ("args", "kwargs"):
            continue
        constant[name] = value
    observations = set()
    for site, y in observed.items():
        equal = [n for n, value in constant.items() if value.shape == y.shape and bool(jnp.array_equal(value, y))]
        if equal:  # of several, that of the site's name, or the last: observations are last
            observations.add(site if site in equal else equal[-1])
    constant = {name: value for name, value in constant.items() if name not in observations}
    every = {(frame.size, frame.name) for frames in known.frames.values() for frame in frames}
    sizes = [size for size, _ in every]
    plates = {size: name for size, name in every if sizes.count(size) == 1}  # of two as long, none is known to be it
    names = {
        name: [plates[len(value)], *(f"{name}_dim_{i}" for i in range(value.ndim - 1))]
        for name, value in constant.items()
        if len(value) in plates
    }
    return constant, names
