r"""S2: what has a closed form, or nearly, for a layer on a ring under a Gaussian likelihood.

In whitened coordinates, with A the (N, M) covariances of the function at the data with v, the optimal mean solves

.. math:: (I + A^\top A / \sigma^2)\, m = A^\top (y - m(x)) / \sigma^2 ,

whose matrix has no eigenvalue below one: conjugate gradients need few steps, each O(N M). In the source the unknowns
are not whitened, and the condition number of the kernel comes in.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg

from numpyro_dgp._checks import require_positive
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.circulant import even_part
from numpyro_dgp.ring_functions import RingFunction

__all__ = ["optimal_gain", "optimal_mean"]


def _shared(function: RingFunction, x: ArrayLike, noise: ArrayLike, owner: str) -> tuple[Array, Array]:
    if not isinstance(function, RingFunction) or isinstance(function.kernels, tuple):
        raise ValueError(
            f"{owner}: expected a function on a dgp.Grid with one kernel, got {type(function).__name__}: call it "
            "output by output"
        )
    require_positive(owner, "noise", noise)
    rows = function._inputs(x, None)
    return rows, function._whitened(rows)


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
        ValueError: another function, or noise that is not positive.

    Source: seed 004, algorithms 3.1 and 3.2.
    """
    rows, A = _shared(function, x, noise, "optimal_mean")
    residual = jnp.asarray(y, A.dtype) - function._mean(rows)
    precision = 1 / jnp.square(jnp.asarray(noise, A.dtype))

    def system(m: Array) -> Array:
        return m + precision * (m @ A.T) @ A

    mean, _ = cg(system, precision * residual.T @ A, tol=tol)
    return mean


def optimal_gain(function: RingFunction, x: ArrayLike, noise: ArrayLike) -> Array:
    r"""The optimal circulant covariance under a Gaussian likelihood.

    .. math:: g_k^2 = 1 / \bigl(1 + \textstyle\sum_n |\tilde A_{nk}|^2 / \sigma^2\bigr)

    Args:
        function: as in :func:`optimal_mean`.
        x: inputs (N, D).
        noise: standard deviation of the likelihood.

    Returns:
        Gains (M,): the parameter ``"<name>_auto_gain"`` of a guide with the rule ``guides.Circulant()``.

    Raises:
        ValueError: as :func:`optimal_mean`.

    Source: seed 004, equation 3.19, whitened. In equations 3.17 and 3.18 the inverse spectrum is there twice.
    """
    _, A = _shared(function, x, noise, "optimal_gain")
    power = jnp.square(A).sum(0) / jnp.square(jnp.asarray(noise, A.dtype))
    blocks = tuple(features[0].ring.sizes for _, features in function.parts)
    return 1 / jnp.sqrt(1 + even_part(power, blocks))
