r"""``Grid``: inducing values on a regular grid that closes to a ring.

The kernel is made periodic everywhere, so that the layer is a Gaussian process on a ring and its bound is a bound:
with the plain :math:`k(x, z)` and a circulant :math:`k(Z, Z)` the conditional variance becomes negative without limit.
At the data it agrees with the process on the line if the ring is six lengthscales longer than the range of the data.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.fft import next_fast_len

from numpyro_dgp._checks import (
    expect,
    expected,
    is_concrete,
    require_finite,
    require_inputs,
    require_positive,
    violated,
)
from numpyro_dgp._data import known_numbers
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.functions.weights import whitened_values
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.per_output import Kernels
from numpyro_dgp.means import Mean
from numpyro_dgp.rings.features import NUGGET, RingFeatures
from numpyro_dgp.rings.ring_beliefs import RingPrior
from numpyro_dgp.rings.ring_function import Component, RingFunction, covariance_on_grid
from numpyro_dgp.rings.spectra import Ring, components
from numpyro_dgp.rings.windows import neighbours

__all__ = ["Grid"]

# A grid is too coarse if half-way between its points more than this share of the variance is left given the values.
_COARSE = 0.5


@pytree
class Grid(Ring):
    r"""A regular grid of inducing points on a ring: O(N M) per layer, without matrices (M, M) or factorisations.

    The layer's site holds M whitened values v in real Fourier (Hartley) coordinates, :math:`u = H \Lambda^{1/2} v`,
    where u are the values on the grid and :math:`\Lambda` the spectrum of the periodic kernel. They are
    those of the function without its parts above seventeen times (five times in two dimensions, three times in
    three) the highest frequency that the grid resolves; for smooth kernels there is no difference. The kernel itself is
    not approximated.

    A kernel on all D columns has ``size[0] * ... * size[D-1]`` values. An additive one, ``k0.on(0) + k1.on(1)``, has
    one ring per term, ``size[0] + size[1]`` values. Kernels must be stationary with a spectral density.

    Inputs outside of [low, high] raise an error, in predictions too: on a ring, x and x + (high - low) are the same
    point. Where values are traced, as under ``jax.jit``, ``svi.run`` or NUTS, the function is NaN at such inputs, and
    with it a bound in which a hidden value leaves the ring of the layer above; :func:`~numpyro_dgp.fit` gives the
    reason.

    Args:
        low: where the ring begins, units of the input; a number, or (D,).
        high: where it closes; a number, or (D,). :meth:`around` chooses both.
        size: grid points, an integer or one per dimension, D at most 3.
        neighbours: grid points around an input that its value is computed from, an integer or one per dimension;
            ``None`` for all; :meth:`local` chooses. A step then costs O(N n log n + M log M) instead of O(N M), n being
            their number (with n^2 in place of n log n for the rules ``Circulant``, ``ScaledPrior`` and
            ``ScaledCirculant``), and no array of N times M numbers is made. The rules ``Full``, ``Diagonal`` and
            ``ScaledProduct``, structured guides, joint values and draws of functions look at all points nevertheless;
            where an array over all points would have more than 2**31 numbers, an error names the rules that need none.
            A lengthscale that grows during a fit beyond what the neighbours reach is an error; in compiled
            programs values are then NaN, and :func:`~numpyro_dgp.fit` gives the reason.
        nugget: variance of independent noise on the values on the grid, relative to that of the kernel, the same in
            both precisions. The smaller, the stiffer are the bounds of the rules ``ScaledPrior``, ``ScaledCirculant``
            and ``ScaledProduct``: at 1e-10 first-order optimisers do not train them.

    Raises:
        ValueError: as :class:`~numpyro_dgp.rings.Ring`; neighbours that are not integers from 2 on; a
            nugget that is not between 0 and 1; where weights are known, fewer neighbours than the kernel reaches.

    Example:
        >>> import numpyro
        >>> import numpyro_dgp as dgp
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp import Grid
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), Grid(-5.0, 5.0, 20))
        >>> f(jnp.zeros((7, 1))).batch_shape, f.v.loc.shape
        ((7,), (20,))

    Source: Tebbutt (2016), chapter 3, with the kernel periodic also in k(x, z); additive rings, its section 3.5.
    """

    neighbours: int | tuple[int, ...] | None = static(default=None)
    nugget: float = static(default=NUGGET)

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(
            isinstance(self.nugget, int | float | np.floating) and 0 < self.nugget < 1,
            "a nugget between 0 and 1, a share of the variance of the kernel",
            repr(self.nugget),
            "1e-10 for functions known nearly exactly, in double precision; leave it out otherwise",
        )
        object.__setattr__(self, "nugget", float(self.nugget))
        if self.neighbours is None:
            return
        D = len(self.sizes)
        found = (
            (self.neighbours,) * D
            if isinstance(self.neighbours, int)
            else tuple(np.atleast_1d(self.neighbours).tolist())
        )
        if len(found) != D or not all(isinstance(n, int) and n >= 2 for n in found):
            raise expected(
                "neighbours to be an integer from 2 on, or one per dimension",
                f"{self.neighbours} for {D} dimension(s)",
                "grid.local(kernel) chooses, None means all points",
            )
        object.__setattr__(self, "neighbours", found)

    @classmethod
    def around(
        cls,
        X: ArrayLike,
        lengthscale: ArrayLike,
        *,
        per_lengthscale: float = 2.0,
        margin: float = 3.0,
        nugget: float = NUGGET,
    ) -> Grid:
        """A ring around data: longer by ``margin`` lengthscales on either side, ``per_lengthscale`` points in each.

        Args:
            X: inputs (N, D).
            lengthscale: the smallest that is expected, units of the input; a number, or (D,).
            per_lengthscale: grid points per lengthscale; two leave an RBF a conditional variance of 1e-7.
            margin: lengthscales on either side.
            nugget: of the grid.

        Raises:
            ValueError: NaN or infinite inputs, more than three columns, numbers that are not positive.

        Example:
            >>> grid = Grid.around(np.array([[0.0], [4.0]]), 1.0)
            >>> print(grid.low, grid.high, grid.size)
            [-3.] [7.] (20,)
        """
        X = known_numbers("inputs X", X)
        require_inputs(X)
        require_finite("inputs X", X, "drop or impute the rows with missing values")
        for name, value in [("lengthscale", lengthscale), ("per_lengthscale", per_lengthscale), ("margin", margin)]:
            require_positive(name, value, "all three are lengths or counts beyond zero")
        X = X if X.dtype.kind == "f" else X.astype(float)
        if np.shape(lengthscale) not in ((), (1,), X.shape[-1:]):
            raise expected(
                f"lengthscale to be a number or one per column, shape ({X.shape[-1]},)",
                f"shape {np.shape(lengthscale)}",
                f"inputs have {X.shape[-1]} column(s)",
            )
        scale = np.broadcast_to(np.asarray(lengthscale, X.dtype), X.shape[-1:])
        rows = X.reshape(-1, X.shape[-1])
        low, high = rows.min(0) - margin * scale, rows.max(0) + margin * scale
        wanted = np.ceil(per_lengthscale * (high - low) / scale - 1e-6)
        return cls(low, high, tuple(next_fast_len(max(int(m), 2), real=True) for m in wanted), nugget=nugget)

    def local(self, kernel: Kernel, *, tol: float = 1e-5, scaled: bool = False) -> Grid:
        """The same grid with local windows: values depend on as many neighbours as the kernel reaches.

        Args:
            kernel: with the largest lengthscale that is expected.
            tol: share of the length (root of the sum of squares) of an input's weights that may be left out. Means,
                in standard deviations of the prior, and variances change by about as much.
            scaled: for the rules that scale values on the grid, ``ScaledPrior`` and
                ``ScaledCirculant``. Their variances have other weights than means, which for smooth kernels decay
                more slowly.

        Raises:
            ValueError: a kernel without a spectral density or with hyperparameters that are traced; ``tol`` that is
                not positive.

        Example:
            >>> from numpyro_dgp.kernels import RBF
            >>> grid = Grid(0.0, 1000.0, 2000)
            >>> grid.local(RBF(), tol=1e-3).neighbours
            (12,)
            >>> grid.local(RBF(), tol=1e-3, scaled=True).neighbours > (12,)
            True
        """
        require_positive("tol", tol, "try 1e-5")
        expect(
            is_concrete(kernel, self.low, self.high),
            "a kernel with known hyperparameters",
            "traced ones",
            "call it before the program is compiled, with the largest lengthscale",
        )
        counts = [neighbours(kernel, self, tol, power, self.nugget) for power in ((0.0, 0.5) if scaled else (0.0,))]
        return dataclasses.replace(self, neighbours=tuple(map(max, *counts)) if scaled else counts[0])

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> RingFunction:
        """Open the site of layer ``name`` and return its random function."""
        parts = _components(name, kernels, self)
        _warn_if_coarse(name, parts)
        K = covariance_on_grid(parts)
        M = K.spectrum.shape[-1]
        prior = RingPrior((M,) if outputs is None else (outputs, M), K.spectrum, K.blocks)
        v, site = whitened_values(name, prior, "whitened values")
        near: Any = self.neighbours
        ring = Ring(self.low, self.high, self.sizes)
        return RingFunction(kernels, ring, parts, v, outputs, mean, site, near, self.nugget)


def _components(name: str, kernels: Kernels, grid: Grid) -> tuple[Component, ...]:
    per_output = [components(k, len(grid.sizes)) for k in (kernels if isinstance(kernels, tuple) else (kernels,))]
    if any(set(found) != set(per_output[0]) for found in per_output):
        raise expected(
            "kernels of all outputs to act on the same columns on a Grid",
            [list(found) for found in per_output],
            "open one layer per structure",
            at=f"gp {name!r}",
        )
    return tuple(
        Component(dims, tuple(RingFeatures.of(found[dims], grid.on(dims), grid.nugget) for found in per_output))
        for dims in per_output[0]
    )


def _warn_if_coarse(name: str, parts: tuple[Component, ...]) -> None:
    """Warn if more than half of the variance between grid points is left given the values at the grid points."""
    for f in (f for part in parts for f in part.features):
        if violated(lambda share: share <= _COARSE, share := _share_left(f)):
            warnings.warn(
                f"gp {name!r}: a grid with steps of {np.asarray(_step(f))} leaves {share:.0%} of the variance of its "
                "kernel open between the points: make it finer, dgp.Grid.around(X, lengthscale) takes two points "
                "per lengthscale",
                stacklevel=4,
            )


def _share_left(f: RingFeatures) -> Array:
    """The share of the variance halfway between two grid points that is left given the values at the grid points."""
    # var[f(x) | u] / k(0), x a half step from z
    return f.conditional_variance((f.ring.origin + 0.5 * _step(f))[None])[0] / f.variance


def _step(f: RingFeatures) -> Array:
    return f.ring.length / jnp.asarray(f.ring.sizes, f.ring.dtype)
