r"""The bound of layers whose inducing values depend on each other and hidden values on them, in closed form.

.. math:: q = q(v^1) \prod_{\ell > 1} q(v^\ell \mid v^{\ell-1}) \prod_{\ell, n} q(h^\ell_n \mid v^\ell),
          \quad \text{all Gaussian and linear,} \quad q(v^\ell \mid v^{\ell-1}) = N(U v^{\ell-1} + t,\, W).

Then the inducing values of all layers and the hidden values of one datum are jointly Gaussian. With
:math:`\Sigma^\ell = U \Sigma^{\ell-1} U^\top + W` and T the weights of hidden values,
:math:`\operatorname{Cov}[v^\ell, h^{\ell-1}_n] = U \Sigma^{\ell-1} T_n^\top`, and every term of the bound is an
expectation of :mod:`numpyro_dgp.bounds.markov_layers`. The first layer has known inputs and enters by
:math:`\log p(h \mid v, x)`; layers between it and the last one by the smaller :math:`E[\log N(h; f(h^-), s^2)]`, in
which the variance between inducing inputs is linear.

Expectations of a function whose inducing values depend on its inputs.

Inputs :math:`h_n` of variance :math:`V_n` and whitened inducing values :math:`v \sim N(m, \Sigma)` are jointly Gaussian
with :math:`G_n = \operatorname{Cov}[v, h_n]`, as they are where both follow the inducing values of the layer below.
Then

.. math:: v \mid h_n \sim N\bigl(m + G_n V_n^{-1} (h_n - E h_n),\; \Sigma - G_n V_n^{-1} G_n^\top\bigr),

and with :math:`a(h) = L^{-1} k(Z, h)`, :math:`L L^\top = k(Z, Z)`, all that a layer needs are expectations of
:math:`k(z, h)` and :math:`k(z, h)\,k(h, z')` times affine functions of h, one for every z.

Linear Gaussian couplings of whitened inducing values: :math:`q(v \mid v^-) = N(U v^- + t,\, W)`.

U and W may be dense, or thin matrices that are never multiplied out. A layer has P outputs with M values each, the one
below :math:`P^-` with :math:`M^-`.

Source: Chamberlin (2016), sections 4.7, 4.9 and A.5. The mean of h there, :math:`A_n \mu^\# + B_n`, must be
:math:`A_n \mu + B_n`, and its divergences take the covariance of h for that of u; Chamberlin (2016), sections 4.7 and
4.8. Its conditional means (figure 4.9) have a minus where a plus belongs, which carries on into 4.7.6 and 4.7.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expected
from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.bounds.collapsed import Observations
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.expectations import Tilted, psi0, psi2
from numpyro_dgp.math.gaussians import entropy, expected_kl, kl_full, kl_low_rank
from numpyro_dgp.math.linalg import einsum, matmul, times_transpose
from numpyro_dgp.math.matrix_ops import DenseOperations, DiagonalOperations
from numpyro_dgp.math.row_blocks import each_row
from numpyro_dgp.math.whitening import inverse_cholesky, residual_variance, resolved

__all__ = [
    "Coupled",
    "HiddenLayer",
    "InnerMarkovLayer",
    "JointCovariance",
    "LowRankCovariance",
    "LowRankTransition",
    "MarkovLayer",
    "Target",
    "expected_product",
    "expected_square",
    "markov_bound",
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
            return jnp.linalg.solve(self.variance, cross.reshape(*shape[:1], -1, shape[-1]).mT).mT.reshape(shape)
        V = self.variance.reshape(shape[0], *(1,) * (cross.ndim - 2), shape[-1])
        return cross / jnp.where(V > 0, V, jnp.inf)  # an input without variance has no covariances: slope zero

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


@pytree
class LowRankTransition:
    r"""A coupling U = B O of rank J: J (P M + P⁻ M⁻) numbers, and as many operations for a product with a vector.

    A dense U has P M P⁻ M⁻. With J at least the smaller of its two sides every U is such a product.

    Args:
        left: B (P, M, J).
        right: O (J, P⁻, M⁻).

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import LowRankTransition
        >>> U = LowRankTransition(jnp.ones((1, 3, 2)), jnp.ones((2, 2, 4)))  # (3, 8) of rank 2
        >>> U.shape
        (1, 3, 2, 4)

    Source: Chamberlin (2016), section A.6.
    """

    left: Array
    right: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the dense U (P, M, P⁻, M⁻)."""
        return (*jnp.shape(self.left)[:2], *jnp.shape(self.right)[1:])


