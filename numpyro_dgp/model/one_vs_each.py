"""The softmax of many classes under a bound that looks at classes two by two, or at a part of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_dgp._checks import violated
from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.quadrature import GaussHermite
from numpyro_dgp.model.fields_in_order import FieldsInOrder
from numpyro_dgp.model.robustmax import of_class

__all__ = ["OneVsEach"]


class OneVsEach(FieldsInOrder, dist.CategoricalLogits):
    r"""A categorical distribution of logits v whose expected log density is bounded from below, class by class:

    .. math:: \log \frac{e^{v_y}}{\sum_c e^{v_c}} \ge \sum_{c \ne y} \log \frac{1}{1 + e^{v_c - v_y}} .

    Inside ``Likelihood`` every term is a one-dimensional Gauss-Hermite integral, over the difference of two function
    values, without draws. With two classes it is the softmax. Draws, probabilities and ``log_prob`` are those of the
    softmax; of functions that are mixed, ``f(x).mix(W)``, it takes the expectation of ``log_prob`` by draws.

    Args:
        values: function values (..., P), one per class.
        others: labels (B,) of classes drawn uniformly, with replacement, in every step: the terms of these stand for
            all, without bias. ``None`` takes all classes.

    Raises:
        ValueError: fewer than two classes, or others that are not labels of classes of shape (B,), one at least.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> from numpyro_dgp.model.function_values import FunctionValues
        >>> f_x = FunctionValues(jnp.array([[0.3, 2.0, -1.0]]), jnp.full((1, 3), 1e-9))
        >>> print(dgp.Likelihood(f_x, dgp.OneVsEach).log_prob(jnp.array([1])).round(3))
        [-0.216]
        >>> print(dgp.OneVsEach(f_x.loc).log_prob(jnp.array([1])).round(3))  # the softmax
        [-0.209]

    Source: Titsias (2016), section 2.
    """

    pytree_data_fields: tuple[str, ...] = ("others",)

    def __init__(self, values: Array, others: ArrayLike | None = None) -> None:
        if jnp.ndim(values) < 1 or jnp.shape(values)[-1] < 2:
            raise ValueError(
                f"OneVsEach: expected values (..., P) of at least two classes, got {jnp.shape(values)}: "
                "open the layer with outputs= the number of classes"
            )
        if others is not None:
            others = others if isinstance(others, jax.Array) else np.asarray(others)
            classes = jnp.shape(values)[-1]
            draw = f"jax.random.randint(numpyro.prng_key(), (50,), 0, {classes})"
            if others.ndim != 1 or not others.size or not jnp.issubdtype(others.dtype, jnp.integer):
                raise ValueError(
                    f"OneVsEach: expected others to be labels of shape (B,), got {others.dtype} of shape "
                    f"{others.shape}: {draw}"
                )
            if violated(lambda labels: (labels >= 0) & (labels < classes), others):
                raise ValueError(
                    f"OneVsEach: expected others to be labels from 0 to {classes - 1}, got one of "
                    f"{np.min(others)} to {np.max(others)}: {draw}"
                )
        self.others = others
        super().__init__(logits=values)

    __repr__ = brief

    def expected_log_prob(self, y: Array, loc: Array, variance: Array) -> Array:
        """The bound on E[log p(y | v)] for independent v_p ~ N(loc_p, variance_p)."""
        classes = jnp.arange(loc.shape[-1]) if self.others is None else jnp.asarray(self.others)
        share = 1.0 if self.others is None else loc.shape[-1] / len(classes)
        own_loc, own_variance = (of_class(a, y)[..., None] for a in (loc, variance))
        differences = own_loc - loc[..., classes], own_variance + variance[..., classes]
        nodes = GaussHermite().nodes(*differences)
        terms = nodes.mean(jax.nn.log_sigmoid(nodes.points))
        return share * jnp.where(classes == jnp.asarray(y, int)[..., None], 0.0, terms).sum(-1)
