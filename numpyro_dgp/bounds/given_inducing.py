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

Source: Chamberlin (2016), section 4.3, whose q(v) has t and :math:`\Omega` fixed instead, and neglects that the layer
above depends on q(v).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.bounds.collapsed import Quadratic
from numpyro_dgp.math.gaussians import entropy
from numpyro_dgp.math.linalg import matmul, times_transpose
from numpyro_dgp.math.quadratic_forms import quadratic_forms

__all__ = ["Following", "follow"]


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
    s2, w = (jnp.broadcast_to(jnp.asarray(a, ratio.dtype), ratio.shape) for a in (jnp.square(noise), weights))
    shared = matmul((w * ratio / s2) * features.T, features)  # sum_n w_n r_n / s_n^2 <a_n> <a_n>'
    root = Quadratic(data.Phi - shared, data.b, data.c).optimum()[1]  # R R' = (I + Φ - shared)^-1
    loc = data.optimum()[0]  # (I + Φ)^-1 b
    belief_variance = quadratic_forms(times_transpose(root)[None], features)[:, 0]  # <a_n>' Σ <a_n>
    variance = ratio * s2  # Ω_n = r_n s_n^2
    # The entropy of q(h_n | v), and what E[log N(h_n; f, s_n^2)] has beyond h_n at its mean:
    # -(Ω_n + ((1 - r_n)^2 - 1) <a_n>' Σ <a_n>) / 2 s_n^2.
    own = entropy(variance) - 0.5 * ratio + ratio * (1 - 0.5 * ratio) / s2 * belief_variance
    return Following(
        loc=loc,
        scale_tril=root,
        weights=ratio[:, None] * features,
        variance=variance,
        marginal_variance=variance + jnp.square(ratio) * belief_variance,  # Ω_n + T_n Σ T_n'
        bound=data.at(loc, root) + (w * own).sum(),
    )
