"""``PointsAndSlopes``: a function is represented by values and by slopes at inducing inputs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_dgp._checks import expect, expected, require_finite, violated
from numpyro_dgp._data import as_floats, as_numbers, own_numbers
from numpyro_dgp._fields import Checked, flag
from numpyro_dgp._numpyro import plates_around
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.functions.functionals import DirectionalSlope, smoothness
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.points import whiten_columns
from numpyro_dgp.functions.weights import InducingPrior, Weights, matvec, whitened_values
from numpyro_dgp.kernels.per_output import Kernels, covariances, cross_covariance, every, features, gram, variances
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.math.whitening import inverse_cholesky
from numpyro_dgp.means import Mean

__all__ = ["PointsAndSlopes", "SlopedFunction"]

_SLOPE = DirectionalSlope()


@pytree
class PointsAndSlopes(Checked):
    r"""Inducing values and slopes: a function is represented by :math:`f(z_m)` and :math:`e_s^\top \nabla f(t_s)`.

    A slope is as informative as a second value next to the first, without two nearly equal inducing inputs. It
    suits layers whose slopes are observed, functions that are wanted together with their gradient, and few inducing
    inputs in places where the function is steep. The layer's site holds the whitened values v of both, with
    :math:`u = D L v`, where D are the prior standard deviations of values and slopes, and :math:`L L^\top` are their
    correlations: neither the units of a column nor the length of a direction matter.

    Args:
        Z: inputs of the values (M, D), or ``None`` for slopes alone.
        at: inputs of the slopes (S, D), t.
        directions: e, one for each slope (S, D), or the same for all (D,); may be left out where D = 1.
        learn: make ``Z``, ``at`` and ``directions`` parameters, ``"<name>_Z"``, ``"<name>_at"`` and
            ``"<name>_directions"``, optimised with everything else.

    Raises:
        ValueError: arrays of other shapes, NaN or infinite entries, a direction of length zero; where the layer is
            opened, a kernel whose functions have no slopes, and a plate of groups.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro_dgp as dgp
        >>> Z = jnp.array([[0.0, 0.0], [1.0, 1.0]])
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.functions.PointsAndSlopes.with_gradients(Z))
        >>> f(Z).batch_shape, f.v.loc.shape  # two values, and two slopes at each
        ((2,), (6,))
        >>> bool(f.grad(Z, 0).variance.max() < 1e-5)  # which determine them
        True

    Source: Padidar et al. (2021), section 3.
    """

    Z: ArrayLike | None
    at: ArrayLike
    directions: ArrayLike | None = None
    learn: bool = flag(static=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("Z", self.Z), ("at", self.at), ("directions", self.directions)):
            if values is not None:
                object.__setattr__(self, name, values := own_numbers(name, values))
                require_finite(name, values, "build them from clean data")
        shapes = {name: np.shape(values) for name, values in (("Z", self.Z), ("at", self.at)) if values is not None}
        expect(
            not any(len(shape) != 2 or 0 in shape for shape in shapes.values())
            and len({s[1] for s in shapes.values()}) <= 1,
            "Z (M, D) of values and at (S, D) of slopes with the same columns",
            f"shapes {shapes}",
            "for one column write Z[:, None]; Z=None for slopes alone, dgp.Points(Z) for values alone",
        )
        S, D = shapes["at"]
        e = np.ones((S, 1)) if self.directions is None and D == 1 else self.directions
        if e is None or np.shape(e) not in ((D,), (S, D)):
            raise expected(
                f"directions of shape ({S}, {D}), one for each slope, or ({D},) for all",
                None if e is None else np.shape(e),
                "all slopes at Z are dgp.functions.PointsAndSlopes.with_gradients(Z)",
            )
        object.__setattr__(self, "directions", e)
        expect(not violated(lambda e: (e != 0).any(-1), e), "nonzero directions", "a row of zeros", "leave it out")

    @classmethod
    def with_gradients(cls, Z: ArrayLike, *, learn: bool = False) -> PointsAndSlopes:
        """The value and all D slopes at every row of Z (M, D): M (D + 1) numbers for each output.

        With ``learn=True`` the slopes begin there, along the columns, and may leave the values.

        Raises:
            ValueError: as for the class.

        Example:
            >>> import numpy as np
            >>> PointsAndSlopes.with_gradients(np.zeros((5, 3))).at.shape
            (15, 3)
        """
        Z = as_numbers("Z", Z)
        expect(np.ndim(Z) == 2, "inputs Z of shape (M, D)", np.shape(Z), "for one column write Z[:, None]")
        M, D = np.shape(Z)
        # Slopes along e_1, ..., e_D at z_1, then at z_2, ...
        return cls(Z, jnp.repeat(jnp.asarray(Z), D, 0), jnp.tile(jnp.eye(D), (M, 1)), learn)

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> SlopedFunction:
        """Open the sites of layer ``name`` and return its random function."""
        if plates_around():
            raise expected(
                "dgp.functions.PointsAndSlopes outside of plates",
                f"plate {plates_around()[0].name!r}",
                "a function for each of its members has dgp.Points(Z)",
            )
        for kernel in every(kernels):
            least = smoothness(kernel, None)
            if least.derivatives < 1:
                raise expected(
                    "a kernel whose functions have slopes for dgp.functions.PointsAndSlopes",
                    f"{least.part}, whose functions have none",
                    "Matern32, Matern52 and RBF have some, and dgp.Points(Z) needs none",
                )
        at = as_floats("inputs of slopes", self.at)
        Z = at[:0] if self.Z is None else as_floats("inducing inputs", self.Z)
        e = jnp.broadcast_to(jnp.asarray(self.directions, at.dtype), at.shape)
        if self.learn:
            Z = Z if self.Z is None else numpyro.param(f"{name}_Z", Z)
            at, e = numpyro.param(f"{name}_at", at), numpyro.param(f"{name}_directions", e)
        slopes = jnp.concatenate([at, e], -1)
        whiten = _whiten(kernels, Z, slopes)
        M = whiten.shape[-1]
        prior = InducingPrior((M,) if outputs is None else (outputs, M), whiten.dtype)
        v, site = whitened_values(name, prior)
        return SlopedFunction(kernels, Z, slopes, whiten, v, outputs, mean, site)


@pytree
class SlopedFunction(InducedFunction):
    """A function represented by whitened values and slopes at inducing inputs; made by ``dgp.gp``.

    Args:
        kernels: one kernel, or one per output.
        Z: inputs of the values (M, D).
        slopes: inputs and directions of the slopes (S, 2 D).
        whiten: from values and slopes to v, (M + S, M + S), or (P, M + S, M + S) where kernels differ.
        v: the weights: known, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of v.
    """

    kernels: Kernels
    Z: Array
    slopes: Array
    whiten: Array
    v: Weights
    outputs: int | None = static()
    mean: Mean
    site: str | None = static(default=None)

    @property
    def size(self) -> int:
        return self.whiten.shape[-1]

    @property
    def dims(self) -> int:
        return self.Z.shape[-1]

    @property
    def dense(self) -> bool:
        return True

    def features(self, rows: Array) -> Array:
        whiten = self.whiten.astype(jnp.result_type(rows, self.whiten))
        # A = Cov[f(x), u] W', with u the values and slopes, v = W u.
        return matmul(_with_inducing(self.kernels, rows, self.Z, self.slopes).astype(whiten.dtype), whiten.mT)

    def prior_variance(self, rows: Array) -> Array:
        return variances(self.kernels, rows)

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        return covariances(self.kernels, x, y)

    def held(self) -> SlopedFunction:
        kernels, Z, slopes, whiten = jax.lax.stop_gradient((self.kernels, self.Z, self.slopes, self.whiten))
        return dataclasses.replace(self, kernels=kernels, Z=Z, slopes=slopes, whiten=whiten)

    def prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        def values(x: Array) -> Array:
            return matvec(weights, features(self.kernels, key, x, weights.shape[-1]))

        # u of the same random functions: their values at Z, and their slopes.
        known = jnp.concatenate([values(self.Z), _SLOPE(values, self.slopes)])
        return values(rows), whiten_columns(self.whiten, known)


def _with_slopes(kernels: Kernels, x: Array, slopes: Array) -> Array:
    """Covariances of values at x (N, D) with slopes (S, 2 D): (N, S) where shared, else (P, N, S)."""
    return _SLOPE(lambda t: cross_covariance(kernels, x, t).mT, slopes).mT  # e' grad_t k(x, t)


def _with_inducing(kernels: Kernels, x: Array, Z: Array, slopes: Array) -> Array:
    """Covariances of values at x (N, D) with inducing values and slopes: (N, M + S), or (P, N, M + S)."""
    return jnp.concatenate([cross_covariance(kernels, x, Z), _with_slopes(kernels, x, slopes)], -1)


def _whiten(kernels: Kernels, Z: Array, slopes: Array) -> Array:
    """The inverse Cholesky factor of the covariance of values and slopes, with jitter relative to each of them."""
    # K = [Cov[f, f] Cov[f, s]; Cov[s, f] Cov[s, s]], f the values at Z, s the slopes.
    values = jnp.concatenate([gram(kernels, Z), _with_slopes(kernels, Z, slopes)], -1)
    K = jnp.concatenate([values, _SLOPE(lambda x: _with_inducing(kernels, x, Z, slopes), slopes)], -2)
    # K = D L L' D: L factorises the correlations, and W = L^-1 D^-1.
    variance = jnp.diagonal(K, axis1=-2, axis2=-1)
    scale = jnp.sqrt(jnp.where(variance > 0, variance, 1))  # D, one where nothing varies
    correlation = K / (scale[..., :, None] * scale[..., None, :])
    return inverse_cholesky(correlation, "inducing values and slopes") / scale[..., None, :]
