r"""``Basis``: functions as finite sums of sines, weighted by the spectral density of the kernel (HSGP).

On an interval of length :math:`\Delta` from a, the Laplacian with zeros at both ends has the eigenfunctions

.. math:: e_j(x) = \sqrt{2 / \Delta}\, \sin\bigl(\omega_j (x - a)\bigr), \qquad \omega_j = \pi j / \Delta ,

in several columns products of these. With the spectral density :math:`\varrho` of a stationary kernel

.. math:: f(x) = m(x) + \sum_{j=1}^M \sqrt{\varrho(\omega_j)}\; e_j(x)\, v_j, \qquad v_j \sim N(0, 1) ,

tends to the process as :math:`\Delta` and M grow. The layer is this finite sum: v determines the function.
``Basis.around`` chooses the interval and the number of sines from an error of the covariances.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from numpyro_dgp._checks import expect, expected, require_finite, require_inputs, require_positive, violated
from numpyro_dgp._data import known_numbers
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.random_function import Moments
from numpyro_dgp.functions.sines import KernelSeries, SineBox
from numpyro_dgp.functions.weights import InducingPrior, Weights, whitened_values
from numpyro_dgp.kernels import RBF
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.per_output import Kernels, every, shared, stacked, variances
from numpyro_dgp.math.belief_moments import ROWS
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.means import Mean

__all__ = ["Basis", "BasisFunction", "least_size", "reach"]


@pytree
class BasisFunction(InducedFunction):
    """A basis expansion with weights v; made by ``dgp.gp``.

    Args:
        kernels: one kernel, or one per output.
        box: where its sines live, mostly a ``dgp.Basis``.
        series: the functions, for all outputs or for each.
        v: the weights: known, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of the weights.
    """

    kernels: Kernels
    box: SineBox
    series: tuple[KernelSeries, ...]
    v: Weights
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
        found = [series(rows) for series in self.series]  # sqrt(rho(omega_j)) e_j(x) (N, M)
        return checkpoint_name(stacked(self.kernels, found), ROWS)

    def block_moments(self, rows: Array) -> Callable[[Array], Moments]:
        """With a draw of the weights these are multiplied by their standard deviations, and not the sines."""
        if not self.v.known:
            return super().block_moments(rows)
        v = self.by_output(self.v.loc)

        def moments(rows: Array) -> Moments:
            if shared(self.kernels):
                loc = self.series[0].summed(rows, v)
            else:
                loc = jnp.concatenate([s.summed(rows, w[None]) for s, w in zip(self.series, v, strict=True)], -1)
            return loc, jnp.zeros_like(loc), None, None

        return moments

    def prior_variance(self, rows: Array) -> Array:
        return jnp.square(self.features(rows)).sum(-1)  # sum_j rho(omega_j) e_j(x)^2

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        def by_batch(x: Array) -> Array:
            found = self.features(x.reshape(-1, x.shape[-1]))
            return jnp.moveaxis(found.reshape(-1, *x.shape[:-1], self.size), 0, -3)

        A = by_batch(x)
        return matmul(A, (A if y is None else by_batch(y)).mT)  # A(x) A(y)', the k of the finite sum

    def held(self) -> BasisFunction:
        kernels, series = jax.lax.stop_gradient((self.kernels, self.series))
        return dataclasses.replace(self, kernels=kernels, series=series)

    def whitened_values_of(self, other: InducedFunction) -> tuple[Array, Array]:
        r"""The weights of the same sines in an earlier fit: :math:`v_j` times the ratio of standard deviations."""
        if not isinstance(other, BasisFunction) or self.v.whole is not None:
            return super().whitened_values_of(other)
        same = bool(jax.tree.structure(self.series) == jax.tree.structure(other.series))  # type: ignore[operator]
        if not same or jax.tree.leaves((self.mean, other.mean)):
            raise expected(
                "the Basis, the kernel and a mean function without parameters as in the earlier fit, for dgp.update",
                "others" if not same else type(self.mean).__name__,
                "keep Basis and kernel, with dgp.means.ZeroMean() or IdentityMean(), or use dgp.Points(Z)",
                at=f"gp {self.site!r}",
            )
        # One function, d_j v_j = d'_j v'_j: v' = (d / d') v, d the standard deviations of now.
        pairs = zip(self.series, other.series, strict=True)
        ratios = jnp.stack([ours.deviations(self.site) / theirs.deviations(self.site) for ours, theirs in pairs])
        known = ratios * self.by_output(self.v.loc)
        slope = ratios[:, :, None] * jnp.eye(self.size, dtype=ratios.dtype)  # diag(d / d') (P, M, M)
        belief_covariance = self.v.feature_covariance(slope)
        return known, jnp.zeros_like(slope) if belief_covariance is None else belief_covariance


def _is_between(x: Any, low: Any, high: Any) -> Any:
    return (x >= low) & (x <= high)


# Longer intervals and more sines are asked for by mistake.
_MOST = 2**20


def reach(kernel: type[Kernel], lengthscale: float, error: float) -> float:
    """The distance beyond which a kernel is at most ``error`` of its variance, up to rounding.

    Args:
        kernel: class of a stationary kernel.
        lengthscale: its lengthscale.
        error: share of the variance.
    """
    k = _of(kernel, lengthscale)

    at = lengthscale * np.geomspace(1e-3, 1e3, 2000)
    with jax.ensure_compile_time_eval():
        near = np.abs(k(jnp.zeros((1, 1)), jnp.asarray(at)[:, None]))[0] > error * np.asarray(_variance(k))
    return float(at[min(np.flatnonzero(near)[-1] + 1, len(at) - 1)]) if near.any() else 0.0


def least_size(kernel: type[Kernel], lengthscale: float, length: float, error: float) -> int:
    """The number of sines on an interval that leaves out at most ``error`` of the variance of a kernel.

    Args:
        kernel: class of a stationary kernel.
        lengthscale: its lengthscale.
        length: of the interval.
        error: share of the variance.

    Raises:
        ValueError: more than a million sines.
    """
    k, size = _of(kernel, lengthscale), 64
    while size <= _MOST:
        with jax.ensure_compile_time_eval():
            # k(0) = (1 / pi) int_0^inf rho(omega) d omega, in steps of pi / length.
            density = np.asarray(k.spectral_density(math.pi * jnp.arange(size + 1.0)[:, None] / length), float)
            wanted = (1 - error) * float(_variance(k))
        below = (np.cumsum(density) - 0.5 * density[0]) / length  # by the trapezoidal rule, from zero on
        if (enough := below >= wanted).any():
            return max(int(np.argmax(enough)), 1)
        size *= 4
    raise expected(
        f"lengthscales resolved by a million sines on {length:.3g}",
        f"{lengthscale:.3g}",
        "use dgp.Points, or a larger error",
    )


def _of(kernel: type[Kernel], lengthscale: float) -> Kernel:
    expect(
        isinstance(kernel, type) and issubclass(kernel, Kernel),
        "a kernel class",
        repr(kernel),
        "kernel=dgp.kernels.Matern32",
    )
    return kernel(lengthscale=lengthscale)  # type: ignore[call-arg]


def _variance(kernel: Kernel) -> jnp.ndarray:
    return kernel.diag(jnp.zeros((1, 1)))[0]


# In the middle of the box at least this share of the variance of the kernel must be represented.
_ENOUGH = 0.9


@pytree
class Basis(SineBox):
    r"""Sines on an interval, with the spectral density of the kernel as variances of their weights: O(N M), without
    kernel matrices.

    The layer's site holds the M weights v. They determine the function: Var[f | v] = 0.
    The model is this finite sum, which tends to the process as the interval and the size grow. Hidden values need
    process noise, ``f(x, noise=s)``, where a guide gives them a distribution, and follow the model otherwise.

    A kernel on all D columns has ``size[0] * ... * size[D-1]`` weights, D at most 3. Additive kernels,
    ``k0.on(0) + k1.on(1)``, have ``size[0] + size[1]``, and any number of columns. Summands are stationary kernels with
    a spectral density, kernels with basis functions (``Periodic`` and ``Cosine`` by their Fourier series, the
    constant, one weight, and ``Linear``, one for each column), which know no boundary, and products of these. For a
    periodic kernel a column of size m has the multiples of its frequency up to (m - 1) / 2.

    At ``low`` and ``high``, and beyond them, the function is its mean, without variance. Inputs outside give a warning,
    in predictions too; compiled programs of the user, and the steps of a fit, do not look. The inputs of a
    layer above a hidden one move while the program is fitted: give it an interval as wide as they may become.

    Args:
        low: where the interval begins, units of the input; a number, or (D,).
        high: where it ends; a number, or (D,). :meth:`around` chooses both, and the size.
        size: sines, an integer for each column, or one integer for all of them.

    Raises:
        ValueError: ends that are not finite or not in order; a size that is not a positive integer; in ``dgp.gp``,
            kernels without a spectral density, on more than three columns together, or of other columns; kernels of the
            outputs with different numbers of weights.

    Warns:
        UserWarning: in ``dgp.gp``, a lengthscale that is known and too short for the size, or too long for the
            interval; where the function is called, known inputs outside of the interval.

    Example:
        >>> import numpyro
        >>> import numpyro_dgp as dgp
        >>> import jax.numpy as jnp
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Basis(-5.0, 5.0, 20))
        >>> values = f(jnp.zeros((7, 1)))
        >>> values.batch_shape, f.v.loc.shape, float(values.variance.max())
        ((7,), (20,), 0.0)

    Source: Solin and Sarkka (2020); Riutort-Mayol et al. (2023).
    """

    @classmethod
    def around(
        cls,
        X: ArrayLike,
        lengthscale: ArrayLike,
        *,
        longest: ArrayLike | None = None,
        error: float = 0.01,
        kernel: type[Kernel] = RBF,
    ) -> Basis:
        r"""The interval around data and the size at which the error of covariances is about ``error``.

        One half is for the size: it leaves as much of the variance to higher frequencies, at the shortest lengthscale.
        The other is for the ends: the kernel at twice their distance from the data is as much of the variance, at the
        longest lengthscale, which is what the variance lacks at the outermost data. The sizes of
        Riutort-Mayol et al. (2023), 1.75, 3.42 and 2.65 times half the length of the interval over the lengthscale for
        RBF, Matern 3/2 and Matern 5/2, are within a tenth of those for ``error=0.02``.

        Args:
            X: inputs (N, D), or for a layer above a hidden one the two rows of what its inputs may become.
            lengthscale: the shortest that is expected, units of the input; a number, or (D,).
            longest: the longest; by default the same.
            error: relative to the variance.
            kernel: its class, such as ``dgp.kernels.Matern32``; the rougher, the more sines.

        Raises:
            ValueError: NaN or infinite inputs, numbers that are not positive, lengthscales of another shape or out of
                order, a kernel without a spectral density.

        Example:
            >>> import numpy as np
            >>> basis = Basis.around(np.array([[0.0], [4.0]]), 1.0)
            >>> print(basis.low.round(2), basis.high.round(2), basis.size)
            [-1.64] [5.64] (6,)
        """
        X = known_numbers("inputs X", X)
        require_inputs(X)
        require_finite("inputs X", X, "drop or impute the rows with missing values")
        longest = lengthscale if longest is None else longest
        for name, value in [("lengthscale", lengthscale), ("longest", longest), ("error", error)]:
            require_positive(name, value, "lengthscales and the error are beyond zero")
            if np.shape(value) not in ((), (1,), X.shape[-1:]) or (name == "error" and not np.max(value) < 1):
                range_ = "a share of the variance below one" if name == "error" else f"of shape () or {X.shape[-1:]}"
                got = value if np.size(value) == 1 else np.shape(value)
                raise expected(f"{name} to be {range_}", got, f"inputs have {X.shape[-1]} column(s)")
        X = X if X.dtype.kind == "f" else X.astype(float)
        short, long = (np.broadcast_to(np.asarray(value, X.dtype), X.shape[-1:]) for value in (lengthscale, longest))
        if not (short <= long).all():
            raise expected(
                "the longest lengthscale as longest",
                f"{longest} and {lengthscale}",
                "Basis.around(X, 0.5, longest=2.0)",
            )
        rows = X.reshape(-1, X.shape[-1])
        # At a distance d from an end the finite sum tends to the variance k(0) - k(2 d).
        margin = np.array([reach(kernel, float(scale), error / 2) / 2 for scale in long], X.dtype)
        low, high = rows.min(0) - margin, rows.max(0) + margin
        sides = zip(short.tolist(), (high - low).tolist(), strict=True)
        return cls(low, high, tuple(least_size(kernel, scale, length, error / 2) for scale, length in sides))

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> BasisFunction:
        """Open the site of layer ``name`` and return its random function."""
        series = tuple(KernelSeries.of(k, self) for k in every(kernels))
        sizes = {s.size for s in series}
        if len(sizes) > 1:
            raise expected(
                "equally many weights for the kernels of all outputs",
                [s.size for s in series],
                "open one layer per structure",
            )
        M = sizes.pop()
        prior = InducingPrior((M,) if outputs is None else (outputs, M), self.dtype)
        v, site = whitened_values(name, prior, "weights")
        function = BasisFunction(kernels, self, series, v, outputs, mean, site)
        _warn_if_lost(name, function)
        return function


def _warn_if_lost(name: str, function: BasisFunction) -> None:
    """Warn if the basis does not represent most of the variance of the kernel in the middle of its box."""
    middle = function.box.middle()[None]
    found, whole = function.prior_variance(middle), variances(function.kernels, middle)
    if violated(lambda found, whole: found >= _ENOUGH * whole, found, whole):
        warnings.warn(
            f"gp {name!r}: in the middle of the Basis its {function.size} functions have {jnp.min(found / whole):.0%} "
            "of the variance of the kernel: lengthscales are too short for the size, or too long for the interval; "
            "dgp.Basis.around(X, lengthscale) chooses both",
            stacklevel=4,
        )
