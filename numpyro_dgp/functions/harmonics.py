r"""``Harmonics``: functions on the sphere, represented by spherical harmonics of low degree.

For a kernel of directions, :math:`k(x, x') = r(x) r(x') \sum_l a_l P_l(\hat x \cdot \hat x')`, the function is a sum of
independent parts, one for each degree l, and each part is a sum of :math:`N_l` spherical harmonics with independent
weights:

.. math:: f(x) = m(x) + r(x) \sum_l \sqrt{a_l}\, B_l(\hat x)\, v_l, \qquad v_l \sim N(0, I),
          \quad B_l(\hat x) B_l(\hat x')^\top = P_l(\hat x \cdot \hat x') .

The weights of some degrees are the inducing values; the other degrees are the conditional variance. No kernel matrix is
factorised.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import caller, expect, expect_kind, expected, is_concrete, require_count
from numpyro_dgp._fields import Checked, checked, count
from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.weights import InducingPrior, Weights, matvec, whitened_values
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.per_output import Kernels, by_kernel, covariances, every, variances
from numpyro_dgp.kernels.sphere import ZonalKernel
from numpyro_dgp.math.linalg import jitter, matmul
from numpyro_dgp.math.spherical_harmonics import degree_shares, harmonics, num_harmonics, zonal_polynomials
from numpyro_dgp.means import Mean

__all__ = ["HarmonicFunction", "Harmonics"]

_MOST = 2000
_BEYOND = 24  # degrees beyond those of v that draws of functions look at one by one
_NOTHING = 1e-10  # least share of a degree, at which sqrt(a_l) and log(a_l) have finite slopes
_NO_SHARE = 1e-6  # of the variance: degrees with less get a warning


def _degrees(name: str, degrees: Any) -> tuple[int, ...]:
    """Degrees in their order, of which an integer is the highest."""
    found = (*range(degrees + 1),) if isinstance(degrees, int) else degrees
    known = isinstance(found, tuple) and all(isinstance(n, int | np.integer) and n >= 0 for n in found)
    if not known or not found or len(set(found)) < len(found):
        what = f"{name} to be different integers from 0 on, or the highest of all"
        raise expected(what, repr(degrees), "degrees=6, or degrees=(0, 1, 2, 4, 6)")
    return tuple(sorted(map(int, found)))


@pytree
class Harmonics(Checked):
    r"""Spherical harmonics of low degree: O(N M) per layer, no inducing inputs and no factorisation.

    For kernels of directions: :class:`~numpyro_dgp.kernels.Zonal` and :class:`~numpyro_dgp.kernels.ArcCosine`, which
    add a bias to the D columns and look at the direction in D + 1 dimensions, and for places on the earth
    :class:`~numpyro_dgp.kernels.Chordal` and :class:`~numpyro_dgp.kernels.GreatCircle`. The layer's site has the
    whitened weights v of all harmonics of the degrees that are kept. All others make the conditional variance

    .. math:: \operatorname{var}[f(x) \mid v] = r(x)^2 \Bigl( \kappa(0) - \sum_{l\ \mathrm{kept}} a_l \Bigr),

    the same everywhere except for the factor r: harmonics resolve all places equally. There are many of
    them in many dimensions; :meth:`around` keeps the degrees that say most.

    Args:
        columns: D, of the inputs.
        degrees: the degrees that are kept, or the highest of all from 0 on. An arc-cosine kernel has no variance in
            odd degrees from 3 on (order 1), even from 2 on (order 0), or odd from 3 on (order 2).

    Raises:
        ValueError: numbers that are no degrees, more than 2000 harmonics of one degree; in ``dgp.gp``, a kernel that is
            not one of directions.

    Warns:
        UserWarning: in ``dgp.gp``, degrees in which a known kernel has no variance.

    Example:
        >>> import numpyro
        >>> import numpyro_dgp as dgp
        >>> import jax.numpy as jnp
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.ArcCosine(), dgp.Harmonics(columns=2, degrees=(0, 1, 2, 4, 6)))
        >>> f(jnp.zeros((7, 2))).batch_shape, f.v.loc.shape  # 1 + 3 + 5 + 9 + 13
        ((7,), (31,))

    Source: Dutordoir et al. (2020b), section 3.
    """

    columns: int = count(hint="columns=X.shape[-1]", static=True)
    degrees: tuple[int, ...] = checked(_degrees, static=True)

    @classmethod
    def around(cls, kernel: Kernel, columns: int, size: int) -> Harmonics:
        """The degrees with the most variance for each harmonic, as many as ``size`` harmonics allow.

        Args:
            kernel: a kernel of directions, with the shortest lengthscale that is expected.
            columns: the number of columns, D.
            size: the most harmonics.

        Raises:
            ValueError: another kernel, one whose hyperparameters are traced, or a size of which not even degree 0 can
                be kept.

        Example:
            >>> import numpyro_dgp as dgp
            >>> dgp.Harmonics.around(dgp.kernels.ArcCosine(), columns=2, size=40).degrees
            (0, 1, 2, 4, 6)
        """
        require_count("columns", columns, "X.shape[1]")
        require_count("size", size, "100")
        dims = _dims(kernel, columns)
        expect(
            is_concrete(kernel),
            "a kernel with known hyperparameters",
            "traced ones",
            "call it before the program is compiled, with the shortest lengthscale",
        )
        last, total = 0, num_harmonics(dims, 0)
        # Degrees 0 to L, at most four times as many harmonics as may be kept.
        while total + num_harmonics(dims, last + 1) <= 4 * size:
            last, total = last + 1, total + num_harmonics(dims, last + 1)
        dtype = jnp.result_type(float)
        shares = np.asarray(degree_shares(dims, last, kernel.cast(dtype).by_angle, dtype))
        # a_l / N_l, the variance of one harmonic
        each = shares / [num_harmonics(dims, degree) for degree in range(last + 1)]
        kept, left = [], size
        for degree in np.argsort(-each, kind="stable"):
            if shares[degree] > 1e-6 * shares.sum() and num_harmonics(dims, int(degree)) <= left:
                kept.append(int(degree))
                left -= num_harmonics(dims, int(degree))
        return cls(columns, tuple(kept))

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> HarmonicFunction:
        """Open the site of layer ``name`` and return its random function."""
        degrees = self.degrees
        found = {_dims(kernel, self.columns) for kernel in every(kernels)}
        if len(found) > 1:
            raise expected(
                "all kernels on the same sphere",
                f"directions in {sorted(found)} dimensions",
                "open one layer per kernel",
            )
        (dims,) = found
        sizes = [num_harmonics(dims, degree) for degree in degrees]  # type: ignore[union-attr]
        if max(sizes) > _MOST:
            degree = degrees[sizes.index(max(sizes))]  # type: ignore[index]
            raise expected(
                f"at most {_MOST} harmonics of one degree",
                f"{max(sizes)} of degree {degree} with {self.columns} columns",
                "dgp.Harmonics.around(kernel, columns, size) chooses, dgp.Points has fewer inducing values",
            )
        dtype = jnp.result_type(*jax.tree.leaves(kernels), float)
        shape = (sum(sizes),) if outputs is None else (outputs, sum(sizes))
        v, site = whitened_values(name, InducingPrior(shape, dtype))
        function = HarmonicFunction(kernels, self.columns, dims, degrees, v, outputs, mean, site)  # type: ignore
        _warn_of_nothing(function)
        return function


def _dims(kernel: Any, columns: int) -> int:
    """E, the dimension in which a kernel has its directions."""
    expect_kind(
        kernel,
        ZonalKernel,
        "a kernel of directions for dgp.Harmonics (Zonal, ArcCosine, Chordal, GreatCircle)",
        "dgp.kernels.Zonal(dgp.kernels.Matern52(1.0, 0.5)) for inputs of any kind",
    )
    return int(jax.eval_shape(lambda: kernel.directions(jnp.zeros((1, columns)))).shape[-1])


def _warn_of_nothing(function: HarmonicFunction) -> None:
    """Warn of degrees in which a known kernel has almost no variance, in all outputs."""
    shares, total = function.shares(), function.total()
    if is_concrete(shares, total):
        known = np.atleast_2d(np.asarray(shares, float))
        empty = (known < _NO_SHARE * np.asarray(total, float).reshape(-1, 1)).all(0)
        if empty.any():
            warnings.warn(
                f"{caller()}: its kernel has next to no variance in degrees "
                f"{np.asarray(function.degrees)[empty].tolist()} of its Harmonics, whose weights do nothing: leave "
                "them out, or dgp.Harmonics.around(kernel, columns, size)",
                stacklevel=4,
            )


def _at_angle_zero(kernel: ZonalKernel, dtype: Any) -> Array:
    return kernel.cast(dtype).by_angle(jnp.zeros((), dtype))


@pytree
class HarmonicFunction(InducedFunction):
    """A function of directions that is represented by its parts of some degrees; made by ``dgp.gp``.

    Args:
        kernels: one kernel of directions, or one per output.
        columns: the number of columns, D.
        sphere: E, the dimension in which directions are unit vectors.
        degrees: those of v, in order.
        v: the weights: known, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of v.
    """

    kernels: Any
    columns: int = static()
    sphere: int = static()
    degrees: tuple[int, ...] = static()
    v: Weights
    outputs: int | None = static()
    mean: Mean
    site: str | None = static(default=None)

    @property
    def size(self) -> int:
        return sum(num_harmonics(self.sphere, degree) for degree in self.degrees)

    @property
    def dims(self) -> int:
        return self.columns

    @property
    def dense(self) -> bool:
        return True

    def shares(self, last: int | None = None) -> Array:
        """Variances of the parts (L,), or (P, L) where outputs differ: of all degrees up to ``last``, or those of v."""

        def of(kernel: ZonalKernel) -> Array:
            dtype = jnp.result_type(*jax.tree.leaves(kernel), float)
            kernel = kernel.cast(dtype)
            a = degree_shares(self.sphere, max(self.degrees) if last is None else last, kernel.by_angle, dtype)
            a = jnp.maximum(a, _NOTHING * jax.lax.stop_gradient(a.sum()))
            return a if last is not None else a[jnp.array(self.degrees)]

        return by_kernel(of, self.kernels)

    def total(self) -> Array:
        """Variances of all parts together, or (P,) where outputs differ."""
        # kappa(0) = sum_l a_l
        return by_kernel(
            lambda kernel: _at_angle_zero(kernel, jnp.result_type(*jax.tree.leaves(kernel), float)), self.kernels
        )

    def features(self, rows: Array) -> Array:
        shares = self.shares()

        def of(kernel: ZonalKernel, shares: Array) -> Array:
            kernel = kernel.cast(rows.dtype)
            directions = kernel.directions(rows)
            parts = [harmonics(self.sphere, degree, directions) for degree in self.degrees]  # B_l (N, N_l)
            scaled = [jnp.sqrt(a).astype(rows.dtype) * part for a, part in zip(shares, parts, strict=True)]
            return kernel.factor(rows)[:, None] * jnp.concatenate(scaled, -1)  # r(x) [sqrt(a_l) B_l]_l

        return by_kernel(of, self.kernels, shares)

    def prior_variance(self, rows: Array) -> Array:
        return variances(self.kernels, rows)

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        return covariances(self.kernels, x, y)

    def conditional_variance(self, rows: Array, A: Array) -> Array:
        least = jitter(rows.dtype, self.size)

        def of(kernel: ZonalKernel, shares: Array) -> Array:
            kernel = kernel.cast(rows.dtype)
            total = _at_angle_zero(kernel, rows.dtype)
            # r(x)^2 (kappa(0) - sum of the a_l kept), at least the jitter
            return jnp.square(kernel.factor(rows)) * jnp.maximum(total - shares.sum(), least * total)

        return by_kernel(of, self.kernels, self.shares())

    def held(self) -> HarmonicFunction:
        return dataclasses.replace(self, kernels=jax.lax.stop_gradient(self.kernels))

    def prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        r"""Of the degrees of v by their weights, of the others by random zonal functions :math:`P_l(\hat x \cdot w)`.

        A function takes its degree l with a probability in proportion to :math:`a_l`, and its direction w at random:
        its covariance is that of the part. All degrees beyond the last one that is evaluated count as one more.
        """
        P, num = weights.shape
        own, degree_key, direction_key = jax.random.split(key, 3)
        v = jax.random.normal(own, (P, self.size), weights.dtype)
        last = max(self.degrees) + _BEYOND
        # Degrees that v does not have, up to L; L + 1 represents all beyond.
        absent = np.setdiff1d(np.arange(last + 2), self.degrees)
        ends = jax.random.normal(direction_key, (self.sphere, num), rows.dtype)
        ends = ends / jnp.linalg.norm(ends, axis=0)  # w, uniform on the sphere (E, num)

        def of(kernel: ZonalKernel, shares: Array) -> Array:
            kernel = kernel.cast(rows.dtype)
            total = _at_angle_zero(kernel, rows.dtype)
            # a_l of the absent degrees, and the rest of kappa(0) beyond L.
            left = jnp.append(shares, jnp.maximum(total - shares.sum(), _NOTHING * total))[absent]
            which = jax.random.categorical(degree_key, jnp.log(left), shape=(num,))
            cosine = matmul(kernel.directions(rows), ends)
            found, polynomials = jnp.zeros_like(cosine), zonal_polynomials(self.sphere, cosine)
            for degree in range(last + 2):
                # E_w[N_l P_l(x . w) P_l(x' . w)] = P_l(x . x')
                polynomial = next(polynomials) * num_harmonics(self.sphere, degree) ** 0.5
                if degree in absent:
                    found = jnp.where(which == np.searchsorted(absent, degree), polynomial, found)
            # r(x) sqrt(sum_l a_l) sqrt(N_l) P_l(x . w), of degree l with probability a_l / sum_l a_l
            return kernel.factor(rows)[:, None] * jnp.sqrt(left.sum()) * found

        others = by_kernel(of, self.kernels, self.shares(last))
        return matvec(weights, others) + matvec(v, self.features(rows)), v
