r"""Observations of one function with Gaussian noise, :math:`y_n \sim N(\kappa_n f(x_n), s_n^2)`."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array, ArrayLike

__all__ = ["Observations", "require_rows"]


class Observations:
    r"""The factors of the expectations of f in an expected log density of observations.

    .. math:: \sum_n \beta_n \log N(y_n; \kappa_n f_n, s_n^2)
              = \sum_n \frac{\beta_n}{s_n^2} \Bigl( \kappa_n y_n f_n - \tfrac12 \kappa_n^2 f_n^2 - \tfrac12 y_n^2 \Bigr)
                - \beta_n \log (\sqrt{2 \pi}\, s_n)

    Args:
        y: observations (N,), or of any other shape.
        noise: standard deviation s, a number or one per observation, as are the others.
        slope: :math:`\kappa`.
        weights: how much each observation counts, :math:`\beta`.

    Attributes:
        precision: :math:`\beta_n / s_n^2`.
        linear: :math:`\kappa_n \beta_n / s_n^2`, the factor of :math:`y_n f_n`.
        quadratic: :math:`\kappa_n^2 \beta_n / s_n^2`, the factor of :math:`-\tfrac12 f_n^2`.

    Example:
        >>> import jax.numpy as jnp
        >>> y = jnp.array([1.0, 2.0])
        >>> print(f"{Observations(y, 1.0).log_density(jnp.square(y)):.3f}")  # log N(1; 0, 1) + log N(2; 0, 1)
        -4.338
    """

    def __init__(self, y: Array, noise: ArrayLike, slope: ArrayLike = 1.0, weights: ArrayLike = 1.0) -> None:
        def rows(value: ArrayLike) -> Array:
            return jnp.broadcast_to(jnp.asarray(value, y.dtype), y.shape)

        self.slope, self.noise, self.weights = rows(slope), rows(noise), rows(weights)
        self.precision = self.weights / jnp.square(self.noise)
        self.linear = self.precision * self.slope
        self.quadratic = self.linear * self.slope

    def log_density(self, square: Array) -> Array:
        """The weighted sum of log densities where the expected squares of the residuals are ``square``."""
        return self.peak() - 0.5 * (self.precision * square).sum()

    def peak(self) -> Array:
        """The same where the residuals are zero: the greatest value it can have."""
        return -(self.weights * jnp.log(math.sqrt(2 * math.pi) * self.noise)).sum()


def require_rows(owner: str, y: Array, **arrays: Array) -> None:
    """Raise a ``ValueError`` unless y is (N,) and every other array has N rows."""
    if np.ndim(y) != 1 or any(np.shape(a)[:1] != np.shape(y) for a in arrays.values()):
        raise ValueError(
            f"{owner}: expected y of shape (N,) and one row per datum in everything else, got y {np.shape(y)} with "
            f"{ {name: np.shape(a) for name, a in arrays.items()} }: for several outputs, jax.vmap over them"
        )
