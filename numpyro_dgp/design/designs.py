r"""Initial designs, and additions to a design that fill the space.

Distances are those of columns in units of their range; two different labels of a category are one apart.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numpyro_dgp._checks import expect, require_count
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.design.input_space import Box, as_box, generator

__all__ = ["additions", "latin_hypercube", "maximin", "sobol", "scrambled_points"]

_CANDIDATES = 4096
_POWER = 15.0


def latin_hypercube(bounds: ArrayLike | Box, num: int, key: Array) -> np.ndarray:
    """A Latin hypercube: each column has one point in each of ``num`` equal parts of its range, in random order.

    Args:
        bounds: lowest and highest values (D, 2), or a :class:`Box`. A column of whole numbers or labels has each value
            equally often, or one time more.
        num: number of points N.
        key: PRNG key.

    Returns:
        Points (N, D) in double precision.

    Raises:
        ValueError: bounds as :class:`Box`; a number of points that is not positive, or an invalid key.

    Example:
        >>> import jax
        >>> import numpyro_dgp as dgp
        >>> X = dgp.design.latin_hypercube([[0.0, 4.0]], 4, jax.random.key(0))
        >>> print(sorted(X[:, 0].astype(int).tolist()))
        [0, 1, 2, 3]

    Source: Stein (1987), by SciPy.
    """
    from scipy.stats import qmc  # imported here, since it takes a second

    box, rng = _arguments(bounds, num, key)
    unit = qmc.LatinHypercube(box.dims, seed=rng).random(num)
    unit[:, box.whole] = (np.floor(num * unit[:, box.whole]) + 0.5) / num  # middles of the parts
    return box.from_unit(unit)


def sobol(bounds: ArrayLike | Box, num: int, key: Array) -> np.ndarray:
    """The first points of a scrambled Sobol sequence, spread more evenly than independent ones.

    A number of points that is a power of two has the same number of them in each half of every column.

    Args:
        bounds: lowest and highest values (D, 2), or a :class:`Box`.
        num: number of points N.
        key: PRNG key; it fixes the scrambling.

    Returns:
        Points (N, D) in double precision.

    Raises:
        ValueError: bounds as :class:`Box`; a number of points that is not positive, or an invalid key.

    Example:
        >>> import jax
        >>> import numpyro_dgp as dgp
        >>> X = dgp.design.sobol([[0.0, 1.0], [-1.0, 1.0]], 8, jax.random.key(0))
        >>> X.shape, int((X[:, 1] < 0).sum())
        ((8, 2), 4)

    Source: Owen (1998), by SciPy.
    """
    box, rng = _arguments(bounds, num, key)
    return box.from_unit(scrambled_points(box.dims, num, rng))


def maximin(bounds: ArrayLike | Box, num: int, key: Array, *, num_exchanges: int | None = None) -> np.ndarray:
    r"""A Latin hypercube that maximises the smallest distance between points, by exchanges.

    Points are in the middle of their part of every column. Two of them exchange their values in a column, which
    leaves a Latin hypercube one, if that lowers

    .. math:: \phi_p(X) = \Bigl( \sum_{i<j} \lVert x_i - x_j \rVert^{-p} \Bigr)^{1/p},

    with p = 15: for large p that is one over the smallest distance. Early exchanges that raise it a little are kept
    at random (simulated annealing), and the design with the largest smallest distance is returned.

    Args:
        bounds: lowest and highest values (D, 2), or a :class:`Box`. Points with the same whole numbers and labels are
            as far from each other as in their other columns; where there are no others, points may coincide.
        num: number of points N.
        key: PRNG key.
        num_exchanges: exchanges that are tried; 200 N by default. Each costs N D operations.

    Returns:
        Points (N, D) in double precision.

    Raises:
        ValueError: bounds as :class:`Box`; numbers that are not positive, or an invalid key.

    Example:
        >>> import jax
        >>> from scipy.spatial.distance import pdist
        >>> import numpyro_dgp as dgp
        >>> key, square = jax.random.key(0), [[0.0, 1.0], [0.0, 1.0]]
        >>> nearest = [pdist(f(square, 20, key)).min() for f in (dgp.design.latin_hypercube, dgp.design.maximin)]
        >>> bool(nearest[0] < 0.15 < nearest[1])
        True

    Source: Morris and Mitchell (1995).
    """
    box, rng = _arguments(bounds, num, key)
    if num_exchanges is not None:
        require_count("num_exchanges", num_exchanges, "5000")
    parts = np.stack([rng.permutation(num) for _ in range(box.dims)], 1)
    X = box.from_unit((parts + 0.5) / num)
    return X if num == 1 else _exchanged(box, X, num_exchanges or 200 * num, rng)


def additions(bounds: ArrayLike | Box, existing: ArrayLike, num: int, key: Array) -> np.ndarray:
    r"""Points to add to a design one at a time, each as far as possible from all others.

    .. math:: x_{n+1} = \operatorname{argmax}_x \min_{i \le n} \lVert x - x_i \rVert

    over 4096 Sobol points, and then over smaller and smaller cubes around the best. No function values are needed. The
    farthest points lie at the bounds first; ``sobol`` with more points stays inside.

    Args:
        bounds: lowest and highest values (D, 2), or a :class:`Box`.
        existing: the points that are there (N, D).
        num: number of points to add.
        key: PRNG key.

    Returns:
        The new points (num, D), the one that is farthest from ``existing`` first.

    Raises:
        ValueError: bounds as :class:`Box`; existing points of another shape or outside the bounds; a number of points
            that is not positive, or an invalid key.

    Example:
        >>> import jax
        >>> import numpyro_dgp as dgp
        >>> X = dgp.design.additions([[0.0, 1.0]], [[0.0], [0.4]], 2, jax.random.key(0))
        >>> print(X.round(2).ravel())
        [1.  0.7]

    Source: Johnson et al. (1990), for the distance that is maximised.
    """
    box, rng = _arguments(bounds, num, key)
    points = box.require_points("existing", existing)
    expect(len(points), "at least one existing point", "none", "design.maximin makes a design from nothing")
    candidates = box.from_unit(scrambled_points(box.dims, _CANDIDATES, rng))
    distance = _nearest(box, candidates, points)
    for _ in range(num):
        best = _farthest_near(box, candidates[distance.argmax()], distance.max(), points, rng)
        points = np.concatenate([points, best[None]])
        distance = np.minimum(distance, _nearest(box, candidates, best[None]))
    return points[-num:]


def scrambled_points(dims: int, num: int, rng: np.random.Generator) -> np.ndarray:
    """Points (num, dims) of the unit cube, the first ones of a scrambled Sobol sequence."""
    from scipy.stats import qmc

    return qmc.Sobol(dims, seed=rng).random_base2(max(0, num - 1).bit_length())[:num]


def _arguments(bounds: Any, num: Any, key: Any) -> tuple[Box, np.random.Generator]:
    require_count("num", num, "10, or 10 times the number of columns")
    return as_box(bounds), generator(key)


def _nearest(box: Box, X: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Of every row of ``X`` the distance from the nearest of ``points``."""
    from scipy.spatial import cKDTree

    return cKDTree(box.places(points)).query(box.places(X))[0]


