r"""The optimal q(v) and its bound. A Gaussian likelihood is quadratic in the whitened inducing values of a layer:

.. math::
    E[\log p(y \mid v)] = c + b^\top v - \tfrac12 v^\top \Phi\, v
    \quad\Longrightarrow\quad
    q(v) = N\bigl((I + \Phi)^{-1} b,\, (I + \Phi)^{-1}\bigr), \quad
    \mathcal L = c + \tfrac12 b^\top (I + \Phi)^{-1} b - \tfrac12 \log\lvert I + \Phi\rvert .

The data enter by :math:`(\Phi, b, c)` only, which are sums over data and over uses of one function; c is a constant.
:math:`I + \Phi` needs no jitter.

``Observations`` are those of one function with Gaussian noise, :math:`y_n \sim N(\kappa_n f(x_n), s_n^2)`.

Source: Titsias (2009); Chamberlin (2016), sections 2.2-2.5 and A.1-A.2, whitened.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expected, require_noise
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.expectations import Integrate, psi0, psi1, psi1_times_h, psi2
from numpyro_dgp.math.gaussians import kl_full
from numpyro_dgp.math.linalg import einsum, matmul, solve_lower, times_transpose
from numpyro_dgp.math.matrix_ops import DenseOperations
from numpyro_dgp.math.quadratic_forms import quadratic_forms
from numpyro_dgp.math.whitening import residual_variance, resolved

__all__ = [
    "Observations",
    "Quadratic",
    "from_features",
    "from_moments",
    "from_rows",
    "predict",
    "require_rows",
    "upper_bound",
    "with_features",
]


class Observations(NamedTuple):
    r"""Observations with Gaussian noise, :math:`y_n \sim N(\kappa_n f(x_n), s_n^2)`, and the factors of f in

    .. math:: \sum_n \beta_n \log N(y_n; \kappa_n f_n, s_n^2)
              = \sum_n \frac{\beta_n}{s_n^2} \Bigl( \kappa_n y_n f_n - \tfrac12 \kappa_n^2 f_n^2 - \tfrac12 y_n^2 \Bigr)
                - \beta_n \log (\sqrt{2 \pi}\, s_n)

    Args:
        y: observations minus :math:`\kappa` times the mean function (N,), or of any other shape.
        noise: standard deviation s, a number or one per observation, as are the others.
        slope: :math:`\kappa`.
        y_variance: variance of observations that are Gaussian themselves.
        weights: how much each observation counts, :math:`\beta`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import Observations
        >>> data = Observations(jnp.array([1.0, 2.0]), 0.5, slope=3.0)
        >>> print(data.precision, data.linear)
        [4. 4.] [12. 12.]
    """

    y: Array
    noise: ArrayLike
    slope: ArrayLike = 1.0
    y_variance: ArrayLike = 0.0
    weights: ArrayLike = 1.0

    def __repr__(self) -> str:
        return brief(self)

    def _rows(self, value: ArrayLike) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, self.y.dtype), self.y.shape)

    @property
    def precision(self) -> Array:
        r""":math:`\beta_n / s_n^2`."""
        return self._rows(self.weights) / jnp.square(self._rows(self.noise))

    @property
    def linear(self) -> Array:
        r""":math:`\kappa_n \beta_n / s_n^2`, the factor of :math:`y_n f_n`."""
        return self.precision * self._rows(self.slope)

    @property
    def quadratic(self) -> Array:
        r""":math:`\kappa_n^2 \beta_n / s_n^2`, the factor of :math:`-\tfrac12 f_n^2`."""
        return self.linear * self._rows(self.slope)

    def log_density(self, square: Array) -> Array:
        """The weighted sum of log densities where the expected squares of the residuals are ``square``."""
        return self.peak() - 0.5 * (self.precision * square).sum()  # -sum_n β_n (log(sqrt(2 π) s_n) + r_n^2 / 2 s_n^2)

    def peak(self) -> Array:
        """The same where the residuals are zero: the greatest value it can have."""
        return -(self._rows(self.weights) * jnp.log(math.sqrt(2 * math.pi) * self._rows(self.noise))).sum()


def require_rows(y: Array, **arrays: Array) -> None:
    """Raise a ``ValueError`` unless y is (N,) and every other array has N rows."""
    if np.ndim(y) != 1 or any(np.shape(a)[:1] != np.shape(y) for a in arrays.values()):
        raise expected(
            "y of shape (N,) and one row per datum in everything else",
            f"y {np.shape(y)} with { {name: np.shape(a) for name, a in arrays.items()} }",
            "for several outputs, jax.vmap over them",
        )


class Quadratic(NamedTuple):
    r"""The expected log-likelihood of one function, :math:`c + b^\top v - \tfrac12 v^\top \Phi v`.

    Args:
        Phi: (M, M).
        b: (M,).
        c: a number.
        peak: the greatest value the log-likelihood can have, at residuals of zero; used by :meth:`bound` only.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import Quadratic
        >>> data = Quadratic(jnp.full((1, 1), 3.0), jnp.full(1, 2.0), jnp.array(0.0))
        >>> loc, scale_tril = data.optimum()
        >>> print(loc, scale_tril**2, f"{data.bound():.4f} {data.at(loc, scale_tril):.4f}")
        [0.5] [[0.25]] -0.1931 -0.1931
    """

    Phi: Array
    b: Array
    c: Array
    peak: ArrayLike = math.inf

    def __repr__(self) -> str:
        return brief(self)

    def optimum(self) -> tuple[Array, Array]:
        r"""Mean :math:`(I + \Phi)^{-1} b` and triangular root R of :math:`(I + \Phi)^{-1}`, of the optimal q(v)."""
        R = DenseOperations.inverse_root(self._precision())
        return DenseOperations.apply(R, DenseOperations.apply(R.mT, self.b)), R  # R R' b = (I + Φ)^-1 b

    def bound(self) -> Array:
        r"""The bound at the optimum; NaN where it is rounding error.

        With noise far below the function's scale c and :math:`\tfrac12 b^\top (I + \Phi)^{-1} b` are of the size of
        :math:`\sum_n y_n^2 / s_n^2` and cancel. Their sum cannot be above ``peak``. Errors g of the gradient at the
        optimum m add :math:`\tfrac12 g^\top (I + \Phi)^{-1} g` to it, which must be below a tenth of the bound. Their
        size is taken as :math:`\epsilon\, \lvert \Phi \rvert \lvert m \rvert`, with :math:`\epsilon` half a unit in
        the last place, and their signs alternate: smooth functions of ordered inducing inputs resolve these least. So
        must the rounding of the two numbers themselves, as in :meth:`resolved_bound`.
        """
        L, half = self._whitened()
        found, m = self._bound(L, half), solve_lower(L, half, transpose=True)  # m = L^-T L^-1 b
        last = 0.5 * jnp.finfo(L.dtype).eps * (-1.0) ** jnp.arange(L.shape[-1], dtype=L.dtype)
        # g = ± ε |Φ| |m| of alternating signs, and its effect g' (I + Φ)^-1 g / 2
        g = last[:, None] * matmul(jnp.abs(self.Phi), jnp.abs(m))
        error = jnp.maximum(_half_square(solve_lower(L, g)), _rounding(half))
        return jnp.where(error > 1 + 0.1 * jnp.abs(found), jnp.nan, found)

    def resolved_bound(self) -> Array:
        r"""The bound at the optimum, NaN where rounding may change it by half a nat and a thousandth of ``peak``.

        The error is taken as four units in the last place of :math:`\tfrac12 b^\top (I + \Phi)^{-1} b`. A sampler would
        go to where it is largest: a chain must not be there at all.
        """
        L, half = self._whitened()
        peak = jnp.where(jnp.isfinite(self.peak), self.peak, 0.0)
        return jnp.where(_rounding(half) > 0.5 + 1e-3 * jnp.abs(peak), jnp.nan, self._bound(L, half))

    def _bound(self, L: Array, half: Array) -> Array:
        fit = self.c + _half_square(half)  # c + b' (I + Φ)^-1 b / 2
        log_det = jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)).sum(-1)  # log|I + Φ| / 2
        # A fit above the peak of the likelihood can be rounding only.
        return jnp.where(fit > self.peak + 1e-3 * jnp.abs(self.peak) + 1, jnp.nan, fit - log_det)

    def _whitened(self) -> tuple[Array, Array]:
        r"""L with :math:`L L^\top = I + \Phi`, and :math:`L^{-1} b` as a column."""
        L = jnp.linalg.cholesky(self._precision())
        return L, solve_lower(L, self.b[..., None])

    def at(self, loc: Array, scale_tril: Array) -> Array:
        """The bound at any q(v) = N(loc, scale_tril scale_tril'), its divergence from N(0, I) included."""
        return self.expected(loc, scale_tril) - kl_full(loc, scale_tril)

    def expected(self, loc: Array, scale_tril: Array) -> Array:
        """The expected log-likelihood under q(v)."""
        return self.under(loc, times_transpose(scale_tril))

    def under(self, loc: Array, covariance: Array) -> Array:
        """The same with the covariance of q(v)."""
        # E[v' Φ v] = m' Φ m + tr Φ Σ
        square = (loc * DenseOperations.apply(self.Phi, loc)).sum(-1) + (self.Phi * covariance).sum((-2, -1))
        return self.c + (self.b * loc).sum(-1) - 0.5 * square

    def plus(self, other: Quadratic) -> Quadratic:
        """The sum of two: more data, or another use of the same function."""
        return jax.tree.map(jnp.add, self, other)

    def over(self, beta: ArrayLike) -> Quadratic:
        """The log-likelihood divided by a number, as where the prior counts that many times."""
        return jax.tree.map(lambda part: part / beta, self)

    def _precision(self) -> Array:
        return jnp.eye(self.Phi.shape[-1], dtype=self.Phi.dtype) + self.Phi


def _rounding(half: Array) -> Array:
    """What rounding may change a half square by, as four units in its last place."""
    return 4 * jnp.finfo(half.dtype).eps * _half_square(half)


def _half_square(column: Array) -> Array:
    return 0.5 * jnp.square(column[..., 0]).sum(-1)


def from_features(A: Array, variances: Array, data: Observations) -> Quadratic:
    r"""The quadratic of data at inputs known exactly, :math:`y_n \sim N(\kappa_n f(x_n), s_n^2)`.

    .. math::
        \Phi = \sum_n \frac{\kappa_n^2}{s_n^2} a_n a_n^\top, \quad b = \sum_n \frac{\kappa_n}{s_n^2} y_n a_n, \quad
        c = \sum_n \log N(y_n; 0, s_n^2) - \frac{\kappa_n^2}{2 s_n^2} (k(x_n, x_n) - a_n^\top a_n)

    Args:
        A: rows :math:`a_n = L^{-1} k(Z, x_n)` with :math:`L L^\top = k(Z, Z)` (N, M).
        variances: :math:`k(x_n, x_n)` (N,).
        data: observations (N,).

    Returns:
        The expected log-likelihood as a :class:`Quadratic` in v.

    Raises:
        ValueError: arrays that do not have one row per datum.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import Observations, from_features
        >>> print(from_features(jnp.ones((2, 1)), jnp.ones(2), Observations(jnp.array([1.0, 2.0]), 0.5)).b)
        [12.]

    Source: Chamberlin (2016), equations 2.2 and 2.3.
    """
    require_rows(data.y, A=A, variances=variances)
    # Var[f(x_n) | v] = k(x_n, x_n) - a_n' a_n
    conditional = residual_variance(variances, jnp.square(A).sum(-1), A.shape[-1])
    return from_rows(A, data._replace(y_variance=data.y_variance + jnp.square(jnp.asarray(data.slope)) * conditional))


def from_rows(A: Array, data: Observations) -> Quadratic:
    r"""The quadratic of :math:`E[\log N(y_n;\; \kappa_n a_n^\top v, s_n^2)]` where :math:`y_n` has a variance.

    The variance may be that of the function given v, times :math:`\kappa_n^2`: then this is :func:`from_features`. With
    that variance in :math:`s_n^2` instead it is the log density of y given v, the function between inducing inputs
    integrated.

    Args:
        A: rows :math:`a_n` (N, M).
        data: observations (N,).

    Raises:
        ValueError: arrays that do not have one row per datum.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds.collapsed import Observations, from_rows
        >>> print(from_rows(jnp.ones((2, 1)), Observations(jnp.array([1.0, 2.0]), 0.5)).Phi)
        [[8.]]
    """
    require_rows(data.y, A=A)
    # Φ = sum_n β_n κ_n^2 / s_n^2 a_n a_n' and b = sum_n β_n κ_n / s_n^2 y_n a_n
    c = data.log_density(jnp.square(data.y) + data.y_variance)
    return Quadratic(matmul((data.quadratic * A.T), A), matmul(data.linear * data.y, A), c, data.peak())


def from_moments(
    kernel: Kernel,
    Z: Array,
    whiten: Array,
    loc: Array,
    variance: Array,
    data: Observations,
    *,
    tilt: Array | None = None,
    integrate: Integrate = None,
) -> Quadratic:
    r"""The same at Gaussian inputs :math:`h_n`, and observations that may depend on them:

    .. math:: E\bigl[\log N(y_n + \zeta_n^\top h_n;\; \kappa_n f(h_n), s_n^2)\bigr], \qquad f \text{ with mean zero}.

    The tilt :math:`\zeta` of a linear mean function of f is :math:`-\kappa` times its slope, and a posterior of y that
    is linear in the layer below adds its slopes to the tilt.

    Args:
        kernel: the kernel k.
        Z: inducing inputs (M, D).
        whiten: :math:`L^{-1}` with :math:`L L^\top = k(Z, Z)` (M, M).
        loc: means of the inputs h (N, D).
        variance: their variances (N, D), or covariances (N, D, D).
        data: observations (N,), without the part that depends on h; their variance is that given h.
        tilt: :math:`\zeta` (N, D); zero by default.
        integrate: how expectations of k are computed: ``None`` for the closed form,
            ``dgp.likelihoods.GaussHermite(n)`` for n nodes per input column, or ``dgp.likelihoods.MonteCarlo(n, key)``.

    Returns:
        The expected log-likelihood as a :class:`Quadratic` in v.

    Raises:
        ValueError: arrays that do not fit together, or a kernel whose expectations have no closed form.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import Observations, from_moments
        >>> from numpyro_dgp.kernels import Linear
        >>> one, mu = jnp.ones((1, 1)), jnp.array([[1.0], [2.0]])
        >>> data = Observations(mu[:, 0], 1.0)
        >>> certain = from_moments(Linear(), one, one, mu, 0 * mu, data)
        >>> uncertain = from_moments(Linear(), one, one, mu, 0 * mu + 0.5, data)
        >>> print(certain.Phi, uncertain.Phi)  # the sums over data of E[h]^2 and of E[h^2]
        [[5.]] [[6.]]

    Source: Chamberlin (2016), sections 2.5 and 4.6; the Bayesian GPLVM of Titsias and Lawrence (2010).
    """
    return with_features(kernel, Z, whiten, loc, variance, data, tilt=tilt, integrate=integrate)[0]


def with_features(
    kernel: Kernel,
    Z: Array,
    whiten: Array,
    loc: Array,
    variance: Array,
    data: Observations,
    *,
    tilt: Array | None = None,
    integrate: Integrate = None,
) -> tuple[Quadratic, Array]:
    r""":func:`from_moments` and the expected features :math:`\langle a_n \rangle` (N, M) behind it."""
    require_rows(data.y, loc=loc, variance=variance)
    y, y_variance = data.y, data.y_variance
    square = jnp.square(y) + y_variance
    first = psi1(kernel, loc, variance, Z, integrate=integrate)  # <k(h_n, Z)> (N, M)
    linear = matmul(data.linear * y, first)  # sum_n β_n κ_n / s_n^2 y_n <k(Z, h_n)>
    if tilt is not None:
        # V_n ζ_n, and E[(y_n + ζ_n' h_n)^2] = (y_n + ζ_n' E h_n)^2 + ζ_n' V_n ζ_n + Var[y_n]
        tilted = DenseOperations.apply(variance, tilt) if variance.ndim == 3 else variance * tilt
        square = jnp.square(y + (tilt * loc).sum(-1)) + (tilt * tilted).sum(-1) + y_variance
        values = psi1_times_h(kernel, loc, variance, Z, integrate=integrate)
        # + sum_n β_n κ_n / s_n^2 <ζ_n' h_n k(Z, h_n)>
        linear = linear + einsum("n,nd,nmd->m", data.linear, tilt, values)
    # sum_n β_n κ_n^2 / s_n^2 <k(Z, h_n) k(h_n, Z)>
    second = psi2(kernel, loc, variance, Z, weights=data.quadratic, integrate=integrate)
    whiten = resolved(whiten, second)
    Phi = matmul(matmul(whiten, second), whiten.T)  # L^-1 psi_2 L^-T
    Phi = 0.5 * (Phi + Phi.T)
    variances = psi0(kernel, loc, variance, integrate=integrate)  # <k(h_n, h_n)>
    # Not clipped, unlike residual_variance: rounding errors of the trace are those of Phi, and cancel in the bound.
    remainder = (data.quadratic * variances).sum() - jnp.trace(Phi)
    features = matmul(first, whiten.T)  # rows <a_n>' = <k(h_n, Z)> L^-T
    c = data.log_density(square) - 0.5 * remainder
    return Quadratic(Phi, matmul(whiten, linear), c, data.peak()), features


def predict(A: Array, variances: Array, loc: Array, scale_tril: Array) -> tuple[Array, Array]:
    r"""Mean and variance of the function at new inputs, without its mean function: each (N,).

    .. math:: A m, \qquad k(x, x) - a^\top a + a^\top \Sigma\, a

    Args:
        A: rows :math:`a = L^{-1} k(Z, x)` at the new inputs (N, M).
        variances: k(x, x) there (N,).
        loc: m (M,), from :meth:`Quadratic.optimum`.
        scale_tril: triangular root R of :math:`\Sigma` (M, M).

    Returns:
        Means (N,) and variances (N,).

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import predict
        >>> A, variances = jnp.array([[0.0], [0.8]]), jnp.ones(2)  # far from the inducing input, and near it
        >>> mean, variance = predict(A, variances, jnp.array([0.5]), jnp.array([[0.1]]))
        >>> print(f"{mean[0]:.2f} {mean[1]:.2f} {variance[0]:.2f} {variance[1]:.2f}")
        0.00 0.40 1.00 0.37
    """
    belief_variance = quadratic_forms(times_transpose(scale_tril)[None], A)[:, 0]  # a' Σ a
    return matmul(A, loc), residual_variance(variances, jnp.square(A).sum(-1), A.shape[-1]) + belief_variance


def upper_bound(A: Array, variances: Array, y: Array, noise: ArrayLike) -> Array:
    r"""An upper bound on the log evidence, which lies between :meth:`Quadratic.bound` and this.

    .. math::
        -\tfrac12 \log\lvert A A^\top + s^2 I\rvert - \tfrac12 y^\top (A A^\top + (\tau + s^2) I)^{-1} y
        - \tfrac{N}{2} \log 2\pi, \qquad \tau = \mathrm{tr}(k(X, X) - A A^\top)

    Args:
        A: rows :math:`L^{-1} k(Z, x_n)` (N, M).
        variances: :math:`k(x_n, x_n)` (N,).
        y: observations minus the mean function (N,).
        noise: standard deviation s, a number.

    Returns:
        The upper bound, a number in nats.

    Raises:
        ValueError: arrays that do not have one row per datum.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import Observations, from_features, upper_bound
        >>> A, variances, y = 0.8 * jnp.ones((2, 1)), jnp.ones(2), jnp.array([1.0, 1.2])
        >>> lower = from_features(A, variances, Observations(y, 0.5)).bound()
        >>> print(f"{lower:.2f} {upper_bound(A, variances, y, 0.5):.2f}")
        -3.63 -1.91

    Source: Titsias (2014).
    """
    require_rows(y, A=A, variances=variances)
    require_noise(noise)
    gram, projected = matmul(A.T, A), matmul(A.T, y)
    eye, s2 = jnp.eye(A.shape[1], dtype=A.dtype), jnp.square(jnp.asarray(noise, A.dtype))
    total = s2 + residual_variance(variances, jnp.square(A).sum(-1), A.shape[-1]).sum()  # s^2 + τ
    # log|A A' + s^2 I| = log|I + A' A / s^2| + N log s^2
    log_det = 2 * jnp.log(jnp.diagonal(jnp.linalg.cholesky(eye + gram / s2))).sum() + len(y) * jnp.log(s2)
    # With t = τ + s^2: y' (A A' + t I)^-1 y = (y' y - y' A (I + A' A / t)^-1 A' y / t) / t
    half = solve_lower(jnp.linalg.cholesky(eye + gram / total), projected[:, None])[:, 0]
    square = (matmul(y, y) - matmul(half, half) / total) / total
    return -0.5 * (log_det + square + len(y) * math.log(2 * math.pi))
