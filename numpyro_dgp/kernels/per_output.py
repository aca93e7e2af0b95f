"""One kernel for all outputs of a layer, or one per output, with the outputs as first axis."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.kernels.base import Kernel

__all__ = ["Kernels", "covariances", "cross_covariance", "features", "gram", "variances"]

# One kernel for all outputs, or one per output.
Kernels = Kernel | tuple[Kernel, ...]


def _per_output(kernels: tuple[Kernel, ...], Z: Array) -> Sequence[tuple[Kernel, Array]]:
    return [(k, Z[p] if Z.ndim == 3 else Z) for p, k in enumerate(kernels)]


def gram(kernels: Kernels, Z: Array) -> Array:
    """k(Z, Z): shape (M, M) where outputs share kernel and inputs, else (P, M, M)."""
    if isinstance(kernels, Kernel):
        return kernels.gram(Z)
    return jnp.stack([k.gram(z) for k, z in _per_output(kernels, Z)])


def cross_covariance(kernels: Kernels, x: Array, Z: Array) -> Array:
    """k(x, Z) for x of shape (N, D): shape (N, M) where shared, else (P, N, M)."""
    if isinstance(kernels, Kernel):
        return kernels(x, Z)
    return jnp.stack([k(x, z) for k, z in _per_output(kernels, Z)])


def variances(kernels: Kernels, x: Array) -> Array:
    """k(x, x) for x of shape (..., N, D): shape (..., N) for one kernel, else (P, ..., N)."""
    if isinstance(kernels, Kernel):
        return kernels.diag(x)
    return jnp.stack([k.diag(x) for k in kernels])


def covariances(kernels: Kernels, x: Array, y: Array | None = None) -> Array:
    """k(x, x), or k(x, y), between rows (..., N, D): shape (..., P, N, N), P = 1 where outputs share it."""
    shared = (kernels,) if isinstance(kernels, Kernel) else kernels
    return jnp.stack([k.gram(x) if y is None else k(x, y) for k in shared], axis=-3)


def features(kernels: Kernels, key: Array, x: Array, num: int) -> Array:
    """Random functions with covariance k at x (N, D): shape (N, num) where shared, else (P, N, num)."""
    if isinstance(kernels, Kernel):
        return kernels.features(key, x, num)
    return jnp.stack([k.features(key, z, num) for k, z in _per_output(kernels, x)])
