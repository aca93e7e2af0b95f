"""How far the ends of an interval must be from data, and how many sines it needs, for an error of the covariances."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp.kernels.base import Kernel

__all__ = ["least_size", "reach"]

# Longer intervals and more sines are asked for by mistake.
_MOST = 2**20


def reach(kernel: type[Kernel], lengthscale: float, error: float) -> float:
    """The distance from which on a kernel is at most ``error`` of its variance, up to its rounding.

    Args:
        kernel: class of a stationary kernel.
        lengthscale: its lengthscale.
        error: share of the variance.
    """
    k = _of(kernel, lengthscale)

    at = lengthscale * np.geomspace(1e-3, 1e3, 2000)
    with jax.ensure_compile_time_eval():
        near = np.abs(k(jnp.zeros((1, 1)), jnp.asarray(at)[:, None]))[0] > error * np.asarray(_variance(k))
    return float(at[min(np.flatnonzero(near)[-1] + 1, len(at) - 1)]) if near.any() else 0.0


def least_size(kernel: type[Kernel], lengthscale: float, length: float, error: float) -> int:
    """The number of sines on an interval above whose frequencies is at most ``error`` of the variance of a kernel.

    Args:
        kernel: class of a stationary kernel.
        lengthscale: its lengthscale.
        length: of the interval.
        error: share of the variance.

    Raises:
        ValueError: more than a million sines.
    """
    k, size = _of(kernel, lengthscale), 64
    while size <= _MOST:
        with jax.ensure_compile_time_eval():
            density = np.asarray(k.spectral_density(math.pi * jnp.arange(size + 1.0)[:, None] / length), float)
            wanted = (1 - error) * float(_variance(k))
        below = (np.cumsum(density) - 0.5 * density[0]) / length  # by the trapezoidal rule, from zero on
        if (enough := below >= wanted).any():
            return max(int(np.argmax(enough)), 1)
        size *= 4
    raise ValueError(
        f"Basis.around: expected lengthscales that a million sines on {length:.3g} resolve, got {lengthscale:.3g}: "
        "use dgp.Points, or a larger error"
    )


def _of(kernel: type[Kernel], lengthscale: float) -> Kernel:
    if not isinstance(kernel, type) or not issubclass(kernel, Kernel):
        raise ValueError(f"Basis.around: expected the class of a kernel, got {kernel!r}: kernel=dgp.kernels.Matern32")
    return kernel(lengthscale=lengthscale)  # type: ignore[call-arg]


def _variance(kernel: Kernel) -> jnp.ndarray:
    return kernel.diag(jnp.zeros((1, 1)))[0]
