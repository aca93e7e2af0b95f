"""A kernel before a place along one column, and another one behind it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import require_finite, require_scalar
from numpyro_dgp._typing import Array, Number, pytree, static
from numpyro_dgp.kernels.base import Kernel, as_kernel
from numpyro_dgp.kernels.hyperparameters import column_number, require_number

__all__ = ["ChangePoint"]


@pytree
class ChangePoint(Kernel):
    r"""One function before a place, an unrelated one behind it, with a transition between them:

    .. math:: k(x, x') = (1 - w(x))\, k_1(x, x')\, (1 - w(x')) + w(x)\, k_2(x, x')\, w(x'),
              \qquad w(x) = \frac{1}{1 + e^{-(x_d - c) / a}} .

    The function is :math:`(1 - w) f_1 + w f_2`; half way its variance is a quarter of the sum of both. For several
    places nest it. Parts see all columns: ``ChangePoint(RBF().on(0), Matern32().on(0, 1), 0.5)``.

    Args:
        before: :math:`k_1`, a kernel, a number for a constant one, or a function k(X1, X2).
        after: :math:`k_2`, likewise.
        location: c, units of column d.
        width: a, positive, units of column d; nine tenths of the transition are within three widths of c.
        column: d, counted from 0.

    Raises:
        ValueError: parts that are no kernels, a location that is not finite, a width that is not positive, a column
            that is not an integer from 0 on or that the inputs do not have.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import ChangePoint, RBF
        >>> kernel = ChangePoint(RBF(lengthscale=5.0), RBF(lengthscale=0.1), location=0.0, width=0.1)
        >>> x = jnp.array([[-1.0], [-0.5], [0.5], [1.0]])
        >>> print(np.array(kernel(x, x)).round(2))
        [[1.   0.99 0.01 0.  ]
         [0.99 0.99 0.01 0.  ]
         [0.01 0.01 0.99 0.  ]
         [0.   0.   0.   1.  ]]

    Source: Lloyd et al. (2014).
    """

    before: Kernel
    after: Kernel
    location: Number
    width: Number = 1.0
    column: int = static(default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", as_kernel(self.before))
        object.__setattr__(self, "after", as_kernel(self.after))
        require_scalar("ChangePoint", "location", self.location)
        require_finite("location of ChangePoint", self.location, "a place along the column, 0.5")
        require_number(self, "width")
        if (column := column_number(self.column)) is None:
            raise ValueError(
                f"ChangePoint: expected column to be a number counted from 0, got {self.column!r}: column=0 is the "
                "first"
            )
        object.__setattr__(self, "column", column)

    def check_inputs(self, X: Any) -> None:
        self.before.check_inputs(X)
        self.after.check_inputs(X)

    def _weights(self, X: Array) -> tuple[Array, Array]:
        """1 - w and w at inputs (..., N, D), each (..., N)."""
        if self.column >= X.shape[-1]:
            raise ValueError(
                f"kernel ChangePoint: expected inputs with at least {self.column + 1} columns, for column="
                f"{self.column}, got shape {X.shape}: columns are counted from 0"
            )
        z = (X[..., self.column] - self.location) / self.width
        return jax.nn.sigmoid(-z), jax.nn.sigmoid(z)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        (b1, a1), (b2, a2) = self._weights(X1), self._weights(X2)
        before = b1[..., :, None] * self.before.evaluate(X1, X2) * b2[..., None, :]
        return before + a1[..., :, None] * self.after.evaluate(X1, X2) * a2[..., None, :]

    def diagonal(self, X: Array) -> Array:
        before, after = self._weights(X)
        return jnp.square(before) * self.before.diagonal(X) + jnp.square(after) * self.after.diagonal(X)

    def features(self, key: Array, X: Array, num: int) -> Array:
        before, after = self._weights(X)
        first, second = jax.random.split(key)
        return before[..., None] * self.before.features(first, X, num) + after[..., None] * self.after.features(
            second, X, num
        )
