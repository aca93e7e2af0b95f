"""Stochastic lower bounds of the log evidence of a program and, given posterior samples, upper bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers

from numpyro_dgp._checks import expect, expect_kind, expected, require_count, require_key
from numpyro_dgp._compiled import Compiled
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.analysis.checks import LOG_DENSITIES, require
from numpyro_dgp.analysis.program import require_sound
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.mcmc.annealing import Path, Runs, anneal, first_path, tuned
from numpyro_dgp.mcmc.for_mcmc import Collapse, for_mcmc, sampled_program
from numpyro_dgp.mcmc.guide_coordinates import LOG_RATIO
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["Evidence", "evidence"]

# The end of the name of the site of a guide's numbers, in a program in its coordinates.
_WHITE = "_white"


class Evidence(NamedTuple):
    r"""The result of :func:`evidence`: log weights of runs from the guide to the posterior, and back.

    A bound is the logarithm of a mean of weights, with the standard error of that logarithm. The effective number of
    weights is :math:`(\sum_c e^{w_c})^2 / \sum_c e^{2 w_c}`; where it is a few only, the bound is loose and its
    standard error too small.

    Args:
        log_weights: :math:`w_c` of the runs from the guide (C,).
        acceptance: mean probability of acceptance at every temperature but the first and the last (T - 1,).
        reverse_log_weights: of the runs from draws of the posterior back to the guide (C,), whose weights have the mean
            1 / p(y); ``None`` without such draws.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.diagnostics import Evidence
        >>> found = Evidence(np.log([1.0, 3.0]), np.array([0.8]), -np.log([2.0, 2.0]))
        >>> print(np.exp([found.lower, found.upper]).round(3), round(found.lower_ess, 3), found.upper_se)
        [2. 2.] 1.6 0.0
    """

    log_weights: np.ndarray
    acceptance: np.ndarray
    reverse_log_weights: np.ndarray | None = None

    def __repr__(self) -> str:
        return brief(self)

    @property
    def lower(self) -> float:
        r"""Log of the mean weight, in expectation below the log evidence: :math:`\log \frac1C \sum_c e^{w_c}`."""
        return _log_mean(self.log_weights)

    @property
    def lower_se(self) -> float:
        """Its standard error."""
        return _log_mean_se(self.log_weights)

    @property
    def lower_ess(self) -> float:
        """The effective number of weights."""
        return _effective(self.log_weights)

    @property
    def upper(self) -> float:
        r"""In expectation above the log evidence: :math:`-\log \frac1C \sum_c e^{w_c}` back; NaN without such runs."""
        return -_log_mean(self._back)

    @property
    def upper_se(self) -> float:
        """Its standard error, for independent draws."""
        return _log_mean_se(self._back)

    @property
    def upper_ess(self) -> float:
        """The effective number of weights."""
        return _effective(self._back)

    @property
    def _back(self) -> np.ndarray:
        return np.array([np.nan]) if self.reverse_log_weights is None else self.reverse_log_weights


def _relative(log_weights: np.ndarray) -> np.ndarray:
    """Weights over the largest one."""
    return np.exp(np.asarray(log_weights, float) - np.max(log_weights))


def _log_mean(log_weights: np.ndarray) -> float:
    return float(np.max(log_weights) + np.log(_relative(log_weights).mean()))


def _log_mean_se(log_weights: np.ndarray) -> float:
    weights = _relative(log_weights)
    # sd(w) / (mean(w) sqrt(C))
    return float(weights.std(ddof=1) / weights.mean() / len(weights) ** 0.5) if len(weights) > 1 else np.nan


def _effective(log_weights: np.ndarray) -> float:
    weights = _relative(log_weights)
    return float(weights.sum() ** 2 / np.square(weights).sum())  # (sum w)^2 / sum w^2


def evidence(
    posterior: Posterior,
    key: Array,
    *args: Any,
    samples: Mapping[str, ArrayLike] | None = None,
    num_chains: int = 32,
    num_temperatures: int = 500,
    num_leapfrogs: int = 8,
    collapse: Collapse = "auto",
    **kwargs: Any,
) -> Evidence:
    r"""The log evidence :math:`\log p(y)` of a program by annealed importance sampling from a fitted guide.

    The bound of a guide is below it by the divergence of the guide from the posterior. In the coordinates of the guide,
    those of ``dgp.for_mcmc(model, params, guide=guide)``, runs follow

    .. math:: p_\beta(\epsilon) \propto N(\epsilon; 0, I)^{1 - \beta}\,
              \Bigl[ p(T(\epsilon), y)\, \lvert\det \partial T / \partial \epsilon\rvert \Bigr]^\beta

    from draws of the guide, :math:`\beta = 0`, to the posterior, :math:`\beta = 1`, by Hamiltonian Monte Carlo.
    Their weights have the mean p(y), whatever the guide and however far the runs lag behind, so that the logarithm of
    an average is a lower bound in expectation; that it is above :math:`\log p(y) + b` has a probability below
    :math:`e^{-b}`. Of several lower bounds, from other guides or from the prior, the largest counts: runs from a guide
    that misses a mode may never get there. Temperatures and step sizes come from a trial run and are fixed then.

    With draws of the posterior, ``samples``, as many runs go back, and give an upper bound. It holds as far as the
    chain has converged: draws from a part of the posterior can make it too low, and an upper bound clearly below the
    lower one shows that they have. Autocorrelated draws make its standard error too small.

    **What p(y) is.** The integral of the density that NUTS samples, with its constants. Under ``dgp.Likelihood`` with
    ``collapse="bound"``, which takes the expectation of the log density given v, it is the evidence of that program,
    which ``dgp.ELBO()`` bounds, and below the one with ``collapse="marginal"``. Layers that are integrated
    (``collapse=``) leave it as it is, and make it easier to find.

    **Hyperparameters.** Those from ``numpyro.sample`` are integrated. Where the guide has a point
    (``dgp.guides.Delta``), runs begin at a Gaussian around it, of scale 0.1 on the unconstrained scale; the bound of
    such a guide has a prior density in place of a divergence, and may be above the evidence. Those from
    ``numpyro.param`` stay at their values in the fit: the evidence is that of the program with these values, and a
    chain has to have the same.

    Args:
        posterior: a fit with a guide made of Gaussians, as for ``dgp.for_mcmc``.
        key: PRNG key.
        *args: arguments of the program, observations included.
        samples: draws of every site from the posterior, ``mcmc.get_samples()`` of ``MCMC(NUTS(dgp.for_mcmc(model)))``
            or any other sampler of this program, (S, ...) by site, or (chains, S, ...) with ``group_by_chain=True``;
            evenly spaced ones of them are used, as many as there are runs.
        num_chains: C, runs in each direction.
        num_temperatures: the number of temperatures, T. Twice as many bring both bounds closer, in twice the time.
        num_leapfrogs: gradients at each temperature; a run takes T times as many.
        collapse: see ``dgp.for_mcmc``.
        **kwargs: keyword arguments of the program.

    Returns:
        An :class:`Evidence`: ``lower``, ``upper``, their standard errors and effective numbers of weights.

    Raises:
        ValueError: no fit with a guide, numbers that are not positive integers, a single run, samples that are not
            draws of the sites of this program on these data; a program that subsamples (its log density is an estimate)
            or observes nothing, observations with a robust loss, a guide that ``for_mcmc`` does not take, ``samples``
            with a guide that draws all sites together (``AutoMultivariateNormal``) or with a ``RingNormal``; weights
            that are all zero or a NaN density.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> (model, X, y), key = dgp.testing.toy(), jax.random.key(0)
        >>> guide = dgp.guides.InducingPoint(model)
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.05), dgp.ELBO())
        >>> result = svi.run(key, 300, X, y, progress_bar=False)
        >>> found = dgp.diagnostics.evidence(dgp.Posterior(model, guide, result.params), key, X, y, num_temperatures=50)
        >>> exact = -dgp.ELBO().loss(key, {}, model, dgp.guides.Collapsed(model), X, y)
        >>> print(f"{-result.losses[-1]:.0f} {found.lower:.0f} {exact:.0f}")  # the bound of the guide is below
        16 18 18

    Source: Neal (2001); Grosse et al. (2015) for the upper bound.
    """
    for name, count in {"num_chains": num_chains, "num_temperatures": num_temperatures,
                        "num_leapfrogs": num_leapfrogs}.items():  # fmt: skip
        require_count(name, count, "the default")
    expect(num_chains >= 2, "num_chains of two or more", num_chains, "a standard error needs them")
    require_key(key)
    do = "evidence(dgp.Posterior(model, guide, result.params), key, X, y); draws of the posterior are samples="
    expect_kind(posterior, Posterior, "a fit with a guide", do)
    expect(posterior.guide is not None, "a fit with a guide", "draws of MCMC", do)
    model = posterior.model
    expect(
        sampled_program(model) is model,
        "the program that the guide is of",
        "what for_mcmc made of it",
        "pass the program, and collapse= to this function",
    )
    require_sound(require(LOG_DENSITIES, fn=model), args, kwargs)
    program = for_mcmc(model, posterior.params, guide=posterior.guide, collapse=collapse)
    arrays, rebuild = split_arguments(args, kwargs)
    white, shapes = _sites(program, *rebuild(arrays))
    flat, unravel = ravel_pytree({name: jnp.zeros(site.shape, site.dtype) for name, site in white.items()})
    draws = None if samples is None else _draws(samples, white, shapes, num_chains)

    @Compiled
    def run(arrays: list[Array], starts: Array, path: Path, key: Array, adapt: Array) -> Runs:
        again, options = rebuild(arrays)

        def log_ratio(position: Array) -> Array:
            given = handlers.substitute(data=unravel(position))
            with handlers.block(), handlers.trace() as sites, given, handlers.seed(rng_seed=0):
                program(*again, **options)
            return sites[LOG_RATIO]["fn"].log_factor

        return anneal(jax.vmap(jax.value_and_grad(log_ratio)), path, starts, key, num_leapfrogs, adapt)

    def from_guide(key: Array, path: Path, adapt: bool) -> Runs:
        start_key, key = jax.random.split(key)
        # e ~ N(0, I), a draw of the guide
        starts = jax.random.normal(start_key, (num_chains, flat.size), flat.dtype)
        return run(arrays, starts, path, key, jnp.asarray(adapt))

    @Compiled
    def positions(arrays: list[Array], draws: dict[str, Array]) -> Array:
        again, options = rebuild(arrays)
        return jax.lax.map(lambda one: ravel_pytree(program.position_of(one, again, options))[0], draws)

    trial_key, up_key, down_key = jax.random.split(key, 3)
    path = first_path(num_temperatures, flat.size, flat.dtype)
    path = tuned(path, from_guide(trial_key, path, adapt=True))
    forward = from_guide(up_key, path, adapt=False)
    log_weights, acceptance = np.asarray(forward.log_weights, float), np.asarray(forward.acceptance, float)
    expect(
        np.isfinite(log_weights).any(),
        "a finite log density at draws of the guide",
        "none",
        "are params of this fit and these data?",
    )
    if draws is None:
        return Evidence(log_weights, acceptance)
    reverse = run(arrays, positions(arrays, draws), path.reversed(), down_key, jnp.asarray(False))  # beta from 1 to 0
    expect(
        np.isfinite(reverse.log_weights).all(),
        "samples at which the density of this program is finite",
        "others",
        "pass samples=mcmc.get_samples() of this program on these data",
    )
    return Evidence(log_weights, acceptance, np.asarray(reverse.log_weights, float))


def _sites(program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Shapes and dtypes of the numbers that the program is sampled in, by site, and shapes of the values of its
    sites."""

    def run() -> tuple[dict[str, Array], dict[str, Array]]:
        with handlers.block(), handlers.trace() as sites, handlers.seed(rng_seed=0):
            program(*args, **kwargs)
        expect(LOG_RATIO in sites, "a program that observes data", "none", "pass the observations")
        white = {n: s["value"] for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
        return white, {n: s["value"] for n, s in sites.items() if s["type"] == "deterministic"}

    white, values = jax.eval_shape(run)
    return white, {name: values[name].shape for name in values if name + _WHITE in white}


def _draws(
    samples: Any, white: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], num_chains: int
) -> dict[str, Array]:
    """Evenly spaced draws, at most ``num_chains``, of the sites whose numbers are sampled."""
    advice = "pass samples=mcmc.get_samples() of this program on these data"
    expect_kind(samples, Mapping, "samples as a dict of draws by site", advice)
    names = [name.removesuffix(_WHITE) for name in white]
    expect(
        not (missing := [name for name in names if name not in samples]),
        f"samples with draws of {names}",
        f"none for {missing}",
        f"{advice}, and a guide that draws its sites one by one, such as dgp.guides.InducingPoint",
    )
    found = {name: jnp.asarray(samples[name]) for name in names}
    leading = {name: value.shape[: max(0, value.ndim - len(shapes[name]))] for name, value in found.items()}
    first = leading[names[0]]
    for name, value in found.items():
        if leading[name] != first or len(first) not in (1, 2) or 0 in first or value.shape != (*first, *shapes[name]):
            raise expected(
                f"samples of {name!r} of shape (S, ...) or (chains, S, ...), with draws of shape {shapes[name]}",
                value.shape,
                advice,
            )
    total = int(np.prod(first))
    chosen = np.linspace(0, total - 1, min(num_chains, total)).astype(int)
    return {name: value.reshape(total, *shapes[name])[chosen] for name, value in found.items()}
