"""A structured rule: hidden values that are one linear map of the layer below, for all data."""

import dataclasses

import jax.numpy as jnp
from numpyro.distributions import constraints

from numpyro_dgp.extend import FunctionValues, Rule, require_site


@dataclasses.dataclass(frozen=True)
class LinearBelow(Rule):
    """q(h_n | x_n) = N(W' x_n + b, s^2), where x_n is what the layer sees of the layer below."""

    scale: float = 0.1

    def __call__(self, site):
        require_site(FunctionValues, self, site, "the values of a hidden layer")
        x, P = site.fn.inputs, site.fn.event_shape[0]
        W = site.param("W", lambda: jnp.eye(x.shape[-1], P, dtype=x.dtype))
        b = site.param("b", lambda: jnp.zeros(P, x.dtype))
        s = site.param(
            "s", lambda: jnp.full(P, self.scale, x.dtype), constraint=constraints.positive
        )
        return FunctionValues(x @ W + b, jnp.square(s))