def _farthest_near(
    box: Box, best: np.ndarray, distance: float, points: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """A point near ``best`` that is farther from all ``points``."""
    width = 0.1
    for _ in range(20):
        steps = rng.uniform(-width, width, (64, box.dims)) * (box.high - box.low)
        tried = box.snapped(best + steps)
        tried[:, box.categories] = best[box.categories]
        found = _nearest(box, tried, points)
        if found.max() > distance:
            best, distance = tried[found.argmax()], found.max()
        else:
            width *= 0.7
    return best


def _exchanged(box: Box, X: np.ndarray, num_exchanges: int, rng: np.random.Generator) -> np.ndarray:
    """The design after exchanges of values within columns."""
    floor = 1e-6  # of squared distances: points that coincide count a lot, but not infinitely
    powers = lambda squares: np.maximum(squares, floor) ** (-_POWER / 2)  # noqa: E731 - d^-p
    square = lambda a, b: np.square(a - b).sum(-1)  # noqa: E731
    X, places = X.copy(), box.places(X)
    num = len(X)
    squares = square(places[:, None], places[None])
    np.fill_diagonal(squares, np.inf)
    # phi_p^p = sum over i < j of d_ij^-p
    energy = powers(squares).sum() / 2
    best, nearest = X.copy(), squares.min()
    for step in range(num_exchanges):
        (i, j), d = rng.choice(num, 2, replace=False), rng.integers(box.dims)
        pair = X[[i, j]]
        pair[:, d] = pair[::-1, d]
        moved = box.places(pair)
        rows = square(moved[:, None], places[None])
        rows[[0, 1], [i, j]] = np.inf
        rows[0, j] = rows[1, i] = square(*moved)
        # The terms with i or j, of which that of the pair is in both rows.
        before = powers(squares[[i, j]]).sum() - powers(squares[i, j])
        change = powers(rows).sum() - powers(rows[0, j]) - before
        ratio = math.log(max(energy + change, 1e-300) / energy) / _POWER  # of phi_p, in the logarithm
        temperature = 0.01 * (1 - step / num_exchanges)
        if ratio > 0 and rng.random() >= math.exp(-ratio / max(temperature, 1e-12)):  # Metropolis on log phi_p
            continue
        X[[i, j]], places[[i, j]] = pair, moved
        squares[[i, j]], squares[:, [i, j]] = rows, rows.T
        energy = powers(squares).sum() / 2 if step % 100 == 0 else energy + change
        if squares.min() > nearest:
            best, nearest = X.copy(), squares.min()
    return best
