"""One kernel for all outputs of a layer, or one per output, with the outputs as first axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.kernels.base import Kernel

__all__ = [
    "Kernels",
    "by_kernel",
    "covariances",
    "cross_covariance",
    "every",
    "features",
    "gram",
    "shared",
    "stacked",
    "variances",
]

# One kernel for all outputs, or one per output.
Kernels = Kernel | tuple[Kernel, ...]


def shared(kernels: Kernels) -> bool:
    """Whether all outputs have the same kernel."""
    return not isinstance(kernels, tuple)


def every(kernels: Kernels) -> tuple[Kernel, ...]:
    """The kernels of all outputs, P of them, or the one that they share."""
    return kernels if isinstance(kernels, tuple) else (kernels,)


def stacked(kernels: Kernels, arrays: Iterable[Array]) -> Array:
    """Arrays, one for each of :func:`every` kernel: (P, ...), without the first axis where outputs share a kernel."""
    found = list(arrays)
    return found[0] if shared(kernels) else jnp.stack(found)


def by_kernel(function: Callable[..., Array], kernels: Kernels, *arrays: Any) -> Array:
    """``function(kernel, *arrays)``, :func:`stacked`; where outputs differ each takes its own entry of the arrays."""
    if shared(kernels):
        return function(kernels, *arrays)
    return jnp.stack([function(k, *(a[p] for a in arrays)) for p, k in enumerate(every(kernels))])


def _of_outputs(kernels: Kernels, Z: Array) -> Any:
    """Inputs (M, D), or (P, M, D), by output."""
    return Z if Z.ndim == 3 or shared(kernels) else [Z] * len(every(kernels))


def gram(kernels: Kernels, Z: Array) -> Array:
    """k(Z, Z): shape (M, M) where outputs share kernel and inputs, else (P, M, M)."""
    return by_kernel(lambda k, z: k.gram(z), kernels, _of_outputs(kernels, Z))


def cross_covariance(kernels: Kernels, x: Array, Z: Array) -> Array:
    """k(x, Z) for x of shape (N, D): shape (N, M) where shared, else (P, N, M)."""
    return by_kernel(lambda k, z: k(x, z), kernels, _of_outputs(kernels, Z))


def variances(kernels: Kernels, x: Array) -> Array:
    """k(x, x) for x of shape (..., N, D): shape (..., N) for one kernel, else (P, ..., N)."""
    return stacked(kernels, (k.diag(x) for k in every(kernels)))


def covariances(kernels: Kernels, x: Array, y: Array | None = None) -> Array:
    """k(x, x), or k(x, y), between rows (..., N, D): shape (..., P, N, N), P = 1 where outputs share it."""
    return jnp.stack([k.gram(x) if y is None else k(x, y) for k in every(kernels)], axis=-3)


def features(kernels: Kernels, key: Array, x: Array, num: int) -> Array:
    """Random functions with covariance k at x (N, D): shape (N, num) where shared, else (P, N, num)."""
    return by_kernel(lambda k, z: k.features(key, z, num), kernels, _of_outputs(kernels, x))
