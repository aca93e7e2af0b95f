r"""What a stretch of a Gaussian Markov chain says, as a function of the state before it; stretches are joined.

Given the state :math:`s_0` before a stretch, the state after it and the density of the observations in it are

.. math:: s_1 \sim N(A s_0 + b,\; C), \qquad \log p(y \mid s_0) = c + \eta^\top s_0 - \tfrac12 s_0^\top J s_0 .

Two stretches, one after the other, are a stretch. Joining is associative, so that many can be joined in any order: one
after the other, or all pairs at once, which takes as many rounds as the logarithm of their number.

Source: Sarkka and Garcia-Fernandez (2021), their elements of filtering and smoothing in one, with the constant.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import lu_factor, lu_solve

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import matmul

__all__ = ["Element", "after", "before", "join"]


class Element(NamedTuple):
    """A stretch of a chain.

    Args:
        A: slope (..., d, d) of the state after it by the state before it.
        b: shift (..., d).
        C: covariance (..., d, d).
        eta: slope (..., d) of the log density of its observations, at the state zero before it.
        J: minus their curvature (..., d, d).
        c: their log density (...,) at the state zero before it.
    """

    A: Array
    b: Array
    C: Array
    eta: Array
    J: Array
    c: Array

    @classmethod
    def start(cls, mean: Array, covariance: Array) -> Element:
        """The stretch before all observations, after which the state is N(mean, covariance) whatever was before."""
        zeros = jnp.zeros_like(covariance)
        return cls(zeros, mean, covariance, jnp.zeros_like(mean), zeros, jnp.zeros(mean.shape[:-1], mean.dtype))

    @classmethod
    def nothing(cls, size: int, dtype: jnp.dtype) -> Element:
        """A stretch in which nothing happens."""
        eye, zero = jnp.eye(size, dtype=dtype), jnp.zeros(size, dtype)
        return cls(eye, zero, 0 * eye, zero, 0 * eye, zero[0])


def join(first: Element, then: Element) -> Element:
    """Two stretches as one; leading dimensions broadcast."""
    d = first.b.shape[-1]
    lu = lu_factor(jnp.eye(d, dtype=first.C.dtype) + matmul(first.C, then.J))  # eigenvalues of one and more
    residual = then.eta - _times(then.J, first.b)
    # (I + C J)^-1 of A, of C, and of the mean after the first stretch given the observations in the second.
    informed = first.b + _times(first.C, then.eta)
    solved = lu_solve(lu, jnp.concatenate([first.A, first.C], -1))
    A, C, b = solved[..., :d], solved[..., d:], lu_solve(lu, informed[..., None])[..., 0]
    log_det = jnp.log(jnp.abs(jnp.diagonal(lu[0], axis1=-2, axis2=-1))).sum(-1)
    square = (residual * _times(C, residual)).sum(-1)
    known = (then.eta * first.b).sum(-1) - 0.5 * (first.b * _times(then.J, first.b)).sum(-1)
    forward = matmul(then.A, C)
    slope = lu_solve(lu, residual[..., None], trans=1)[..., 0]  # (I + J C)^-1 (eta - J b)
    return Element(
        matmul(then.A, A),
        _times(then.A, b) + then.b,
        _symmetric(matmul(forward, then.A.mT)) + then.C,
        first.eta + _times(first.A.mT, slope),
        first.J + _symmetric(matmul(first.A.mT, matmul(then.J, A))),
        first.c + then.c + known + 0.5 * square - 0.5 * log_det,
    )


def _times(matrix: Array, vector: Array) -> Array:
    return matmul(matrix, vector[..., None])[..., 0]


def _symmetric(matrix: Array) -> Array:
    return 0.5 * (matrix + matrix.mT)


def before(elements: Element, start: Element, parallel: bool) -> tuple[Element, Element]:
    """All that is before each of several stretches, ``start`` included, and all together.

    Args:
        elements: the stretches, leading dimension first.
        start: what is before all of them.
        parallel: join pairs at once, not one stretch after the other.
    """
    if parallel:
        joined = jax.lax.associative_scan(join, _stacked(start, elements))
        return jax.tree.map(lambda a: a[:-1], joined), jax.tree.map(lambda a: a[-1], joined)

    def step(so_far: Element, element: Element) -> tuple[Element, Element]:
        return join(so_far, element), so_far

    total, earlier = jax.lax.scan(step, start, elements)
    return earlier, total


def after(elements: Element, parallel: bool) -> tuple[Array, Array]:
    """What all stretches after each one say about the state after it: eta and J.

    Args:
        elements: the stretches, leading dimension first.
        parallel: as in :func:`before`.
    """
    end = Element.nothing(elements.b.shape[-1], elements.b.dtype)
    if parallel:
        last = jax.tree.map(lambda a: a[::-1], elements)
        joined = jax.lax.associative_scan(lambda a, b: join(b, a), _stacked(end, last))
        return joined.eta[:-1][::-1], joined.J[:-1][::-1]

    def step(rest: Element, element: Element) -> tuple[Element, tuple[Array, Array]]:
        return join(element, rest), (rest.eta, rest.J)

    return jax.lax.scan(step, end, elements, reverse=True)[1]


def _stacked(one: Element, many: Element) -> Element:
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), one, many)
