"""Conditionals for classification: robust-max, with its own expectation, and one-vs-each, a bound on the softmax by
pairs of classes or a subset of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr
from numpyro.distributions import constraints

from numpyro_dgp._checks import expect, expected, violated
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.functions.site_distribution import SiteDistribution
from numpyro_dgp.math.linalg import safe_sqrt
from numpyro_dgp.math.peaked_integral import log_expectation
from numpyro_dgp.math.quadrature import GaussHermite

__all__ = ["OneVsEach", "RobustMax", "of_class"]


def of_class(values: Array, y: ArrayLike) -> Array:
    """``values`` (..., P) of the classes y; both may have batch dimensions to the left."""
    index = jnp.asarray(y, int)[..., None]
    batch = jnp.broadcast_shapes(values.shape[:-1], index.shape[:-1])
    values, index = jnp.broadcast_to(values, (*batch, values.shape[-1])), jnp.broadcast_to(index, (*batch, 1))
    return jnp.take_along_axis(values, index, -1)[..., 0]


class RobustMax(SiteDistribution):
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
        >>> from numpyro_dgp.functions.function_values import FunctionValues
        >>> from numpyro_dgp.likelihoods import RobustMax
        >>> print(RobustMax(jnp.array([0.3, 2.0, -1.0]), epsilon=0.5).probs)
        [0.25 0.5  0.25]
        >>> f_x = FunctionValues(jnp.array([[0.3, 2.0, -1.0]]), jnp.ones((1, 3)))
        >>> likelihood = dgp.Likelihood(f_x, lambda v: dgp.likelihoods.RobustMax(v, 0.1))
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
            raise expected(
                "values (..., P) of two classes or more",
                jnp.shape(values),
                "pass outputs=P, the number of classes, to gp",
            )
        expect(0 < epsilon < 1, "0 < epsilon < 1", epsilon, "1e-3 is usual")
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
        return winner * (1 - self.epsilon - other) + other  # 1 - epsilon, or epsilon / (P - 1)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return jax.random.categorical(key, jnp.log(self.probs), shape=self.shape(sample_shape))

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        return jnp.log(of_class(self.probs, value))

    def expected_log_prob(self, y: Array, loc: Array, variance: Array) -> Array:
        """E[log p(y | v)] for independent v_p ~ N(loc_p, variance_p)."""
        first = self._probability_first(y, loc, variance)  # P(v_y is the largest)
        other = jnp.log(self.epsilon / (loc.shape[-1] - 1))
        # E log p = first log(1 - epsilon) + (1 - first) log(epsilon / (P - 1))
        return first * jnp.log1p(-self.epsilon) + (1 - first) * other

    def log_marginal(self, y: Array, loc: Array, variance: Array) -> Array:
        """log E[p(y | v)] for independent v_p ~ N(loc_p, variance_p)."""
        own_loc, own_variance = jnp.broadcast_arrays(*(of_class(a, y) for a in (loc, variance)))

        def log_first(own: Array) -> Array:
            return self._log_probability_below(own, y, loc, variance)

        # E_{v_y} prod_{c != y} Phi((v_y - mu_c) / sigma_c)
        first = jnp.exp(log_expectation(log_first, own_loc, own_variance, most=64))
        return jnp.log(first * (1 - self.epsilon) + (1 - first) * self.epsilon / (loc.shape[-1] - 1))

    def _probability_first(self, y: Array, loc: Array, variance: Array) -> Array:
        own_loc, own_variance = (of_class(a, y) for a in (loc, variance))
        nodes = GaussHermite().nodes(own_loc, own_variance)
        # sum_k w_k prod_{c != y} Phi((v_k - mu_c) / sigma_c)
        return nodes.mean(jnp.exp(self._log_probability_below(nodes.points, y, loc, variance)))

    def _log_probability_below(self, own: Array, y: Array, loc: Array, variance: Array) -> Array:
        """Of all other classes together, given the value of class y."""
        below = log_ndtr((own[..., None] - loc) / safe_sqrt(variance))  # log P(v_c < v_y)
        return jnp.where(jnp.arange(loc.shape[-1]) == jnp.asarray(y, int)[..., None], 0, below).sum(-1)


class OneVsEach(SiteDistribution, dist.CategoricalLogits):
    r"""A categorical distribution of logits v whose expected log density is bounded from below, class by class:

    .. math:: \log \frac{e^{v_y}}{\sum_c e^{v_c}} \ge \sum_{c \ne y} \log \frac{1}{1 + e^{v_c - v_y}} .

    Inside ``Likelihood`` every term is a one-dimensional Gauss-Hermite integral, over the difference of two function
    values, without draws. With two classes it is the softmax. Draws, probabilities and ``log_prob`` are those of the
    softmax; of functions that are mixed, ``f(x).mix(W)``, it takes the expectation of ``log_prob`` by draws.

    Args:
        values: function values (..., P), one per class.
        others: labels (B,) of classes drawn uniformly, with replacement, in every step: their terms estimate the
            sum over all, without bias. ``None`` takes all classes.

    Raises:
        ValueError: fewer than two classes, or others that are not labels of classes of shape (B,), one at least.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> from numpyro_dgp.functions.function_values import FunctionValues
        >>> f_x = FunctionValues(jnp.array([[0.3, 2.0, -1.0]]), jnp.full((1, 3), 1e-9))
        >>> print(dgp.Likelihood(f_x, dgp.likelihoods.OneVsEach).log_prob(jnp.array([1])).round(3))
        [-0.216]
        >>> print(dgp.likelihoods.OneVsEach(f_x.loc).log_prob(jnp.array([1])).round(3))  # the softmax
        [-0.209]

    Source: Titsias (2016), section 2.
    """

    pytree_data_fields: tuple[str, ...] = ("others",)

    def __init__(self, values: Array, others: ArrayLike | None = None) -> None:
        if jnp.ndim(values) < 1 or jnp.shape(values)[-1] < 2:
            raise expected(
                "values (..., P) of two classes or more",
                jnp.shape(values),
                "pass outputs=P, the number of classes, to gp",
            )
        if others is not None:
            others = others if isinstance(others, jax.Array) else np.asarray(others)
            classes = jnp.shape(values)[-1]
            draw = f"jax.random.randint(numpyro.prng_key(), (50,), 0, {classes})"
            expect(
                others.ndim == 1 and others.size and jnp.issubdtype(others.dtype, jnp.integer),
                "others to be labels of shape (B,)",
                f"{others.dtype} of shape {others.shape}",
                draw,
            )
            if violated(lambda labels: (labels >= 0) & (labels < classes), others):
                raise expected(
                    f"others to be labels from 0 to {classes - 1}", f"one of {np.min(others)} to {np.max(others)}", draw
                )
        self.others = others
        super().__init__(logits=values)

    __repr__ = brief

    def expected_log_prob(self, y: Array, loc: Array, variance: Array) -> Array:
        """The bound on E[log p(y | v)] for independent v_p ~ N(loc_p, variance_p)."""
        classes = jnp.arange(loc.shape[-1]) if self.others is None else jnp.asarray(self.others)
        share = 1.0 if self.others is None else loc.shape[-1] / len(classes)  # P / B: B terms stand for P
        own_loc, own_variance = (of_class(a, y)[..., None] for a in (loc, variance))
        # v_y - v_c ~ N(mu_y - mu_c, sigma_y^2 + sigma_c^2)
        differences = own_loc - loc[..., classes], own_variance + variance[..., classes]
        nodes = GaussHermite().nodes(*differences)
        terms = nodes.mean(jax.nn.log_sigmoid(nodes.points))  # E log 1 / (1 + e^(v_c - v_y))
        return share * jnp.where(classes == jnp.asarray(y, int)[..., None], 0.0, terms).sum(-1)
