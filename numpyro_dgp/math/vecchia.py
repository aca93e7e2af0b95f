r"""Vecchia's approximation: Gaussian values that are each conditioned on a few others.

With :math:`u_i \mid u_{c(i)} \sim N(b_i^\top u_{c(i)},\, d_i)` for every i, the matrix B of the weights is strictly
triangular in the order of the values, and

.. math:: u = (I - B)^{-1} D^{1/2} v, \qquad v \sim N(0, I), \qquad \log p(u) = \log N(v; 0, I) - \tfrac12 \log\det D .

Arrays here have the values first: u (N, ...), weights (N, C, ...).

The conditioning sets approximate the joint density by

.. math:: p(u_1, \dots, u_N) \approx \prod_i p(u_i \mid u_{c(i)}), \qquad c(i) \subset \{j \text{ before } i\}

The sets c(i) are found once, by NumPy and SciPy, from known inputs. Source: Vecchia (1988); Guinness (2018).

Source: Vecchia (1988); Katzfuss and Guinness (2021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import is_concrete
from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.math.linalg import matmul, solve_lower
from numpyro_dgp.math.tuning import tuned

__all__ = [
    "ConditioningSets",
    "conditional",
    "conditioning_sets",
    "coordinate_order",
    "each_conditional",
    "from_neighbours",
    "in_order",
    "maxmin_order",
    "nearest",
    "nearest_before",
    "onto_neighbours",
    "schedule",
    "values_first",
    "values_last",
]


@pytree
class ConditioningSets:
    """The sets c(i) of N values, and in which steps the values can be computed one after another.

    Args:
        neighbours: rows (N, C) of the values that each is conditioned on; its own row where there are fewer.
        steps: rows (T, W), of which each step's depend on rows of earlier steps only; N where there are fewer.
    """

    neighbours: Array | np.ndarray
    steps: Array | np.ndarray

    @property
    def present(self) -> Array | np.ndarray:
        """Which entries of ``neighbours`` are neighbours (N, C)."""
        return self.neighbours != np.arange(len(self.neighbours))[:, None]


def conditioning_sets(X: np.ndarray, order: np.ndarray, num: int) -> ConditioningSets:
    """The ``num`` nearest rows before each row of X (N, D), for an order that lists the rows."""
    neighbours = nearest_before(X, order, num)
    return ConditioningSets(neighbours.astype(np.int32), schedule(neighbours, order).astype(np.int32))


def _tree(X: np.ndarray) -> Any:
    """A tree of rows; imported here, because it costs a tenth of the import of the package and few programs need it."""
    from scipy.spatial import cKDTree

    return cKDTree(X)


def coordinate_order(X: np.ndarray) -> np.ndarray:
    """The rows of X (N, D) sorted by the first column, rows with equal ones by the second, and so on."""
    return np.lexsort(X.T[::-1])


def maxmin_order(X: np.ndarray) -> np.ndarray:
    """The rows of X (N, D), each as far as possible from those before it, the first nearest to the mean of all.

    A new row changes the distances of rows around it only, as far away as it is from those before it.

    Source: Guinness (2018).
    """
    tree, N = _tree(X), len(X)
    order = np.empty(N, int)
    order[0] = np.square(X - X.mean(0)).sum(1).argmin()
    distance = np.sqrt(np.square(X - X[order[0]]).sum(1))  # to the nearest row that is in the order already
    distance[order[0]] = -1.0  # never the largest again
    for i in range(1, N):
        order[i] = new = int(distance.argmax())
        around = np.asarray(tree.query_ball_point(X[new], distance[new]))
        near = np.sqrt(np.square(X[around] - X[new]).sum(1))
        distance[around] = np.minimum(distance[around], near)
        distance[new] = -1.0
    return order


def nearest_before(X: np.ndarray, order: np.ndarray, num: int) -> np.ndarray:
    """The ``num`` rows nearest to each row of X (N, D) among those before it: (N, num), its own row where there are
    fewer.

    Rows are taken in groups that double: at least half of the rows up to the end of a group lie before it.
    """
    N = len(X)
    num = min(num, N - 1)
    ordered = X[order]
    found = np.repeat(np.arange(N)[:, None], num, 1)  # by rank
    start = 1
    while start < N:
        end = min(2 * start, N)
        tree, ranks, size = _tree(ordered[:end]), np.arange(start, end), min(2 * num + 1, end)
        while len(ranks):
            near = tree.query(ordered[ranks], size)[1].reshape(len(ranks), -1)
            before = near < ranks[:, None]
            enough = before.sum(1) >= np.minimum(num, ranks)
            chosen = np.argsort(~before[enough], axis=1, kind="stable")[:, :num]
            rows = np.take_along_axis(near[enough], chosen, 1)
            own = ranks[enough, None]
            found[ranks[enough], : rows.shape[1]] = np.where(rows < own, rows, own)
            # Rows with too few of these before them look again, at twice as many.
            ranks, size = ranks[~enough], min(2 * size, end)
        start = end
    neighbours = np.empty_like(found)
    neighbours[order] = order[found]
    return neighbours


def schedule(neighbours: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Steps (T, W) in which the values can be computed, each from those of earlier steps: N where a step has fewer.

    A value comes one step after the last of its neighbours; steps with many values are cut into several, so that the
    array has about as many entries as there are values.
    """
    N = len(order)
    level = np.zeros(N + 1, int)
    level[N] = -1
    others = np.where(neighbours == np.arange(N)[:, None], N, neighbours)
    for row in order:
        level[row] = 1 + level[others[row]].max(initial=-1)  # no neighbour: level -1
    groups = np.split(np.argsort(level[:N], kind="stable"), np.cumsum(np.bincount(level[:N]))[:-1])
    width = -(-2 * N // len(groups))
    parts = [group[i : i + width] for group in groups for i in range(0, len(group), width)]
    width = max(map(len, parts))
    return np.array([np.pad(part, (0, width - len(part)), constant_values=N) for part in parts])


def nearest(X: Array, rows: Array, num: int) -> Array | np.ndarray:
    """The ``num`` rows of X (N, D) that are nearest to each of ``rows`` (n, D): (n, num), by a tree where both are
    known, and by all distances in blocks of rows where they are traced."""
    num = min(num, len(X))
    if is_concrete(X, rows):
        return _tree(np.asarray(X)).query(np.asarray(rows), num)[1].reshape(len(rows), num)

    def of_row(row: Array) -> Array:
        return jax.lax.top_k(-jnp.square(X - row).sum(-1), num)[1]

    rows, block = jax.lax.stop_gradient(rows), max(1, tuned().cells // X.size)
    return jax.vmap(of_row)(rows) if len(rows) <= block else jax.lax.map(of_row, rows, batch_size=block)


def conditional(
    within: Array, diagonal: Array, cross: Array, prior: Array, nugget: Array, present: Array
) -> tuple[Array, Array]:
    r"""Weights and variance of one value given its neighbours, of noise of variance ``nugget`` on all of them.

    .. math:: b = (K_{cc} + \epsilon I)^{-1} k_c, \qquad d = k - k_c^\top b + \epsilon

    Args:
        within: :math:`K_{cc}` (..., C, C), of which the diagonal does not count.
        diagonal: its diagonal (..., C).
        cross: :math:`k_c` (..., C).
        prior: k, the variance of the value (...).
        nugget: :math:`\epsilon` (...).
        present: which of the C neighbours there are (C,); the weights of the others are zero.

    Returns:
        b (..., C) and d (...).
    """
    alone = jnp.eye(len(present), dtype=bool)
    # A neighbour that is not there has variance one and no covariances: its weight is zero.
    own = jnp.where(present, diagonal + nugget[..., None], 1.0)
    K = jnp.where(alone, own[..., None], jnp.where(present & present[:, None], within, 0.0))
    k = jnp.where(present, cross, 0.0)
    b = solve_positive(K, k)  # (K_cc + ε I)^-1 k_c
    # k - k_c' b is positive but for rounding.
    return b, jnp.maximum(prior - (k * b).sum(-1), 0.0) + nugget


@jax.custom_jvp
def solve_positive(K: Array, k: Array) -> Array:
    """``K^{-1} k`` for positive definite matrices (..., C, C) and vectors (..., C)."""
    return _solve(jnp.linalg.cholesky(K), k)


@solve_positive.defjvp
def _solve_positive_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # K db = dk - dK b, with the same factor; the derivative of the factorisation would cost several solves of matrices.
    (K, k), (dK, dk) = primals, tangents
    L = jnp.linalg.cholesky(K)
    b = _solve(L, k)
    return b, _solve(L, dk - matmul(dK, b[..., None])[..., 0])


def _solve(L: Array, k: Array) -> Array:
    return solve_lower(L, solve_lower(L, k[..., None]), transpose=True)[..., 0]


def each_conditional(function: Callable[..., Any], size: int, *rows: Any) -> Any:
    """``jax.vmap(function)(*rows)``, in small blocks where that would need much memory; these are computed again for
    derivatives.

    Args:
        function: of one row of each of ``rows``.
        size: how many numbers it has in memory for one row.
        *rows: arrays (N, ...).
    """
    block = max(1, tuned().cells // (8 * size))
    if len(rows[0]) <= 64 * block:
        return jax.vmap(function)(*rows)
    return jax.lax.map(jax.checkpoint(lambda row: function(*row)), rows, batch_size=block)


def values_first(a: Array) -> Array:
    """From (..., N) to (N, ...)."""
    return jnp.moveaxis(a, -1, 0)


def values_last(a: Array) -> Array:
    """From (N, ...) to (..., N)."""
    return jnp.moveaxis(a, 0, -1)


def from_neighbours(sets: ConditioningSets, weights: Array, u: Array) -> Array:
    """B u, the sums of each value's neighbours with its weights: (N, ...)."""
    return (weights * u[sets.neighbours]).sum(1)


def onto_neighbours(sets: ConditioningSets, weights: Array, u: Array) -> Array:
    """B' u, each value added to its neighbours with its weights: (N, ...)."""
    return jnp.zeros_like(u).at[sets.neighbours].add(weights * u[:, None])


def in_order(sets: ConditioningSets, weights: Array, target: Array) -> Array:
    r""":math:`(I - B)^{-1}` times numbers (N, ...), one step of the schedule after the other."""
    N, steps = len(target), jnp.asarray(sets.steps)
    neighbours = jnp.asarray(sets.neighbours)

    def parts(rows: Array, b: Array) -> tuple[Array, Array]:
        return neighbours.at[rows].get(mode="clip"), b.at[rows].get(mode="clip")

    def forward(y: Array) -> Array:
        def step(u: Array, rows: Array) -> tuple[Array, None]:
            others, b = parts(rows, held)
            new = y.at[rows].get(mode="clip") + (b * u[others]).sum(1)  # u_i = y_i + b_i' u_c(i)
            return u.at[rows].set(new, mode="drop"), None

        return jax.lax.scan(step, jnp.zeros_like(y), steps)[0]

    def backward(y: Array) -> Array:
        def step(u: Array, rows: Array) -> tuple[Array, None]:
            others, b = parts(rows, held)
            new = jnp.where((rows < N).reshape(-1, *(1,) * (u.ndim - 1)), u.at[rows].get(mode="clip"), 0.0)
            return u.at[others].add(b * new[:, None]), None  # (I - B')^-1: u_c(i) += b_i u_i, last values first

        return jax.lax.scan(step, y, steps, reverse=True)[0]

    # Differentiated as the linear equation u - B u = y: the solves themselves take B as given.
    held = jax.lax.stop_gradient(weights)
    return jax.lax.custom_linear_solve(
        lambda u: u - from_neighbours(sets, weights, u),
        target,
        lambda _, y: forward(y),
        lambda _, y: backward(y),
    )
