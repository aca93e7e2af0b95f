"""Convolutional kernels: weighted sums of one function over the patches of an image, and the patches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expect_kind, expected, require_count, require_finite
from numpyro_dgp._data import as_numbers, own_numbers
from numpyro_dgp._fields import Checked, count, flag
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.kernels.base import Kernel, as_kernel
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.math.row_blocks import in_blocks

__all__ = ["Convolutional", "Patches", "as_convolutional"]


@dataclasses.dataclass(frozen=True)
class Patches(Checked):
    r"""The patches of an image: all windows of h by w pixels, in steps of ``stride`` pixels, R of them.

    Images are rows of H W C numbers, as ``images.reshape(N, -1)`` gives them of an array (N, H, W) or (N, H, W, C).
    Called on images (..., H W C), it returns their patches (..., R, D), row of places by row of places; each has its D
    = h w C numbers in the order of the pixels of an image. What a layer with C outputs computes of R patches, (..., R,
    C), is again an image, of ``grid`` by C, after ``h.reshape(*h.shape[:-2], -1)``. Pixels beyond the last full step
    are in no patch.

    Args:
        image: (H, W), or (H, W, C) for C numbers per pixel.
        patch: (h, w).
        stride: pixels from one patch to the next, along both sides.
        places: put the row and the column of the first pixel of every patch behind its numbers, counted from 0, so that
            a kernel can see where a patch is: D = h w C + 2.

    Raises:
        ValueError: sizes that are no positive integers, patches larger than the image; where it is called, rows of
            another length than H W C.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> patches = dgp.kernels.Patches(image=(3, 4), patch=(2, 2))
        >>> patches.grid, patches.count, patches.size
        ((2, 3), 6, 4)
        >>> print(patches(jnp.arange(12))[0])  # pixels 0 and 1 of the first line, and of the second
        [0 1 4 5]

    Source: van der Wilk et al. (2017), section 3; Dutordoir et al. (2020a) for places.
    """

    image: tuple[int, ...]
    patch: tuple[int, int]
    stride: int = count(1)
    places: bool = flag()

    def __post_init__(self) -> None:
        super().__post_init__()
        image, patch = (self.image, (2, 3), "(H, W) or (H, W, C)"), (self.patch, (2,), "(h, w)")
        for name, (sizes, lengths, shape) in {"image": image, "patch": patch}.items():
            expect(
                isinstance(sizes, tuple | list) and len(sizes) in lengths,
                f"{name}={shape}",
                repr(sizes),
                "Patches((9, 9), (3, 3))",
            )
            for size in sizes:
                require_count(f"every number of {name}", size, "Patches((28, 28), (5, 5))")
            object.__setattr__(self, name, tuple(map(int, sizes)))
        if self.patch[0] > self.image[0] or self.patch[1] > self.image[1]:
            raise expected(
                f"patches no larger than the image, {self.image[:2]}",
                self.patch,
                "the sizes of a layer above are those of the grid below, Patches((*below.grid, outputs), patch)",
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Places of patches along both sides."""
        rows, columns = ((n - m) // self.stride + 1 for n, m in zip(self.image[:2], self.patch, strict=True))
        return rows, columns

    @property
    def count(self) -> int:
        """R, the number of patches of an image."""
        return math.prod(self.grid)

    @property
    def size(self) -> int:
        """D, the numbers of one patch."""
        return math.prod((*self.patch, *self.image[2:])) + 2 * self.places

    @property
    def pixels(self) -> int:
        """H W C, the numbers of one image."""
        return math.prod(self.image)

    def require_images(self, x: Any) -> None:
        """Raise unless ``x`` has rows of as many numbers as an image has."""
        expect(
            np.ndim(x) >= 1 and np.shape(x)[-1] == self.pixels,
            f"images {self.image} as rows of {self.pixels} numbers",
            f"shape {np.shape(x)}",
            "images.reshape(len(images), -1); of values (..., R, C) at patches h.reshape(*h.shape[:-2], -1)",
        )

    def __call__(self, x: ArrayLike) -> Array:
        """The patches (..., R, D) of images (..., H W C)."""
        x = as_numbers("images", x)
        self.require_images(x)
        x = jnp.asarray(x)
        batch, (rows, columns) = x.shape[:-1], self.grid
        x = x.reshape(*batch, *self.image[:2], -1)
        x = _windows(x, -2, self.patch[1], columns, self.stride)  # (..., H, W', w, C)
        x = _windows(x, -4, self.patch[0], rows, self.stride)  # (..., H', h, W', w, C)
        found = jnp.moveaxis(x, -4, -3).reshape(*batch, self.count, -1)
        if not self.places:
            return found
        steps = self.stride * np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
        places = jnp.asarray(steps.reshape(-1, 2), found.dtype)
        return jnp.concatenate([found, jnp.broadcast_to(places, (*batch, *places.shape))], -1)


def _windows(x: Array, axis: int, width: int, count: int, stride: int) -> Array:
    """``count`` windows of ``width`` entries along an axis, counted from the last, which becomes two."""
    axis += x.ndim
    starts = range(width)
    parts = [x[(slice(None),) * axis + (slice(s, s + (count - 1) * stride + 1, stride),)] for s in starts]
    return jnp.stack(parts, axis + 1)


@pytree
class Convolutional(Kernel):
    r"""The kernel of a function of images that is the weighted sum of a function g of their patches:

    .. math:: f(x) = \sum_r w_r\, g(x^{[r]}), \qquad
              k(x, x') = \sum_{r, r'} w_r w_{r'}\, k_g(x^{[r]}, x'^{[r']})

    where :math:`x^{[r]}` is patch r of R. The response to a pattern is the same at all places; the weights
    are the importance of each place. With ``Patches(..., places=True)``, whose patches include their position, the
    response may also vary over the image: ``RBF(1.0, 2.0).on(0, 1, 2, 3) * RBF(1.0, 5.0).on(4, 5)`` for patches of
    2 by 2 pixels.

    Inputs are images, rows of H W C numbers. The kernel of N and N' images costs N N' R^2 evaluations of that of g,
    computed in blocks to save memory. ``dgp.functions.InducingPatches`` needs only N M R, and N R^2 for the variances.

    Args:
        kernel: :math:`k_g`, a kernel of patches, rows of ``patches.size`` numbers.
        patches: which patches an image has.
        weights: w (R,), of any sign; by default 1/R each, the mean of the responses.

    Raises:
        ValueError: no kernel, no :class:`~numpyro_dgp.kernels.Patches`, other numbers of weights; where it is called,
            inputs that are not rows of as many numbers as an image has.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_dgp as dgp
        >>> k = dgp.kernels.Convolutional(dgp.kernels.RBF(), dgp.kernels.Patches(image=(1, 3), patch=(1, 2)))
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
        expect_kind(self.patches, Patches, "dgp.kernels.Patches(image, patch)", "dgp.kernels.Patches((28, 28), (5, 5))")
        if self.weights is None:
            return
        object.__setattr__(self, "weights", own_numbers("weights", self.weights))
        expect(
            np.shape(self.weights) == (self.patches.count,),
            f"weights of shape ({self.patches.count},), one per patch",
            np.shape(self.weights),
            "None for the mean",
        )
        require_finite("weights", self.weights, "draw them from a Normal")

    def check_inputs(self, X: Any) -> None:
        if np.shape(X)[-1:] == (self.patches.size,) != (self.patches.pixels,):
            raise expected(
                f"images of {self.patches.pixels} numbers",
                f"patches {np.shape(X)}",
                "pass them as dgp.functions.InducingPatches(Z); a layer on patches has the kernel of patches",
            )
        self.patches.require_images(X)

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
            # sum_r w_r k_g(x^[r], z)
            return jax.vmap(lambda patches: matmul(w, self.kernel.evaluate(patches, Z)))(self.patches(x))

        return in_blocks(block, X, cells=self.patches.count * len(Z))

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return jnp.vectorize(self._between, signature="(n,d),(m,d)->(n,m)")(X1, X2)

    def _between(self, X1: Array, X2: Array) -> Array:
        w, pairs = self._weights(X1.dtype), self.patches.count**2

        def pair(patches: Array, others: Array) -> Array:
            return matmul(matmul(w, self.kernel.evaluate(patches, others)), w)  # sum_rr' w_r w_r' k_g(x^[r], x'^[r'])

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
            return matmul(matmul(K, w), w)  # w' K w

        def block(x: Array) -> Array:
            return jax.vmap(variance)(self.patches(x))

        return in_blocks(block, X.reshape(-1, X.shape[-1]), cells=self.patches.count**2).reshape(X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        w = self._weights(X.dtype)

        def block(x: Array) -> Array:
            # sum_r w_r g(x^[r])
            return jax.vmap(lambda patches: matmul(w, self.kernel.features(key, patches, num)))(self.patches(x))

        found = in_blocks(block, X.reshape(-1, X.shape[-1]), cells=self.patches.count * num)
        return found.reshape(*X.shape[:-1], num)


def as_convolutional(kernel: Kernel) -> Convolutional | None:
    """A positive multiple of a :class:`Convolutional` kernel as one of them; ``None`` for any other kernel.

    Example:
        >>> import numpyro_dgp as dgp
        >>> k = dgp.kernels.Convolutional(dgp.kernels.RBF(), dgp.kernels.Patches((2, 2), (1, 1)))
        >>> as_convolutional(2.0 * k).kernel.right, as_convolutional(k + k)
        (Constant(variance=2.0), None)
    """
    summands = kernel.expanded()
    alone = summands[0].alone if len(summands) == 1 else None
    if not isinstance(alone, Convolutional):
        return None
    return (
        # The scale goes to the kernel of patches: α k has α k_g.
        Convolutional(summands[0].scale * alone.kernel, alone.patches, alone.weights) if summands[0].scales else alone
    )
