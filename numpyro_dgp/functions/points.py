"""``Points``: a function is represented by its values at inducing inputs.

Parameters of layers for their inducing inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_dgp._checks import expect, expected, require_finite, require_squares
from numpyro_dgp._data import as_floats, own_numbers
from numpyro_dgp._fields import Checked, flag
from numpyro_dgp._numpyro import plates_around
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.functions.groups import GroupedFunction, open_in_plate
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.random_function import Moments, PointValues
from numpyro_dgp.functions.weights import InducingPrior, Weights, matvec, whitened_values
from numpyro_dgp.kernels.per_output import (
    Kernels,
    covariances,
    cross_covariance,
    every,
    features,
    gram,
    shared,
    variances,
)
from numpyro_dgp.math.belief_moments import belief_moments
from numpyro_dgp.math.linalg import jitter, matmul, nugget, rows_times
from numpyro_dgp.math.whitening import inverse_cholesky, relative_change, residual_variance
from numpyro_dgp.means import Mean, ZeroMean

__all__ = ["Points", "SparseFunction", "learned_inputs", "whiten_columns"]


def learned_inputs(name: str, Z: Array) -> Array:
    """The inducing inputs of layer ``name`` as the parameter ``"<name>_Z"``, which starts at ``Z``."""
    found: Array = numpyro.param(f"{name}_Z", Z, of_layer=name)
    return found


@pytree
class Points(Checked):
    r"""Inducing points: a function is represented by its values at ``Z``.

    The layer's site holds the whitened values v, with :math:`f(Z) - m(Z) = L v` and
    :math:`L L^\top = k(Z, Z)`.

    Args:
        Z: inducing inputs (M, D) in the units of the layer's inputs, or (P, M, D) for separate ones per
            output.
        learn: make ``Z`` a ``numpyro.param`` called ``"<name>_Z"``, optimised with everything else.

    Raises:
        ValueError: ``Z`` has another shape, or NaN or infinite entries; with ``learn``, a site of the program that is
            called ``"<name>_Z"`` too.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp import Points
        >>> Points(np.linspace(-2, 2, 10)[:, None], learn=True).Z.shape
        (10, 1)

    Source: Salimbeni (2020), section 1.2.
    """

    Z: ArrayLike
    learn: bool = flag(static=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "Z", own_numbers("inducing inputs Z", self.Z))
        expect(
            np.ndim(self.Z) in (2, 3) and 0 not in np.shape(self.Z),
            "Z of shape (M, D), or (P, M, D) for separate inputs per output",
            np.shape(self.Z),
            "for one input column write Z[:, None]",
        )
        require_finite("inducing inputs Z", self.Z, "build them from clean data, e.g. dgp.initial.kmeans(X, M)")
        require_squares("inducing inputs Z", self.Z)

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> SparseFunction | GroupedFunction:
        """Open the sites of layer ``name`` and return its random function; in a plate, one for each of its groups."""
        Z = as_floats("inducing inputs Z", self.Z)
        plates = plates_around()
        in_groups = len(plates) == 1
        expect(
            in_groups or Z.ndim != 3 or Z.shape[0] == (outputs or 1),
            f"separate inducing inputs Z (P, M, D) with P = outputs = {outputs}",
            Z.shape,
            "or share one Z of shape (M, D)",
            at=f"gp {name!r}",
        )
        if self.learn:
            Z = learned_inputs(name, Z)
        if in_groups:
            return open_in_plate(name, plates[0], kernels, Z, outputs, mean)
        whiten = inverse_cholesky(gram(kernels, Z), f"k(Z, Z) of gp {name!r}")
        shape = (Z.shape[-2],) if outputs is None else (outputs, Z.shape[-2])
        v, site = whitened_values(name, InducingPrior(shape, Z.dtype))
        return SparseFunction(kernels, Z, whiten, v, outputs, mean, site)


def whiten_columns(whiten: Array, values: Array) -> Array:
    """Whitened values (P, M) of values (M, P) at the inducing inputs."""
    return matmul(whiten, values.T[..., None])[..., 0]


@pytree
class SparseFunction(InducedFunction):
    """A function represented by whitened values at inducing inputs; made by ``dgp.gp``.

    Args:
        kernels: one kernel, or one per output.
        Z: inducing inputs (M, D) or (P, M, D).
        whiten: :math:`L^{-1}`, the inverse Cholesky factor of k(Z, Z), (M, M) or (P, M, M).
        v: the weights: known, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of the whitened values; ``None`` where there is none.
    """

    kernels: Kernels
    Z: Array
    whiten: Array
    v: Weights
    outputs: int | None = static()
    mean: Mean
    site: str | None = static(default=None)

    @property
    def size(self) -> int:
        return self.Z.shape[-2]

    @property
    def dims(self) -> int:
        return self.Z.shape[-1]

    @property
    def inducing_inputs(self) -> Array:
        return self.Z

    @property
    def outputs_differ(self) -> bool:
        return isinstance(self.kernels, tuple) or self.Z.ndim == 3

    def at_points(self, output: int | None) -> PointValues:
        kernel = self.kernels[output or 0] if isinstance(self.kernels, tuple) else self.kernels
        Z, whiten = (a if output is None or a.ndim == 2 else a[output] for a in (self.Z, self.whiten))
        return PointValues(kernel, Z, whiten)

    def features(self, rows: Array) -> Array:
        """A = k(x, Z) L^{-T}."""
        dtype = jnp.result_type(rows, self.whiten)
        cross = cross_covariance(self.kernels, rows, self.Z).astype(dtype)
        whiten = self.whiten.astype(dtype)
        return rows_times(cross, whiten.T) if cross.ndim == whiten.ndim == 2 else matmul(cross, whiten.mT)

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        return covariances(self.kernels, x, y)

    def held(self) -> SparseFunction:
        stopped = jax.lax.stop_gradient((self.kernels, self.Z, self.whiten))
        return dataclasses.replace(self, kernels=stopped[0], Z=stopped[1], whiten=stopped[2])

    def prior_variance(self, rows: Array) -> Array:
        return variances(self.kernels, rows)

    def block_moments(self, rows: Array) -> Callable[[Array], Moments]:
        v, M = self.v, self.size
        if v.dense_root is None or self.whiten.ndim == 3:
            return super().block_moments(rows)
        change = relative_change(gram(self.kernels, self.Z), self.whiten)  # zeros E, dL^-1 = dE L^-1
        factors = v.dense_root.reshape(-1, M, M)
        arrays = change, jax.lax.stop_gradient(self.whiten), self.by_output(v.loc), factors
        dtype = jnp.result_type(rows, *arrays)
        from_cross = belief_moments(len(rows), *(a.astype(dtype) for a in arrays))

        def moments(rows: Array) -> Moments:
            cross, k = cross_covariance(self.kernels, rows, self.Z), variances(self.kernels, rows)[:, None]
            loc, explained, gain = from_cross(cross.astype(dtype))  # a'm, a'a and a' (Sigma - I) a
            conditional = residual_variance(k, explained[:, None], M)
            belief_variance = jnp.maximum(gain + explained[:, None], 0)  # a' Sigma a
            # k - a'a + a' Sigma a = k + gain, without the a'a that cancels
            return loc, jnp.broadcast_to(conditional, loc.shape), belief_variance, k + gain

        return moments

    def moments(self, rows: Array) -> Moments:
        loc, conditional, belief_variance, total = super().moments(rows)
        if total is not None:
            # Computed here, because in a block it would be computed again for the derivative.
            least = jitter(total.dtype, self.size) * variances(self.kernels, rows)
            total = jnp.maximum(total, least[:, None])
        return loc, conditional, belief_variance, total

    def prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        def values(x: Array) -> Array:
            return matvec(weights, features(self.kernels, key, x, weights.shape[-1]))

        return values(rows), whiten_columns(self.whiten, values(self.Z))  # g(x), and v_g = L^-1 g(Z)

    def summands(self) -> tuple[SparseFunction, ...]:
        r"""The independent functions whose sum is this one, less its mean, where its kernel is :math:`\sum_i k_i`.

        .. math:: p(f_i(x) \mid v) = N\bigl(A_i v,\; k_i(x, x) - A_i A_i^\top\bigr), \qquad A_i = k_i(x, Z) L^{-\top}

        so that in a fit each has the posterior that the fit of the sum gives it, on which the others depend: variances
        of the parts are larger than that of the sum where data decide on the sum only. The kernel is a sum as it is
        written, ``k1 + k2``; a product is one summand. With ``posterior.layers``, given a draw of the hyperparameters:

        ``f, inputs = posterior.layers(key, X)["y"]; trend, season = f.summands(); trend(X).variance``

        Returns:
            Functions to call on inputs, in the order of the kernels; their mean functions are zero.

        Raises:
            ValueError: a draw of the whole function; kernels of the outputs with different numbers of summands.

        Example:
            >>> import jax.numpy as jnp
            >>> import numpyro_dgp as dgp
            >>> x, k = jnp.linspace(0.0, 3.0, 5)[:, None], dgp.kernels
            >>> f = dgp.gp("f", k.RBF(1.0, 2.0) + k.Periodic(1.0, 1.0, 1.0), None).condition(x, jnp.sin(x[:, 0]))
            >>> trend, season = f.summands()
            >>> bool(jnp.allclose(trend(x).mean + season(x).mean, f(x).mean, atol=1e-3))
            True
        """
        expect(
            self.v.whole is None, "a posterior", f"a draw of {self.site!r}", "posterior.layers(key, X)", at="f.summands"
        )
        parts = [kernel.summands() for kernel in every(self.kernels)]
        if len({len(each) for each in parts}) > 1:
            raise expected(
                "kernels of all outputs with equally many summands",
                f"{[len(each) for each in parts]} in layer {self.site!r}",
                "add a kernel of a tiny variance",
                at="f.summands",
            )
        kernels: Sequence[Kernels] = parts[0] if shared(self.kernels) else list(zip(*parts, strict=True))
        return tuple(
            SummandFunction(k, self.Z, self.whiten, self.v, self.outputs, ZeroMean(), self.site) for k in kernels
        )

    def whitened_values_of(self, other: InducedFunction) -> tuple[Array, Array]:
        if not isinstance(other, SparseFunction) or self.v.whole is not None:
            return super().whitened_values_of(other)
        differ = self.outputs_differ or other.outputs_differ
        found = []
        for output in range(self.outputs or 1) if differ else (None,):
            # v' = L'^-1 (f(Z') - m'(Z')), f(Z') = m(Z') + k(Z', Z) L^-T v + N(0, Var[f(Z') | v]).
            ours, theirs = self.at_points(output), other.at_points(output)
            values = (self.mean_at(theirs.Z) - other.mean_at(theirs.Z)).reshape(len(theirs.Z), -1)
            means = values if output is None else values[:, output, None]
            found.append((*_whitened_values(ours, theirs), whiten_columns(theirs.whiten, means)))
        A, conditional, shift = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
        known = self.by_output(self.v.loc)
        belief_covariance = self.v.feature_covariance(A)
        # A m + shift, and C + A Sigma A'
        loc = matmul(A, known[..., None])[..., 0] + shift
        return loc, conditional if belief_covariance is None else conditional + belief_covariance


@pytree
class SummandFunction(SparseFunction):
    """One of the functions that a function with a sum of kernels is the sum of, given the values of the sum.

    Its kernel is its own, L and v are those of the sum.
    """

    def block_moments(self, rows: Array) -> Callable[[Array], Moments]:
        return InducedFunction.block_moments(self, rows)  # no derivative of L by this kernel

    def prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        raise expected("inputs at which parts are called or joint", "a draw of a whole function", at="f.summands")


def _whitened_values(ours: PointValues, theirs: PointValues) -> tuple[Array, Array]:
    r"""Whitened values at other points given ours: the slope (1, M', M) and the covariance (1, M', M').

    The jitter of k(Z, Z) is the variance of independent noise on the inducing values. Points in both sets have the
    same noise: where all are, the slope is the identity and the covariance is zero.
    """
    K, noise = ours.kernel.gram(theirs.Z), nugget(ours.kernel.gram(ours.Z))
    # Cov[u', u] = k(Z', Z) + e [z' = z], Cov[u', u'] = k(Z', Z') + e I
    cross = ours.kernel(theirs.Z, ours.Z) + noise * _same_rows(theirs.Z, ours.Z)
    A = matmul(matmul(theirs.whiten, cross), ours.whiten.mT)  # L'^-1 Cov[u', u] L^-T
    # Cov[v', v']; given v it is C = Cov[v', v'] - A A'.
    prior = matmul(matmul(theirs.whiten, K + noise * jnp.eye(len(K), dtype=K.dtype)), theirs.whiten.mT)
    return A[None], (prior - matmul(A, A.mT))[None]


def _same_rows(X: Array, Y: Array) -> Array:
    """One where two rows are the same point (N, M): the first of several equal rows is the first of the others."""

    def equal(X: Array, Y: Array) -> Array:
        return (X[:, None] == Y).all(-1)

    # How many rows before each are equal to it: repeated rows are paired in their order.
    first, second = (jnp.tril(equal(rows, rows), -1).sum(-1) for rows in (X, Y))
    return (equal(X, Y) & (first[:, None] == second)).astype(X.dtype)
