r"""Functions represented by values on a regular grid that closes to a ring; ``grids.Grid`` opens them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import is_concrete
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.per_output import Kernels
from numpyro_dgp.means import Mean
from numpyro_dgp.model.beliefs import Belief, FunctionDraw, project
from numpyro_dgp.model.random_function import InducedFunction, Moments
from numpyro_dgp.rings.circulant import Circulant, hartley, split
from numpyro_dgp.rings.features import RingFeatures, random_waves
from numpyro_dgp.rings.ring_beliefs import RingBelief
from numpyro_dgp.rings.windows import Window

if TYPE_CHECKING:
    from numpyro_dgp.representations.grid import Grid

__all__ = ["Component", "RingFunction", "covariance_on_grid"]

# What a component of an additive kernel acts on, with its features: one for all outputs, or one per output.
Component = tuple[tuple[int, ...], tuple[RingFeatures, ...]]


def covariance_on_grid(parts: tuple[Component, ...]) -> Circulant:
    """The covariance of the values on the grid, block by block: eigenvalues (M,), or (P, M) where outputs differ."""
    spectrum = jnp.concatenate([jnp.stack([f.spectrum for f in features]) for _, features in parts], -1)
    return Circulant(spectrum[0] if len(spectrum) == 1 else spectrum, tuple(f[0].ring.sizes for _, f in parts))


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
        return covariance_on_grid(self.parts)

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

    def _moments(self, rows: Array) -> Moments:
        u = self.u
        spreads_far = isinstance(u, Belief) and not (isinstance(u, RingBelief) and u.is_local)
        if self.grid.neighbours is None or isinstance(u, FunctionDraw) or spreads_far:
            return super()._moments(rows)
        windows = self._windows(rows)
        loc = self._near(windows, self._rows(u.loc if isinstance(u, Belief) else u))
        conditional: Any = sum(w.conditional_variance() for w in windows)
        spread = u.spread_near(windows) if isinstance(u, RingBelief) else None
        return loc, jnp.broadcast_to(conditional.T, loc.shape), spread, None

    def _windows(self, rows: Array) -> tuple[Window, ...]:
        """What rows (N, D) have to do with the neighbours on each of the rings."""

        def window(dims: tuple[int, ...], features: tuple[RingFeatures, ...]) -> Window:
            near: Any = self.grid.neighbours
            kernels = tuple(f.kernel for f in (features[:1] if isinstance(self.kernels, Kernel) else features))
            return Window.of(kernels, features[0].ring, tuple(near[d] for d in dims), rows[:, list(dims)])

        return tuple(window(dims, features) for dims, features in self.parts)

    def _near(self, windows: tuple[Window, ...], v: Array) -> Array:
        """A v for whitened values (P, M), from neighbours: (N, P)."""
        blocks = tuple(w.ring.sizes for w in windows)
        at_sites = split(hartley(v, blocks), blocks)
        values: Any = sum((w.weights(0.0) * w.take(s)).sum(-1) for w, s in zip(windows, at_sites, strict=True))
        return values.T

    def means_at(self, x: ArrayLike) -> Callable[[Array], Array]:
        """The linear map from whitened values (P, M) to the function at x (N, D), less its mean: (N, P)."""
        rows = self._inputs(x, None)
        if self.grid.neighbours is None:
            A = self._whitened(rows)
            return lambda v: project(v, A)
        windows = self._windows(rows)
        return lambda v: self._near(windows, v)

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
