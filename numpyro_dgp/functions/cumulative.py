"""Integrals of piecewise linear functions: increasing functions, if the integrand is positive."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, require_finite, violated
from numpyro_dgp._data import as_floats, as_numbers
from numpyro_dgp._typing import Array, ArrayLike

__all__ = ["cumulative"]


def cumulative(x: ArrayLike, knots: ArrayLike, rates: ArrayLike) -> Array:
    r"""The integral of a function r of one input that is linear between its values at knots, and constant beyond them.

    .. math:: c(x) = \int_{t_1}^x r(t)\, dt

    For positive rates it is a smooth increasing function. A Gaussian process as the logarithm of the rates makes it a
    monotone layer, a warp of one input column. An increasing function in the place of the rates makes it convex.

    Draw the logarithms jointly, ``f.joint(knots)``, because every x sees the rates at all knots before it. Of D columns
    each has its own warp: ``jax.vmap(dgp.functions.cumulative, (1, None, 1), 1)(X, knots, rates)``.

    Args:
        x: numbers of any shape, a column of inputs.
        knots: t (Q,), increasing, in units of x.
        rates: r at the knots (Q,), units of the result per unit of x.

    Returns:
        Integrals of the shape of ``x``.

    Raises:
        ValueError: knots that do not increase, another number of rates, or NaN or infinite inputs.

    Example:
        >>> import jax, numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> knots = jnp.linspace(0, 1, 20)
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.RBF(4.0, 0.3), dgp.Points(jnp.linspace(0, 1, 8)[:, None]))
        ...     v = numpyro.sample("log_rate", f.joint(knots[:, None]))
        >>> h = dgp.functions.cumulative(jnp.array([0.0, 0.1, 0.5, 2.0]), knots, jnp.exp(v))
        >>> bool((jnp.diff(h) > 0).all())
        True

    Source: Barnett et al. (2024), there with linear interpolation between knots.
    """
    given = {"inputs": x, "knots": knots, "rates": rates}
    x, knots, rates = (as_numbers(name, a) for name, a in given.items())
    expect(
        np.ndim(knots) == 1 and np.size(knots) >= 2 and np.shape(rates) == np.shape(knots),
        "knots (Q,) of one input and a rate for each",
        f"{np.shape(knots)} and {np.shape(rates)}",
        "take one column of the knots, knots[:, 0], and a scalar function for the rates",
    )
    require_finite("inputs", x, "drop or impute the rows with missing values")
    expect(
        not violated(lambda t: t[1:] > t[:-1], knots), "knots that increase", "some that do not", "jnp.unique(knots)"
    )
    dtype = jnp.result_type(x, knots, rates, float)
    x, knots, rates = (as_floats(name, given[name]).astype(dtype) for name in given)
    steps, rises = jnp.diff(knots), jnp.diff(rates)
    # How much of each interval lies below x. Sums over intervals keep the rows of x apart, as indices would not.
    share = jnp.clip((x[..., None] - knots[:-1]) / steps, 0, 1)
    # int_0^s (r_q + a (r_{q+1} - r_q)) step da = step (s r_q + s^2 (r_{q+1} - r_q) / 2)
    inside = (steps * (share * rates[:-1] + 0.5 * jnp.square(share) * rises)).sum(-1)
    # Beyond the knots, where the rates are constant: (x - t_1) r_1, (x - t_Q) r_Q.
    return inside + jnp.minimum(x - knots[0], 0) * rates[0] + jnp.maximum(x - knots[-1], 0) * rates[-1]
