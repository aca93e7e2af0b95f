r"""Expectations of kernels under Gaussian inputs, the "psi statistics" and their relatives.

For independent Gaussian inputs :math:`h_n`, given by their means and variances, and fixed rows z of Z:

.. math::
    \psi_0 = \langle k(h, h) \rangle, \quad \psi_1 = \langle k(h, z) \rangle, \quad
    \psi_2 = \sum_n \beta_n \langle k(z, h_n)\, k(h_n, z') \rangle,

and the same with factors h inside the expectations. They are computed in closed form
(:mod:`numpyro_dgp.kernels.gaussian_integrals`), or by quadrature nodes or draws. Columns of labels, those of
``Categorical`` and ``Embedding`` kernels in sums and products with others, have variance zero.

Source: Chamberlin (2016), sections 2.5, 4.6 and 4.8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import require_inputs, violated
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.linalg import matmul, safe_sqrt
from numpyro_dgp.algebra.quadrature import GaussHermite, MonteCarlo, white_nodes
from numpyro_dgp.algebra.row_blocks import each_row, sum_symmetric
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.gaussian_integrals import Tilted, require_exact_labels

__all__ = ["psi0", "psi1", "psi1_times_h", "psi1_times_hh", "psi2", "psi2_times_h"]

Integrate = GaussHermite | MonteCarlo | None


def psi0(kernel: Kernel, loc: ArrayLike, variance: ArrayLike, *, integrate: Integrate = None) -> Array:
    r""":math:`\psi_{0n} = \langle k(h_n, h_n) \rangle`, shape (N,).

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: their variances (N, D), zeros allowed, or covariances (N, D, D).
        integrate: ``None`` for the closed form, ``GaussHermite(n)`` for n nodes per input column, or
            ``MonteCarlo(n, key)``. The last two need covariances (N, D, D) to be positive definite.

    Raises:
        ValueError: inputs that do not fit together, negative variances, covariances that are not symmetric, a kernel
            without a closed form, or too many nodes.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Linear
        >>> print(psi0(Linear(), jnp.array([[1.0]]), jnp.array([[3.0]])))  # 1 + 3
        [4.]
    """
    m, v = _inputs("psi0", loc, variance)
    return each_row(m, v, 1, _statistics(kernel, m, v, integrate).diagonal)


def psi1(kernel: Kernel, loc: ArrayLike, variance: ArrayLike, Z: ArrayLike, *, integrate: Integrate = None) -> Array:
    r""":math:`\psi_{1nm} = \langle k(h_n, z_m) \rangle`, shape (N, M).

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: (N, D) or (N, D, D), as in :func:`psi0`.
        Z: inducing inputs (M, D).
        integrate: as in :func:`psi0`.

    Raises:
        ValueError: as :func:`psi0`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import RBF
        >>> print(psi1(RBF(), jnp.zeros((1, 1)), jnp.full((1, 1), 3.0), jnp.zeros((1, 1))))  # (1 + 3)^(-1/2)
        [[0.5]]

    Source: Chamberlin (2016), section 4.8.2.
    """
    m, v, z = _inputs("psi1", loc, variance, Z)
    return each_row(m, v, z.size, partial(_statistics(kernel, m, v, integrate).values, z, ()))


def psi1_times_h(
    kernel: Kernel, loc: ArrayLike, variance: ArrayLike, Z: ArrayLike, *, integrate: Integrate = None
) -> Array:
    r""":math:`\langle h_{nd}\, k(h_n, z_m) \rangle`, shape (N, M, D).

    It is needed for a linear mean function, and for a posterior :math:`q(h \mid h^-)` that is linear in the layer
    below.

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: (N, D) or (N, D, D), as in :func:`psi0`.
        Z: inducing inputs (M, D).
        integrate: as in :func:`psi0`.

    Raises:
        ValueError: as :func:`psi0`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Constant
        >>> print(psi1_times_h(Constant(2.0), jnp.array([[1.0, 3.0]]), jnp.ones((1, 2)), jnp.zeros((1, 2))))
        [[[2. 6.]]]

    Source: Chamberlin (2016), sections 4.6.3 and 4.8.3.
    """
    m, v, z = _inputs("psi1_times_h", loc, variance, Z)
    statistics, unit = _statistics(kernel, m, v, integrate), jnp.eye(m.shape[-1], dtype=m.dtype)

    def row(*datum: Array) -> Array:
        return jax.vmap(lambda e: statistics.values(z, (e,), *datum), out_axes=-1)(unit)

    return each_row(m, v, z.size * len(unit), row)


def psi1_times_hh(
    kernel: Kernel, loc: ArrayLike, variance: ArrayLike, Z: ArrayLike, *, integrate: Integrate = None
) -> Array:
    r""":math:`\langle h_{nd}\, h_{nd'}\, k(h_n, z_m) \rangle`, shape (N, M, D, D).

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: (N, D) or (N, D, D), as in :func:`psi0`.
        Z: inducing inputs (M, D).
        integrate: as in :func:`psi0`.

    Raises:
        ValueError: as :func:`psi0`.

    Source: Chamberlin (2016), section 4.8.3.1, which subtracts the product of the means where it must be added.
    """
    m, v, z = _inputs("psi1_times_hh", loc, variance, Z)
    statistics, unit = _statistics(kernel, m, v, integrate), jnp.eye(m.shape[-1], dtype=m.dtype)

    def row(*datum: Array) -> Array:
        inner = jax.vmap(lambda e, f: statistics.values(z, (e, f), *datum), (None, 0), -1)
        return jax.vmap(inner, (0, None), -2)(unit, unit)

    return each_row(m, v, z.size * len(unit) ** 2, row)


def psi2(
    kernel: Kernel,
    loc: ArrayLike,
    variance: ArrayLike,
    Z: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    integrate: Integrate = None,
) -> Array:
    r""":math:`\psi_2 = \sum_n \beta_n \langle k(Z, h_n)\, k(h_n, Z) \rangle`, shape (M, M).

    The sum and its derivative are taken over blocks of data, so that N matrices are never in memory together.

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: (N, D) or (N, D, D), as in :func:`psi0`.
        Z: inducing inputs (M, D).
        weights: :math:`\beta` (N,); ones by default.
        integrate: as in :func:`psi0`.

    Raises:
        ValueError: as :func:`psi0`, or weights of another shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import RBF
        >>> Z, exact = jnp.array([[0.0], [1.0]]), jnp.zeros((5, 1))
        >>> bool(jnp.allclose(psi2(RBF(), exact, exact, Z), RBF()(Z, exact) @ RBF()(exact, Z)))
        True

    Source: Chamberlin (2016), sections 2.5 and 4.8.4.
    """
    m, v, z = _inputs("psi2", loc, variance, Z)
    w = jnp.ones(len(m), m.dtype) if weights is None else jnp.asarray(weights, m.dtype)
    if w.shape != m.shape[:1]:
        raise ValueError(f"psi2: expected weights of shape {m.shape[:1]}, got {w.shape}: one number per row of m")
    statistics = _statistics(kernel, m, v, integrate)
    row = lambda pairs, *datum: statistics.pairs(z, pairs, (), *datum)  # noqa: E731
    return sum_symmetric(len(z), w, m.shape[-1], row, m, v)


def psi2_times_h(
    kernel: Kernel,
    loc: ArrayLike,
    variance: ArrayLike,
    Z: ArrayLike,
    directions: ArrayLike,
    *,
    integrate: Integrate = None,
) -> Array:
    r""":math:`\sum_n \langle (e_n^\top h_n)\, k(Z, h_n)\, k(h_n, Z) \rangle`, shape (M, M).

    Args:
        kernel: the kernel k.
        loc: means of the inputs (N, D).
        variance: (N, D) or (N, D, D), as in :func:`psi0`.
        Z: inducing inputs (M, D).
        directions: :math:`e_n` (N, D); unit vectors give single columns of h.
        integrate: as in :func:`psi0`.

    Raises:
        ValueError: as :func:`psi0`, or directions of another shape.

    Source: Chamberlin (2016), section 4.8.4.
    """
    m, v, z = _inputs("psi2_times_h", loc, variance, Z)
    b = jnp.asarray(directions, m.dtype)
    if b.shape != m.shape:
        raise ValueError(f"psi2_times_h: expected directions of shape {m.shape}, got {b.shape}: one vector per row")
    statistics, ones = _statistics(kernel, m, v, integrate), jnp.ones(len(m), m.dtype)
    row = lambda pairs, *datum: statistics.pairs(z, pairs, datum[2:], *datum[:2])  # noqa: E731
    return sum_symmetric(len(z), ones, m.shape[-1], row, m, v, b)


class _Nodes:
    """Statistics of one datum by quadrature; all data share the same nodes of a standard normal."""

    def __init__(self, kernel: Kernel, loc: Array, rule: GaussHermite | MonteCarlo) -> None:
        self.kernel = kernel
        self.white, log_weights = white_nodes(rule, loc.shape[-1], loc.dtype)
        self.weights = jnp.exp(log_weights)

    def _points(self, extra: Sequence[Array], loc: Array, variance: Array) -> tuple[Array, Array]:
        if variance.ndim == 1:
            points = loc + safe_sqrt(variance) * self.white
        else:
            points = loc + matmul(self.white, jnp.linalg.cholesky(variance).T)
        return points, math.prod([matmul(points, b) for b in extra], start=self.weights)

    def diagonal(self, loc: Array, variance: Array) -> Array:
        points, weights = self._points((), loc, variance)
        return matmul(weights, self.kernel.diag(points))

    def values(self, Z: Array, extra: Sequence[Array], loc: Array, variance: Array) -> Array:
        points, weights = self._points(extra, loc, variance)
        return matmul(weights, self.kernel(points, Z))

    def pairs(self, Z: Array, pairs: Any, extra: Sequence[Array], loc: Array, variance: Array) -> Array:
        points, weights = self._points(extra, loc, variance)
        K = self.kernel(points, Z)
        return matmul(K.T * weights, K)[pairs]


def _statistics(kernel: Kernel, loc: Array, variance: Array, integrate: Integrate) -> Any:
    require_exact_labels("expectations of a kernel", kernel, loc.shape[-1], variance)
    return Tilted(kernel, loc.shape[-1], loc.dtype) if integrate is None else _Nodes(kernel, loc, integrate)


def _is_covariance(V: Any) -> Any:
    """Whether matrices (N, D, D) are symmetric, up to rounding, and their variances at least zero."""
    index = np.arange(V.shape[-1])
    apart = abs(V - V.swapaxes(-1, -2)) > 1e-3 * abs(V).max((-1, -2), keepdims=True)
    return ~apart & ~(V[..., index, index] < 0)[..., None]


def _inputs(owner: str, loc: ArrayLike, variance: ArrayLike, *Z: ArrayLike) -> list[Array]:
    require_inputs(owner, loc)
    shape = np.shape(loc)
    if len(shape) != 2 or np.shape(variance) not in (shape, (*shape, shape[-1])):
        raise ValueError(
            f"{owner}: expected means of shape (N, D) with variances (N, D) or covariances (N, D, D), got "
            f"{shape} and {np.shape(variance)}: inputs known exactly have variance zero, jnp.zeros_like(loc)"
        )
    if np.ndim(variance) == 2 and violated(lambda v: ~(v < 0), variance):
        raise ValueError(f"{owner}: expected variances of at least zero, got {np.min(variance)}: pass variances")
    if np.ndim(variance) == 3 and violated(_is_covariance, variance):
        raise ValueError(
            f"{owner}: expected covariances (N, D, D) that are symmetric, with variances of at least zero, got others: "
            "of factors L they are L @ L.mT"
        )
    for z in Z:
        require_inputs(owner, z, shape[-1])
    arrays = [loc, variance, *Z]
    dtype = jnp.result_type(*arrays, float)
    return [jnp.asarray(a, dtype) for a in arrays]
