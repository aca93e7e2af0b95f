r"""The determinant of a symmetric positive definite Toeplitz matrix, in O(n^2) operations and O(n) memory.

Durbin's recursion gives the coefficients :math:`a^{(m)}` of the best linear prediction of a value from the m before it,
and the variances :math:`E_m` of its errors, whose product is the determinant. From the last coefficients follows the
first column :math:`x = (1, a) / E` of the inverse, and from it, by the formula of Gohberg and Semencul, the sums along
the diagonals of the inverse, which are the slopes of the log determinant:

.. math:: \sum_i (T^{-1})_{i, i+k} = \frac{1}{x_0} \sum_j (n - k - 2 j)\, x_j x_{j + k} .
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array

__all__ = ["toeplitz_log_determinant"]


@jax.custom_vjp
def toeplitz_log_determinant(column: Array) -> Array:
    """log det of the symmetric Toeplitz matrix with a first column (n,): a number.

    Example:
        >>> print(float(jnp.exp(toeplitz_log_determinant(jnp.array([2.0, 1.0]))).round(4)))
        3.0

    Source: Trench (1964).
    """
    return _durbin(column)[0]


def _durbin(column: Array) -> tuple[Array, Array]:
    """The log determinant, and the first column of the inverse (n,)."""
    n = len(column)
    # The last m entries of a reversed vector are its first m in reversed order: slices of fixed length n do for all m.
    zeros = jnp.zeros_like(column)

    def backwards(values: Array, m: Array) -> Array:
        """``values[m], values[m - 1], ..., values[0], 0, ...`` (n,)."""
        return jax.lax.dynamic_slice(jnp.concatenate([values[::-1], zeros]), (n - 1 - m,), (n,))

    def step(m: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        a, error, total = state  # a[0] = 1 and the coefficients of order m - 1
        reflection = -(a * backwards(column, m)).sum() / error
        a = a + reflection * backwards(a, m)
        error = error * (1 - jnp.square(reflection))
        return a, error, total + jnp.log(error)

    start = zeros.at[0].set(1), column[0], jnp.log(column[0])
    a, error, total = jax.lax.fori_loop(1, n, step, start)
    return total, a / error


def _forward(column: Array) -> tuple[Array, Array]:
    return _durbin(column)


def _backward(x: Array, slope: Array) -> tuple[Array]:
    n = len(x)
    k = jnp.arange(n, dtype=x.dtype)
    waves = jnp.fft.rfft(x, 2 * n)

    def correlation(left: Array) -> Array:
        """Sums of ``left[j] x[j + k]`` over j (n,)."""
        return jnp.fft.irfft(jnp.conj(jnp.fft.rfft(left, 2 * n)) * waves, 2 * n)[:n]

    sums = ((n - k) * correlation(x) - 2 * correlation(k * x)) / x[0]
    return (slope * jnp.where(k == 0, 1, 2) * sums,)


toeplitz_log_determinant.defvjp(_forward, _backward)
