r"""Expectations of a function whose inducing values depend on its inputs.

Inputs :math:`h_n` of variance :math:`V_n` and whitened inducing values :math:`v \sim N(m, \Sigma)` are jointly Gaussian
with :math:`G_n = \operatorname{Cov}[v, h_n]`, as they are where both follow the inducing values of the layer below.
Then

.. math:: v \mid h_n \sim N\bigl(m + G_n V_n^{-1} (h_n - E h_n),\; \Sigma - G_n V_n^{-1} G_n^\top\bigr),

and with :math:`a(h) = L^{-1} k(Z, h)`, :math:`L L^\top = k(Z, Z)`, all that a layer needs are expectations of
:math:`k(z, h)` and :math:`k(z, h)\,k(h, z')` times affine functions of h, one for every z.

Source: Chamberlin (2016), sections 4.7 and A.5. Its conditional means (figure 4.9) have a minus where a plus belongs,
which carries on into 4.7.6 and 4.7.7.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.bounds.collapsed import Observations
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.expectations import Tilted, psi0, psi2
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.math.matrix_ops import DenseOperations, DiagonalOperations
from numpyro_dgp.math.row_blocks import each_row
from numpyro_dgp.math.whitening import resolved

__all__ = [
    "Coupled",
    "Target",
    "expected_density",
    "expected_product",
    "expected_square",
]


@pytree
class Coupled:
    r"""Whitened inducing values of one function and their covariance with its inputs.

    Args:
        loc: m (M,).
        covariance: :math:`\Sigma` (M, M).
        with_inputs: :math:`G_n = \operatorname{Cov}[v, h_n]` (N, M, D).

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds.markov_layers import Coupled
        >>> v = Coupled(jnp.zeros(3), jnp.eye(3), jnp.zeros((5, 3, 2)))  # independent of 5 inputs of 2 columns
        >>> v.with_inputs.shape
        (5, 3, 2)
    """

    loc: Array
    covariance: Array
    with_inputs: Array


@pytree
class Target:
    """One number per datum, jointly Gaussian with the inputs and the inducing values of a function.

    Args:
        loc: means (N,).
        with_inputs: covariances with the inputs (N, D).
        with_values: covariances with v (N, M).

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds.markov_layers import Target
        >>> target = Target(jnp.ones(5), jnp.zeros((5, 2)), jnp.zeros((5, 3)))  # the number one, for 5 data
        >>> target.with_values.shape
        (5, 3)
    """

    loc: Array
    with_inputs: Array
    with_values: Array


class _Layer:
    """The conditional mean and covariance of v given the inputs of the function, in the coordinates :math:`L^{-T} v`.

    A constant input 1 is appended as the last column, so that affine functions are linear forms.
    """

    def __init__(self, kernel: Kernel, Z: Array, whiten: Array, loc: Array, variance: Array, v: Coupled) -> None:
        D, one = loc.shape[-1], jnp.ones((len(loc), 1), loc.dtype)
        self.statistics = Tilted(kernel.on(*range(D)), D + 1, loc.dtype)
        self.Z = jnp.pad(Z, ((0, 0), (0, 1)))
        self.inputs = jnp.hstack([loc, one]), jnp.pad(variance, [(0, 0), *[(0, 1)] * (variance.ndim - 1)])
        self.loc, self.variance = loc, variance
        # Cov[v~] = L^-T Σ L^-1 for v~ = L^-T v
        self.whiten, self.covariance = whiten, matmul(matmul(whiten.T, v.covariance), whiten)
        # E[v~ | h] = L^-T m + B (h - E h), B = L^-T G V^-1 (N, M, D)
        self.slopes = self.by_inputs(matmul(whiten.T, v.with_inputs))
        self.forms = self.affine(matmul(whiten.T, v.loc), self.slopes)

    def by_inputs(self, cross: Array) -> Array:
        """From covariances with the inputs (N, ..., D) to the slopes of the conditional mean given the inputs."""
        shape = cross.shape
        if self.variance.ndim == 3:
            # An input without variance has no covariances: slope zero.
            exact = jnp.diagonal(self.variance, axis1=1, axis2=2) <= 0
            V = self.variance + exact[..., None] * jnp.eye(shape[-1], dtype=cross.dtype)
            return jnp.linalg.solve(V, cross.reshape(*shape[:1], -1, shape[-1]).mT).mT.reshape(shape)
        V = self.variance.reshape(shape[0], *(1,) * (cross.ndim - 2), shape[-1])
        return cross / jnp.where(V > 0, V, jnp.inf)

    def affine(self, mean: Array, slopes: Array) -> Array:
        """The linear forms of (h, 1) that are ``mean`` at the mean of h."""
        at = self.loc.reshape(self.loc.shape[0], *(1,) * (slopes.ndim - 2), -1)
        return jnp.concatenate([slopes, (mean - (slopes * at).sum(-1))[..., None]], -1)  # b' h + (mean - b' E h)


def _times_variance(variance: Array, slopes: Array) -> Array:
    """Products of slopes (M, D) with the variance (D,) or (D, D) of the inputs."""
    return (DiagonalOperations if variance.ndim == 1 else DenseOperations).apply(variance, slopes)


def expected_product(
    kernel: Kernel, Z: Array, whiten: Array, loc: Array, variance: Array, v: Coupled, target: Target
) -> Array:
    r""":math:`\langle y_n\, a(h_n)^\top v \rangle`, shape (N,); with y = 1 the mean of the function.

    .. math:: \sum_m \bigl\langle k(z_m, h)\, \bigl(\operatorname{Cov}[\tilde v_m, y \mid h]
              + E[\tilde v_m \mid h]\, E[y \mid h]\bigr) \bigr\rangle, \qquad \tilde v = L^{-\top} v

    Args:
        kernel: k, of which Gaussian expectations have a closed form.
        Z: inducing inputs (M, D).
        whiten: :math:`L^{-1}` (M, M).
        loc: means of the inputs (N, D).
        variance: their variances (N, D) or covariances (N, D, D).
        v: inducing values.
        target: the targets y.

    Returns:
        Expectations (N,).

    Raises:
        ValueError: a kernel without closed form.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Linear
        >>> from numpyro_dgp.bounds.markov_layers import Coupled, Target, expected_product
        >>> one, zero = jnp.ones((1, 1)), jnp.zeros((1, 1))
        >>> v = Coupled(jnp.zeros(1), one, 0.5 * one[None])  # Cov[v, h] = 0.5, so that E[h v] = 0.5
        >>> print(expected_product(Linear(), one, one, zero, one, v, Target(one[0], zero, zero)))
        [0.5]

    Source: Chamberlin (2016), section 4.7.6.
    """
    layer = _Layer(kernel, Z, whiten, loc, variance, v)
    slopes = layer.by_inputs(target.with_inputs)  # E[y | h] = E y + b' (h - E h)
    forms = layer.affine(target.loc, slopes)
    # Cov[v~, y | h] = L^-T Cov[v, y] - B V b
    common = jax.vmap(lambda s, b, B: (_times_variance(s, b) * B).sum(-1))(variance, slopes, layer.slopes)
    given = matmul(target.with_values, whiten) - common

    def row(m: Array, s: Array, own: Array, t: Array, c: Array) -> Array:
        values = lambda *extra: layer.statistics.values(layer.Z, extra, m, s)  # noqa: E731
        # sum_m Cov[v~_m, y | h] <k(z_m, h)> + <k(z_m, h) E[v~_m | h] E[y | h]>
        return (c * values() + values(own, t)).sum()

    return each_row(*layer.inputs, Z.size, row, layer.forms, forms, given)


def expected_square(kernel: Kernel, Z: Array, whiten: Array, loc: Array, variance: Array, v: Coupled) -> Array:
    r""":math:`\langle v^\top a(h_n)\, a(h_n)^\top v \rangle`, shape (N,).

    .. math:: \sum_{mm'} \bigl\langle k(z_m, h)\, k(h, z_{m'})\,
              \bigl(\operatorname{Cov}[\tilde v_m, \tilde v_{m'} \mid h] + E[\tilde v_m \mid h]\, E[\tilde v_{m'} \mid
              h]\bigr) \bigr\rangle, \qquad \tilde v = L^{-\top} v

    It and its derivative are computed in blocks of data, so that matrices of a few data are in memory at once.

    Args:
        kernel: k, as in :func:`expected_product`, as are the others.
        Z: inducing inputs (M, D).
        whiten: :math:`L^{-1}` (M, M).
        loc: means of the inputs (N, D).
        variance: their variances (N, D) or covariances (N, D, D).
        v: inducing values.

    Returns:
        Expectations (N,).

    Raises:
        ValueError: a kernel without closed form.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Linear
        >>> from numpyro_dgp.bounds.markov_layers import Coupled, expected_square
        >>> one, zero = jnp.ones((1, 1)), jnp.zeros((1, 1))
        >>> v = Coupled(jnp.zeros(1), one, 0.5 * one[None])  # E[h^2 v^2] = 1 + 2 Cov[v, h]^2
        >>> print(expected_square(Linear(), one, one, zero, one, v))
        [1.5]

    Source: Chamberlin (2016), section 4.7.7.
    """
    layer = _Layer(kernel, Z, whiten, loc, variance, v)
    i, j = map(jnp.asarray, np.triu_indices(len(Z)))
    twice = jnp.where(i == j, 1, 2).astype(loc.dtype)  # pairs i <= j stand for both orders

    @jax.checkpoint
    def row(m: Array, s: Array, own: Array, B: Array, S: Array) -> Array:
        pairs = lambda *extra: layer.statistics.pairs(layer.Z, (i, j), extra, m, s)  # noqa: E731
        # Cov[v~_i, v~_j | h] = Cov[v~_i, v~_j] - B_i V B_j'
        C = layer.covariance[i, j] - (B[i] * _times_variance(S, B[j])).sum(-1)
        return matmul(twice, C * pairs() + pairs(own[i], own[j]))

    return each_row(*layer.inputs, len(i) * (Z.shape[1] + 1), row, layer.forms, layer.slopes, variance)


def expected_density(
    kernel: Kernel,
    Z: Array,
    whiten: Array,
    loc: Array,
    variance: Array,
    v: Coupled,
    target: Target,
    data: Observations,
) -> Array:
    r""":math:`\sum_n E[\log N(t_n;\; \kappa_n f(h_n), s_n^2)]` of targets t that are Gaussian together with h and v.

    Args:
        kernel: k, of a function f of mean zero.
        Z: inducing inputs (M, D).
        whiten: :math:`L^{-1}` (M, M).
        loc: means of the inputs (N, D).
        variance: their variances (N, D) or covariances (N, D, D).
        v: inducing values.
        target: the targets.
        data: :math:`\kappa`, s and weights of rows; ``y`` and ``y_variance`` are means and variances of the targets.

    Returns:
        A number.

    Raises:
        ValueError: a kernel without closed form.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Linear
        >>> from numpyro_dgp.bounds import Observations
        >>> from numpyro_dgp.bounds.markov_layers import Coupled, Target, expected_density
        >>> one, zero = jnp.ones((1, 1)), jnp.zeros((1, 1))
        >>> v, t = Coupled(jnp.zeros(1), one, 0.5 * one[None]), Target(zero[0], zero, zero)  # f(h) = v h
        >>> print(f"{expected_density(Linear(), one, one, zero, one, v, t, Observations(zero[0], 1.0)):.4f}")
        -1.6689

    Source: Chamberlin (2016), section 4.7.
    """
    second = psi2(kernel, loc, variance, Z, weights=data.quadratic)
    whiten = resolved(whiten, second)
    # Not clipped, unlike residual_variance: rounding errors of the trace are those of the expected squares, and cancel.
    prior = (data.quadratic * psi0(kernel, loc, variance)).sum()
    remainder = prior - jnp.trace(matmul(matmul(whiten, second), whiten.T))
    where = kernel, Z, whiten, loc, variance, v
    kappa = jnp.asarray(data.slope)
    # E[(t - kappa a(h)' v)^2] (N,)
    fitted = jnp.square(kappa) * expected_square(*where) - 2 * kappa * expected_product(*where, target)
    return data.log_density(jnp.square(data.y) + data.y_variance + fitted) - 0.5 * remainder
