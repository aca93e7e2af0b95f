r"""Spherical harmonics in any dimension, by zonal functions around fixed points.

On the unit sphere in :math:`R^E`, the harmonics of degree l are a space of dimension :math:`N_l`. Its reproducing
kernel is the polynomial :math:`P_l(\cos\theta)` with :math:`P_l(1) = 1`, Legendre's where E = 3, up to a factor. Of
:math:`N_l` points :math:`w_i` in general position the functions :math:`P_l(w_i \cdot x)` are a basis, and

.. math:: B_l(x) = \bigl[P_l(x \cdot w_i)\bigr]_i R^{-1}, \quad R^\top R = \bigl[P_l(w_i \cdot w_j)\bigr]_{ij}
          \qquad\Rightarrow\qquad B_l(x)\, B_l(x')^\top = P_l(x \cdot x') .

Source: Dutordoir et al. (2020b), section 2 and appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array
from numpyro_dgp.math.linalg import matmul

__all__ = ["num_harmonics", "degree_shares", "harmonics", "zonal_polynomials"]

_NODES = 200


def num_harmonics(dims: int, degree: int) -> int:
    """The number of independent harmonics of one degree on the unit sphere in ``dims`` dimensions.

    Example:
        >>> [num_harmonics(3, degree) for degree in range(4)], num_harmonics(9, 4)
        ([1, 3, 5, 7], 450)
    """
    # The dimension of the homogeneous polynomials of degree l, less that for degree l - 2.
    return math.comb(degree + dims - 1, dims - 1) - (math.comb(degree + dims - 3, dims - 1) if degree > 1 else 0)


def zonal_polynomials(dims: int, cosine: Any) -> Iterator[Any]:
    """The polynomials P_0, P_1, ... at given cosines, one after the other, by their recurrence.

    Args:
        dims: E.
        cosine: numbers from -1 to 1, of NumPy or of JAX.
    """
    before, now, degree = 0 * cosine, 0 * cosine + 1, 0
    while True:
        yield now
        # (l + E - 2) P_l+1(t) = (2 l + E - 2) t P_l(t) - l P_l-1(t), and P_1(t) = t
        step = ((2 * degree + dims - 2) * cosine * now - degree * before) / (degree + dims - 2) if degree else cosine
        before, now, degree = now, step, degree + 1


def _polynomial(dims: int, degree: int, cosine: Any) -> Any:
    return next(p for i, p in enumerate(zonal_polynomials(dims, cosine)) if i == degree)


def harmonics(dims: int, degree: int, directions: Array) -> Array:
    """B_l at unit vectors (N, E): the harmonics of one degree, whose squares add up to one everywhere, (N, N_l)."""
    points, inverse = _basis(dims, degree)
    dtype = directions.dtype
    cosine = matmul(directions, jnp.asarray(points.T, dtype))  # x . w_i (N, N_l)
    return matmul(_polynomial(dims, degree, cosine), jnp.asarray(inverse, dtype))  # [P_l(x . w_i)]_i R^-1


@lru_cache
def _basis(dims: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (N_l, E) and the inverse of R: of many directions those by a pivoted Cholesky factorisation."""
    size = num_harmonics(dims, degree)
    tried = np.random.default_rng(0).normal(size=(4 * size + 100, dims))
    tried /= np.linalg.norm(tried, axis=1, keepdims=True)
    factor, left, chosen = np.zeros((size, len(tried))), np.ones(len(tried)), []
    for i in range(size):
        best = int(left.argmax())  # of the largest pivot: furthest from the span of those chosen
        # R_ij = (P_l(w_i . w_j) - sum_{k<i} R_ki R_kj) / R_ii for the chosen w_i and all w_j
        row = _polynomial(dims, degree, (tried * tried[best]).sum(1)) - (factor[:i, best, None] * factor[:i]).sum(0)
        factor[i] = row / math.sqrt(left[best])
        left = left - factor[i] ** 2  # 1 - sum_k R_kj^2, since P_l(1) = 1
        chosen.append(best)
    R = np.triu(factor[:, chosen])  # R' R = [P_l(w_i . w_j)]
    return tried[chosen], np.linalg.solve(R, np.eye(size))


def degree_shares(dims: int, last: int, profile: Callable[[Array], Array], dtype: jnp.dtype) -> Array:
    r"""How much of the variance of a zonal kernel is in each degree: :math:`a_0, \dots, a_L`.

    .. math:: \kappa(\theta) = \sum_l a_l\, P_l(\cos\theta), \qquad
              a_l = N_l\, \frac{\int \kappa(\theta)\, P_l(\cos\theta) \sin^{E-2}\theta \, d\theta}
                               {\int \sin^{E-2}\theta \, d\theta}

    by Gauss-Legendre quadrature in the angle, in which kernels are smooth. They add up to :math:`\kappa(0)`.

    Args:
        dims: E.
        last: L.
        profile: :math:`\kappa`, of angles between 0 and pi.
        dtype: of the result.

    Source: Dutordoir et al. (2020b), equation 8, the formula of Funk and Hecke.
    """
    nodes, weights = np.polynomial.legendre.leggauss(_NODES + 2 * last)
    angle = 0.5 * math.pi * (nodes + 1)
    whole = math.sqrt(math.pi) * math.gamma((dims - 1) / 2) / math.gamma(dims / 2)
    weights = 0.5 * math.pi / whole * weights * np.sin(angle) ** (dims - 2)
    polynomials = zonal_polynomials(dims, np.cos(angle))
    # N_l P_l(cos θ) sin(θ)^(E-2) dθ / whole, one row per degree
    rows = [num_harmonics(dims, degree) * weights * next(polynomials) for degree in range(last + 1)]
    return matmul(jnp.asarray(np.stack(rows), dtype), profile(jnp.asarray(angle, dtype))[:, None])[:, 0]
