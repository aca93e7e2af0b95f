"""Predicted quantities of one run of a fitted program: moments, densities, draws, layers, whole functions, quantiles.

Each function takes the fit, what is predicted, a key, one draw of MCMC and the arguments of the model.

For the function at several inputs together, all functions below the last one are draws of whole functions, consistent
across inputs. The last one stays a distribution: under a Gaussian q(v) its values are jointly Gaussian with v
integrated out, and otherwise given a draw of v.

Quantiles of y have a closed form where y is a label or Gaussian given each posterior sample; otherwise they are those
of draws of y.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_dgp._checks import expect, expected, is_concrete, require_levels
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.analysis.program import inspect_program
from numpyro_dgp.analysis.sites import (
    Message,
    Trace,
    is_function_values,
    is_likelihood,
    is_row_by_row,
    sample_values,
    unwrap,
    values_of,
)
from numpyro_dgp.densities import JointMixture, Mixture, MomentsOnly
from numpyro_dgp.functions.function_inputs import noise_covariance
from numpyro_dgp.functions.function_values import FunctionValues, MixedValues
from numpyro_dgp.functions.random_function import FeatureFunction
from numpyro_dgp.functions.weights import Belief
from numpyro_dgp.guides.run import marginal
from numpyro_dgp.jaxprs.row_by_row import rows_apart
from numpyro_dgp.likelihoods.families import is_family
from numpyro_dgp.likelihoods.outcomes import labels, moments, value_range
from numpyro_dgp.likelihoods.stacked_values import SeveralValues
from numpyro_dgp.math.linalg import einsum, set_diagonal
from numpyro_dgp.predict.draws import DrawFunctions, hidden_values, trace_over_all_rows
from numpyro_dgp.predict.fitted import Fit, Target

__all__ = [
    "Levels",
    "densities_of",
    "draws_of",
    "function_of",
    "functions_of",
    "hidden_of",
    "is_gaussian",
    "jointly_of",
    "label_probabilities",
    "moments_of",
    "observed_distribution",
    "observed_function",
    "probabilities_of",
    "predictive",
    "predictive_of",
    "warn_infinite",
]

_GAUSSIAN = dist.Normal, dist.MultivariateNormal, dist.LowRankMultivariateNormal
_OF_GAUSSIANS = "log_prob", "sample", "mean", "variance", "cdf", "icdf"


def moments_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Mixture:
    """Mean and variance of y."""
    fn = observed_distribution(fit, target, key, sample, args, kwargs)
    return (Mixture if is_gaussian(fn) else MomentsOnly)(*moments(fn))


def warn_infinite(found: Mixture) -> None:
    """Warn that moments do not exist, at the line that called a method of ``Posterior``."""
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
    fn = fn.everywhere() if is_likelihood(fn) else fn
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
    if is_row_by_row(fn) and fn.noise is None:
        return fn
    expect(
        is_likelihood(fn),
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
    if guide is not None:
        sample = fit.seeded(guide, draw_key, target)(*args, **kwargs)
    program = fit.given(sample, fit.seeded(fit.model, draw_key, target), args, kwargs, target)
    sites = trace_over_all_rows(DrawFunctions(program, path_key, num_features), args, kwargs)
    last = sites[target.site or ""]
    values = hidden_values(sites)
    if not is_likelihood(last["fn"]):
        return values
    return {**values, last["name"]: values_of(last["fn"]).loc}  # given a whole function, its value


def _observed(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Message:
    """The observed site in one run of the model."""
    return fit.trace(target, key, sample, args, kwargs)[target.site or ""]


def observed_distribution(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Any:
    """The distribution of y in one run of the model."""
    return unwrap(_observed(fit, target, key, sample, args, kwargs)["fn"])


def is_gaussian(fn: Any) -> bool:
    """Whether every entry of y is Gaussian."""
    if is_family(fn, dist.Independent):
        return is_gaussian(unwrap(fn.base_dist))
    if is_likelihood(fn):
        return fn.normal is not None and is_gaussian(fn.per_number(fn.f_x.loc))
    return is_function_values(fn) or is_family(fn, *_GAUSSIAN, methods=_OF_GAUSSIANS)


def _log_density(fn: Any, y: Array) -> Array:
    """The normalised log density of observations."""
    return fn.log_marginal(y) if is_likelihood(fn) else fn.log_prob(y)


def jointly_of(
    num_features: int, fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any
) -> JointMixture:
    """Joint moments of the function that the observed site is a ``Likelihood`` of."""
    if fit.data is None:
        sites = _functions_below(num_features, fit, target, key, sample, args, kwargs)
    else:
        sites = fit.trace(target, key, sample, args, kwargs)
        if below := hidden_values(sites):
            raise expected(
                "layers with inducing points below the last one",
                f"{sorted(below)[0]!r} of an exact process or above one, whose values are drawn row by row",
                "give the layers dgp.Points(X)",
            )
    f_x = observed_function(unwrap(sites[target.site or ""]["fn"]), target.site)
    covariances, priors = _covariances(f_x)
    one = f_x.event_dim == 0
    # The diagonal has the variances of predict_function.
    covariances = set_diagonal(covariances, f_x.variance[None] if one else f_x.variance.mT)
    return JointMixture(f_x.loc, covariances[0], priors[0]) if one else JointMixture(f_x.loc, covariances, priors)


def _functions_below(
    num_features: int, fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any
) -> Trace:
    """A run with draws of whole functions below the last one."""
    draw_key, path_key = jax.random.split(key)
    guide = fit.guide_at(target)
    if guide is not None:
        integrated = marginal(fit.seeded(guide, draw_key, target))
        sample = sample_values(handlers.trace(integrated).get_trace(*args, **kwargs))
    drawn = {
        name: value.sample(jax.random.fold_in(path_key, i)) if isinstance(value, Belief) else value
        for i, (name, value) in enumerate(sample.items())
    }
    structure = inspect_program(fit.model, args, kwargs)
    kept = {name: sample[name] for name in structure.inducing if name in sample.keys() - structure.hidden}
    program = fit.given(drawn, fit.seeded(fit.model, draw_key, target), args, kwargs, target)
    return trace_over_all_rows(DrawFunctions(program, path_key, num_features, kept), args, kwargs)


def _covariances(f_x: FunctionValues) -> tuple[Array, Array]:
    """Covariances of function values and of those of their prior, each (P, N, N)."""
    if isinstance(f_x, MixedValues):
        # Cov (W g)_p = sum_q W_pq^2 C_q
        return tuple(einsum("pq,qnm->pnm", jnp.square(f_x.W), C) for C in _covariances(f_x.functions))  # type: ignore[return-value]
    if isinstance(f_x, SeveralValues):
        sites = [part.layer for part in f_x.parts]
        expect(
            len(set(sites)) >= len(sites),
            "independent functions under the Likelihood",
            f"several values of {sites}",
            "two values of one function are correlated; give each function a layer of its own",
        )
        of_parts = [_covariances(part) for part in f_x.parts]
        return tuple(jnp.concatenate(parts) for parts in zip(*of_parts, strict=True))  # type: ignore[return-value]
    function, x, noise = f_x.function, f_x.inputs, f_x.noise
    if not isinstance(function, FeatureFunction) or f_x.batch_shape != x.shape[:-1] or x.ndim != 2:
        got = "values without one" if function is None else type(function).__name__
        raise expected(
            "a function with inducing values, such as on dgp.Points(Z), at N rows under the Likelihood",
            f"{got} at values of shape {f_x.batch_shape}",
            "its values have no joint covariance here",
        )
    # Cov[f(x)] (P, N, N), v integrated where q(v) is Gaussian
    joint, N = function.joint(x, noise=noise).covariance, len(x)
    prior = function.covariance(x) + noise_covariance(noise, N, joint.dtype)  # k(X, X) + s^2 I
    shape = function.outputs or 1, N, N
    return jnp.broadcast_to(joint, shape), jnp.broadcast_to(prior, shape)


_DRAWS_OF_Y = 50
"""Of every draw of the latent variables: they cost little next to that one."""


class _Labels(NamedTuple):
    """Probabilities (N, K) of the labels ``first``, ``first + 1``, ..."""

    probabilities: Array
    first: Array

    def quantile(self, q: np.ndarray) -> Array:
        """The first label whose cumulative probability reaches the level; the axes of the levels first."""
        below = self.probabilities.mean(0).cumsum(-1)  # P(y <= k), averaged over draws
        reached = [
            (below < level * below[..., -1:]).sum(-1) for level in q.ravel().tolist()
        ]  # the first k with P(y <= k) >= q
        quantiles = self.first[0] + jnp.stack(reached)
        return quantiles.reshape(*q.shape, *quantiles.shape[1:])


class _Draws(NamedTuple):
    """Draws of y (N, ..., R)."""

    y: Array

    def quantile(self, q: np.ndarray) -> Array:
        """The empirical quantile, one of the draws, and therefore an integer for counts."""
        together = jnp.sort(jnp.moveaxis(self.y, 0, -1).reshape(*self.y.shape[1:-1], -1), -1)
        places = [math.ceil(level * together.shape[-1]) - 1 for level in q.ravel().tolist()]  # the ceil(q n)-th of n
        quantiles = jnp.moveaxis(together[..., np.array(places)], -1, 0)
        return quantiles.reshape(*q.shape, *quantiles.shape[1:])


def predictive_of(
    fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any
) -> Mixture | _Labels | _Draws:
    """The representation of y from which quantiles are computed, in one run of the model."""
    run_key, y_key = jax.random.split(key)
    if target.batch is not None:
        y_key = jax.random.fold_in(y_key, target.batch)
    return predictive(observed_distribution(fit, target, run_key, sample, args, kwargs), y_key)


def predictive(fn: Any, key: Array) -> Mixture | _Labels | _Draws:
    """Moments of a distribution that is Gaussian, probabilities of labels, or draws."""
    found = value_range(fn)
    found.require_order()
    if found.finite and not fn.event_shape:
        return _Labels(label_probabilities(fn), jnp.asarray(int(found.low or 0)))
    if is_gaussian(fn):
        return Mixture(*moments(fn))
    return _Draws(jnp.moveaxis(rows_apart(lambda k: fn.sample(k, (_DRAWS_OF_Y,)))(key), 0, -1))


@dataclasses.dataclass(frozen=True)
class Levels:
    """Quantiles from the results of :func:`predictive` for all draws.

    Args:
        q: the levels, in order.
        shape: of the array that they came in.
    """

    q: tuple[float, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(q: ArrayLike) -> Levels:
        """Known levels as a part of the program that computes quantiles."""
        require_levels(q)
        expect(is_concrete(q), "known levels q", "traced ones", "pass numbers that jax.jit does not trace")
        levels = np.asarray(q, float)
        return Levels(tuple(levels.ravel().tolist()), levels.shape)

    def __call__(self, found: Mixture | _Labels | _Draws) -> Array:
        """Quantiles, the axes of the levels first."""
        return found.quantile(np.asarray(self.q).reshape(self.shape))
