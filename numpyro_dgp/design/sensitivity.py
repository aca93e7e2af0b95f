r"""Sensitivity analysis: Sobol' indices, the share of the variance of a function due to each input, and main effects,
the mean over all other inputs. Both are integrals over independent input distributions, computed with randomised Sobol
points for every draw of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import tqdm

from numpyro_dgp._checks import expect, expected, require_count, require_finite, require_key, require_levels
from numpyro_dgp._data import known_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.design.thompson import function_draws

__all__ = [
    "InputColumns",
    "Inputs",
    "Integrals",
    "MainEffects",
    "SobolIndices",
    "input_columns",
    "main_effects",
    "sobol_indices",
    "unit_points",
]


class Integrals(NamedTuple):
    r"""Integrals of drawn functions by randomised points, with two errors.

    Draw s with randomisation r gives an estimate :math:`T_{rs}`. Its variance over s is the posterior variance, its
    variance over r that of the numerical integration:

    .. math:: T_s = \tfrac1R \sum_r T_{rs}, \qquad
              \hat\sigma^2_\mathrm{integration} = \tfrac{1}{R (R - 1)} \sum_r (\bar T_{r\cdot} - \bar T)^2, \qquad
              \hat\sigma^2_\mathrm{emulator} = \operatorname{var}_s T_s
              - \tfrac{1}{R} \operatorname{var}_{rs} (T_{rs} - \bar T_{r\cdot} - T_s + \bar T) .

    The last term, with (R - 1) (S - 1) degrees of freedom, is the contribution of the integration to the variance over
    draws: the two errors are components of a two-way analysis of variance. The emulator's falls with more data, the
    integration's with more points.

    Raises:
        ValueError: :meth:`interval` gets a level that is not between 0 and 1.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.design import Integrals
        >>> truth = np.array([0.2, 0.3, 0.4])  # of three functions
        >>> noise = 0.01 * np.random.default_rng(0).normal(size=(8, 3, 1))
        >>> found = Integrals(truth[:, None] + noise)
        >>> found.mean.round(2), found.emulator_error.round(2), found.integration_error.round(3)
        (array([0.3]), array([0.1]), array([0.002]))
    """

    values: np.ndarray
    """By randomisation and draw (R, S, ...)."""

    def __repr__(self) -> str:
        return brief(self)

    @property
    def draws(self) -> np.ndarray:
        """One for every draw of the function, averaged over randomisations (S, ...)."""
        return self.values.mean(0)

    @property
    def mean(self) -> np.ndarray:
        """Over draws (...)."""
        return self.values.mean((0, 1))

    @property
    def integration_error(self) -> np.ndarray:
        """Standard error of ``mean`` as an integral, over randomisations (...)."""
        return self.values.mean(1).std(0, ddof=1) / np.sqrt(len(self.values))

    @property
    def emulator_error(self) -> np.ndarray:
        """Standard deviation over draws of the function, without what integration adds; 0 for one function (...)."""
        R, S = self.values.shape[:2]
        if S == 1:
            return np.zeros(self.values.shape[2:])
        both = self.values - self.values.mean(1, keepdims=True) - self.draws + self.mean  # T_rs - T_r. - T_s + T
        added = np.square(both).sum((0, 1)) / ((R - 1) * (S - 1)) / R  # var_rs / R
        return np.sqrt(np.maximum(self.draws.var(0, ddof=1) - added, 0))  # var_s T_s - added

    def interval(self, level: float = 0.9) -> np.ndarray:
        """The central interval with that share of the draws.

        Args:
            level: between 0 and 1.

        Returns:
            Lower and upper ends (2, ...).

        Raises:
            ValueError: a level that is not between 0 and 1.
        """
        require_levels(level)
        return np.quantile(self.draws, [0.5 - 0.5 * float(level), 0.5 + 0.5 * float(level)], axis=0)


Inputs: TypeAlias = ArrayLike | Sequence[Any] | Mapping[str, Any]

# A distribution without ends is shown between these quantiles.
_ENDS = 0.005, 0.995


class InputColumns(NamedTuple):
    """Independent columns of inputs.

    Args:
        names: of the columns, D of them.
        columns: a box (low, high) or a distribution for each.
    """

    names: tuple[str, ...]
    columns: tuple[Any, ...]

    def at(self, levels: np.ndarray) -> np.ndarray:
        """Quantiles of the columns at ``levels`` (..., D) between 0 and 1."""
        pairs = zip(self.columns, np.moveaxis(levels, -1, 0), strict=True)
        return np.stack([_quantile(column, level) for column, level in pairs], -1)

    def lines(self, num: int) -> np.ndarray:
        """``num`` values of each column, evenly spaced: end to end of a box, or between outer quantiles (D, num)."""
        ends = [c if isinstance(c, tuple) else _quantile(c, np.array(_ENDS)) for c in self.columns]
        return np.stack([np.linspace(low, high, num) for low, high in ends])


def input_columns(inputs: Inputs) -> InputColumns:
    """Names and distributions of columns.

    Args:
        inputs: per column a pair (low, high) or a distribution of single numbers: as an array (D, 2), as a list, or by
            name.

    Raises:
        ValueError: what is neither, boxes without width, distributions of several numbers or without ``icdf``.
    """
    if isinstance(inputs, Mapping):
        names, given = tuple(map(str, inputs)), list(inputs.values())
    elif isinstance(inputs, Sequence) and not isinstance(inputs, str):
        names, given = (), list(inputs)
    else:
        found = known_numbers("inputs", inputs)
        names, given = (), list(found) if found.ndim else []
    expect(
        given,
        "inputs with a pair (low, high) or a distribution for every column",
        "none",
        '[(0.0, 1.0), dist.Normal(2.0, 0.5)], or by name, {"speed, m/s": (0.0, 1.0)}',
    )
    names = names or tuple(f"x{d}" for d in range(len(given)))
    return InputColumns(names, tuple(_column(name, c) for name, c in zip(names, given, strict=True)))


def unit_points(key: Array, num_randomisations: int, num_points: int, dims: int) -> np.ndarray:
    """Scrambled Sobol points in the open unit cube, independently for every randomisation: (R, n, dims).

    Args:
        key: PRNG key.
        num_randomisations: R, at least two.
        num_points: n, a power of two.
        dims: of the cube.

    Raises:
        ValueError: other numbers.
    """
    from scipy.stats.qmc import Sobol  # imported here, since it takes a quarter of a second

    for name, value in (("num_randomisations", num_randomisations), ("num_points", num_points)):
        require_count(name, value, "256, a power of two" if name == "num_points" else "8")
    expect(
        num_randomisations >= 2,
        "at least two randomisations",
        num_randomisations,
        "their variance estimates the integration error; 8 is usual",
    )
    expect(
        num_points >= 2 and not num_points & (num_points - 1),
        "num_points, a power of two from 2",
        num_points,
        "Sobol's points cover the cube evenly at 64, 128, 256, ...",
    )
    seeds = np.asarray(jax.random.bits(key, (num_randomisations,), jnp.uint32))
    points = [Sobol(dims, seed=int(seed)).random_base2(int(num_points).bit_length() - 1) for seed in seeds]
    edge = float(jnp.finfo(jnp.result_type(float)).eps) / 2  # quantiles of 0 and 1 may be infinite
    return np.clip(np.stack(points), edge, 1 - edge)


def _column(name: str, column: Any) -> Any:
    if not isinstance(column, dist.Distribution):
        ends = known_numbers(f"inputs, column {name!r}", column).astype(float)
        expect(
            ends.shape == (2,),
            f"a pair (low, high) or a distribution for column {name!r}",
            f"shape {ends.shape}",
            "inputs have one entry per column of X, as an array of shape (D, 2)",
        )
        require_finite(f"ends of {name!r}", ends, "a column without ends needs a distribution, dist.Normal()")
        if not ends[0] < ends[1]:
            raise expected(
                f"low < high for column {name!r}",
                f"{ends[0]:.6g} and {ends[1]:.6g}",
                "leave out a column that does not vary, lambda X: f(insert it again)",
            )
        return float(ends[0]), float(ends[1])
    if column.batch_shape + column.event_shape or column.is_discrete:
        shape = f"of shape {column.batch_shape + column.event_shape}"
        raise expected(
            f"a continuous distribution of single numbers for column {name!r}",
            f"{type(column).__name__}, {('discrete' if column.is_discrete else shape)}",
            "give every column its own; for integers use Uniform(low - 0.5, high + 0.5) and round in the emulator",
        )
    try:
        _quantile(column, np.array(0.5))
    except (NotImplementedError, ImportError) as error:
        raise expected(
            f"a distribution with quantiles for column {name!r}",
            f"{type(column).__name__}, whose icdf is missing ({str(error) or type(error).__name__})",
            "take a box, or a distribution that has it, such as Normal, LogNormal, TruncatedNormal",
        ) from error
    return column


def _quantile(column: Any, levels: np.ndarray) -> np.ndarray:
    if isinstance(column, tuple):
        return column[0] + (column[1] - column[0]) * levels
    return np.asarray(column.icdf(jnp.asarray(levels)), float)


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

    The indices are computed for every draw of the function, at the same points for all draws. With rows A and B of n
    scrambled Sobol points in 2 D dimensions, and :math:`A_B^{(d)}`, which is A with column d from B,

    .. math:: \hat V_d = \tfrac1n \sum_j (f(B)_j - \bar f) \bigl(f(A_B^{(d)})_j - f(A)_j\bigr), \qquad
              \hat E_d = \tfrac1{2n} \sum_j \bigl(f(A)_j - f(A_B^{(d)})_j\bigr)^2

    are the numerators, and the variance of the 2 n values of f(A) and f(B) is the denominator. That takes
    R n (D + 2) values of each draw. Small first indices can come out below zero, within their error.

    Args:
        emulator: a posterior of a program whose first argument is X (N, D), from which S functions are drawn (50 by
            default, ``posterior.using(num_samples=S)``); or a function from X to values (N,) or draws (S, N), such as
            ``lambda X: draws(X, other)["y"][..., 0]`` with ``draws = posterior.functions(key)``.
        inputs: for every column of X, in its units, a pair (low, high), between which it is uniform, or a NumPyro
            distribution with ``icdf``: as an array (D, 2), a list, or a dict by name.
        key: PRNG key.
        groups: columns, by number or name, of the groups whose indices are asked for; every column for itself by
            default.
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
    require_key(key)
    columns = input_columns(inputs)
    names, members = _members(columns.names, groups)
    function_key, point_key = jax.random.split(key)
    D = len(columns.names)
    points = unit_points(point_key, num_randomisations, num_points, 2 * D)
    example = columns.at(points[0, :2, :D])
    function = function_draws(emulator, function_key, batch_size, example)
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
    rows = np.stack([A, B, *np.where(members[:, None], B, A)])  # A, B, A_B of each group: (G + 2, n, D)
    values = function(rows.reshape(-1, D))
    _require_variation(values[:, : 2 * n])
    values = values.astype(float)
    both = values[:, : 2 * n]
    mean, variance = both.mean(1)[:, None, None], both.var(1)[:, None]  # of f(A) and f(B)
    values = values.reshape(len(values), -1, n)
    change = values[:, 2:] - values[:, :1]  # f(A_B) - f(A)
    first = ((values[:, 1:2] - mean) * change).mean(-1) / variance  # V / var f
    return first, np.square(change).mean(-1) / 2 / variance  # E / var f


def _require_variation(values: np.ndarray) -> None:
    """Raise where a draw is constant to rounding, over the rows of ``values`` (S, N)."""
    eps = np.finfo(values.dtype if values.dtype.kind == "f" else float).eps
    constant = np.ptp(values, axis=1) <= 100 * eps * np.abs(values).max(1)
    if constant.any():
        raise expected(
            "functions that vary with the inputs",
            f"{constant.sum()} of {len(constant)} draws constant, the first at {values[constant.argmax(), 0]:.6g}",
            "there is no variance to share; widen the inputs, or check the fit",
        )


def _members(
    columns: tuple[str, ...], groups: Mapping[str, Sequence[int | str]] | None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Names of groups, and which columns each has (G, D)."""
    if groups is None:
        return columns, np.eye(len(columns), dtype=bool)
    if not isinstance(groups, Mapping) or not groups:
        got = "none" if isinstance(groups, Mapping) else f"a {type(groups).__name__}"
        raise expected("groups as a dict of lists of columns, at least one", got, 'groups={"both": [0, 1]}')
    marks = np.zeros((len(groups), len(columns)), bool)
    for mark, (name, group) in zip(marks, groups.items(), strict=True):
        several = isinstance(group, Sequence | np.ndarray) and not isinstance(group, str) and len(group)
        for column in group if several else ():
            if column in columns:
                mark[columns.index(column)] = True
            elif isinstance(column, int | np.integer) and 0 <= column < len(columns):
                mark[column] = True
        if not several or mark.sum() != len(group):
            raise expected(
                f"group {name!r} to be a list of columns among {', '.join(columns)} or 0 to {len(columns) - 1}",
                repr(group),
                'groups={"both": [0, 1]}',
            )
    return tuple(map(str, groups)), marks


