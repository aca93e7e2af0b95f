r"""Seven ways to write a Gaussian as a pair of arrays, and the natural gradient in each.

A Gaussian :math:`N(m, \Sigma)` over n numbers, in batches of any shape, as a pair of arrays (..., n) and (..., n, n):

====================  =======================================================  =====================================
``"mean/sqrt"``       :math:`m,\; R` lower triangular                          :math:`R R^\top = \Sigma`
``"mean/cov"``        :math:`m,\; \Sigma`
``"mean/log"``        :math:`m,\; \log \Sigma`                                 the matrix logarithm
``"natural"``         :math:`\Sigma^{-1} m,\; -\tfrac12 \Sigma^{-1}`
``"natural/sqrt"``    :math:`\Sigma^{-1} m,\; F` lower triangular              :math:`F F^\top = \tfrac12 \Sigma^{-1}`
``"natural/log"``     :math:`\Sigma^{-1} m,\; \log(\tfrac12 \Sigma^{-1})`      the matrix logarithm
``"expectation"``     :math:`m,\; \Sigma + m m^\top`
====================  =======================================================  =====================================

With ``diagonal=True`` both arrays have one shape, every number is a Gaussian of its own, and the same formulas hold
number by number.

Source: Salimbeni (2020), section 3.3.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.matrix_ops import Dense, Diagonal

__all__ = ["Coordinates", "Pair", "convert", "natural_gradient", "natural_step", "require_coordinates", "sample"]

Coordinates = Literal["mean/sqrt", "mean/cov", "mean/log", "natural", "natural/sqrt", "natural/log", "expectation"]
Pair = tuple[Array, Array]


def _to(target: Coordinates, m: Array, R: Array, ops: Any) -> Pair:
    """From mean and root to other coordinates."""
    if target == "mean/sqrt":
        return m, R
    if target == "expectation":
        return m, ops.gram(R) + ops.outer(m)
    if target.startswith("mean"):
        covariance = ops.gram(R)
        return m, ops.log(covariance) if target == "mean/log" else covariance
    back = ops.transpose(ops.inverse(R))
    first = ops.apply(back, ops.apply(ops.transpose(back), m))
    half = 0.5 * ops.gram(back)
    if target == "natural":
        return first, -half
    return first, ops.root(half) if target == "natural/sqrt" else ops.log(half)


def _from(source: Coordinates, first: Array, second: Array, ops: Any) -> Pair:
    """From other coordinates to mean and root, with a positive diagonal."""
    if source == "mean/sqrt":
        return first, ops.positive(second)
    if source == "expectation":
        return first, ops.root(second - ops.outer(first))
    if source.startswith("mean"):
        return first, ops.root(ops.exp(second) if source == "mean/log" else second)
    half = {"natural": lambda a: -a, "natural/sqrt": ops.gram, "natural/log": ops.exp}[source](second)
    R = ops.inverse_root(2 * half)
    return ops.apply(R, ops.apply(ops.transpose(R), first)), R


def require_coordinates(owner: str, name: str) -> None:
    """Raise unless ``name`` is one of the coordinates."""
    if name not in get_args(Coordinates):
        raise ValueError(
            f"{owner}: expected coordinates among {', '.join(get_args(Coordinates))}; got {name!r}: "
            'try "natural", or "mean/sqrt"'
        )


def convert(pair: Pair, source: Coordinates, target: Coordinates, *, diagonal: bool = False) -> Pair:
    """The same Gaussians in other coordinates.

    The result is NaN where ``pair`` is not a Gaussian, for example where ``"mean/cov"`` holds a matrix that is not
    positive definite. Factors come back with a positive diagonal.

    Args:
        pair: two arrays (..., n) and (..., n, n); of one shape when diagonal.
        source: the coordinates of ``pair``.
        target: the coordinates wanted.
        diagonal: whether every number is a Gaussian of its own.

    Raises:
        ValueError: unknown coordinates.

    Example:
        >>> import jax.numpy as jnp
        >>> first, second = convert((jnp.ones(1), jnp.full((1, 1), 0.5)), "mean/sqrt", "natural")
        >>> print(first, second)
        [4.] [[-2.]]

    Source: Salimbeni (2020), section 3.3.
    """
    for name in (source, target):
        require_coordinates("convert", name)
    ops = Diagonal if diagonal else Dense
    return pair if source == target else _to(target, *_from(source, *pair, ops), ops)


def sample(
    key: Array, pair: Pair, source: Coordinates, sample_shape: tuple[int, ...] = (), *, diagonal: bool = False
) -> Array:
    r"""Draws :math:`m + R\epsilon` of Gaussians in any coordinates, shape ``sample_shape`` + (..., n).

    Args:
        key: PRNG key.
        pair: the Gaussians.
        source: the coordinates of ``pair``.
        sample_shape: shape of independent draws.
        diagonal: whether every number is a Gaussian of its own.
    """
    m, R = convert(pair, source, "mean/sqrt", diagonal=diagonal)
    white = jax.random.normal(key, (*sample_shape, *m.shape), m.dtype)
    return m + (Diagonal if diagonal else Dense).apply(R, white)


def natural_gradient(
    natural: Pair, slope: Pair, coordinates: Coordinates, *, diagonal: bool = False
) -> tuple[Pair, Pair]:
    r"""A Gaussian and the natural gradient of a loss at it, both in the coordinates :math:`\xi`.

    .. math:: \tilde\nabla_\xi\, \mathrm{loss} = \frac{\partial \xi}{\partial \theta}\,
              \frac{\partial\, \mathrm{loss}}{\partial \eta^\top}

    One product with the Jacobian of the conversion from natural coordinates :math:`\theta`, in forward mode.

    Args:
        natural: the Gaussian in natural coordinates.
        slope: derivative of the loss by its expectation coordinates :math:`\eta`.
        coordinates: :math:`\xi`.
        diagonal: whether every number is a Gaussian of its own.

    Source: Salimbeni (2020), equation 3.10.
    """
    return jax.jvp(lambda t: convert(t, "natural", coordinates, diagonal=diagonal), (natural,), (slope,))


def natural_step(
    pair: Pair, gradient: Pair, step_size: Array, coordinates: Coordinates, *, diagonal: bool = False
) -> Pair:
    r"""One step along the natural gradient from N(m, R R'), in units of that Gaussian itself.

    With :math:`v = m + R \epsilon` the Gaussian over :math:`\epsilon` is standard normal, whatever m and R: nothing is
    ill-conditioned and no digits are lost where :math:`\Sigma` is small beside m. Natural gradients do not change under
    such a map, and a straight line in the coordinates of :math:`\epsilon` is one in those of v for ``"mean/sqrt"``,
    ``"mean/cov"``, ``"natural"`` and ``"expectation"``. In the three others a step differs from one in the coordinates
    of v by terms of second order.

    Args:
        pair: mean and root with a positive diagonal, ``"mean/sqrt"``.
        gradient: derivatives of the loss by both.
        step_size: :math:`\gamma`, one per Gaussian, (...,); of the shape of the means when diagonal.
        coordinates: in which the step is straight.
        diagonal: whether every number is a Gaussian of its own.

    Returns:
        Mean and root after the step; NaN where the step leaves the cone of positive-definite matrices.

    Source: Salimbeni (2020), equation 3.10; the derivative of a Cholesky factor is that of Murray (2016).
    """
    ops = Diagonal if diagonal else Dense
    (m, R), (slope_m, slope_R) = pair, gradient
    slope = ops.apply(ops.transpose(R), slope_m), ops.slope_of_gram(R, slope_R)
    start = jnp.zeros_like(m), ops.like_identity(-0.5, R)
    point, direction = natural_gradient(start, slope, coordinates, diagonal=diagonal)
    ends: tuple[tuple[int, ...], ...] = ((), ()) if diagonal else ((-1,), (-2, -1))  # axes of one Gaussian
    sizes = [jnp.expand_dims(step_size, axes) for axes in ends]
    moved = point[0] - sizes[0] * direction[0], point[1] - sizes[1] * direction[1]
    shift, factor = convert(moved, coordinates, "mean/sqrt", diagonal=diagonal)
    return m + ops.apply(R, shift), ops.product(R, factor)
