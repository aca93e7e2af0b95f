"""Robust-max classification, a conditional for ``Likelihood`` with an expectation of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import log_ndtr
from numpyro.distributions import constraints

from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.linalg import safe_sqrt
from numpyro_dgp.algebra.peaked_integral import log_expectation
from numpyro_dgp.algebra.quadrature import GaussHermite
from numpyro_dgp.model.fields_in_order import FieldsInOrder

__all__ = ["RobustMax", "of_class"]


def of_class(values: Array, y: ArrayLike) -> Array:
    """``values`` (..., P) of the classes y; both may have batch dimensions of their own to the left."""
    index = jnp.asarray(y, int)[..., None]
    batch = jnp.broadcast_shapes(values.shape[:-1], index.shape[:-1])
    values, index = jnp.broadcast_to(values, (*batch, values.shape[-1])), jnp.broadcast_to(index, (*batch, 1))
    return jnp.take_along_axis(values, index, -1)[..., 0]


class RobustMax(FieldsInOrder):
    r"""Robust-max classification: class :math:`\arg\max_p v_p` with probability :math:`1 - \epsilon`, else any other.

    Inside ``Likelihood`` its expectation needs only the probability that :math:`v_y` is the largest, one
    one-dimensional integral: by Gauss-Hermite quadrature for the bound, over intervals around the peak for densities.

    Args:
        values: function values (..., P), one per class.
        epsilon: probability of the other classes together.

    Raises:
        ValueError: fewer than two classes, or epsilon outside (0, 1).

    Example:
        >>> import numpyro_dgp as dgp
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.model.function_values import FunctionValues
        >>> from numpyro_dgp import RobustMax
        >>> print(RobustMax(jnp.array([0.3, 2.0, -1.0]), epsilon=0.5).probs)
        [0.25 0.5  0.25]
        >>> f_x = FunctionValues(jnp.array([[0.3, 2.0, -1.0]]), jnp.ones((1, 3)))
        >>> likelihood = dgp.Likelihood(f_x, lambda v: dgp.RobustMax(v, 0.1))
        >>> likelihood
        Likelihood(RobustMax, own integral)
        >>> print(f"{likelihood.log_marginal(jnp.array([1]))[0]:.2f}")
        -0.23

    Source: Hernandez-Lobato et al. (2011); Salimbeni (2020), section 3.4.5.
    """

    arg_constraints = {"values": constraints.real_vector}
    pytree_aux_fields = ("epsilon",)

    __repr__ = brief

    def __init__(self, values: Array, epsilon: float = 1e-3) -> None:
        if jnp.ndim(values) < 1 or jnp.shape(values)[-1] < 2:
            raise ValueError(
                f"RobustMax: expected values (..., P) of at least two classes, got {jnp.shape(values)}: "
                "open the layer with outputs= the number of classes"
            )
        if not 0 < epsilon < 1:
            raise ValueError(f"RobustMax: expected 0 < epsilon < 1, got {epsilon}: 1e-3 is usual")
        self.values, self.epsilon = values, epsilon
        super().__init__(jnp.shape(values)[:-1], ())

    @property
    def support(self) -> constraints.Constraint:
        return constraints.integer_interval(0, self.values.shape[-1] - 1)

    @property
    def probs(self) -> Array:
        """Class probabilities (..., P)."""
        winner = jax.nn.one_hot(self.values.argmax(-1), self.values.shape[-1], dtype=self.values.dtype)
        other = self.epsilon / (self.values.shape[-1] - 1)
        return winner * (1 - self.epsilon - other) + other

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return jax.random.categorical(key, jnp.log(self.probs), shape=self.shape(sample_shape))

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        return jnp.log(of_class(self.probs, value))

    def expected_log_prob(self, y: Array, loc: Array, variance: Array) -> Array:
        """E[log p(y | v)] for independent v_p ~ N(loc_p, variance_p)."""
        first = self._probability_first(y, loc, variance)
        other = jnp.log(self.epsilon / (loc.shape[-1] - 1))
        return first * jnp.log1p(-self.epsilon) + (1 - first) * other

    def log_marginal(self, y: Array, loc: Array, variance: Array) -> Array:
        """log E[p(y | v)] for independent v_p ~ N(loc_p, variance_p)."""
        own_loc, own_variance = jnp.broadcast_arrays(*(of_class(a, y) for a in (loc, variance)))

        def log_first(own: Array) -> Array:
            return self._log_probability_below(own, y, loc, variance)

        first = jnp.exp(log_expectation(log_first, own_loc, own_variance, most=64))
        return jnp.log(first * (1 - self.epsilon) + (1 - first) * self.epsilon / (loc.shape[-1] - 1))

    def _probability_first(self, y: Array, loc: Array, variance: Array) -> Array:
        own_loc, own_variance = (of_class(a, y) for a in (loc, variance))
        nodes = GaussHermite().nodes(own_loc, own_variance)
        return nodes.mean(jnp.exp(self._log_probability_below(nodes.points, y, loc, variance)))

    def _log_probability_below(self, own: Array, y: Array, loc: Array, variance: Array) -> Array:
        """Of all other classes together, given the value of class y."""
        below = log_ndtr((own[..., None] - loc) / safe_sqrt(variance))
        return jnp.where(jnp.arange(loc.shape[-1]) == jnp.asarray(y, int)[..., None], 0, below).sum(-1)
