r"""Predictions of values at several inputs together: mixtures of joint Gaussians."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import require_key
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.densities import Mixture
from numpyro_dgp.math.linalg import conditional_cholesky, einsum, matmul

__all__ = ["JointMixture", "lower_factors"]


def lower_factors(covariances: Array, means: Array) -> Array:
    """Lower factors of covariances (..., N, N) that rounding may have left singular, zero included.

    Variances below the rounding error of the ``means`` (..., N) count as that.
    """
    info = jnp.finfo(covariances.dtype)
    # Squares of the rounding errors of means; tiny / eps, so that zero has a factor.
    least = jnp.square(info.eps * jax.lax.stop_gradient(means)) + float(info.tiny / info.eps)
    C = covariances + least[..., None] * jnp.eye(covariances.shape[-1], dtype=covariances.dtype)
    return conditional_cholesky(C, jax.lax.stop_gradient(jnp.diagonal(C, axis1=-2, axis2=-1)))


class JointMixture(NamedTuple):
    r"""A mixture over S draws of Gaussians over the values of a function at N inputs together.

    .. math:: p(f) = \tfrac1S \sum_s N(f;\; \mu_s, C_s), \qquad
              E f = \bar\mu, \quad
              \operatorname{Cov} f = \tfrac1S \sum_s C_s + \tfrac1S \sum_s (\mu_s - \bar\mu)(\mu_s - \bar\mu)^\top

    ``posterior.predict_jointly`` gives it. Of a function with P outputs it has the covariances between inputs, output
    by output, and none between outputs.

    Args:
        means: given each draw (S, N), or (S, N, P).
        covariances: between inputs given each draw (S, N, N), or (S, P, N, N), squared units of f.
        prior_covariances: of the last function before any data, at the same inputs to it, of the same shape.

    Raises:
        ValueError: by :meth:`sample`, something else than a PRNG key.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp import JointMixture
        >>> C = jnp.array([[[1.0, 0.5], [0.5, 1.0]]] * 2)
        >>> mixture = JointMixture(jnp.array([[0.0, 0.0], [2.0, 2.0]]), C, C)  # S = 2, N = 2
        >>> print(mixture.mean, mixture.covariance)
        [1. 1.] [[2.  1.5]
         [1.5 2. ]]
        >>> mixture.sample(jax.random.key(0)).shape
        (2, 2)
    """

    means: Array
    covariances: Array
    prior_covariances: Array

    def __repr__(self) -> str:
        return brief(self)

    @property
    def mean(self) -> Array:
        """Mean of the mixture (N,), or (N, P)."""
        return self.means.mean(0)

    @property
    def covariance(self) -> Array:
        """Covariance of the mixture (N, N), or (P, N, N): mean of the covariances plus covariance of the means."""
        apart = self.by_output - self.by_output.mean(0)
        return self.covariances.mean(0) + einsum("s...n,s...m->...nm", apart, apart) / len(apart)

    @property
    def by_output(self) -> Array:
        """Means with inputs last: (S, N), or (S, P, N)."""
        return self.means if self.means.ndim == 2 else self.means.mT

    @property
    def marginals(self) -> Mixture:
        """The same mixture input by input, without correlations, as :meth:`Posterior.predict_function` gives it."""
        variances = jnp.diagonal(self.covariances, axis1=-2, axis2=-1)
        return Mixture(self.means, variances if self.means.ndim == 2 else variances.mT)

    def factors(self) -> Array:
        """Lower factors of the covariances, (S, N, N) or (S, P, N, N)."""
        return lower_factors(self.covariances, self.by_output)

    def sample(self, key: Array) -> Array:
        """One draw of the values from every Gaussian, of the shape of ``means``.

        Args:
            key: PRNG key.
        """
        require_key("JointMixture", key)
        white = jax.random.normal(key, self.by_output.shape, self.means.dtype)
        draws = self.by_output + matmul(self.factors(), white[..., None])[..., 0]  # mu_s + L_s e
        return draws if self.means.ndim == 2 else draws.mT
