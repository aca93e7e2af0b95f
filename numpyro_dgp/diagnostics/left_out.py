"""Leave-one-out scores where importance weights fail: moment matching, and refits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to
from scipy.special import logsumexp

from numpyro_dgp._checks import expect, require_count, require_key
from numpyro_dgp._typing import Array
from numpyro_dgp.diagnostics.arviz import Source, opened
from numpyro_dgp.diagnostics.local_sites import local_sites
from numpyro_dgp.diagnostics.pareto import R_EFF, smoothed
from numpyro_dgp.diagnostics.ratios import drawing, summed_over_data
from numpyro_dgp.diagnostics.reliability import ELPDData, pointwise
from numpyro_dgp.predict.posterior import Posterior

if TYPE_CHECKING:
    from arviz_stats import SamplingWrapper
    from xarray import DataArray, DataTree

__all__ = ["loo_moment_match", "refits"]

# Maps of one datum.
_STEPS = 30


class _Densities(NamedTuple):
    """Log densities at vectors u (S, D) of all sites that the data share, on the unconstrained scale.

    Args:
        drawn: of the draws, log g(u) (S,).
        fitted: of the posterior, log pi(u) (S,), up to a constant.
        target: of the data as they entered it, log p~(y_n | u) (S, N).
        predictive: normalised, log p(y_n | u) (S, N).
    """

    drawn: np.ndarray
    fitted: np.ndarray
    target: np.ndarray
    predictive: np.ndarray


def loo_moment_match(
    score: ELPDData,
    tree: DataTree,
    source: Source,
    key: Array,
    *args: Any,
    local_samples: int = 20,
    site: str | None = None,
    **kwargs: Any,
) -> ELPDData:
    r"""Leave-one-out scores of data with unreliable weights, by draws that are moved to the posterior without them.

    Where a datum decides the posterior, the weights of :func:`loo` have a heavy tail. An affine map T of the vector u
    of all sites that the data share matches mean, scales or covariance of the draws to their weighted ones, and is
    repeated as long as Pareto's :math:`\hat k` falls. Then half of the draws are moved, and all weighed by

    .. math:: \omega = \frac{\pi(u)}{\tilde p(y_i \mid u)} \Bigm/ \Bigl[ g(u) +
              g(T^{-1} u)\, \lvert\det T\rvert^{-1} \Bigr],

    where :math:`\pi` is the posterior, :math:`\tilde p` the density of a datum in it, and g the density of the draws of
    the tree, each with the Jacobian of u. The score is that of :func:`loo`. Latents and hidden values of single data
    are integrated by the same K draws from the model at every u.

    Limits. The map has :math:`D^2` numbers for D numbers in u, so that covariances are matched with more than 2 D draws
    only. A posterior that gets another mode without the datum is not reached: refit it (:func:`refits`).
    ``arviz_stats.loo_moment_match`` has the same for posteriors without :math:`\tilde p`.

    Args:
        score: of :func:`loo`.
        tree: of which.
        source: what the tree was made of, a fit or an MCMC object.
        key: PRNG key.
        *args: arguments of the program, observations included.
        local_samples: the number of draws, K.
        site: the observed site, where there are several.
        **kwargs: keyword arguments of the program.

    Returns:
        A copy of the score, with data whose :math:`\hat k` fell replaced; their ``log_weights`` are NaN.

    Raises:
        ValueError: a score of some of the data only, a tree of a guide whose draws are not corrected or of other data,
            or discrete sites.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> (model, X, y), key = dgp.testing.toy(), jax.random.key(0)
        >>> y = y.at[3].set(0.7)  # an outlier
        >>> guide = dgp.guides.InducingPoint(model)
        >>> svi = numpyro.infer.SVI(model, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
        >>> posterior = dgp.Posterior(model, guide, svi.run(key, 2, X, y, progress_bar=False).params)
        >>> tree = dgp.diagnostics.to_arviz(posterior, key, X, y, num_samples=1000)
        >>> score = dgp.diagnostics.loo(tree)
        >>> better = dgp.diagnostics.loo_moment_match(score, tree, posterior, key, X, y)
        >>> bool(score.pareto_k.max() > score.good_k), bool(better.pareto_k.max() < better.good_k)
        (True, True)

    Source: Paananen et al. (2021), algorithm 1 and section 3.2.
    """
    require_key(key)
    require_count("local_samples", local_samples, "the default")
    tree, name = pointwise(tree, site)
    data = tree["log_likelihood"][name]
    shapes: Any = getattr(score, "pareto_k", None)
    expect(
        shapes is not None and np.shape(shapes) == data.shape[2:] and np.isfinite(shapes).all(),
        "a score of dgp.diagnostics.loo(tree), of all data",
        type(score).__name__ if shapes is None else f"{int(np.isfinite(shapes).sum())} data",
    )
    of_guide = "log_q" in tree.children.get("sample_stats", {})
    reason = data.attrs.get("reason", tree["log_likelihood"].attrs.get("reason"))
    expect(not (of_guide and reason), "draws that are corrected to the posterior", reason)
    u, densities = _densities(tree, name, opened(source).posterior, key, local_samples, args, kwargs)
    r_eff = float(tree["log_likelihood"].attrs.get(R_EFF, 1.0))
    found = copy.deepcopy(score)
    for n in np.flatnonzero(np.ravel(shapes) > score.good_k):
        elpd, shape = _matched(u, densities, int(n), r_eff)
        at = np.unravel_index(n, np.shape(shapes))
        if shape < shapes.to_numpy()[at]:
            found.elpd_i.values[at], found.pareto_k.values[at] = elpd, shape
            found.log_weights.values[at] = np.nan
    moved = found.elpd_i.to_numpy() - score.elpd_i.to_numpy()
    found.elpd, found.p = score.elpd + moved.sum(), score.p - moved.sum()
    found.se = (found.n_data_points * np.var(found.elpd_i.to_numpy())) ** 0.5
    found.warning = bool((found.pareto_k > found.good_k).any())
    return found


def _matched(u: np.ndarray, densities: Any, n: int, r_eff: float) -> tuple[float, float]:
    """The score of a datum and Pareto's k, by draws u (S, D) whose densities are a function of such."""

    def weighed(at: _Densities, drawn: np.ndarray) -> tuple[np.ndarray, float]:
        # pi(u) / p~(y_n | u) / g; draws outside of the support have weight zero
        ratio = np.nan_to_num(at.fitted - at.target[:, n] - drawn, nan=-np.inf)
        weights, shape = smoothed(ratio, r_eff)
        return weights, float(shape)

    size = u.shape[1]
    start = densities(u)
    A, b = np.eye(size), np.zeros(size)  # T u = A u + b
    moved, (weights, shape) = u, weighed(start, start.drawn)
    for _ in range(_STEPS):
        for kind in ("mean", "scales", "covariance")[: 3 if len(u) > 2 * size else 2]:
            step, shift = _map_to_moments(moved, np.exp(weights), kind)
            trial = moved @ step.T + shift
            at = densities(trial)
            new, k = weighed(at, start.drawn)  # up to |det T|, one number
            if k < shape:
                moved, weights, shape, A, b = trial, new, k, step @ A, step @ b + shift
                break
        else:
            break
    half = np.arange(len(u)) < len(u) // 2
    both = np.where(half[:, None], moved, u)
    at, back = densities(both), densities(np.linalg.solve(A, (both - b).T).T)
    mixture = np.logaddexp(at.drawn, back.drawn - np.linalg.slogdet(A)[1])  # g(u) + g(T^-1 u) / |det T|
    weights, shape = weighed(at, mixture)
    return float(logsumexp(weights + at.predictive[:, n])), shape


def _map_to_moments(u: np.ndarray, weights: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """A and b of the map A u + b that gives draws (S, D) the moments that they have with weights (S,)."""
    mean, weighted = u.mean(0), weights @ u
    root = target = np.eye(u.shape[1])
    if kind == "scales":
        root, target = np.diag(u.std(0)), np.diag(np.sqrt(weights @ np.square(u - weighted)))
    if kind == "covariance":
        covariance = (u - weighted).T @ ((u - weighted) * weights[:, None])
        with suppress(np.linalg.LinAlgError):  # of too few effective draws: scales only
            root, target = np.linalg.cholesky(np.cov(u.T, bias=True)), np.linalg.cholesky(covariance)
    A = target @ np.linalg.inv(root)
    return A, weighted - A @ mean


def _densities(
    tree: DataTree,
    name: str,
    posterior: Posterior,
    key: Array,
    local_samples: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[np.ndarray, Callable[[np.ndarray], _Densities]]:
    """The draws of a tree as vectors (S, D), and their densities."""
    draws: dict[str, Any] = {
        str(n): v.to_numpy().reshape(-1, *v.shape[2:]) for n, v in tree["posterior"].data_vars.items()
    }
    program = Posterior(posterior.model, params=posterior.params, samples=draws)
    known = local_sites(program, args, kwargs)
    plates, found = tuple(frame.size for frame in known.frames[name]), tree["log_likelihood"][name].shape[2:]
    expect(found == plates, f"the data of the tree, {found}", plates, "leave rows without observations out of the data")
    first = {n: v[0] for n, v in draws.items()} | dict(posterior.params or {})
    sites = handlers.trace(handlers.substitute(handlers.seed(posterior.model, key), data=first)).get_trace(
        *args, **kwargs
    )
    kinds = "hyperparameter", "inducing", "exact"
    shared = [n for n, kind in known.kinds.items() if kind in kinds and sites[n]["type"] == "sample"]
    discrete = [n for n in shared if sites[n]["fn"].is_discrete]
    expect(shared and not discrete, "sites that all data share, continuous ones", discrete or "none")
    transforms = {n: biject_to(sites[n]["fn"].support) for n in shared}
    free = {n: np.asarray(transforms[n].inv(jnp.asarray(draws[n]))) for n in shared}
    size = len(free[shared[0]])
    keys = jnp.repeat(key[None], size, 0)  # the same draws of latents at every u
    run = drawing(program, known, size, local_samples, args, kwargs)
    # Draws of a corrected tree are from the posterior with normalised densities, others of a chain from the fitted one.
    corrected = "reason" not in tree["log_likelihood"].attrs

    @jax.jit
    def constrained(free: dict[str, Array]) -> tuple[dict[str, Array], Array]:
        values, jacobian = {}, jnp.zeros(size)
        for n, transform in transforms.items():
            values[n] = transform(free[n])
            jacobian += transform.log_abs_det_jacobian(free[n], values[n]).reshape(size, -1).sum(1)
        return values, jacobian

    def densities(u: np.ndarray) -> _Densities:
        parts = np.split(u, np.cumsum([free[n][0].size for n in shared])[:-1], 1)
        values, jacobian = constrained({n: part.reshape(free[n].shape) for n, part in zip(shared, parts, strict=True)})
        found = run(keys, {**draws, **values})
        fitted, normalised = (summed_over_data(known, of) for of in (found.joint, found.normalised))
        prior = found.log_p + jacobian
        each = (np.asarray(of[name], float).reshape(size, -1) for of in (found.target, found.predictive))
        drawn = normalised if corrected else fitted
        return _Densities(np.asarray(prior + drawn, float), np.asarray(prior + fitted, float), *each)

    return np.concatenate([free[n].reshape(size, -1) for n in shared], 1), densities


def refits(
    tree: DataTree, refit: Callable[..., Source], key: Array, *args: Any, site: str | None = None
) -> SamplingWrapper:
    r"""Refits without some rows, as ``arviz_stats.reloo`` and ``loo_kfold`` call them.

    The score of a row is :math:`\log p(y_i \mid y_{-i})`, ``log_density`` of the posterior without it.

    Args:
        tree: from ``to_arviz``.
        refit: a function of the program's arguments without the rows that are left out, which returns a fit, as
            ``dgp.Posterior``, or an MCMC object that has run. A fit is exact where the guide is, as
            ``dgp.guides.Collapsed`` under fixed hyperparameters; otherwise start it at the parameters of the whole
            fit, ``dgp.fit(..., init_params=result.params)``.
        key: PRNG key, for predictions.
        *args: arguments of the program, the observations last. Rows are taken from arrays as long as these.
        site: the observed site, where there are several.

    Returns:
        ArviZ's ``SamplingWrapper``, for ``arviz_stats.reloo(wrapper, score)`` and ``loo_kfold(tree, wrapper)``.

    Raises:
        ValueError: no tree of ``to_arviz``, a ``refit`` that is not a function, or observations that are not the last
            argument; when it runs, a ``refit`` that returns something else.

    Example:
        >>> import arviz_stats, jax, numpyro, optax, numpyro_dgp as dgp
        >>> (model, X, y), key = dgp.testing.toy(), jax.random.key(0)
        >>> def fit(X, y):
        ...     return dgp.Posterior(model, dgp.guides.Collapsed(model).on(X, y), {})
        >>> tree = dgp.diagnostics.to_arviz(fit(X, y), key, X, y)
        >>> wrapper = dgp.diagnostics.refits(tree, fit, key, X, y)
        >>> score = arviz_stats.loo_kfold(tree, wrapper, k=5)
        >>> score.n_folds, bool(score.elpd > 10)
        (5, True)

    Source: Vehtari et al. (2017), section 2.
    """
    from arviz_stats import SamplingWrapper
    from xarray import DataArray

    require_key(key)
    expect(callable(refit), "a function refit(X, y) that returns a fit", type(refit).__name__)
    tree, name = pointwise(tree, site)
    data: Any = tree["log_likelihood"][name]
    length = len(args[-1]) if args and np.ndim(args[-1]) else 0
    expect(
        data.shape[2:] == (length,),
        f"arguments of the program, observations of shape {data.shape[2:]} last",
        f"{length} rows",
        "refits(tree, refit, key, X, y)",
    )

    def rows(index: Any) -> tuple[Any, ...]:
        return tuple(arg[index] if np.ndim(arg) and len(arg) == length else arg for arg in args)

    class Refits(SamplingWrapper):  # type: ignore[misc]
        """ArviZ's protocol: rows, a fit without them, and their density under it."""

        def sel_observations(self, idx: Any) -> tuple[Any, Any]:
            left = np.isin(np.arange(length), idx)
            return rows(np.flatnonzero(~left)), rows(np.flatnonzero(left))

        def sample(self, modified_observed_data: Any) -> Any:
            return opened(refit(*modified_observed_data)).posterior

        def get_inference_data(self, fitted_model: Any) -> Any:
            return fitted_model

        def log_likelihood__i(self, excluded_obs: Any, idata__i: Any) -> DataArray:
            *inputs, y = excluded_obs
            density = idata__i.log_density(key, y, *inputs)
            return DataArray(np.asarray(density)[None, None], dims=data.dims)

    return Refits(refit, tree)
