r"""Linear Gaussian couplings of whitened inducing values: :math:`q(v \mid v^-) = N(U v^- + t,\, W)`.

U and W may be dense, or thin matrices that are never multiplied out. A layer has P outputs with M values each, the one
below :math:`P^-` with :math:`M^-`.
"""

from __future__ import annotations

from typing import TypeAlias

import jax.numpy as jnp

from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.algebra.gaussians import kl_full
from numpyro_dgp.algebra.linalg import einsum, matmul, times_transpose
from numpyro_dgp.algebra.low_rank import kl_low_rank

__all__ = ["JointCovariance", "LowRankCovariance", "LowRankTransition"]


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


@pytree
class JointCovariance:
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


@pytree
class LowRankCovariance:
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


Transition: TypeAlias = Array | LowRankTransition
Covariance: TypeAlias = Array | JointCovariance | LowRankCovariance


def coupled(U: Transition, below: Array) -> Array:
    """U times columns (..., P⁻, M⁻, K): shape (..., P, M, K)."""
    if isinstance(U, LowRankTransition):
        return einsum("pmj,...jk->...pmk", U.left, einsum("jqr,...qrk->...jk", U.right, below))
    return einsum("pmqr,...qrk->...pmk", U, below)


def root(W: Covariance, P: int, M: int) -> Array:
    """Columns (P, M, K) of which W is the sum of squares."""
    if isinstance(W, JointCovariance):
        return W.scale_tril.reshape(P, M, P * M)
    if isinstance(W, LowRankCovariance):
        alone = jnp.diag(W.scale.reshape(-1)).reshape(P, M, P * M)
        return jnp.concatenate([alone, W.scale[..., None] * W.factor], -1)
    return einsum("pmk,pq->pmqk", W, jnp.eye(P, dtype=W.dtype)).reshape(P, M, P * M)


def covariances(W: Covariance, P: int, M: int) -> Array:
    """The parts of W of single outputs (P, M, M)."""
    if isinstance(W, JointCovariance):
        return times_transpose(W.scale_tril.reshape(P, M, P * M))
    if isinstance(W, LowRankCovariance):
        thin = W.scale[..., None] * W.factor
        return matmul(thin, thin.mT) + jnp.square(W.scale)[..., None] * jnp.eye(M, dtype=W.scale.dtype)
    return times_transpose(W)


def divergence(loc: Array, W: Covariance) -> Array:
    """KL[N(loc, W) || N(0, I)] of all outputs (P, M) together."""
    if isinstance(W, JointCovariance):
        return kl_full(loc.reshape(-1), W.scale_tril)
    if isinstance(W, LowRankCovariance):
        J = W.factor.shape[-1]
        return kl_low_rank(loc.reshape(-1), W.scale.reshape(-1), W.factor.reshape(-1, J), False)
    return kl_full(loc, W).sum()


def root_shape(W: Covariance, P: int, M: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the array that W is, and the one expected for P outputs with M values each."""
    if isinstance(W, JointCovariance):
        return jnp.shape(W.scale_tril), (P * M, P * M)
    if isinstance(W, LowRankCovariance):
        return jnp.shape(W.scale), (P, M)
    return jnp.shape(W), (P, M, M)
