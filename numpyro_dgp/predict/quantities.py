"""What is predicted from one run of a fitted program: moments, densities, draws, layers, whole functions.

Each function takes the fit, what is predicted, a key, one draw of MCMC and the arguments of the model.

What is predicted, and from how many draws by default.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_dgp._checks import expect, is_concrete
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, unwrap
from numpyro_dgp.densities import Mixture, MomentsOnly
from numpyro_dgp.functions.function_values import FunctionValues, Values
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.likelihoods.families import is_family
from numpyro_dgp.likelihoods.likelihood import Likelihood
from numpyro_dgp.likelihoods.outcomes import labels, moments
from numpyro_dgp.predict.draws import DrawFunctions, hidden_values, sample_values, trace_over_all_rows
from numpyro_dgp.predict.fitted import Fit, Target

__all__ = [
    "Quantity",
    "densities_of",
    "draws_of",
    "function_of",
    "functions_of",
    "hidden_of",
    "is_gaussian",
    "label_probabilities",
    "moments_of",
    "observed_distribution",
    "observed_function",
    "probabilities_of",
    "warn_infinite",
]

_GAUSSIAN = dist.Normal, dist.MultivariateNormal, dist.LowRankMultivariateNormal
_OF_GAUSSIANS = "log_prob", "sample", "mean", "variance", "cdf", "icdf"


def moments_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Mixture:
    """Mean and variance of y."""
    fn = observed_distribution(fit, target, key, sample, args, kwargs)
    return (Mixture if is_gaussian(fn) else MomentsOnly)(*moments(fn))


def warn_infinite(found: Mixture) -> None:
    """Warn the caller of a method of ``Posterior`` of moments that do not exist."""
    if isinstance(found, MomentsOnly) and is_concrete(found):
        rows = ~np.isfinite(found.variances).all(0)
        if rows.any():
            warnings.warn(
                f"Posterior.predict: mean or variance of y is infinite or NaN at {rows.sum()} of {rows.size} entries, "
                "as of a Student-t with no more than two degrees of freedom: posterior.quantile(key, q, X) has "
                "quantiles, which any distribution has",
                stacklevel=3,
            )


def draws_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
    """A draw of y."""
    return _observed(fit, target, key, sample, args, kwargs)["value"]


def densities_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
    """Log densities of the observations, which are the first of ``args``."""
    y, *args = args
    return _log_density(observed_distribution(fit, target, key, sample, args, kwargs), y)


def probabilities_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
    """Probabilities of the labels of y, along the last axis."""
    return label_probabilities(observed_distribution(fit, target, key, sample, args, kwargs))


def label_probabilities(fn: Any) -> Array:
    """Probabilities of the labels of a distribution (..., K)."""
    fn = fn.everywhere() if isinstance(fn, Likelihood) else fn
    values = labels(fn)
    y = jnp.broadcast_to(values.reshape(-1, *(1,) * len(fn.batch_shape)), (len(values), *fn.batch_shape))
    return jnp.moveaxis(jnp.exp(_log_density(fn, y)), 0, -1)  # E p(y = k | v), k last


def function_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Mixture:
    """Mean and variance of the function that the observed site is a ``Likelihood`` of."""
    fn = observed_distribution(fit, target, key, sample, args, kwargs)
    f_x = observed_function(fn, target.site)
    return Mixture(f_x.loc, f_x.variance)


def observed_function(fn: Any, site: str | None) -> FunctionValues:
    """Values of the function that the observed site is a ``Likelihood`` of."""
    if isinstance(fn, FunctionValues) and fn.noise is None:
        return fn
    expect(
        isinstance(fn, Likelihood),
        "an observed dgp.Likelihood, which has a function",
        f"{type(fn).__name__} at site {site!r}",
        "posterior.hidden(key, X) draws the values of layers",
    )
    return fn.f_x.marginals()


def hidden_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> dict[str, Array]:
    """Values of the hidden layers."""
    return hidden_values(fit.trace(target, key, sample, args, kwargs))


def functions_of(
    num_features: int, fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any
) -> dict[str, Array]:
    """Values of a draw of whole functions, of every hidden layer and of the function under the observed site."""
    expect(
        fit.data is None,
        "functions with inducing points",
        "an exact process (inducing=None)",
        "draws of its values at the rows of a call are posterior.predict_jointly(key, X).sample(key)",
    )
    draw_key, path_key = jax.random.split(key)
    guide = fit.guide_at(target)
    if isinstance(guide, Guide):
        sample = fit.seeded(guide, draw_key, target)(*args, **kwargs)
    elif guide is not None:
        sample = sample_values(handlers.trace(fit.seeded(guide, draw_key, target)).get_trace(*args, **kwargs))
    program = fit.given(sample, fit.seeded(fit.model, draw_key, target), args, kwargs, target)
    sites = trace_over_all_rows(DrawFunctions(program, path_key, num_features), args, kwargs)
    last = sites[target.site or ""]
    f_x: Any = getattr(unwrap(last["fn"]), "f_x", None)
    values = hidden_values(sites)
    return values if f_x is None else {**values, last["name"]: f_x.loc}  # given a whole function, its value


def _observed(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Message:
    """The observed site in one run of the model."""
    return fit.trace(target, key, sample, args, kwargs)[target.site or ""]


def observed_distribution(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Any:
    """The distribution of y in one run of the model."""
    return unwrap(_observed(fit, target, key, sample, args, kwargs)["fn"])


def is_gaussian(fn: dist.Distribution) -> bool:
    """Whether every number of y is Gaussian."""
    if is_family(fn, dist.Independent):
        return is_gaussian(unwrap(fn.base_dist))  # type: ignore[attr-defined]
    if isinstance(fn, Likelihood):
        return fn.normal is not None and is_gaussian(fn.per_number(fn.f_x.loc))
    return isinstance(fn, Values) or is_family(fn, *_GAUSSIAN, methods=_OF_GAUSSIANS)


def _log_density(fn: Any, y: Array) -> Array:
    """The normalised log density of observations."""
    return fn.log_marginal(y) if isinstance(fn, Likelihood) else fn.log_prob(y)


class Quantity(NamedTuple):
    """What is predicted.

    Args:
        of_draw: a function of :mod:`~numpyro_dgp.predict.quantities`.
        settings: its first arguments.
        finish: from the quantities of all draws, along the first axis, to the result; ``None`` to leave them.
        needs_site: whether it is of a single observed site.
        observations: how many of the arguments come before those of the model.
        leading: how many axes ``finish`` puts before those of one draw.
        num_samples: the number of draws by default; fewer where ``samples`` has fewer.
        every: that many also where all are the same.
    """

    of_draw: Callable[..., Any]
    settings: tuple[Any, ...] = ()
    finish: Callable[[Any], Any] | None = None
    needs_site: bool = True
    observations: int = 0
    leading: int = 0
    num_samples: int = 100
    every: bool = False

    def axes_of_rows(self, of_draw: Sequence[int | None]) -> tuple[int | None, ...]:
        """The axis of rows of every result, given that of everything computed from one draw."""
        leading = self.leading if self.finish else 1
        axes = tuple(None if axis is None else axis + leading for axis in of_draw)
        return axes[:1] if self.finish else axes