class _Covariance:
    """What a layer asks of W, the covariance of its P M inducing values given those below."""

    def _root(self, P: int, M: int) -> Array:
        """Columns (P, M, K) of which W is the sum of squares."""
        raise NotImplementedError

    def _of_outputs(self, P: int, M: int) -> Array:
        """The parts of W of single outputs (P, M, M)."""
        raise NotImplementedError

    def _divergence(self, loc: Array) -> Array:
        """KL[N(loc, W) || N(0, I)] of all outputs (P, M) together."""
        raise NotImplementedError

    def _shapes(self, P: int, M: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the array that W is, and the one expected for P outputs with M values each."""
        raise NotImplementedError


@pytree
class _BlockCovariance(_Covariance):
    r"""Outputs that are independent given those below, :math:`W_p = R_p R_p^\top`, as an array R (P, M, M)."""

    scale_tril: Array

    def _root(self, P: int, M: int) -> Array:
        return einsum("pmk,pq->pmqk", self.scale_tril, jnp.eye(P, dtype=self.scale_tril.dtype)).reshape(P, M, P * M)

    def _of_outputs(self, P: int, M: int) -> Array:
        return times_transpose(self.scale_tril)

    def _divergence(self, loc: Array) -> Array:
        return kl_full(loc, self.scale_tril).sum()

    def _shapes(self, P: int, M: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return jnp.shape(self.scale_tril), (P, M, M)


@pytree
class JointCovariance(_Covariance):
    r"""One W for all outputs together, :math:`W = R R^\top`.

    Args:
        scale_tril: the lower triangular R (P M, P M), outputs one after the other.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import JointCovariance
        >>> JointCovariance(jnp.eye(6)).scale_tril.shape  # two outputs with three values each
        (6, 6)

    Source: Chamberlin (2016), section 4.9.
    """

    scale_tril: Array

    def _root(self, P: int, M: int) -> Array:
        return self.scale_tril.reshape(P, M, P * M)

    def _of_outputs(self, P: int, M: int) -> Array:
        return times_transpose(self._root(P, M))

    def _divergence(self, loc: Array) -> Array:
        return kl_full(loc.reshape(-1), self.scale_tril)

    def _shapes(self, P: int, M: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return jnp.shape(self.scale_tril), (P * M, P * M)


@pytree
class LowRankCovariance(_Covariance):
    r"""One W for all outputs together, :math:`W = \mathrm{diag}(\sigma)\,(I + F F^\top)\,\mathrm{diag}(\sigma)`.

    P M (J + 1) numbers; its divergence from N(0, I) takes P M J² operations.

    Args:
        scale: :math:`\sigma` (P, M).
        factor: F (P, M, J).

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import LowRankCovariance
        >>> LowRankCovariance(jnp.ones((2, 3)), jnp.zeros((2, 3, 1))).factor.shape
        (2, 3, 1)

    Source: Chamberlin (2016), section A.6.
    """

    scale: Array
    factor: Array

    def _root(self, P: int, M: int) -> Array:
        # diag(σ) and diag(σ) F side by side
        alone = jnp.diag(self.scale.reshape(-1)).reshape(P, M, P * M)
        return jnp.concatenate([alone, self.scale[..., None] * self.factor], -1)

    def _of_outputs(self, P: int, M: int) -> Array:
        thin = self.scale[..., None] * self.factor
        # diag(σ)^2 + diag(σ) F F' diag(σ), for rows of one output
        return matmul(thin, thin.mT) + jnp.square(self.scale)[..., None] * jnp.eye(M, dtype=self.scale.dtype)

    def _divergence(self, loc: Array) -> Array:
        J = self.factor.shape[-1]
        return kl_low_rank(loc.reshape(-1), self.scale.reshape(-1), self.factor.reshape(-1, J), False)

    def _shapes(self, P: int, M: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return jnp.shape(self.scale), (P, M)


Transition: TypeAlias = Array | LowRankTransition
Covariance: TypeAlias = Array | JointCovariance | LowRankCovariance


def coupled(U: Transition, below: Array) -> Array:
    """U times columns (..., P⁻, M⁻, K): shape (..., P, M, K)."""
    if isinstance(U, LowRankTransition):
        return einsum("pmj,...jk->...pmk", U.left, einsum("jqr,...qrk->...jk", U.right, below))  # B (O x)
    return einsum("pmqr,...qrk->...pmk", U, below)


@pytree
class HiddenLayer:
    r"""A layer of P outputs at known inputs, whose values have means that are linear in its inducing values.

    .. math:: q(v_p) = N(m_p, \Sigma_p), \qquad q(h_{np} \mid v_p) = N(T_{np} v_p + t_{np}, \Omega_{np})

    Args:
        kernel: k, shared by the outputs.
        Z: inducing inputs (M, D).
        loc: m (P, M).
        scale_tril: triangular roots R of :math:`\Sigma` (P, M, M).
        weights: T (N, P, M).
        shift: t (N, P).
        scale: square roots of :math:`\Omega` (N, P).
        noise: standard deviation s of the process noise, a number.
        mean: prior means at the inputs (N, P), or a number.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import HiddenLayer
        >>> from numpyro_dgp.kernels import RBF
        >>> Z, m, R = jnp.linspace(-1, 1, 3)[:, None], jnp.zeros((1, 3)), jnp.eye(3)[None]
        >>> hidden = HiddenLayer(RBF(), Z, m, R, jnp.zeros((3, 1, 3)), Z, jnp.ones((3, 1)), 0.1)  # N = M = 3, P = 1
        >>> hidden.weights.shape, hidden.noise
        ((3, 1, 3), 0.1)
    """

    kernel: Kernel
    Z: Array
    loc: Array
    scale_tril: Array
    weights: Array
    shift: Array
    scale: Array
    noise: Array | float
    mean: Array | float = 0.0


@pytree
class MarkovLayer:
    r"""The last layer, of P outputs over P⁻ hidden ones: :math:`q(v \mid v^-) = N(U v^- + t,\; W)`.

    Args:
        kernel: k, shared by the outputs.
        Z: inducing inputs (M, P⁻).
        transition: U (P, M, P⁻, M⁻), or a :class:`~numpyro_dgp.bounds.LowRankTransition`.
        loc: t (P, M).
        scale_tril: triangular roots of W (P, M, M), one per output; or one W for all outputs, a
            :class:`~numpyro_dgp.bounds.JointCovariance` or :class:`~numpyro_dgp.bounds.LowRankCovariance`.
        noise: standard deviation of the observations, a number.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import MarkovLayer
        >>> from numpyro_dgp.kernels import RBF
        >>> Z, m, R = jnp.linspace(-1, 1, 3)[:, None], jnp.zeros((1, 3)), jnp.eye(3)[None]
        >>> last = MarkovLayer(RBF(), Z, jnp.zeros((1, 3, 1, 3)), m, R, 0.5)
        >>> last.transition.shape
        (1, 3, 1, 3)
    """

    kernel: Kernel
    Z: Array
    transition: Transition
    loc: Array
    scale_tril: Covariance
    noise: Array | float

    @property
    def _covariance(self) -> _Covariance:
        """W."""
        W = self.scale_tril
        return W if isinstance(W, _Covariance) else _BlockCovariance(W)


@pytree
class InnerMarkovLayer:
    r"""A layer between the first and the last: inducing values like those of :class:`MarkovLayer`, and hidden values.

    .. math:: q(h_n \mid v) = \prod_p N(T_{np} v_p + t_{np}, \Omega_{np})

    Args:
        values: the inducing values; ``noise`` is the standard deviation s of the process noise.
        weights: T (N, P, M).
        shift: t (N, P).
        scale: square roots of :math:`\Omega` (N, P).
        slope: of a linear mean function (P⁻, P), or ``None`` for mean zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import InnerMarkovLayer, MarkovLayer
        >>> from numpyro_dgp.kernels import RBF
        >>> Z, m, R = jnp.linspace(-1, 1, 3)[:, None], jnp.zeros((1, 3)), jnp.eye(3)[None]
        >>> values = MarkovLayer(RBF(), Z, jnp.zeros((1, 3, 1, 3)), m, R, 0.1)
        >>> inner = InnerMarkovLayer(values, jnp.zeros((5, 1, 3)), jnp.zeros((5, 1)), jnp.ones((5, 1)), jnp.eye(1))
        >>> inner.weights.shape
        (5, 1, 3)
    """

    values: MarkovLayer
    weights: Array
    shift: Array
    scale: Array
    slope: Array | None = None


class _State(NamedTuple):
    """What the layer above needs of a layer: means m (P, M) of its inducing values, factors F (P, M, K) of their joint
    covariance F F', covariances Cov[v, h] (N, P, M, D), means (N, D) of the hidden values h and
    their variances (N, D) or covariances (N, D, D)."""

    mean: Array
    columns: Array
    with_hidden: Array
    loc: Array
    variance: Array


def markov_bound(
    hidden: HiddenLayer, last: MarkovLayer, X: Array, y: Array, *, between: Sequence[InnerMarkovLayer] = ()
) -> Array:
    r"""The bound of two or more layers with inducing values that follow those below, a number.

    With two layers the same bound as that of ``dgp.ELBO`` with the rules ``GivenInducing`` and ``MarkovInducing``,
    without draws; with more a lower one, because layers in between enter by
    :math:`E[\log N(h; f(h^-), s^2)]`.

    Args:
        hidden: the first layer, with a posterior of its values at X.
        last: the last, with mean function zero and a Gaussian likelihood.
        X: inputs (N, D).
        y: observations (N, P), P the outputs of the last layer.
        between: the layers between these two, from the second on.

    Returns:
        The bound, a number in nats.

    Raises:
        ValueError: arrays that do not fit together, or a kernel above the first layer without closed form.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import RBF
        >>> from numpyro_dgp.bounds import HiddenLayer, MarkovLayer, markov_bound
        >>> Z, m, R = jnp.linspace(-1, 1, 3)[:, None], jnp.zeros((1, 3)), jnp.eye(3)[None]
        >>> hidden = HiddenLayer(RBF(), Z, m, R, jnp.zeros((3, 1, 3)), Z, jnp.ones((3, 1)), 0.1)
        >>> last = MarkovLayer(RBF(), Z, jnp.zeros((1, 3, 1, 3)), m, R, 0.5)
        >>> markov_bound(hidden, last, Z, jnp.sin(Z)).shape
        ()

    Source: Chamberlin (2016), sections 4.7, 4.9 and A.5, with :math:`\log p(h \mid v, x)` for
    :math:`\log N(h; f, \sigma^2)` in the first layer.
    """
    _require_shapes(hidden, tuple(between), last, X, y)
    Sigma = times_transpose(hidden.scale_tril)
    below = _first(hidden, Sigma)
    # -KL[q(v^1) || N(0, I)] - E KL[q(h^1 | v^1) || p(h^1 | v^1, X)]
    bound = -kl_full(hidden.loc, hidden.scale_tril).sum() - _hidden_divergence(hidden, Sigma, X)
    for layer in between:
        mean, columns, v = _follow(layer.values, below)
        T, S = layer.weights, v.covariance
        loc = layer.shift + einsum("npm,pm->np", T, mean)  # E h = T m + t
        TF = einsum("npm,pmk->npk", T, columns)  # Cov[h] = T F F' T' + Ω with Cov[v] = F F'
        with_below = einsum("npm,npmd->npd", T, jnp.moveaxis(v.with_inputs, 0, 1))  # Cov[h, h^-] = T Cov[v, h^-]
        with_values = einsum("npm,pmk->npk", T, S)  # Cov[h_p, v_p] = T Σ
        variance = jnp.square(layer.scale) + (with_values * T).sum(-1)  # T Σ T' + Ω
        slope = jnp.zeros((below.loc.shape[1], loc.shape[1]), loc.dtype) if layer.slope is None else layer.slope
        target = _less_linear(Target(loc, with_below, with_values), variance, slope, below, v)
        # + E[log N(h; f(h^-), s^2)] + entropy of q(h | v) - E KL[q(v | v^-) || N(0, I)]
        bound = bound + _expected_density(layer.values, below, v, *target) + entropy(jnp.square(layer.scale)).sum()
        bound = bound - _divergence(layer.values, below)
        covariance = matmul(TF, TF.mT) + jnp.square(layer.scale)[..., None] * jnp.eye(T.shape[1], dtype=T.dtype)
        # Cov[v, h] = F F' T'
        below = _State(mean, columns, einsum("pmk,ndk->npmd", columns, TF), loc, covariance)
    _, _, v = _follow(last, below)
    N, Q = y.shape
    # Observations are targets without covariances.
    known = Target(y, jnp.zeros((N, Q, below.loc.shape[1]), y.dtype), jnp.zeros((N, *last.loc.shape), y.dtype))
    return bound + _expected_density(last, below, v, known, jnp.zeros_like(y)) - _divergence(last, below)


def _first(layer: HiddenLayer, Sigma: Array) -> _State:
    TS = einsum("npk,pkl->npl", layer.weights, Sigma)  # T_n Σ
    one = jnp.eye(len(Sigma), dtype=TS.dtype)
    variance = jnp.square(layer.scale) + (TS * layer.weights).sum(-1)  # T Σ T' + Ω
    loc = layer.shift + einsum("npk,pk->np", layer.weights, layer.loc)
    columns = _BlockCovariance(layer.scale_tril)._root(*layer.loc.shape)
    # Outputs of the first layer are independent: Cov[v_p, h_d] = 0 unless p = d.
    return _State(layer.loc, columns, einsum("npm,pd->npmd", TS, one), loc, variance)


def _follow(layer: MarkovLayer, below: _State) -> tuple[Array, Array, Coupled]:
    """Means and columns of the inducing values, and what each output of them has in common with the layer's inputs."""
    mean = layer.loc + coupled(layer.transition, below.mean[..., None])[..., 0]  # U m^- + t
    moved = coupled(layer.transition, below.columns)  # U F^-, where Cov[v^-] = F^- F^-'
    W, sizes = layer._covariance, layer.loc.shape
    columns = jnp.concatenate([moved, W._root(*sizes)], -1)
    own = matmul(moved, moved.mT) + W._of_outputs(*sizes)  # Σ = U Σ^- U' + W
    with_inputs = jnp.moveaxis(coupled(layer.transition, below.with_hidden), 0, 1)  # Cov[v, h^-] = U Cov[v^-, h^-]
    return mean, columns, Coupled(mean, own, with_inputs)


def _divergence(layer: MarkovLayer, below: _State) -> Array:
    """E KL[q(v | v⁻) || N(0, I)]: that at the mean of v⁻, and half the trace of the covariance that U adds."""
    mean = layer.loc + coupled(layer.transition, below.mean[..., None])[..., 0]
    trace = jnp.square(coupled(layer.transition, below.columns)).sum()  # tr U Σ^- U'
    return layer._covariance._divergence(mean) + 0.5 * trace


def _less_linear(target: Target, variance: Array, slope: Array, below: _State, v: Coupled) -> tuple[Target, Array]:
    """The target without ``slope`` (P⁻, P) times the inputs, and its variance."""
    V: Any = below.variance if below.variance.ndim == 3 else jax.vmap(jnp.diag)(below.variance)
    between = einsum("dp,nde->npe", slope, V)  # w' V, covariances of w' h^- with h^-
    both = target.with_inputs
    # Var[t - w' h^-] = Var[t] + w' V w - 2 w' Cov[h^-, t]
    variance = variance + (between * slope.T).sum(-1) - 2 * (both * slope.T).sum(-1)
    shared = einsum("dp,pnmd->npm", slope, v.with_inputs)  # Cov[w' h^-, v]
    return Target(target.loc - matmul(below.loc, slope), both - between, target.with_values - shared), variance


def _hidden_divergence(layer: HiddenLayer, Sigma: Array, X: Array) -> Array:
    r""":math:`\sum_{np} E_{q(v)} \mathrm{KL}[q(h_{np} \mid v) \,\|\, p(h_{np} \mid v, x_n)]`."""
    whiten = inverse_cholesky(layer.kernel.gram(layer.Z), "k(Z, Z) of the first layer")
    A = matmul(layer.kernel(X, layer.Z), whiten.T)  # rows a_n' = k(x_n, Z) L^-T
    conditional = residual_variance(layer.kernel.diag(X), jnp.square(A).sum(-1), len(layer.Z))
    c = (conditional + jnp.square(layer.noise))[:, None]  # Var[h_n | v] = k - a_n' a_n + s^2 under the model
    between = layer.weights - A[:, None]  # T_n - a_n'
    # E[(T_n v + t_n - m(x_n) - a_n' v)^2] = gap_n^2 + (T_n - a_n') Σ (T_n - a_n')'
    gap = layer.shift - layer.mean + einsum("npk,pk->np", between, layer.loc)
    square = jnp.square(gap) + einsum("npk,pkl,npl->np", between, Sigma, between)
    return expected_kl(jnp.square(layer.scale), square, c).sum()


def _expected_density(layer: MarkovLayer, below: _State, v: Coupled, target: Target, target_variance: Array) -> Array:
    """E[log N(t; f(h⁻), noise²)] of targets t (N, P), which may be Gaussian together with h⁻ and v."""
    loc, variance = below.loc, below.variance
    second = psi2(layer.kernel, loc, variance, layer.Z)
    whiten = resolved(inverse_cholesky(layer.kernel.gram(layer.Z), "k(Z, Z) of a layer"), second)
    # Not clipped, unlike residual_variance: rounding errors of the trace are those of the expected squares, and cancel.
    remainder = psi0(layer.kernel, loc, variance).sum() - jnp.trace(matmul(matmul(whiten, second), whiten.T))
    where = layer.kernel, layer.Z, whiten, loc, variance

    def output(own: Coupled, t: Target, t_variance: Array) -> Array:
        product, square = expected_product(*where, own, t), expected_square(*where, own)
        error = jnp.square(t.loc) + t_variance - 2 * product + square  # E[(t - a(h)' v)^2] (N,)
        # sum_n <k(h, h)> - tr <a a'> is shared out evenly: only its sum counts.
        return Observations(t.loc, layer.noise).log_density(error + remainder / len(loc))

    return jax.vmap(output, (0, 1, 1))(v, target, target_variance).sum()


def _require_shapes(
    hidden: HiddenLayer, between: tuple[InnerMarkovLayer, ...], last: MarkovLayer, X: Array, y: Array
) -> None:
    (M, D), (N, P) = np.shape(hidden.Z), np.shape(hidden.shift)
    found = {"hidden.loc": np.shape(hidden.loc), "hidden.scale_tril": np.shape(hidden.scale_tril)}
    found |= {"hidden.weights": np.shape(hidden.weights), "hidden.scale": np.shape(hidden.scale)}
    wanted: dict[str, tuple[int, ...]] = dict(zip(found, ((P, M), (P, M, M), (N, P, M), (N, P)), strict=True))
    wide, many = P, M
    for i, layer in enumerate((*(inner.values for inner in between), last)):
        name = f"between[{i}].values" if i < len(between) else "last"
        L, Q = np.shape(layer.Z)[0], np.shape(layer.loc)[0]
        found |= {f"{name}.Z": np.shape(layer.Z), f"{name}.transition": tuple(np.shape(layer.transition))}
        wanted |= {f"{name}.Z": (L, wide), f"{name}.transition": (Q, L, wide, many), f"{name}.loc": (Q, L)}
        found |= {f"{name}.loc": np.shape(layer.loc)}
        found[f"{name}.scale_tril"], wanted[f"{name}.scale_tril"] = layer._covariance._shapes(Q, L)
        if i < len(between):
            inner, stem, slope = between[i], f"between[{i}]", (wide, Q)
            found |= {f"{stem}.weights": np.shape(inner.weights), f"{stem}.shift": np.shape(inner.shift)}
            found |= {f"{stem}.scale": np.shape(inner.scale)}
            wanted |= {f"{stem}.weights": (N, Q, L), f"{stem}.shift": (N, Q), f"{stem}.scale": (N, Q)}
            found |= {f"{stem}.slope": slope if inner.slope is None else np.shape(inner.slope)}
            wanted |= {f"{stem}.slope": slope}
        wide, many = Q, L
    found |= {"X": np.shape(X), "y": np.shape(y)}
    wanted |= {"X": (N, D), "y": (N, wide)}
    for name, shape in wanted.items():
        if found[name] != shape:
            raise expected(
                f"{name} of shape {shape}",
                found[name],
                f"with {N} data, {M} inducing inputs and {P} columns in the first layer, and the layers above it",
            )
