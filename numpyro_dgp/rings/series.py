"""From a regular series to a ring long enough for it."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
from scipy.fft import next_fast_len

from numpyro_dgp._checks import require_finite, require_positive
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.kernels import Kernel, as_kernel
from numpyro_dgp.rings.spectra import Ring, periodised

__all__ = ["regular", "wraparound"]


def regular(x: ArrayLike, margin: float) -> tuple[Ring, np.ndarray]:
    """The ring of a regular series, gaps allowed: its points and, behind them, padding.

    Args:
        x: inputs (N,) in order, whole multiples of their smallest difference apart.
        margin: length of the padding, units of x; six lengthscales make the two ends independent.

    Returns:
        The ring, and which of its points are observed, (M,) of bool.

    Raises:
        ValueError: inputs that are not in order or not on a regular grid.

    Example:
        >>> ring, observed = regular(np.array([0.0, 1.0, 2.0, 4.0]), margin=3.0)
        >>> ring.size, observed.astype(int).tolist()
        ((8,), [1, 1, 1, 0, 1, 0, 0, 0])

    Source: Tebbutt (2016), sections 1.3.2 and 1.3.5, with padding.
    """
    x = np.asarray(x)
    require_finite("inputs of rings.regular", x, "drop missing rows: a gap in the inputs is a missing observation")
    require_positive("rings.regular", "margin", margin)
    if x.ndim != 1 or len(x) < 2 or not (np.diff(x) > 0).all():
        raise ValueError(
            f"rings.regular: expected inputs (N,) in increasing order, got shape {x.shape}: sort them first"
        )
    step = np.diff(x).min()
    index = np.rint((x - x[0]) / step).astype(int)
    step = (x[-1] - x[0]) / index[-1]
    off = np.abs((x - x[0]) / step - index).max()
    if off > 0.01:
        raise ValueError(
            f"rings.regular: expected inputs on a regular grid, got one {off:.2g} of a step {step:.4g} away from it: "
            "use dgp.gp with dgp.Grid, whose data may lie anywhere"
        )
    size = next_fast_len(index[-1] + 1 + int(np.ceil(margin / step)), real=True)
    observed = np.zeros(size, bool)
    observed[index] = True
    return Ring(x[0], x[0] + size * step, size), observed


def wraparound(kernel: Kernel, ring: Ring, span: ArrayLike) -> Array:
    r"""The largest error in a correlation made by closing the line to a ring: about :math:`k(L - span) / k(0)`.

    Args:
        kernel: the stationary kernel.
        ring: the ring.
        span: range of the data, units of the input; a number, or (D,).

    Example:
        >>> from numpyro_dgp.kernels import RBF
        >>> bool(wraparound(RBF(), Ring(0.0, 16.0, 32), 10.0) < 2e-8)
        True
    """
    kernel, D = as_kernel(kernel), len(ring.sizes)
    reach = jnp.broadcast_to(jnp.asarray(span, ring.dtype), (D,))
    corners = jnp.asarray(np.array(list(itertools.product((0.0, 1.0), repeat=D))), ring.dtype) * reach
    origin = jnp.zeros((1, D), ring.dtype)
    error = periodised(kernel, ring, corners, origin) - kernel(corners, origin)
    return jnp.abs(error).max() / kernel.diag(origin)[0]
