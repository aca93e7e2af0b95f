"""Its closed form, where the log scale is affine in the function."""

import jax.numpy as jnp
from toys.maxwell import Maxwell

from numpyro_dgp.extend import ClosedForms, Dependence, Form, with_slope


def maxwell(conditional):
    """For log s = a v + b, E[log s] = a m + b and E[s^-2] = exp(-2 (a m + b) + 2 a^2 var)."""

    def expected_log_prob(y, mean, variance):
        scale, derivative, _ = with_slope(conditional, mean, "scale")  # s and a s at the mean of v
        inverse_square = jnp.exp(2 * (derivative / scale) ** 2 * variance) / scale**2
        constant = 0.5 * jnp.log(2 / jnp.pi) + 2 * jnp.log(y)
        return constant - 3 * jnp.log(scale) - 0.5 * y**2 * inverse_square

    return ClosedForms(expected_log_prob)


MAXWELL = Form(Maxwell, {"scale": (Dependence.LOG_AFFINE,)}, maxwell)
