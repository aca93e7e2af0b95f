r"""Functions represented by values on a regular grid that closes to a ring; made by ``dgp.Grid``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expected, is_concrete, kept, violated
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.random_function import Moments
from numpyro_dgp.functions.weights import Weights, matvec
from numpyro_dgp.kernels.per_output import Kernels
from numpyro_dgp.means import Mean
from numpyro_dgp.rings.circulant import CirculantMatrix, hartley, split
from numpyro_dgp.rings.features import NUGGET, RingFeatures, random_waves
from numpyro_dgp.rings.ring_beliefs import RingBelief, require_room
from numpyro_dgp.rings.spectra import Ring
from numpyro_dgp.rings.windows import Window

__all__ = ["Component", "RingFunction", "covariance_on_grid"]


@pytree
class Component:
    """A component of an additive kernel.

    Args:
        dims: the columns it acts on.
        features: its features on the grid of these columns: one for all outputs, or one per output.
    """

    dims: tuple[int, ...] = static()
    features: tuple[RingFeatures, ...]

    def columns(self, x: Array) -> Array:
        """The columns of inputs (..., D) that it acts on."""
        return x[..., list(self.dims)]


def covariance_on_grid(parts: tuple[Component, ...]) -> CirculantMatrix:
    """The covariance of the values on the grid, block by block: eigenvalues (M,), or (P, M) where outputs differ."""
    spectrum = jnp.concatenate([jnp.stack([f.spectrum for f in part.features]) for part in parts], -1)
    sizes = tuple(part.features[0].ring.sizes for part in parts)
    return CirculantMatrix(spectrum[0] if len(spectrum) == 1 else spectrum, sizes)


@pytree
class RingFunction(InducedFunction):
    """A function represented by whitened values on a ring; made by ``dgp.gp``.

    Args:
        kernels: one kernel, or one per output.
        ring: the grid, mostly a ``dgp.Grid``.
        parts: the components of the kernel, each with its features.
        v: the weights: known, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of the whitened values.
        neighbours: grid points around an input that its value is computed from, per dimension; ``None`` for all.
        nugget: variance of noise on the values on the grid, relative to the kernel's.
    """

    kernels: Kernels
    ring: Ring
    parts: tuple[Component, ...]
    v: Weights
    outputs: int | None = static()
    mean: Mean
    site: str | None = static(default=None)
    neighbours: tuple[int, ...] | None = static(default=None)
    nugget: float = static(default=NUGGET)

    @property
    def size(self) -> int:
        return sum(part.features[0].spectrum.shape[-1] for part in self.parts)

    @property
    def dims(self) -> int:
        return len(self.ring.sizes)

    @property
    def inducing_inputs(self) -> Array:
        """The grid points (M, D); for an additive kernel the points of the full grid."""
        return self.ring.points()

    def prior_covariance(self) -> CirculantMatrix:
        """The covariance of the values on the grid, nugget included, (M,) or (P, M) eigenvalues."""
        return covariance_on_grid(self.parts)

    def values_on_grid(self) -> Array:
        """The mean of the values u on the grid, (P, M) or (M,), one component after the other."""
        prior = self.prior_covariance()
        return hartley(jnp.sqrt(prior.spectrum) * self.v.loc, prior.blocks)  # u = H Lambda^1/2 v

    def checked(self, x: ArrayLike, noise: ArrayLike | None = None) -> Array:
        given, x = x, super().checked(x, noise)
        known = given if is_concrete(given) else x  # an array that a traced program makes of it is not
        if violated(_is_between, known, self.ring.low, self.ring.high):
            low, high = np.asarray(self.ring.low), np.asarray(self.ring.high)
            outside = ~_is_between(np.asarray(known), low, high)
            raise expected(
                f"inputs on the ring, from {low} to {high}",
                f"{int(outside.sum())} outside, for example {np.asarray(known)[outside][0]}",
                "make the Grid longer, dgp.Grid.around(X, lengthscale)",
                at="f(x)",
            )
        return kept(_is_between, x, self.ring.low, self.ring.high)

    def moments(self, rows: Array) -> Moments:
        v = self.v
        near = v if isinstance(v, RingBelief) and v.is_local else None
        if self.neighbours is None or v.whole is not None or not (v.known or near is not None):
            return super().moments(rows)
        windows = self._windows(rows)
        loc = self._near(windows, self.by_output(v.loc))
        conditional: Any = sum(w.conditional_variance() for w in windows)
        belief_variance = None if near is None else near.feature_variance_near(windows)
        return loc, jnp.broadcast_to(conditional.T, loc.shape), belief_variance, None

    def _windows(self, rows: Array) -> tuple[Window, ...]:
        """The windows of grid points around rows (N, D), on each of the rings."""

        def window(part: Component) -> Window:
            near: Any = self.neighbours
            features = part.features if self.outputs_differ else part.features[:1]
            kernels = tuple(f.kernel for f in features)
            few = tuple(near[d] for d in part.dims)
            return Window.of(kernels, features[0].ring, few, part.columns(rows), self.nugget)

        return tuple(map(window, self.parts))

    def _near(self, windows: tuple[Window, ...], v: Array) -> Array:
        """A v for whitened values (P, M), from neighbours: (N, P)."""
        blocks = tuple(w.ring.sizes for w in windows)
        # A v = alpha(x)' H v, with alpha(x) = C^-1/2 k(Z, x).
        at_sites = split(hartley(v, blocks), blocks)
        values: Any = sum((w.weights(0.0) * w.take(s)).sum(-1) for w, s in zip(windows, at_sites, strict=True))
        return values.T

    def means_at(self, x: ArrayLike) -> Callable[[Array], Array]:
        """The linear map from whitened values (P, M) to the function at x (N, D), less its mean: (N, P)."""
        rows = self.checked(x)
        if self.neighbours is None:
            A = self.features(rows)
            return lambda v: matvec(v, A)
        windows = self._windows(rows)
        return lambda v: self._near(windows, v)

    def features(self, rows: Array) -> Array:
        if self.neighbours is not None:
            require_room("values that depend on all grid points", len(rows), self.size)
        return jnp.concatenate(
            [self._stack(f.whitened(part.columns(rows)) for f in part.features) for part in self.parts], -1
        )

    def _stack(self, values: Any) -> Array:
        """(P, ...) where outputs differ, without the first axis where they share a kernel."""
        found = list(values)
        return jnp.stack(found) if self.outputs_differ else found[0]

    def prior_variance(self, rows: Array) -> Array:
        # k(0) of all components
        total: Any = sum(self._stack(f.variance for f in part.features) for part in self.parts)
        return jnp.broadcast_to(total[..., None], (*total.shape, len(rows)))

    def conditional_variance(self, rows: Array, A: Array) -> Array:
        parts: Any = (
            self._stack(f.conditional_variance(part.columns(rows)) for f in part.features) for part in self.parts
        )
        return sum(parts)

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        def between(part: Component) -> Array:
            columns = part.columns(x), None if y is None else part.columns(y)
            return jnp.stack([f.covariance(*columns) for f in part.features], -3)

        return sum(map(between, self.parts))  # type: ignore[return-value]

    def held(self) -> RingFunction:
        return dataclasses.replace(self, parts=jax.lax.stop_gradient(self.parts))

    def prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        at_rows: Any = 0
        whitened = []
        for i, part in enumerate(self.parts):
            part_key, features = jax.random.fold_in(key, i), part.features
            x, Z = part.columns(rows), features[0].ring.points()
            values, at_grid = [], []
            for f in features:
                waves = random_waves(f.kernel, part_key, f.ring, weights.shape[-1])
                # f(x), and the values of the same waves on the grid; v = Lambda^-1/2 H u.
                values.append(sum(wave(x) for wave in waves))
                at_grid.append(sum(wave.observed()(Z) for wave in waves))
            at_rows = at_rows + matvec(weights, self._stack(values))
            spectrum = jnp.stack([f.spectrum for f in features])
            on_grid = matvec(weights, self._stack(at_grid)).T
            # u has the noise of the nugget, which f(x) does not have.
            sd = jnp.sqrt(self.nugget * jnp.stack([f.variance for f in features]))[:, None]
            noise_key = jax.random.fold_in(key, len(self.parts) + i)
            on_grid = on_grid + sd * jax.random.normal(noise_key, on_grid.shape, on_grid.dtype)
            whitened.append(hartley(on_grid, (features[0].ring.sizes,)) / jnp.sqrt(spectrum))
        return at_rows, jnp.concatenate(whitened, -1)


def _is_between(x: Any, low: Any, high: Any) -> Any:
    return (x >= low) & (x <= high)
