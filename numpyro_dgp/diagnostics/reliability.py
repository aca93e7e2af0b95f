r"""Reliability of a posterior: Pareto's k of importance weights, and leave-one-out scores.

Importance weights :math:`\omega_s = p(\phi_s, y) / q(\phi_s)` of draws :math:`\phi_s \sim q` correct q to the
posterior. Their largest values follow a generalised Pareto distribution, whose shape :math:`\hat k` determines how many
moments they have. Below 0.5 their variance is finite; up to 0.7 smoothed weights are usable; above, q misses regions
with posterior mass, and neither q nor its correction is reliable.

Source: Vehtari et al. (2024); Yao et al. (2018).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from numpyro_dgp._checks import expect, expect_kind, expected, require_count, require_key
from numpyro_dgp._typing import Array
from numpyro_dgp.diagnostics.pareto import KHAT, LEAST, LOG_WEIGHT, R_EFF, pareto_shape, smoothed
from numpyro_dgp.diagnostics.ratios import draw
from numpyro_dgp.predict.posterior import Posterior

if TYPE_CHECKING:
    from xarray import DataTree

__all__ = ["khat", "local_khat", "loo", "pointwise"]

# Classes of ArviZ and xarray, whose annotations are less precise than their documentation.
ELPDData: TypeAlias = Any
DataArray: TypeAlias = Any


def khat(tree: DataTree) -> float:
    r"""Pareto's :math:`\hat k` of a fit, for the sites that all data share.

    .. math:: \omega_s = \frac{p(\phi_s)}{q(\phi_s)} \prod_n \frac1K \sum_k
                    \frac{p(y_n, w_n^{(k)} \mid \phi_s)}{q(w_n^{(k)} \mid \phi_s)}

    :math:`\phi` are hyperparameters and inducing values. Latents and hidden values of single data, w, are integrated by
    K draws, ``local_samples`` of ``to_arviz``: the weights of all data multiply, so that K has to grow with their
    number before :math:`\hat k` is that of :math:`\phi` alone. With an autoguide over all sites together,
    :math:`\hat k` is that of all sites, with K = 1.

    Limits. It compares q with the program's posterior as a whole, and needs q to cover every direction: with hundreds
    of inducing values, or hyperparameters at a point (``Delta``, whose density is not counted), it is often above 0.7
    although predictions are good, or below although the hyperparameters are uncertain. A low value is strong evidence
    for a fit; after a high one look at :func:`loo`, calibration, and NUTS. A mode that q never visits is not detected.

    Args:
        tree: from ``to_arviz`` of a fit.

    Returns:
        :math:`\hat k`, a number.

    Raises:
        ValueError: a tree of chains, which have no weights.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> (model, X, y), key = dgp.testing.toy(), jax.random.key(0)
        >>> guide = dgp.guides.InducingPoint(model)
        >>> svi = numpyro.infer.SVI(model, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
        >>> params = svi.run(key, 2, X, y, progress_bar=False).params  # the optimum after one step
        >>> tree = dgp.diagnostics.to_arviz(dgp.Posterior(model, guide, params), key, X, y, num_samples=500)
        >>> bool(dgp.diagnostics.khat(tree) < 0.7)  # q is the exact posterior
        True

    Source: Yao et al. (2018), section 3.1.
    """
    stats = getattr(tree, "children", {}).get("sample_stats")
    if stats is not None and KHAT in stats.attrs:  # of the draws before they were resampled
        return float(stats.attrs[KHAT])
    if stats is None or "log_q" not in stats:
        raise expected(
            "the tree of a fit",
            "one without densities of a guide",
            "chains have no importance weights; read r-hat and divergences there (arviz_stats.summary)",
        )
    return float(pareto_shape(np.ravel((stats["lp"] - stats["log_q"]).to_numpy())))


def local_khat(
    posterior: Posterior,
    key: Array,
    *args: Any,
    num_samples: int = 1000,
    num_globals: int = 1,
    **kwargs: Any,
) -> dict[str, np.ndarray]:
    r"""Pareto's :math:`\hat k` of each datum, for its latents and hidden values w given all shared sites.

    .. math:: \omega_{kn} = \frac{p(y_n, w_n^{(k)} \mid \phi)}{q(w_n^{(k)} \mid \phi)}, \qquad
              w_n^{(k)} \sim q(w_n \mid \phi), \quad \phi \sim q(\phi)

    Data with :math:`\hat k` above 0.7 have latents whose posterior their q does not cover: give the guide more freedom
    (``Normal()`` instead of ``Amortised()``), or more importance samples. With ``ImportanceWeighted`` it shows whether
    the proposals work. For hidden layers distributed as in the model the proposal is that distribution, and
    :math:`\hat k` shows whether it is good enough without regard to y. It does not depend on :math:`\phi`.

    Args:
        posterior: a fit.
        key: PRNG key.
        *args: arguments of the program, observations included.
        num_samples: K, at least 25.
        num_globals: draws of :math:`\phi`.
        **kwargs: keyword arguments of the program.

    Returns:
        ``{observed site: k-hat (num_globals, N...)}``; minus infinity for data without latents or hidden values.

    Raises:
        ValueError: draws of MCMC, a guide of another program, or too few samples.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> (model, X, y), key = dgp.testing.toy(2), jax.random.key(0)
        >>> guide = dgp.guides.InducingPoint(model)
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.01), dgp.ELBO())
        >>> posterior = dgp.Posterior(model, guide, svi.get_params(svi.init(key, X, y)))
        >>> dgp.diagnostics.local_khat(posterior, key, X, y, num_samples=50, num_globals=3)["y"].shape  # draws, rows
        (3, 20)
    """
    expect_kind(posterior, Posterior, "dgp.Posterior(model, guide, params)")
    expect(posterior.guide is not None, "a fit with a guide", "draws of MCMC", "they have no importance weights")
    require_key(key)
    require_count("num_globals", num_globals, "the default")
    if not isinstance(num_samples, int) or num_samples < LEAST:
        raise expected(f"num_samples of at least {LEAST}", repr(num_samples), "1000 are usual")
    draws = draw(posterior, key, num_globals, num_samples, args, kwargs, lambda log_weights: log_weights)
    return {
        name: np.full((len(terms), *terms.shape[2:]), -np.inf)
        if terms.shape[1] == 1
        else pareto_shape(np.moveaxis(np.asarray(terms), 1, 0))
        for name, terms in jax.device_get(draws.joint).items()
    }


def loo(tree: DataTree, *, observations: int | None = None, site: str | None = None, seed: int = 0) -> ELPDData:
    r"""Leave-one-out log predictive density by Pareto-smoothed importance sampling.

    .. math:: \sum_n \log p(y_n \mid y_{-n}) \approx \sum_n \log
              \frac{\sum_s \omega_{sn}\, p(y_n \mid \phi_s)}{\sum_s \omega_{sn}}, \qquad
              \omega_{sn} = \frac{p(\phi_s, y)}{q(\phi_s)} \frac{1}{\tilde p(y_n \mid \phi_s)}

    with the largest weights smoothed; the first factor is one for chains. :math:`\tilde p` is the density of y that the
    posterior was fitted to (``log_likelihood_target``) and p the normalised one: a datum is taken out of the posterior
    as it went in. The weights correct the guide too, as far as they can. Where ``to_arviz`` resampled the draws, the
    first factor is :math:`\prod_n \tilde p(y_n \mid \phi_s) / p(y_n \mid \phi_s)`.

    ``arviz_stats.loo`` takes a datum out by the normalised density, of the posterior with these densities. Both scores
    are the same where inducing values determine the functions. Trees in which its draws would not be from that
    posterior have no group ``log_likelihood``.

    Limits. The result carries ``pareto_k`` for every datum. Where it is above ``good_k`` the score of that datum is
    unreliable, mostly because ``khat`` of the whole fit is; then compare on held-out data. Hyperparameters at a point
    (``Delta``) stay as they are when a datum is left out, which flatters the program.

    Args:
        tree: from ``to_arviz``.
        observations: that many data drawn at random instead of all, for large N; the rest enters by
            :math:`\log \frac1S \sum_s p(y_n \mid \phi_s)` (a difference estimator).
        site: the observed site, where there are several.
        seed: for the choice of ``observations``.

    Returns:
        ArviZ's ``ELPDData``, for ``arviz_stats.compare`` and ``arviz_plots.plot_khat``.

    Raises:
        ValueError: a tree that was not made by ``to_arviz`` or has few draws, several observed sites and no ``site``,
            or more ``observations`` than data.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> (model, X, y), key = dgp.testing.toy(), jax.random.key(0)
        >>> guide = dgp.guides.InducingPoint(model)
        >>> svi = numpyro.infer.SVI(model, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
        >>> params = svi.run(key, 2, X, y, progress_bar=False).params  # the optimum after one step
        >>> tree = dgp.diagnostics.to_arviz(dgp.Posterior(model, guide, params), key, X, y, num_samples=500)
        >>> score = dgp.diagnostics.loo(tree)
        >>> bool(score.elpd > 0), bool((score.pareto_k < score.good_k).all())
        (True, True)

    Source: Vehtari et al. (2017); Magnusson et al. (2019), equations 6 and 7 (guides) and 10 (subsampling).
    """
    import arviz_stats

    expect(
        isinstance(seed, int) and seed >= 0, "seed to be an integer, zero or more", type(seed).__name__, "try seed=0"
    )
    tree, name = pointwise(tree, site)
    likelihood: DataArray = tree["log_likelihood"][name]
    target: DataArray = tree["log_likelihood_target"][name]
    expect(
        likelihood.ndim != 2 and (observations is None or likelihood.ndim == 3),
        "data in a plate",
        f"dimensions {likelihood.dims}",
        "draw y inside numpyro.plate, given the values of the functions",
    )
    draws = likelihood.sizes["chain"] * likelihood.sizes["draw"]
    expect(draws >= LEAST, f"at least {LEAST} draws", draws, "to_arviz(..., num_samples=1000) is usual")
    if observations is not None and not (isinstance(observations, int) and 0 < observations <= likelihood.shape[-1]):
        raise expected(f"at most as many observations as data, {likelihood.shape[-1]}", repr(observations))
    base, r_eff = _log_weights(tree), float(tree["log_likelihood"].attrs.get(R_EFF, 1.0))
    with warnings.catch_warnings():  # the Pareto shapes are in the result
        warnings.filterwarnings("ignore", message="Estimated shape parameter")
        if observations is None:
            ratios = (base - target).stack(sample=["chain", "draw"]).transpose("sample", *target.dims[2:])
            weights, k = smoothed(ratios.to_numpy(), r_eff)
            log_weights, shapes = ratios.copy(data=weights).unstack("sample"), likelihood[0, 0].copy(data=k)
            return arviz_stats.loo(
                tree, pointwise=True, var_name=name, reff=r_eff, log_weights=log_weights, pareto_k=shapes
            )
        chosen = np.sort(np.random.default_rng(seed).choice(likelihood.shape[-1], observations, replace=False))
        # ArviZ divides p / q by p(y_n), so that this leaves 1 / p~(y_n).
        log_p = (base + likelihood - target).isel({likelihood.dims[-1]: chosen})
        return arviz_stats.loo_subsample(tree, chosen, True, name, r_eff, log_p=log_p, log_q=0 * base)


def _log_weights(tree: DataTree) -> DataArray:
    """Log of the density that the posterior was fitted to over the one that the draws are of."""
    stats: Any = tree.children.get("sample_stats", {})
    if LOG_WEIGHT in stats:
        return stats[LOG_WEIGHT]
    first = next(iter(tree["log_likelihood_target"].data_vars.values()))
    return stats["lp"] - stats["log_q"] if "log_q" in stats else 0 * first.sum(first.dims[2:])


def pointwise(tree: DataTree, site: str | None) -> tuple[DataTree, str]:
    """The tree with the densities that are to be weighed where ArviZ looks for them, and the observed site."""
    groups = sorted(getattr(tree, "children", ()))
    if "log_likelihood_target" not in groups:
        got = f"one with groups {groups}" if groups else type(tree).__name__
        raise expected("a tree from dgp.diagnostics.to_arviz", got)
    if "log_likelihood_uncorrected" in groups:
        tree = tree.copy()
        tree["log_likelihood"] = tree["log_likelihood_uncorrected"]
    names = [str(name) for name in tree["log_likelihood"].data_vars]
    expect(
        (site is not None or len(names) <= 1) and (site is None or site in names), f"site= one of {names}", repr(site)
    )
    return tree, site or names[0]
