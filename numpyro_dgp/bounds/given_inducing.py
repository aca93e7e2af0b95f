r"""The optimal posterior of hidden values that is linear in the inducing values of their layer.

.. math:: q(h_n \mid v) = N(T_n v + t_n,\, \Omega_n), \qquad q(v) = N(m, \Sigma)

The layer above depends on :math:`h_n` through its mean :math:`T_n m + t_n` and its variance
:math:`\Omega_n + T_n \Sigma T_n^\top` only. With these two fixed, the term of the layer itself,
:math:`E[\log N(h_n; f(x_n), s_n^2)]`, the entropy of q(h | v) and the divergence of q(v) are jointly concave in
:math:`\Sigma` and the covariances :math:`T_n \Sigma`. Their one maximum has, with :math:`r_n = \Omega_n / s_n^2`,

.. math::
    T_n = r_n \langle a_n \rangle, \qquad m = (I + \Phi)^{-1} b, \qquad
    \Sigma^{-1} = I + \Phi - \sum_n \frac{r_n}{s_n^2} \langle a_n \rangle^\top \langle a_n \rangle ,

so that only the mean and :math:`r_n` remain to be optimised: the best of all weights T are the model's own, times
the share r of the process noise that is left in the posterior of a datum. At r = 0 the layer is mean field; with r at
most one, :math:`\Sigma` never exceeds the prior.

**Several outputs together.** With :math:`h_n` of P numbers, :math:`\Omega_n` (P, P), v the values of all outputs one
after the other, :math:`\langle A_n \rangle` (P, P M) with the rows :math:`\langle a_{np} \rangle` on its block diagonal
and :math:`S_n = \mathrm{diag}(s_{np}^2)`, the same argument gives

.. math::
    T_n = \Omega_n S_n^{-1} \langle A_n \rangle, \qquad
    \Sigma^{-1} = I + \Phi - \sum_n \langle A_n \rangle^\top S_n^{-1} \Omega_n S_n^{-1} \langle A_n \rangle :

outputs of v depend on each other where those of :math:`h_n` do. It is positive definite where
:math:`\Omega_n \preceq S_n`. With diagonal :math:`\Omega_n` it is P times the optimum of one output.

Source: Chamberlin (2016), sections 4.3 and 4.4, whose q(v) has T, t and :math:`\Omega` fixed instead, and neglects that
the layer above depends on q(v).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.bounds.collapsed import Quadratic
from numpyro_dgp.math.gaussians import entropy, log_determinant
from numpyro_dgp.math.linalg import einsum, matmul, times_transpose

__all__ = ["Following", "follow", "follow_jointly"]


class Following(NamedTuple):
    r"""The optimal posterior of one output of a layer, and what the layer contributes to the bound.

    Args:
        loc: m (M,).
        scale_tril: lower triangular root R of :math:`\Sigma` (M, M).
        weights: T (N, M).
        variance: :math:`\Omega` (N,).
        marginal_variance: variances of h (N,).
        bound: expected log density and entropy of h, less the divergence of q(v).

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import Observations, follow, from_features
        >>> A, mu = jnp.ones((1, 1)), jnp.array([0.5])
        >>> layer = follow(from_features(A, jnp.ones(1), Observations(mu, 1.0)), A, 1.0, jnp.array([0.5]))
        >>> total = layer.variance + layer.weights**2 @ layer.scale_tril[0] ** 2
        >>> bool(jnp.allclose(layer.marginal_variance, total))  # Omega + T Sigma T'
        True
    """

    loc: Array
    scale_tril: Array
    weights: Array
    variance: Array
    marginal_variance: Array
    bound: Array

    def __repr__(self) -> str:
        return brief(self)


def follow(data: Quadratic, features: Array, noise: ArrayLike, ratio: Array, *, weights: ArrayLike = 1.0) -> Following:
    r"""The optimum over T, m and :math:`\Sigma` of one output.

    Args:
        data: the layer with its values known to be the means of h, from ``from_features`` or ``from_moments``.
        features: :math:`\langle a_n \rangle`, one row per datum (N, M).
        noise: standard deviation s of the process noise, a number or (N,).
        ratio: r, above 0 and up to 1 (N,).
        weights: how much each datum counts, as in ``data``: a number or (N,).

    Returns:
        The posterior and its part of the bound, in nats.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import Observations, follow, from_features
        >>> A, mu = jnp.ones((1, 1)), jnp.array([0.5])
        >>> layer = follow(from_features(A, jnp.ones(1), Observations(mu, 1.0)), A, 1.0, jnp.array([0.5]))
        >>> print(f"{layer.loc[0]:.4f} {layer.weights[0, 0]:.4f} {layer.marginal_variance[0]:.4f}")
        0.2500 0.5000 0.6667

    Source: Chamberlin (2016), section 4.3.
    """
    together = jax.tree.map(lambda a: jnp.asarray(a)[None], data)
    noises = jnp.broadcast_to(jnp.asarray(noise, ratio.dtype), ratio.shape)[:, None]
    found = follow_jointly(together, features[None], noises, jnp.sqrt(ratio)[:, None, None], weights=weights)
    return Following(
        loc=found.loc[0],
        scale_tril=found.scale_tril,
        weights=found.weights[:, 0, 0],
        variance=found.variance[:, 0, 0],
        marginal_variance=found.marginal_variance[:, 0, 0],
        bound=found.bound,
    )


def follow_jointly(
    data: Quadratic, features: Array, noise: ArrayLike, share_root: Array, *, weights: ArrayLike = 1.0
) -> Following:
    r"""The optimum over T, m and :math:`\Sigma` of P outputs that depend on each other.

    .. math:: \Omega_n = S_n^{1/2} Q_n Q_n^\top S_n^{1/2}

    Args:
        data: as in :func:`follow`, of every output: :math:`\Phi` (P, M, M), b (P, M), c (P,).
        features: :math:`\langle a_{np} \rangle` (P, N, M).
        noise: standard deviations s of the process noise, broadcast to (N, P).
        share_root: lower triangular Q (N, P, P), with :math:`Q_n Q_n^\top \preceq I`.
        weights: how much each datum counts, as in ``data``: a number or (N,).

    Returns:
        The posterior: loc (P, M), scale_tril (P M, P M), weights (N, P, P, M), variance and marginal_variance
        (N, P, P).

    Source: Chamberlin (2016), section 4.4.
    """
    P, N, M = features.shape
    s = jnp.broadcast_to(jnp.asarray(noise, features.dtype), (N, P))
    w = jnp.broadcast_to(jnp.asarray(weights, features.dtype), (N,))
    share = times_transpose(share_root)  # Q Q' = S^-1/2 Ω S^-1/2
    rows = features / s.T[..., None]  # of S^-1/2 <A_n> (P, N, M)
    # sum_n <A_n>' S^-1 Ω S^-1 <A_n>, block by block
    shared = einsum("npq,pni,qnj->piqj", w[:, None, None] * share, rows, rows).reshape(P * M, P * M)
    Phi = einsum("pij,pq->piqj", data.Phi, jnp.eye(P, dtype=data.Phi.dtype)).reshape(P * M, P * M)
    together = Quadratic(Phi, data.b.reshape(-1), data.c.sum())
    root = together._replace(Phi=Phi - shared).optimum()[1]  # R R' = (I + Φ - shared)^-1
    loc = data.optimum()[0]  # (I + Φ)^-1 b
    half = einsum("pni,pik->npk", rows, root.reshape(P, M, -1))
    belief = times_transpose(half)  # S^-1/2 <A_n> Σ <A_n>' S^-1/2
    taken = matmul(share, belief)
    # The entropy of q(h_n | v), and what E[log N(h_n; f, S_n)] has beyond h_n at its mean,
    # -tr S^-1 (Ω + T Σ T' - 2 T Σ <A>') / 2 = -tr (QQ' + QQ' B QQ' - 2 QQ' B) / 2.
    own = entropy(jnp.square(s)).sum(-1) + log_determinant(share_root)
    own = own - 0.5 * jnp.trace(share + matmul(taken, share) - 2 * taken, axis1=-2, axis2=-1)
    variance = _scaled(share, s)  # Ω_n
    return Following(
        loc=loc,
        scale_tril=root,
        weights=einsum("np,npq,qnm->npqm", s, share, rows),  # Ω S^-1 <A_n>
        variance=variance,
        marginal_variance=variance + _scaled(matmul(taken, share), s),  # Ω_n + T_n Σ T_n'
        bound=together.at(loc.reshape(-1), root) + (w * own).sum(),
    )


def _scaled(matrices: Array, s: Array) -> Array:
    return s[:, :, None] * matrices * s[:, None, :]
