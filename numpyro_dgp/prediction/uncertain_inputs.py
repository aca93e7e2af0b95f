r"""Predictions at inputs that are known with an error.

Where the inputs are normal around X with variances V, the prediction is a mixture over them too. The draw s of the
latent variables sees

.. math:: x_{snd} = X_{nd} + \sqrt{V_{nd}}\, \Phi^{-1}\bigl((t_{sd} + u_d) \bmod 1\bigr), \qquad
          u_d \sim \mathrm{Uniform}[0, 1]

with points t of Sobol's sequence: at every row inputs are normal, and S draws cover their distribution evenly. All rows
share the same S points, so that a row is predicted alike alone and in company, and predictions are smooth in X.

Source: Girard et al. (2003) for the prediction; Cranley and Patterson (1976) for the points.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import violated
from numpyro_dgp._data import as_floats
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import safe_sqrt
from numpyro_dgp.algebra.quasi_normals import shifted_normals, sobol_points
from numpyro_dgp.fitted import Fit, is_array
from numpyro_dgp.prediction.quantity import Quantity

__all__ = ["at_uncertain_inputs"]

_ERRORS = "standard normal errors of the inputs"  # no site is called so


def at_uncertain_inputs(
    fit: Fit, quantity: Quantity, X_variance: Any, key: Array, num_samples: int, args: Any
) -> tuple[Quantity, Any, dict[str, Array]]:
    """The quantity at inputs that are drawn anew for each draw of the latent variables.

    Args:
        fit: the fitted program.
        quantity: what is predicted; the inputs are the first argument of the model.
        X_variance: variances, of a shape that broadcasts to that of the inputs.
        key: PRNG key.
        num_samples: the number of draws, S.
        args: arguments of the model, behind those of the quantity.

    Returns:
        A quantity, its arguments, and what it needs among the draws, (S, ...).

    Raises:
        ValueError: no inputs, variances that do not fit to them, or a program with an argument of that name.
    """
    place = quantity.observations
    _require_free_name(fit.model)
    X: Any = args[place] if len(args) > place else None
    if not is_array(X) or not jnp.issubdtype(X.dtype, jnp.floating) or not X.ndim:
        got = "none" if X is None else f"{X.dtype} {X.shape}" if is_array(X) else type(X).__name__
        raise ValueError(
            f"Posterior: expected an array of real inputs as the first argument of the program with X_variance=, got "
            f"{got}: X_variance is the variance of each of its entries"
        )
    variance = as_floats("X_variance", X_variance)
    try:
        variance = jnp.broadcast_to(variance, X.shape).astype(X.dtype)
    except ValueError:
        raise ValueError(
            f"Posterior: expected X_variance of a shape that broadcasts to the inputs {X.shape}, got {variance.shape}: "
            "one variance for all, for every column (D,), every row (N, 1), or every entry (N, D)"
        ) from None
    if violated(lambda v: (v >= 0) & (v < np.inf), variance):
        raise ValueError(
            "Posterior: expected X_variance to be finite and not negative, got "
            f"{float(variance.min())} as the smallest: it is the square of the error, 0 for none"
        )
    columns = X.shape[1:]
    points = sobol_points(1 << (num_samples - 1).bit_length(), 0, math.prod(columns))[:num_samples]
    shift = jax.random.uniform(jax.random.fold_in(key, 0), points.shape[1:], X.dtype)
    errors = shifted_normals(jnp.asarray(points, X.dtype), shift).reshape(num_samples, *columns)
    moved = quantity._replace(
        of_draw=_at_moved, settings=(place, quantity.of_draw, quantity.settings), observations=place + 1
    )
    return moved, (*args[:place], safe_sqrt(variance), *args[place:]), {_ERRORS: errors}


def _require_free_name(model: Any) -> None:
    try:
        names = inspect.signature(model).parameters
    except (TypeError, ValueError):
        return
    if "X_variance" in names:
        raise ValueError(
            "Posterior: expected a program without an argument X_variance, got one that has it: give it another name, "
            "since X_variance=... of a prediction are the variances of its inputs"
        )


def _at_moved(
    place: int,
    of_draw: Any,
    settings: tuple[Any, ...],
    fit: Fit,
    target: Any,
    key: Array,
    sample: dict[str, Array],
    args: Any,
    kwargs: Any,
) -> Any:
    """The quantity of one draw at inputs moved by its errors."""
    sample = dict(sample)
    errors = sample.pop(_ERRORS)
    before, (scale, X, *rest) = args[:place], args[place:]
    return of_draw(*settings, fit, target, key, sample, (*before, X + scale * errors, *rest), kwargs)
