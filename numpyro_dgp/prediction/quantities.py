"""What is predicted from one run of a fitted program: moments, densities, draws, layers, whole functions.

Each function takes the fit, what is predicted, a key, one draw of MCMC and the arguments of the model.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers

from numpyro_dgp._typing import Array
from numpyro_dgp.densities import Mixture
from numpyro_dgp.draws import DrawFunctions, hidden_values, sample_values
from numpyro_dgp.fitted import Fit, Target
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.model.outcomes import labels, moments
from numpyro_dgp.model.sites import Message, unwrap

__all__ = ["densities_of", "draws_of", "functions_of", "hidden_of", "moments_of", "probabilities_of"]


def moments_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Mixture:
    """Mean and variance of y."""
    return Mixture(*moments(_observed(fit, target, key, sample, args, kwargs)["fn"]))


def draws_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
    """A draw of y."""
    return _observed(fit, target, key, sample, args, kwargs)["value"]


def densities_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
    """Log densities of the observations, which are the first of ``args``."""
    y, *args = args
    return _log_density(unwrap(_observed(fit, target, key, sample, args, kwargs)["fn"]), y)


def probabilities_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
    """Probabilities of the labels of y, along the last axis."""
    fn: Any = unwrap(_observed(fit, target, key, sample, args, kwargs)["fn"])
    fn = fn.everywhere() if isinstance(fn, Likelihood) else fn
    values = labels("Posterior.probs", fn)
    y = jnp.broadcast_to(values.reshape(-1, *(1,) * len(fn.batch_shape)), (len(values), *fn.batch_shape))
    return jnp.moveaxis(jnp.exp(_log_density(fn, y)), 0, -1)


def hidden_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> dict[str, Array]:
    """Values of the hidden layers."""
    return hidden_values(fit.trace(target, key, sample, args, kwargs))


def functions_of(
    num_features: int, fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any
) -> dict[str, Array]:
    """Values of a draw of whole functions, of every hidden layer and of the function under the observed site."""
    draw_key, path_key = jax.random.split(key)
    guide = fit.guide_at(target)
    if isinstance(guide, Guide):
        sample = fit.seeded(guide, draw_key, target)(*args, **kwargs)
    elif guide is not None:
        sample = sample_values(handlers.trace(fit.seeded(guide, draw_key, target)).get_trace(*args, **kwargs))
    program = fit.given(sample, fit.seeded(fit.model, draw_key, target), args, kwargs, target.plates)
    sites = handlers.trace(DrawFunctions(program, path_key, num_features)).get_trace(*args, **kwargs)
    last = sites[target.site or ""]
    f_x: Any = getattr(unwrap(last["fn"]), "f_x", None)
    values = hidden_values(sites)
    return values if f_x is None else {**values, last["name"]: f_x.loc}


def _observed(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Message:
    """The observed site in one run of the model."""
    return fit.trace(target, key, sample, args, kwargs)[target.site or ""]


def _log_density(fn: Any, y: Array) -> Array:
    """The normalised log density of observations."""
    return fn.log_marginal(y) if isinstance(fn, Likelihood) else fn.log_prob(y)
