"""Patches of images: their sizes and places, and how images are taken apart into them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import require_count
from numpyro_dgp._data import as_numbers
from numpyro_dgp._typing import Array, ArrayLike

__all__ = ["Patches"]


@dataclasses.dataclass(frozen=True)
class Patches:
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
        >>> patches = dgp.Patches(image=(3, 4), patch=(2, 2))
        >>> patches.grid, patches.count, patches.size
        ((2, 3), 6, 4)
        >>> print(patches(jnp.arange(12))[0])  # pixels 0 and 1 of the first line, and of the second
        [0 1 4 5]

    Source: van der Wilk et al. (2017), section 3; Dutordoir et al. (2020a) for places.
    """

    image: tuple[int, ...]
    patch: tuple[int, int]
    stride: int = 1
    places: bool = False

    def __post_init__(self) -> None:
        for name, lengths, shape in (("image", (2, 3), "(H, W) or (H, W, C)"), ("patch", (2,), "(h, w)")):
            sizes = getattr(self, name)
            if not isinstance(sizes, tuple | list) or len(sizes) not in lengths:
                raise ValueError(f"Patches: expected {name}={shape}, got {sizes!r}: Patches((28, 28), (5, 5))")
            for size in sizes:
                require_count("Patches", f"every number of {name}", size, "Patches((28, 28), (5, 5))")
            object.__setattr__(self, name, tuple(map(int, sizes)))
        require_count("Patches", "stride", self.stride, "1")
        if not isinstance(self.places, bool):
            raise ValueError(f"Patches: expected places to be True or False, got {self.places!r}: places=True")
        if self.patch[0] > self.image[0] or self.patch[1] > self.image[1]:
            raise ValueError(
                f"Patches: expected patches no larger than the image, {self.image[:2]}, got {self.patch}: the sizes of "
                "a layer above are those of the grid below, Patches((*below.grid, outputs), patch)"
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

    def require_images(self, owner: str, x: Any) -> None:
        """Raise unless ``x`` has rows of as many numbers as an image has."""
        if np.ndim(x) < 1 or np.shape(x)[-1] != self.pixels:
            raise ValueError(
                f"{owner}: expected images {self.image} as rows of {self.pixels} numbers, got shape {np.shape(x)}: "
                "images.reshape(len(images), -1); of values (..., R, C) at patches h.reshape(*h.shape[:-2], -1)"
            )

    def __call__(self, x: ArrayLike) -> Array:
        """The patches (..., R, D) of images (..., H W C)."""
        x = as_numbers("images", x)
        self.require_images("Patches", x)
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
