r"""Sobol' indices: how much of the variance of a function comes from each of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from numpyro_dgp._checks import require_key
from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.design.function_draws import function_draws
from numpyro_dgp.design.input_distributions import Inputs, input_columns, unit_points
from numpyro_dgp.design.integrals import Integrals

__all__ = ["SobolIndices", "sobol_indices"]


class SobolIndices(NamedTuple):
    """First-order and total indices, as :func:`sobol_indices` gives them.

    Example:
        >>> import jax
        >>> import numpyro_dgp as dgp
        >>> box = {"force": (-1, 1), "angle": (-1, 1)}
        >>> found = dgp.design.sobol_indices(lambda X: X[:, 0] * (1 + X[:, 1]), box, jax.random.key(0))
        >>> for name, first, total in zip(found.names, found.first.mean, found.total.mean):
        ...     print(f"{name}: {abs(first):.2f} alone, {total:.2f} in all")
        force: 0.75 alone, 1.00 in all
        angle: 0.00 alone, 0.25 in all
    """

    names: tuple[str, ...]
    """Of the columns, or of the groups of columns."""
    first: Integrals
    """First-order indices, of groups closed ones; arrays end in one number per name."""
    total: Integrals
    """Total indices, likewise."""

    def __repr__(self) -> str:
        return brief(self)


def sobol_indices(
    emulator: Any,
    inputs: Inputs,
    key: Array,
    *,
    groups: Mapping[str, Sequence[int | str]] | None = None,
    num_functions: int = 50,
    num_points: int = 256,
    num_randomisations: int = 8,
    batch_size: int = 1024,
    progress_bar: bool = True,
) -> SobolIndices:
    r"""First-order and total Sobol' indices, with the error of the emulator and that of the integration.

    With independent inputs, of a column d, or of a group of columns,

    .. math:: S_d = \frac{\operatorname{var}(E[f \mid x_d])}{\operatorname{var} f}, \qquad
              T_d = \frac{E[\operatorname{var}(f \mid x_{-d})]}{\operatorname{var} f}
                  = 1 - \frac{\operatorname{var}(E[f \mid x_{-d}])}{\operatorname{var} f} .

    The first is the share of the variance that x_d makes on its own, the second the share in which it has a part. First
    indices of columns add up to at most one and total ones to at least one, both to one where f is a sum of functions
    of single columns. Of a group, :math:`S` is the closed index, all that its columns make without the others:
    :math:`S_{\{1,2\}} - S_1 - S_2` is the index of second order.

    Every draw of the function has indices of its own, at the same points for all draws. With rows A and B of n
    scrambled Sobol points in 2 D dimensions, and :math:`A_B^{(d)}`, which is A with column d from B,

    .. math:: \hat V_d = \tfrac1n \sum_j (f(B)_j - \bar f) \bigl(f(A_B^{(d)})_j - f(A)_j\bigr), \qquad
              \hat E_d = \tfrac1{2n} \sum_j \bigl(f(A)_j - f(A_B^{(d)})_j\bigr)^2

    are the numerators, and the variance of the 2 n values of f(A) and f(B) is the denominator. That takes
    R n (D + 2) values of each draw. Small first indices can come out below zero, within their error.

    Args:
        emulator: a posterior of a program whose first argument is X (N, D), or a function from X to values (N,) or
            draws (S, N), such as ``lambda X: draws(X, other)["y"][..., 0]`` with ``draws = posterior.functions(key)``.
        inputs: for every column of X, in its units, a pair (low, high), between which it is uniform, or a NumPyro
            distribution with ``icdf``: as an array (D, 2), a list, or a dict by name.
        key: PRNG key.
        groups: columns, by number or name, of the groups whose indices are asked for; every column for itself by
            default.
        num_functions: S draws of the function, where ``emulator`` is a posterior.
        num_points: n, a power of two.
        num_randomisations: R, how many times the points are scrambled anew.
        batch_size: rows of X at a time. Values are kept for one randomisation: S n (D + 2) numbers.
        progress_bar: show a progress bar.

    Returns:
        Names, first-order and total indices, each :class:`Integrals` with arrays (R, S, D).

    Raises:
        ValueError: inputs that are not as above, functions that are constant (there is no variance to share), NaN,
            values of another shape, groups that are no dict of lists of columns that there are, or numbers of points
            that are no powers of two.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> slopes = jnp.array([[3.0, 1.0], [3.0, 2.0]])  # two linear functions
        >>> inputs = {"length, m": (0.0, 1.0), "mass, kg": dist.Normal(5.0, 12**-0.5)}  # of one variance
        >>> found = dgp.design.sobol_indices(lambda X: slopes @ X.T, inputs, jax.random.key(0))
        >>> found.first.draws.round(2)  # 9 / 10 and 1 / 10; 9 / 13 and 4 / 13
        array([[0.9 , 0.1 ],
               [0.69, 0.31]])
        >>> bool((found.first.integration_error < 0.01).all())
        True

    Source: Saltelli et al. (2010), table 2, for the first order; Jansen (1999) for totals; Le Gratiet et al. (2014) for
    the two errors.
    """
    require_key("sobol_indices", key)
    columns = input_columns("sobol_indices", inputs)
    names, members = _members(columns.names, groups)
    function_key, point_key = jax.random.split(key)
    D = len(columns.names)
    points = unit_points("sobol_indices", point_key, num_randomisations, num_points, 2 * D)
    example = columns.at(points[0, :2, :D])
    function = function_draws("sobol_indices", emulator, function_key, num_functions, batch_size, example)
    found = [
        _pick_freeze(function, columns.at(unit[:, :D]), columns.at(unit[:, D:]), members)
        for unit in tqdm.tqdm(points, desc="randomisations", disable=not progress_bar)
    ]
    first, total = (np.stack(values) for values in zip(*found, strict=True))
    return SobolIndices(names, Integrals(first), Integrals(total))


def _pick_freeze(
    function: Callable[[np.ndarray], np.ndarray], A: np.ndarray, B: np.ndarray, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """First-order and total indices (S, G) of groups whose columns are marked in ``members`` (G, D)."""
    n, D = A.shape
    rows = np.stack([A, B, *np.where(members[:, None], B, A)])  # (G + 2, n, D)
    values = function(rows.reshape(-1, D))
    _require_variation(values[:, : 2 * n])
    values = values.astype(float)
    both = values[:, : 2 * n]
    mean, variance = both.mean(1)[:, None, None], both.var(1)[:, None]
    values = values.reshape(len(values), -1, n)
    change = values[:, 2:] - values[:, :1]
    first = ((values[:, 1:2] - mean) * change).mean(-1) / variance
    return first, np.square(change).mean(-1) / 2 / variance


def _require_variation(values: np.ndarray) -> None:
    """Raise where a draw is constant to rounding, over the rows of ``values`` (S, N)."""
    eps = np.finfo(values.dtype if values.dtype.kind == "f" else float).eps
    constant = np.ptp(values, axis=1) <= 100 * eps * np.abs(values).max(1)
    if constant.any():
        raise ValueError(
            f"sobol_indices: expected functions that vary with the inputs, got {constant.sum()} of {len(constant)} "
            f"draws that are constant, the first at {values[constant.argmax(), 0]:.6g}: there is no variance to share; "
            "widen the inputs, check the fit, or leave these draws out"
        )


def _members(
    columns: tuple[str, ...], groups: Mapping[str, Sequence[int | str]] | None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Names of groups, and which columns each has (G, D)."""
    if groups is None:
        return columns, np.eye(len(columns), dtype=bool)
    if not isinstance(groups, Mapping) or not groups:
        got = "none" if isinstance(groups, Mapping) else f"a {type(groups).__name__}"
        raise ValueError(
            f"sobol_indices: expected groups as a dict of lists of columns, at least one, got {got}: "
            'groups={"both": [0, 1]}'
        )
    marks = np.zeros((len(groups), len(columns)), bool)
    for mark, (name, group) in zip(marks, groups.items(), strict=True):
        several = isinstance(group, Sequence | np.ndarray) and not isinstance(group, str) and len(group)
        for column in group if several else ():
            if column in columns:
                mark[columns.index(column)] = True
            elif isinstance(column, int | np.integer) and 0 <= column < len(columns):
                mark[column] = True
        if not several or mark.sum() != len(group):
            raise ValueError(
                f"sobol_indices: expected group {name!r} to be a list of different columns among "
                f"{', '.join(columns)}, or their numbers from 0 to {len(columns) - 1}, got {group!r}: "
                f'groups={{"both": [0, 1]}}'
            )
    return tuple(map(str, groups)), marks
