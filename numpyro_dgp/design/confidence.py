"""Confidence bounds: the mean of the function plus a multiple of its standard deviation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._fields import flag, nonnegative
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.densities import lower_factors
from numpyro_dgp.design.improvement import largest
from numpyro_dgp.design.posterior_acquisition import WithDraws
from numpyro_dgp.math.linalg import matmul

__all__ = ["UpperConfidence"]


@dataclasses.dataclass(frozen=True, eq=False)
class UpperConfidence(WithDraws):
    r"""How good the function may be within a number of standard deviations.

    .. math:: \mathrm{UCB}(x) = \pm\mu(x) + \beta\, \sigma(x), \qquad
              E \max_j \Bigl( \pm\mu(x_j) + \beta \sqrt{\tfrac{\pi}{2}}\; |\gamma_j| \Bigr), \quad
              \gamma \sim N(0, \Sigma)

    for one point, and for a batch, by quasi-random draws. The sign is minus where small values are good, so that it is
    the lower bound with its sign turned. Mean and covariance are those of the mixture over draws.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes all random numbers.
        beta: number of standard deviations, at least zero.
        minimise: whether small values are good.
        num_draws: quasi-random draws, for batches; a power of two.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ExpectedImprovement`, or a ``beta`` that is not finite or below zero.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.ones((1, 5))})
        >>> lower = dgp.design.UpperConfidence(posterior, jax.random.key(0), beta=2.0)
        >>> print(lower(jnp.array([[0.0]])).round(2), lower(jnp.array([[9.0]])).round(2))
        -1.0 2.0

    Source: Srinivas et al. (2010), where beta is the square of this one; Wilson et al. (2017) for batches.
    """

    beta: ArrayLike = nonnegative(2.0, "it is a number of standard deviations, such as 2.0")
    minimise: bool = flag(True, "True where small values are good", kw_only=True)

    __repr__ = brief

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        found = self.jointly(x, None, args, kwargs)
        mean = -found.mean if self.minimise else found.mean
        L = lower_factors(found.covariance, mean)
        if len(mean) == 1:
            return mean[0] + self.beta * L[0, 0]  # +-mu + beta sigma
        spread = jnp.abs(matmul(self.white(1, len(mean), mean.dtype)[0], L.mT))  # |gamma|, gamma = L e
        return largest(mean + self.beta * math.sqrt(math.pi / 2) * spread).mean()  # sqrt(pi / 2) E|gamma_j| = sigma_j
