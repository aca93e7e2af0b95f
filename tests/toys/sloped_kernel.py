"""A kernel with psi statistics: a smooth function times a random slope, and draws of functions."""

import jax
import jax.numpy as jnp

import numpyro_dgp as dgp
from numpyro_dgp.extend import Term, pytree


@pytree
class Sloped(dgp.kernels.Kernel):
    """k(x, x') = (1 + a^2 x . x') exp(-|x - x'|^2 / 2 l^2)."""

    slope: float = 1.0
    lengthscale: float = 1.0

    def evaluate(self, X1, X2):
        smooth = dgp.kernels.RBF(1.0, self.lengthscale).evaluate(X1, X2)
        return (1 + self.slope**2 * X1 @ X2.mT) * smooth

    def diagonal(self, X):
        return 1 + self.slope**2 * jnp.square(X).sum(-1)

    def features(self, key, X, num):
        one, two, three = jax.random.split(key, 3)
        smooth = dgp.kernels.RBF(1.0, self.lengthscale)
        slopes = self.slope * X @ jax.random.normal(one, (X.shape[-1], num), X.dtype)
        return smooth.features(two, X, num) + slopes * smooth.features(three, X, num)

    def tilts(self, dims):
        # Terms s exp(-(x - z)' Lambda (x - z) / 2) prod_j x' A_j z, with no A and with one.
        precision = jnp.full(dims, self.lengthscale**-2.0)
        none = jnp.zeros((), precision.dtype)
        return Term(none, precision), Term(none, precision, (jnp.full(dims, self.slope**2.0),))
