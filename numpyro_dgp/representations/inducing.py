"""How a finite set of values represents a function. ``Points``: values at inducing inputs.

A representation opens the layer's sites (``open``) and returns the random function they define.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_dgp._checks import require_finite
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.algebra.whitening import inverse_cholesky
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.model.beliefs import InducingPrior, whitened_values

if TYPE_CHECKING:
    from numpyro_dgp.means import Mean
    from numpyro_dgp.representations.points import SparseFunction

__all__ = ["Kernels", "Points", "covariances", "cross_covariance", "features", "gram", "variances"]

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


@pytree
class Points:
    r"""Inducing points: a function is represented by its values at ``Z``.

    The layer's site holds the whitened values v, with :math:`f(Z) - m(Z) = L v` and
    :math:`L L^\top = k(Z, Z)`.

    Args:
        Z: inducing inputs (M, D) in the units of the layer's inputs, or (P, M, D) for separate ones per
            output.
        learn: make ``Z`` a ``numpyro.param`` called ``"<name>_Z"``, learned with everything else.

    Raises:
        ValueError: ``Z`` has another shape, or NaN or infinite entries.

    Example:
        >>> import numpy as np
        >>> Points(np.linspace(-2, 2, 10)[:, None], learn=True).Z.shape
        (10, 1)

    Source: Salimbeni (2020), section 1.2.
    """

    Z: ArrayLike
    learn: bool = static(default=False)

    def __post_init__(self) -> None:
        if np.ndim(self.Z) not in (2, 3) or 0 in np.shape(self.Z):
            raise ValueError(
                f"expected Points(Z) of shape (M, D), or (P, M, D) for separate inputs per output, got "
                f"{np.shape(self.Z)}: for one input column write Z[:, None]"
            )
        require_finite("inducing inputs Z", self.Z, "build them from clean data, e.g. dgp.initial.kmeans(X, M)")

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> SparseFunction:
        """Open the sites of layer ``name`` and return its random function."""
        from numpyro_dgp.representations.points import SparseFunction

        Z = jnp.asarray(self.Z, jnp.result_type(self.Z, float))
        if Z.ndim == 3 and Z.shape[0] != (outputs or 1):
            raise ValueError(
                f"gp {name!r}: expected separate inducing inputs Z of shape (P, M, D) with P = outputs = "
                f"{outputs}, got {Z.shape}: give one (M, D) block per output, or share one Z of shape (M, D)"
            )
        if self.learn:
            Z = numpyro.param(f"{name}_Z", Z)
        whiten = inverse_cholesky(gram(kernels, Z), f"k(Z, Z) of gp {name!r}")
        shape = (Z.shape[-2],) if outputs is None else (outputs, Z.shape[-2])
        u = whitened_values(f"gp {name!r}", name, InducingPrior(shape, Z.dtype))
        return SparseFunction(kernels, Z, whiten, u, outputs, mean)
