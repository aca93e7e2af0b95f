"""How far the ends of an interval must be from data, and how many sines it needs, for an error of the covariances."""

from __future__ import annotations

import math

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

    def is_near(distance: float) -> bool:
        return float(jnp.abs(k(jnp.zeros((1, 1)), jnp.full((1, 1), distance)))[0, 0]) > error * float(_variance(k))

    far = lengthscale
    while is_near(far):
        far *= 2
    near = 0.0
    for _ in range(20):
        middle = 0.5 * (near + far)
        near, far = (middle, far) if is_near(middle) else (near, middle)
    return far


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
        density = np.asarray(k.spectral_density(math.pi * jnp.arange(size + 1.0)[:, None] / length), float)
        below = (np.cumsum(density) - 0.5 * density[0]) / length  # by the trapezoidal rule, from zero on
        if (enough := below >= (1 - error) * float(_variance(k))).any():
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
