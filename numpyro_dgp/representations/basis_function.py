"""Functions that are finite sums of known functions with independent weights; ``dgp.Basis`` makes them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from numpyro_dgp._checks import violated
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.algebra.belief_moments import ROWS
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.per_output import Kernels
from numpyro_dgp.means import Mean
from numpyro_dgp.model.beliefs import Belief, FunctionDraw
from numpyro_dgp.model.induced_function import InducedFunction
from numpyro_dgp.model.random_function import Moments
from numpyro_dgp.representations.sines import Box, KernelSeries

__all__ = ["BasisFunction"]


@pytree
class BasisFunction(InducedFunction):
    """A sum of known functions with weights v; ``dgp.gp`` makes it.

    Args:
        kernels: one kernel, or one per output.
        box: where its sines live, mostly a ``representations.basis.Basis``.
        series: the functions, for all outputs or for each.
        u: the value at the site of v: an array, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of the weights.
    """

    kernels: Kernels
    box: Box
    series: tuple[KernelSeries, ...]
    u: Array | Belief | FunctionDraw
    outputs: int | None = static()
    mean: Mean
    site: str | None = static(default=None)

    @property
    def size(self) -> int:
        return self.series[0].size

    @property
    def dims(self) -> int:
        return len(self.box.sizes)

    @property
    def dense(self) -> bool:
        return True

    @property
    def determined(self) -> bool:
        return True

    def checked(self, x: ArrayLike, noise: ArrayLike | None = None) -> Array:
        x = super().checked(x, noise)
        columns = sorted({column for series in self.series for column in series.bounded})
        low, high = (end[np.array(columns, int)] for end in self.box.ends())
        inputs = x[..., columns]
        if violated(_is_between, inputs, low, high):
            outside = ~_is_between(np.asarray(inputs), np.asarray(low), np.asarray(high))
            warnings.warn(
                f"f(x): {int(outside.sum())} of {outside.size} inputs of layer {self.site!r}, for example "
                f"{np.asarray(inputs)[outside][0]}, are outside of its Basis, from {low} to {high}, where the function "
                "is its mean: make it longer, dgp.Basis.around(X, lengthscale)",
                stacklevel=3,
            )
        return x

    def features(self, rows: Array) -> Array:
        found = [series(rows) for series in self.series]
        return checkpoint_name(found[0] if isinstance(self.kernels, Kernel) else jnp.stack(found), ROWS)

    def block_moments(self, rows: Array) -> Callable[[Array], Moments]:
        """With a draw of the weights these are multiplied by their standard deviations, and not the sines."""
        if isinstance(self.u, Belief):
            return super().block_moments(rows)
        v = self.by_output(self.u.u if isinstance(self.u, FunctionDraw) else self.u)

        def moments(rows: Array) -> Moments:
            if isinstance(self.kernels, Kernel):
                loc = self.series[0].summed(rows, v)
            else:
                loc = jnp.concatenate([s.summed(rows, w[None]) for s, w in zip(self.series, v, strict=True)], -1)
            return loc, jnp.zeros_like(loc), None, None

        return moments

    def prior_variance(self, rows: Array) -> Array:
        return jnp.square(self.features(rows)).sum(-1)

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        def by_batch(x: Array) -> Array:
            found = self.features(x.reshape(-1, x.shape[-1]))
            return jnp.moveaxis(found.reshape(-1, *x.shape[:-1], self.size), 0, -3)

        A = by_batch(x)
        return matmul(A, (A if y is None else by_batch(y)).mT)

    def held(self) -> BasisFunction:
        kernels, series = jax.lax.stop_gradient((self.kernels, self.series))
        return dataclasses.replace(self, kernels=kernels, series=series)

    def whitened_values_of(self, other: InducedFunction) -> tuple[Array, Array]:
        r"""The weights of the same sines in an earlier fit: :math:`v_j` times the ratio of standard deviations."""
        if not isinstance(other, BasisFunction) or not isinstance(self.u, Array | Belief):
            return super().whitened_values_of(other)
        same = bool(jax.tree.structure(self.series) == jax.tree.structure(other.series))  # type: ignore[operator]
        if not same or jax.tree.leaves((self.mean, other.mean)):
            raise ValueError(
                f"gp {self.site!r}: expected a Basis and a kernel as in the earlier fit, whose weights dgp.update "
                f"compares with those of now, and a mean function without numbers, got "
                f"{'others' if not same else type(self.mean).__name__}: keep them as they are, with dgp.means.Zero() "
                "or dgp.means.Identity(), or give the layer dgp.Points(Z)"
            )
        pairs = zip(self.series, other.series, strict=True)
        ratios = jnp.stack([ours.deviations(self.site) / theirs.deviations(self.site) for ours, theirs in pairs])
        known = ratios * self.by_output(self.u.loc if isinstance(self.u, Belief) else self.u)
        slope = ratios[:, :, None] * jnp.eye(self.size, dtype=ratios.dtype)
        if isinstance(self.u, Belief):
            return known, self.u.spread_covariance(slope)
        return known, jnp.zeros_like(slope)


def _is_between(x: Any, low: Any, high: Any) -> Any:
    return (x >= low) & (x <= high)
