"""From a regular series to a ring long enough for it."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np
from scipy.fft import next_fast_len

from numpyro_dgp._checks import is_concrete, require_finite
from numpyro_dgp._data import known_numbers
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.kernels import Kernel, as_kernel
from numpyro_dgp.rings.spectra import MAX_SIZE, Ring, periodised, require_ring

__all__ = ["regular", "wraparound"]

# The number of Fourier transforms in a log evidence and its gradient.
_TRANSFORMS = 10
# Points without observations, whose cube a log evidence costs, up to which any series is taken as regular with gaps.
_MOST_GAPS = 5000


def regular(x: ArrayLike, margin: float) -> tuple[Ring, np.ndarray]:
    """The ring of a regular series, gaps allowed: its points and, behind them, padding.

    Args:
        x: inputs (N,) in order, whole multiples of their smallest difference apart.
        margin: length of the padding, units of x; six lengthscales make the two ends independent. A ring with
            padding is a few points longer where that makes its Fourier transforms faster than the algebra of these
            unobserved points is slow. With 0.0 there is no padding: the first point is the neighbour of the last.

    Returns:
        The ring, and which of its points are observed, (M,) of bool.

    Raises:
        ValueError: inputs that are not known numbers, not in order or not on a regular grid; a smallest difference that
            makes a grid almost without observations, as rounded times at no particular places do; a margin that is
            negative, not finite, or makes the ring too large.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.rings import regular
        >>> ring, observed = regular(np.array([0.0, 1.0, 2.0, 4.0]), margin=3.0)
        >>> ring.size, observed.astype(int).tolist()
        ((8,), [1, 1, 1, 0, 1, 0, 0, 0])

    Source: Tebbutt (2016), sections 1.3.2 and 1.3.5, with padding.
    """
    x = known_numbers("inputs of rings.regular", x)
    require_finite("inputs of rings.regular", x, "drop missing rows: a gap in the inputs is a missing observation")
    if isinstance(margin, bool | str) or np.ndim(margin) or not 0 <= margin < math.inf:
        raise ValueError(
            f"rings.regular: expected margin to be a finite number of at least zero, got {margin}: try six "
            "lengthscales, or 0.0 for a process that is periodic itself"
        )
    if x.ndim != 1 or len(x) < 2 or not (np.diff(x) > 0).all():
        raise ValueError(
            f"rings.regular: expected inputs (N,) in increasing order, got shape {x.shape}: "
            + ("take the column, x[:, 0]" if x.ndim == 2 else "sort them first, without repeated inputs")
        )
    x = x.astype(float)
    spacings = np.diff(x)
    steps = (x[-1] - x[0]) / spacings.min()
    if steps - len(x) > max(_MOST_GAPS, 9 * len(x)):
        raise ValueError(
            f"rings.regular: expected inputs on a regular grid, got a smallest spacing of {spacings.min():.4g} (the "
            f"median is {np.median(spacings):.4g}), which makes {steps + 1:.7g} points with {len(x)} observations: use "
            "dgp.gp with dgp.Grid, whose data may lie anywhere, or round the inputs to a coarser grid"
        )
    index = np.rint((x - x[0]) / spacings.min()).astype(int)
    step = (x[-1] - x[0]) / index[-1]
    off = np.abs((x - x[0]) / step - index).max()
    if off > 0.01:
        raise ValueError(
            f"rings.regular: expected inputs on a regular grid, got one {off:.2g} of a step {step:.4g} away from it "
            f"(spacings from {spacings.min():.4g} to {spacings.max():.4g}): use dgp.gp with dgp.Grid, whose data may "
            "lie anywhere"
        )
    if margin / step > MAX_SIZE - index[-1] - 1:
        raise ValueError(
            f"rings.regular: expected a margin that leaves the ring at most {MAX_SIZE} points, got {margin} with steps "
            f"of {step:.4g}: six lengthscales are enough, in units of x"
        )
    size = int(index[-1]) + 1 + math.ceil(margin / step - 1e-6)  # 12 * 0.1 makes 12 steps despite rounding
    size = _fast_size(size, len(x)) if margin > 0 else size
    observed = np.zeros(size, bool)
    observed[index] = True
    return Ring(x[0], x[0] + size * step, size), observed


def _fast_size(least: int, observed: int) -> int:
    r"""The ring size M from ``least`` on with the cheapest log evidence of N = ``observed`` points, in operations:

    .. math:: \tfrac13 (M - N)^3 + 10\, M\, \mathrm{work}(M), \qquad
              \mathrm{work}(M) = \min\Bigl(\sum_{p \mid M} p,\; 12 \log_2 M\Bigr)

    The first term is the Cholesky factorisation for the unobserved points. The second is that of the Fourier
    transforms: a prime factor p of M, as often as it divides M, costs about p operations per point, and Bluestein's
    algorithm, which takes over where factors are large, three transforms of twice the length.
    """
    bluestein = 12 * math.log2(least)
    # Beyond the next product of 2, 3 and 5 both terms grow; so does the cost once the first term alone exceeds it.
    most = observed + math.cbrt((least - observed) ** 3 + 3 * _TRANSFORMS * least * bluestein)
    sizes = np.arange(least, min(next_fast_len(least, real=True), max(least, int(most))) + 1)
    rest, work = sizes.copy(), np.zeros(len(sizes), int)
    for p in range(2, math.isqrt(int(sizes[-1])) + 1):
        while (divides := rest % p == 0).any():
            rest[divides] //= p
            work[divides] += p
    work += np.where(rest > 1, rest, 0)
    cost = (sizes - observed).astype(float) ** 3 / 3 + _TRANSFORMS * sizes * np.minimum(work, bluestein)
    return int(sizes[np.argmin(cost)])


def wraparound(kernel: Kernel, ring: Ring, span: ArrayLike) -> Array:
    r"""The largest error in a correlation made by closing the line to a ring: about :math:`k(\Delta - span) / k(0)`.

    Args:
        kernel: the stationary kernel.
        ring: the ring.
        span: range of the data, units of the input; a number, or (D,).

    Returns:
        The largest error, a share of the variance: a number.

    Raises:
        ValueError: a span that is not a number or one per dimension, or not between zero and the length of the ring.

    Example:
        >>> from numpyro_dgp.kernels import RBF
        >>> from numpyro_dgp.rings import Ring, wraparound
        >>> bool(wraparound(RBF(), Ring(0.0, 16.0, 32), 10.0) < 2e-8)
        True
    """
    require_ring("rings.wraparound", ring)
    kernel, D = as_kernel(kernel), len(ring.sizes)
    require_finite("span of rings.wraparound", span, "the range of the data, x.max() - x.min()")
    inside = not is_concrete(span, ring.length) or bool(np.all((np.asarray(span) >= 0) & (span <= ring.length)))
    if np.shape(span) not in ((), (D,)) or not inside:
        raise ValueError(
            f"rings.wraparound: expected span to be a number or one per dimension, shape ({D},), between zero and the "
            f"length {np.asarray(ring.length) if is_concrete(ring.length) else ''} of the ring, got {span}: it is the "
            "range of the data, x.max() - x.min(); a ring must be longer"
        )
    reach = jnp.broadcast_to(jnp.asarray(span, ring.dtype), (D,))
    corners = jnp.asarray(np.array(list(itertools.product((0.0, 1.0), repeat=D))), ring.dtype) * reach
    origin = jnp.zeros((1, D), ring.dtype)
    error = periodised(kernel, ring, corners, origin) - kernel(corners, origin)
    return jnp.abs(error).max() / kernel.diag(origin)[0]
