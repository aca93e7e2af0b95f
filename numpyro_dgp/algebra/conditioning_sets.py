r"""Which earlier values each value of a Gaussian process is conditioned on, in Vecchia's approximation.

.. math:: p(u_1, \dots, u_N) \approx \prod_i p(u_i \mid u_{c(i)}), \qquad c(i) \subset \{j \text{ before } i\}

The sets c(i) are found once, by NumPy and SciPy, from known inputs. Source: Vecchia (1988); Guinness (2018).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import is_concrete
from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.algebra.tuning import tuned

__all__ = [
    "ConditioningSets",
    "conditioning_sets",
    "coordinate_order",
    "maxmin_order",
    "nearest",
    "nearest_before",
    "schedule",
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
    distance = np.sqrt(np.square(X - X[order[0]]).sum(1))
    distance[order[0]] = -1.0
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
        level[row] = 1 + level[others[row]].max(initial=-1)
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