class MainEffects(NamedTuple):
    """Curves of main effects, as :func:`main_effects` gives them.

    Example:
        >>> import jax
        >>> import numpyro_dgp as dgp
        >>> inputs = {"width, m": (0, 1), "height, m": (0, 3)}
        >>> found = dgp.design.main_effects(lambda X: X[:, 0] * X[:, 1], inputs, jax.random.key(0), num_values=3)
        >>> print(found.x[1], found.curves.mean[1].round(2))  # half of the height
        [0.  1.5 3. ] [0.   0.75 1.5 ]
    """

    names: tuple[str, ...]
    """Of the columns."""
    x: np.ndarray
    """Values of every column (D, G)."""
    curves: Integrals
    """Means there; arrays end in (D, G)."""

    def __repr__(self) -> str:
        return brief(self)


def main_effects(
    emulator: Any,
    inputs: Inputs,
    key: Array,
    *,
    num_values: int = 21,
    num_points: int = 64,
    num_randomisations: int = 8,
    batch_size: int = 1024,
    progress_bar: bool = True,
) -> MainEffects:
    r"""Main effects :math:`E[f \mid x_d = t]` of every column, with the emulator's error and that of the integration.

    The other columns are drawn from their distributions, n scrambled Sobol points, the same ones at every t and for
    every draw of the function: a curve is as smooth as the function, and its integration error moves it as a whole.
    That takes R n D G values of each draw. The variance of a curve over :math:`x_d` is the numerator of the first-order
    index of :func:`sobol_indices`.

    Args:
        emulator: as for :func:`sobol_indices`.
        inputs: as for :func:`sobol_indices`.
        key: PRNG key; the draws of a posterior are those of :func:`sobol_indices` with this key.
        num_values: G values of each column, evenly spaced: from end to end of a box, from the 0.5 % to the 99.5 %
            quantile of a distribution.
        num_points: n, a power of two.
        num_randomisations: R, how many times the points are scrambled anew.
        batch_size: rows of X at a time. Values are kept for one randomisation: S n D G numbers.
        progress_bar: show a progress bar.

    Returns:
        Names, values of the columns (D, G), and :class:`Integrals` with arrays (R, S, D, G), in units of f.

    Raises:
        ValueError: as :func:`sobol_indices`, except for constant functions, which have flat curves.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> draws = lambda X: jnp.array([[1.0], [1.2]]) * (1 + X[:, 0] ** 2 + X[:, 1])  # two functions
        >>> found = dgp.design.main_effects(draws, [(0, 1), (-1, 1)], jax.random.key(0), num_values=3)
        >>> print(found.curves.mean[0].round(2))  # 1.1 times 1, 5/4 and 2
        [1.1  1.37 2.2 ]
        >>> print(found.curves.emulator_error[0].round(2))
        [0.14 0.18 0.28]

    Source: Schonlau and Welch (2006).
    """
    require_key(key)
    require_count("num_values", num_values, "21")
    columns = input_columns(inputs)
    function_key, point_key = jax.random.split(key)
    D = len(columns.names)
    points = unit_points(point_key, num_randomisations, num_points, D)
    example = columns.at(points[0, :2])
    function = function_draws(emulator, function_key, batch_size, example)
    lines = columns.lines(num_values)
    found = []
    for unit in tqdm.tqdm(points, desc="randomisations", disable=not progress_bar):
        rows = np.tile(columns.at(unit), (D, num_values, 1, 1))  # (D, G, n, D)
        for d, line in enumerate(lines):
            rows[d, :, :, d] = line[:, None]  # x_d = t, the others at the n points
        values = function(rows.reshape(-1, D)).astype(float)
        found.append(values.reshape(-1, D, num_values, num_points).mean(-1))  # E[f | x_d = t]
    return MainEffects(columns.names, lines, Integrals(np.stack(found)))
