r"""S2: functions represented by values on a regular grid that closes to a ring: ``Grid`` beside ``Points``.

The kernel is made periodic everywhere, so that the layer is a Gaussian process on a ring and its bound is a bound:
with the plain :math:`k(x, z)` and a circulant :math:`k(Z, Z)` the conditional variance becomes negative without limit.
Seen from the data it is the process on the line as long as the ring is six lengthscales longer than they reach.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.fft import next_fast_len

from numpyro_dgp._checks import is_concrete, require_finite, require_inputs, require_positive
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.beliefs import Belief, FunctionDraw, project, whitened_values
from numpyro_dgp.circulant import Circulant, hartley, split
from numpyro_dgp.induced import InducedFunction
from numpyro_dgp.inducing import Kernels
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.means import Mean
from numpyro_dgp.ring_beliefs import RingBelief, RingPrior
from numpyro_dgp.ring_features import RingFeatures, random_waves
from numpyro_dgp.ring_windows import Window
from numpyro_dgp.spectra import Ring, components

__all__ = ["Grid", "RingFunction"]

# What a component of an additive kernel acts on, with its features: one for all outputs, or one per output.
Component = tuple[tuple[int, ...], tuple[RingFeatures, ...]]


@pytree
class Grid(Ring):
    r"""A regular grid of inducing points on a ring: O(N M) per layer, no matrix of the grid and no factorisation.

    The layer's site holds M whitened values v in real Fourier (Hartley) coordinates, :math:`u = H \Lambda^{1/2} v`,
    where u are the values on the grid and :math:`\Lambda` the spectrum of the periodic kernel. They are
    those of the function without its parts above seventeen times (five times in two dimensions, three times in
    three) the highest frequency that the grid resolves; for smooth kernels there is no difference. The kernel itself is
    not approximated.

    A kernel on all D columns has ``size[0] * ... * size[D-1]`` values. An additive one, ``k0.on(0) + k1.on(1)``, has
    one ring per term, ``size[0] + size[1]`` values. Kernels must be stationary with a spectral density.

    Inputs outside of [low, high] raise an error where their values are known. In compiled programs, where they are
    not, they go round: x and x + (high - low) are the same point.

    Args:
        low: where the ring begins, units of the input; a number, or (D,).
        high: where it closes; a number, or (D,). :meth:`around` chooses both.
        size: grid points, an integer or one per dimension, D at most 3.
        neighbours: grid points around an input that its value is computed from, an integer or one per dimension;
            ``None`` for all. A step then costs O(N n + M log M) instead of O(N M), n being their number, and no array
            of N times M numbers is made; see :mod:`~numpyro_dgp.ring_windows`. ``dgp.rings.neighbours(kernel, grid)``
            says how many are enough. The rules ``Full``, ``Diagonal`` and ``ScaledProduct``, joint values and draws
            of functions look at all points nevertheless.

    Raises:
        ValueError: as :class:`~numpyro_dgp.spectra.Ring`; neighbours that are not integers from 2 on; where weights
            are known, fewer of them than the kernel reaches.

    Example:
        >>> import numpyro
        >>> import numpyro_dgp as dgp
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), Grid(-5.0, 5.0, 20))
        >>> f(jnp.zeros((7, 1))).batch_shape, f.u.shape
        ((7,), (20,))

    Source: seed 004, chapter 3, with the kernel periodic also in k(x, z); additive rings, its section 3.5.
    """

    neighbours: int | tuple[int, ...] | None = static(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbours is None:
            return
        D = len(self.sizes)
        found = (self.neighbours,) * D if isinstance(self.neighbours, int) else tuple(self.neighbours)
        if len(found) != D or not all(isinstance(n, int) and n >= 2 for n in found):
            raise ValueError(
                f"Grid: expected neighbours to be an integer from 2 on, or one per dimension, got {self.neighbours} "
                f"for {D} dimension(s): dgp.rings.neighbours(kernel, grid) chooses, None means all points"
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
        neighbours: int | tuple[int, ...] | None = None,
    ) -> Grid:
        """A ring around data: longer by ``margin`` lengthscales on either side, ``per_lengthscale`` points in each.

        Args:
            X: inputs (N, D).
            lengthscale: the smallest that is expected, units of the input; a number, or (D,).
            per_lengthscale: grid points per lengthscale; two leave an RBF a conditional variance of 1e-7.
            margin: lengthscales on either side.
            neighbours: of :class:`Grid`.

        Raises:
            ValueError: NaN or infinite inputs, more than three columns, numbers that are not positive.

        Example:
            >>> grid = Grid.around(np.array([[0.0], [4.0]]), 1.0)
            >>> print(grid.low, grid.high, grid.size)
            [-3.] [7.] (20,)
        """
        require_inputs("Grid.around", X)
        require_finite("inputs of Grid.around", X, "drop or impute the rows with missing values")
        for name, value in [("lengthscale", lengthscale), ("per_lengthscale", per_lengthscale), ("margin", margin)]:
            require_positive("Grid.around", name, value)
        X = np.asarray(X)
        scale = np.broadcast_to(np.asarray(lengthscale, X.dtype), X.shape[-1:])
        rows = X.reshape(-1, X.shape[-1])
        low, high = rows.min(0) - margin * scale, rows.max(0) + margin * scale
        wanted = np.ceil(per_lengthscale * (high - low) / scale - 1e-6)
        return cls(low, high, tuple(next_fast_len(max(int(m), 2), real=True) for m in wanted), neighbours)

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> RingFunction:
        """Open the site of layer ``name`` and return its random function."""
        parts = _components(name, kernels, self)
        K = _prior_covariance(parts)
        M = K.spectrum.shape[-1]
        prior = RingPrior((M,) if outputs is None else (outputs, M), K.spectrum, K.blocks)
        u = whitened_values(f"gp {name!r}", name, prior, "whitened values")
        return RingFunction(kernels, self, parts, u, outputs, mean)


def _prior_covariance(parts: tuple[Component, ...]) -> Circulant:
    spectrum = jnp.concatenate([jnp.stack([f.spectrum for f in features]) for _, features in parts], -1)
    return Circulant(spectrum[0] if len(spectrum) == 1 else spectrum, tuple(f[0].ring.sizes for _, f in parts))


def _components(name: str, kernels: Kernels, grid: Grid) -> tuple[Component, ...]:
    per_output = [components(k, len(grid.sizes)) for k in ((kernels,) if isinstance(kernels, Kernel) else kernels)]
    if any(set(found) != set(per_output[0]) for found in per_output):
        raise ValueError(
            f"gp {name!r}: expected kernels of all outputs to act on the same columns on a Grid, got "
            f"{[list(found) for found in per_output]}: open one layer per structure"
        )
    return tuple(
        (dims, tuple(RingFeatures.of(found[dims], grid.on(dims)) for found in per_output)) for dims in per_output[0]
    )


@dataclasses.dataclass(frozen=True, eq=False)
class RingFunction(InducedFunction):
    """A function represented by whitened values on a ring; ``dgp.gp`` makes it.

    Args:
        kernels: one kernel, or one per output.
        grid: the ring.
        parts: the components of the kernel, each with its features.
        u: what is known about the whitened values: an array, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
    """

    kernels: Kernels
    grid: Grid
    parts: tuple[Component, ...]
    u: Array | Belief | FunctionDraw
    outputs: int | None
    mean: Mean

    @property
    def size(self) -> int:
        return sum(features[0].spectrum.shape[-1] for _, features in self.parts)

    @property
    def dims(self) -> int:
        return len(self.grid.sizes)

    @property
    def Z(self) -> Array:
        """The grid points (M, D); for an additive kernel the points of the full grid."""
        return self.grid.points()

    def prior_covariance(self) -> Circulant:
        """The covariance of the values on the grid, nugget included, (M,) or (P, M) eigenvalues."""
        return _prior_covariance(self.parts)

    def values_on_grid(self) -> Array:
        """The mean of the values u on the grid, (P, M) or (M,), one component after the other."""
        v = self.u.loc if isinstance(self.u, Belief) else self.u.u if isinstance(self.u, FunctionDraw) else self.u
        prior = self.prior_covariance()
        return hartley(jnp.sqrt(prior.spectrum) * v, prior.blocks)

    def _inputs(self, x: ArrayLike, noise: ArrayLike | None) -> Array:
        x = super()._inputs(x, noise)
        if is_concrete(x, self.grid.low, self.grid.high):
            low, high = np.asarray(self.grid.low), np.asarray(self.grid.high)
            outside = (np.asarray(x) < low) | (np.asarray(x) > high)
            if outside.any():
                raise ValueError(
                    f"f(x): expected inputs on the ring, from {low} to {high}, got {int(outside.sum())} outside, for "
                    f"example {np.asarray(x)[outside][0]}: make the Grid longer, dgp.Grid.around(X, lengthscale)"
                )
        return x

    def _moments(self, rows: Array) -> tuple[Array, Array, Array | None]:
        u = self.u
        if self.grid.neighbours is None or isinstance(u, FunctionDraw):
            return super()._moments(rows)
        if isinstance(u, Belief) and not (isinstance(u, RingBelief) and u.is_local):
            return super()._moments(rows)
        windows = tuple(self._window(dims, features, rows) for dims, features in self.parts)
        v = self._rows(u.loc if isinstance(u, Belief) else u)
        blocks = tuple(w.ring.sizes for w in windows)
        at_sites = split(hartley(v, blocks), blocks)
        loc: Any = sum((w.weights(0.0) * w.take(s)).sum(-1) for w, s in zip(windows, at_sites, strict=True))
        conditional: Any = sum(w.conditional_variance() for w in windows)
        spread = u.spread_near(windows) if isinstance(u, RingBelief) else None
        return loc.T, jnp.broadcast_to(conditional, loc.shape).T, spread

    def _window(self, dims: tuple[int, ...], features: tuple[RingFeatures, ...], rows: Array) -> Window:
        near: Any = self.grid.neighbours
        shared = features[:1] if isinstance(self.kernels, Kernel) else features
        columns = list(dims)
        return Window.of(tuple(f.kernel for f in shared), shared[0].ring, tuple(near[d] for d in dims), rows[:, columns])

    def _whitened(self, rows: Array) -> Array:
        return jnp.concatenate(
            [self._stack(f.whitened(rows[:, list(dims)]) for f in fs) for dims, fs in self.parts], -1
        )

    def _stack(self, values: Any) -> Array:
        """(P, ...) where outputs differ, without the first axis where they share a kernel."""
        found = list(values)
        return found[0] if isinstance(self.kernels, Kernel) else jnp.stack(found)

    def _conditional_variance(self, rows: Array, A: Array) -> Array:
        parts: Any = (
            self._stack(f.conditional_variance(rows[:, list(dims)]) for f in features) for dims, features in self.parts
        )
        return sum(parts)

    def _covariances(self, x: Array, y: Array | None = None) -> Array:
        def part(dims: tuple[int, ...], features: tuple[RingFeatures, ...]) -> Array:
            columns = x[..., list(dims)], None if y is None else y[..., list(dims)]
            return jnp.stack([f.covariance(*columns) for f in features], -3)

        return sum(part(dims, features) for dims, features in self.parts)  # type: ignore[return-value]

    def _fixed(self) -> RingFunction:
        parts = tuple((dims, jax.lax.stop_gradient(features)) for dims, features in self.parts)
        return dataclasses.replace(self, parts=parts)

    def _prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        at_rows: Any = 0
        whitened = []
        for i, (dims, features) in enumerate(self.parts):
            part_key = jax.random.fold_in(key, i)
            x, Z = rows[:, list(dims)], features[0].ring.points()
            values, at_grid = [], []
            for f in features:
                waves = random_waves(f.kernel, part_key, f.ring, weights.shape[-1])
                values.append(sum(wave(x) for wave in waves))
                at_grid.append(sum(wave.observed()(Z) for wave in waves))
            at_rows = at_rows + project(weights, self._stack(values))
            spectrum = jnp.stack([f.spectrum for f in features])
            on_grid = project(weights, self._stack(at_grid)).T
            whitened.append(hartley(on_grid, (features[0].ring.sizes,)) / jnp.sqrt(spectrum))
        return at_rows, jnp.concatenate(whitened, -1)
