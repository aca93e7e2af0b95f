"""The kernel of weighted sums of one function over the patches of an image."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import require_finite
from numpyro_dgp._data import own_numbers
from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.algebra.patches import Patches
from numpyro_dgp.algebra.row_blocks import in_blocks
from numpyro_dgp.kernels.base import Kernel, as_kernel, expand

__all__ = ["Convolutional", "as_convolutional"]


@pytree
class Convolutional(Kernel):
    r"""A function of images that adds up what another function g says of their patches:

    .. math:: f(x) = \sum_r w_r\, g(x^{[r]}), \qquad
              k(x, x') = \sum_{r, r'} w_r w_{r'}\, k_g(x^{[r]}, x'^{[r']})

    where :math:`x^{[r]}` is patch r of R. A pattern that is known from one place of an image is known everywhere.
    Weights say how much a place counts. With patches that have their places, ``Patches(..., places=True)``, the
    response itself may change over the image: ``RBF(1.0, 2.0).on(0, 1, 2, 3) * RBF(1.0, 5.0).on(4, 5)`` for patches of
    2 by 2 pixels.

    Inputs are images, rows of H W C numbers. The kernel of N and N' images costs N N' R^2 evaluations of that of g, in
    blocks, so that they are never in memory together. ``dgp.InducingPatches`` needs only N M R of them and N R^2 for
    the variances.

    Args:
        kernel: :math:`k_g`, a kernel of patches, rows of ``patches.size`` numbers.
        patches: which patches an image has.
        weights: w (R,), of any sign; by default 1/R each, the mean of the responses.

    Raises:
        ValueError: no kernel, no :class:`~numpyro_dgp.Patches`, other numbers of weights; where it is called, inputs
            that are not rows of as many numbers as an image has.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_dgp as dgp
        >>> k = dgp.kernels.Convolutional(dgp.kernels.RBF(), dgp.Patches(image=(1, 3), patch=(1, 2)))
        >>> images = jnp.array([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])  # a step, and its mirror image
        >>> print(np.array(k(images, images)).round(3))
        [[0.803 0.645]
         [0.645 0.803]]

    Source: van der Wilk et al. (2017), equations 10 and 18; Dutordoir et al. (2020a) for places.
    """

    kernel: Any
    patches: Patches = static()
    weights: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", as_kernel(self.kernel))
        if not isinstance(self.patches, Patches):
            raise ValueError(
                f"Convolutional: expected patches=dgp.Patches(image, patch), got {type(self.patches).__name__}: "
                "Convolutional(RBF(), dgp.Patches((28, 28), (5, 5)))"
            )
        if self.weights is None:
            return
        object.__setattr__(self, "weights", own_numbers("weights of Convolutional", self.weights))
        if np.shape(self.weights) != (self.patches.count,):
            raise ValueError(
                f"Convolutional: expected weights of shape ({self.patches.count},), one per patch, got "
                f"{np.shape(self.weights)}: None is the mean of all"
            )
        require_finite("weights of Convolutional", self.weights, "draw them from a Normal")

    def check_inputs(self, X: Any) -> None:
        if np.shape(X)[-1:] == (self.patches.size,) != (self.patches.pixels,):
            raise ValueError(
                f"kernel Convolutional: expected images of {self.patches.pixels} numbers, got patches, {np.shape(X)}: "
                "as inducing inputs they are dgp.InducingPatches(Z); a layer on single patches has the kernel of these"
            )
        self.patches.require_images("kernel Convolutional", X)

    def _weights(self, dtype: jnp.dtype) -> Array:
        R = self.patches.count
        return jnp.full(R, 1 / R, dtype) if self.weights is None else jnp.asarray(self.weights, dtype)

    def with_responses(self, X: Array, Z: Array) -> Array:
        r"""Cov[f(x), g(z)] of images (N, H W C) with the responses to patches (M, D): shape (N, M)."""
        dtype = jnp.result_type(X, Z)
        return jax.jit(Convolutional._with, inline=True)(self.cast(dtype), X.astype(dtype), Z.astype(dtype))

    def _with(self, X: Array, Z: Array) -> Array:
        def block(x: Array) -> Array:
            w = self._weights(x.dtype)
            return jax.vmap(lambda patches: matmul(w, self.kernel.evaluate(patches, Z)))(self.patches(x))

        return in_blocks(block, X, cells=self.patches.count * len(Z))

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return jnp.vectorize(self._between, signature="(n,d),(m,d)->(n,m)")(X1, X2)

    def _between(self, X1: Array, X2: Array) -> Array:
        w, pairs = self._weights(X1.dtype), self.patches.count**2

        def pair(patches: Array, others: Array) -> Array:
            return matmul(matmul(w, self.kernel.evaluate(patches, others)), w)

        def some(x1: Array) -> Array:
            def block(x2: Array) -> Array:
                return jax.vmap(jax.vmap(pair, (0, None)), (None, 0))(self.patches(x1), self.patches(x2))

            return in_blocks(block, X2, cells=pairs * len(x1)).T

        return in_blocks(some, X1, cells=pairs * len(X2))

    def diagonal(self, X: Array) -> Array:
        w = self._weights(X.dtype)

        def variance(patches: Array) -> Array:
            own = self.kernel.diagonal(patches)[:, None]  # free of the rounding of distances
            K = jnp.where(jnp.eye(len(patches), dtype=bool), own, self.kernel.evaluate(patches, patches))
            return matmul(matmul(K, w), w)

        def block(x: Array) -> Array:
            return jax.vmap(variance)(self.patches(x))

        return in_blocks(block, X.reshape(-1, X.shape[-1]), cells=self.patches.count**2).reshape(X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        w = self._weights(X.dtype)

        def block(x: Array) -> Array:
            return jax.vmap(lambda patches: matmul(w, self.kernel.features(key, patches, num)))(self.patches(x))

        found = in_blocks(block, X.reshape(-1, X.shape[-1]), cells=self.patches.count * num)
        return found.reshape(*X.shape[:-1], num)


def as_convolutional(kernel: Kernel) -> Convolutional | None:
    """A positive multiple of a :class:`Convolutional` kernel as one of them; ``None`` for any other kernel.

    Example:
        >>> import numpyro_dgp as dgp
        >>> k = dgp.kernels.Convolutional(dgp.kernels.RBF(), dgp.Patches((2, 2), (1, 1)))
        >>> as_convolutional(2.0 * k).kernel.right, as_convolutional(k + k)
        (Constant(variance=2.0), None)
    """
    summands = expand(kernel)
    alone = summands[0].alone if len(summands) == 1 else None
    if not isinstance(alone, Convolutional):
        return None
    return (
        Convolutional(summands[0].scale * alone.kernel, alone.patches, alone.weights) if summands[0].scales else alone
    )
