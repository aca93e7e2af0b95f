r"""The bound of two layers whose inducing values depend on each other and hidden values on them, in closed form.

.. math:: q = q(v^1)\, q(v^2 \mid v^1) \prod_n q(h_n \mid v^1), \quad \text{all Gaussian and linear.}

Then :math:`(h_n, v^2)` are jointly Gaussian. For one output of the last layer
:math:`\operatorname{Cov}[v^2, h_{np}] = U_p \Sigma_p T_{np}^\top`, with :math:`U_p` the part of its transition that
acts on hidden column p, and it needs the expectations of :mod:`numpyro_dgp.bounds.coupled_expectations` only.

Source: Chamberlin (2016), sections 4.7, 4.9 and A.5. The mean of h there, :math:`A_n \mu^\# + B_n`, must be
:math:`A_n \mu + B_n`, and its divergences take the covariance of h for that of u.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.algebra.gaussians import expected_kl, kl_full
from numpyro_dgp.algebra.linalg import einsum, matmul, times_transpose
from numpyro_dgp.algebra.whitening import inverse_cholesky, open_variance, resolved
from numpyro_dgp.bounds.coupled_expectations import Coupled, Target, expected_product, expected_square
from numpyro_dgp.bounds.observations import Observations
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.psi_statistics import psi0, psi2

__all__ = ["HiddenLayer", "MarkovLayer", "markov_bound"]


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
    r"""The last layer, of P outputs over P⁻ hidden ones: :math:`q(v_p \mid v^-) = N(U_p v^- + t_p,\; \Omega_p)`.

    Args:
        kernel: k, shared by the outputs.
        Z: inducing inputs (M, P⁻).
        transition: U (P, M, P⁻, M⁻).
        loc: t (P, M).
        scale_tril: triangular roots of :math:`\Omega` (P, M, M).
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
    transition: Array
    loc: Array
    scale_tril: Array
    noise: Array | float


def markov_bound(hidden: HiddenLayer, last: MarkovLayer, X: Array, y: Array) -> Array:
    r"""The bound of two layers under :math:`q(v^1)\, q(h \mid v^1)\, q(v^2 \mid v^1)`, a number.

    The same bound as that of ``dgp.ELBO`` with the rules ``GivenInducing`` and ``MarkovInducing``, without draws.

    Args:
        hidden: the first layer, with a posterior of its values at X.
        last: the second, with mean function zero and a Gaussian likelihood.
        X: inputs (N, D).
        y: observations (N, P), P the outputs of the last layer.

    Returns:
        The bound, a number in nats.

    Raises:
        ValueError: arrays that do not fit together, or a kernel of the last layer without closed form.

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
    :math:`\log N(h; f, \sigma^2)`.
    """
    _require_shapes(hidden, last, X, y)
    mu, T, U = hidden.loc, hidden.weights, last.transition
    Sigma = times_transpose(hidden.scale_tril)
    TS = einsum("npk,pkl->npl", T, Sigma)
    means, variances = last.loc + einsum("qmpk,pk->qm", U, mu), jnp.square(hidden.scale) + (TS * T).sum(-1)
    roots = einsum("qmpk,pkl->qmpl", U, hidden.scale_tril)
    spread = einsum("qmpl,qopl->qmo", roots, roots)
    divergence = kl_full(mu, hidden.scale_tril).sum() + kl_full(means, last.scale_tril).sum()
    divergence = divergence + 0.5 * jnp.square(roots).sum() + _hidden_divergence(hidden, Sigma, X)
    v = Coupled(means, times_transpose(last.scale_tril) + spread, einsum("qmpk,npk->qnmp", U, TS))
    return _expected_likelihood(last, hidden.shift + einsum("npk,pk->np", T, mu), variances, v, y) - divergence


def _hidden_divergence(layer: HiddenLayer, Sigma: Array, X: Array) -> Array:
    r""":math:`\sum_{np} E_{q(v)} \mathrm{KL}[q(h_{np} \mid v) \,\|\, p(h_{np} \mid v, x_n)]`."""
    whiten = inverse_cholesky(layer.kernel.gram(layer.Z), "k(Z, Z) of the first layer")
    A = matmul(layer.kernel(X, layer.Z), whiten.T)
    open_ = open_variance(layer.kernel.diag(X), jnp.square(A).sum(-1), len(layer.Z))
    c = (open_ + jnp.square(layer.noise))[:, None]
    between = layer.weights - A[:, None]
    gap = layer.shift - layer.mean + einsum("npk,pk->np", between, layer.loc)
    square = jnp.square(gap) + einsum("npk,pkl,npl->np", between, Sigma, between)
    return expected_kl(jnp.square(layer.scale), square, c).sum()


def _expected_likelihood(last: MarkovLayer, loc: Array, variance: Array, v: Coupled, y: Array) -> Array:
    """E[log N(y; f(h), noise²)] under the coupled Gaussian over h and the v of every output."""
    second = psi2(last.kernel, loc, variance, last.Z)
    whiten = resolved(inverse_cholesky(last.kernel.gram(last.Z), "k(Z, Z) of the last layer"), second)
    # Not clipped, unlike open_variance: rounding errors of the trace are those of the expected squares, and cancel.
    open_ = psi0(last.kernel, loc, variance).sum() - jnp.trace(matmul(matmul(whiten, second), whiten.T))
    where = last.kernel, last.Z, whiten, loc, variance

    def output(own: Coupled, t: Array) -> Array:
        known = Target(t, jnp.zeros_like(loc), jnp.zeros((len(t), len(last.Z)), t.dtype))
        product, square = expected_product(*where, own, known), expected_square(*where, own)
        error = jnp.square(t) - 2 * product + square
        return Observations(t, last.noise).log_density(error + open_ / len(t))

    return jax.vmap(output, (0, 1))(v, y).sum()


def _require_shapes(hidden: HiddenLayer, last: MarkovLayer, X: Array, y: Array) -> None:
    (M, D), (N, P), (L, _), Q = np.shape(hidden.Z), np.shape(hidden.shift), np.shape(last.Z), np.shape(last.loc)[0]
    arrays = {"hidden.loc": hidden.loc, "hidden.scale_tril": hidden.scale_tril, "hidden.weights": hidden.weights}
    arrays |= {"hidden.scale": hidden.scale, "last.Z": last.Z, "last.transition": last.transition, "last.loc": last.loc}
    arrays |= {"last.scale_tril": last.scale_tril, "X": X, "y": y}
    shapes = (P, M), (P, M, M), (N, P, M), (N, P), (L, P), (Q, L, P, M), (Q, L), (Q, L, L), (N, D), (N, Q)
    expected = dict(zip(arrays, shapes, strict=True))
    found = {name: np.shape(a) for name, a in arrays.items()}
    wrong = {name: (found[name], shape) for name, shape in expected.items() if found[name] != shape}
    if wrong:
        name, (got, shape) = next(iter(wrong.items()))
        raise ValueError(
            f"markov_bound: expected {name} of shape {shape}, got {got}: with {N} data, {M} and {L} inducing inputs, "
            f"{P} hidden columns and {Q} outputs"
        )
