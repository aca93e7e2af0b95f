"""A distribution that NumPyro lacks: the length of s e, where e ~ N(0, I) has three components."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints


class Maxwell(dist.Distribution):
    """p(y | s) = sqrt(2 / pi) y^2 exp(-y^2 / 2 s^2) / s^3."""

    arg_constraints = {"scale": constraints.positive}
    support = constraints.positive

    def __init__(self, scale, *, validate_args=None):
        self.scale = scale
        super().__init__(jnp.shape(scale), validate_args=validate_args)

    def sample(self, key, sample_shape=()):
        e = jax.random.normal(key, (3, *self.shape(sample_shape)), jnp.result_type(self.scale))
        return self.scale * jnp.linalg.norm(e, axis=0)

    def log_prob(self, value):
        z = value / self.scale
        return 0.5 * jnp.log(2 / jnp.pi) + 2 * jnp.log(z) - jnp.log(self.scale) - 0.5 * z**2

    @property
    def mean(self):
        return 2 * jnp.sqrt(2 / jnp.pi) * self.scale

    @property
    def variance(self):
        return (3 - 8 / jnp.pi) * self.scale**2
