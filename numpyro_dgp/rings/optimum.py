r"""The optimal mean and the optimal circulant covariance of a layer on a ring under a Gaussian likelihood.

In whitened coordinates, with A the (N, M) covariances of the function at the data with v, the optimal mean solves

.. math:: (I + A^\top A / \sigma^2)\, m = A^\top (y - m(x)) / \sigma^2 ,

whose matrix has no eigenvalue below one: conjugate gradients need few steps, each O(N M), or O(N n + M log M) on a grid
with n neighbours. Without whitening (Tebbutt, 2016, section 3.2) the number of steps depends on the condition number of
the kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg

from numpyro_dgp._checks import expect, require_finite, require_noise, require_positive
from numpyro_dgp._data import as_array, as_numbers
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.rings.ring_function import RingFunction

__all__ = ["optimal_gain", "optimal_mean"]


def _checked(function: RingFunction, noise: ArrayLike) -> None:
    expect(
        isinstance(function, RingFunction) and not function.outputs_differ,
        "a function on a dgp.Grid with one kernel",
        type(function).__name__,
        "call it output by output",
    )
    require_noise(noise)


def _rows(function: RingFunction, x: ArrayLike) -> Array:
    rows = function.checked(as_array("inputs", x))
    expect(rows.ndim == 2, "inputs x of shape (N, D)", rows.shape, "x.reshape(-1, x.shape[-1])")
    return rows


def optimal_mean(function: RingFunction, x: ArrayLike, y: ArrayLike, noise: ArrayLike, *, tol: float = 1e-10) -> Array:
    """The optimal means of q(v) under a Gaussian likelihood, by conjugate gradients.

    Args:
        function: a layer, ``dgp.gp(name, kernel, dgp.Grid(...))``; its own value does not matter.
        x: inputs (N, D).
        y: targets (N,), or (N, P).
        noise: standard deviation of the likelihood.
        tol: relative residual at which to stop, which also bounds the relative error, since no eigenvalue is below one.

    Returns:
        Means (M,) or (P, M): the parameter ``"<name>_auto_loc"`` of a guide.

    Raises:
        ValueError: another function, noise that is not one positive number, targets that are not one finite number per
            input and output, a tolerance that is not positive.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> from numpyro_dgp.rings import optimal_mean
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.RBF(lengthscale=0.3), dgp.Grid(0.0, 4.0, 32))
        >>> x = jnp.linspace(0, 2, 50)[:, None]
        >>> m = optimal_mean(f, x, jnp.sin(3 * x[:, 0]), noise=0.1)
        >>> m.shape
        (32,)

    Source: Tebbutt (2016), algorithms 3.1 and 3.2.
    """
    _checked(function, noise)
    require_positive("tol", tol, "try 1e-10")
    rows, targets = _rows(function, x), as_numbers("targets y", y)
    shape = (len(rows),) if function.outputs is None else (len(rows), function.outputs)
    expect(
        np.shape(targets) == shape,
        f"targets y of shape {shape}, one per input and output",
        np.shape(targets),
        "of a function without outputs take y[:, 0], for a column open it with outputs=1",
    )
    require_finite("targets y", targets, "drop the rows with missing values")
    residual = jnp.asarray(targets, rows.dtype) - function.mean_at(rows)
    precision = 1 / jnp.square(jnp.asarray(noise, rows.dtype))
    start = jnp.zeros((*residual.shape[1:], function.size), rows.dtype)
    known = function.means_at(rows)
    forward = lambda m: known(m.reshape(-1, function.size)).reshape(residual.shape)  # noqa: E731
    backward = jax.linear_transpose(forward, start)  # A', the transpose of the linear map

    def system(m: Array) -> Array:
        return m + precision * backward(forward(m))[0]  # (I + A'A / s^2) m

    mean, _ = cg(system, precision * backward(residual)[0], tol=tol)
    return mean


def optimal_gain(function: RingFunction, x: ArrayLike, noise: ArrayLike) -> Array:
    r"""The optimal circulant covariance under a Gaussian likelihood.

    .. math:: g_k^2 = 1 / \bigl(1 + \textstyle\sum_n |\tilde A_{nk}|^2 / \sigma^2\bigr)

    The sum depends on where the data lie between grid points only, and costs O(N + M) (``RingFeatures.power``).

    Args:
        function: as in :func:`optimal_mean`.
        x: inputs (N, D).
        noise: standard deviation of the likelihood.

    Returns:
        Gains (M,): the parameter ``"<name>_auto_gain"`` of a guide with the rule ``guides.Circulant()``.

    Raises:
        ValueError: as :func:`optimal_mean`.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> from numpyro_dgp.rings import optimal_gain
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.RBF(lengthscale=0.3), dgp.Grid(0.0, 4.0, 32))
        >>> gain = optimal_gain(f, jnp.linspace(0, 4, 100)[:, None], noise=0.1)
        >>> gain.shape, bool(gain.min() > 0), bool(gain.max() <= 1)  # data only reduce variances
        ((32,), True, True)

    Source: Tebbutt (2016), equation 3.19, whitened. In equations 3.17 and 3.18 the inverse spectrum is there twice.
    """
    _checked(function, noise)
    rows = _rows(function, x)
    power = jnp.concatenate([part.features[0].power(part.columns(rows)) for part in function.parts])  # sum_n |A_nk|^2
    return 1 / jnp.sqrt(1 + power / jnp.square(jnp.asarray(noise, rows.dtype)))
