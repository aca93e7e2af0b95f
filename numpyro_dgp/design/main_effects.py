r"""Main effects: the mean of a function over all its inputs but one, as a curve over that one."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from numpyro_dgp._checks import require_count, require_key
from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.design.function_draws import function_draws
from numpyro_dgp.design.input_distributions import Inputs, input_columns, unit_points
from numpyro_dgp.design.integrals import Integrals

__all__ = ["MainEffects", "main_effects"]


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
    num_functions: int = 50,
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
        num_functions: S draws of the function, where ``emulator`` is a posterior.
        num_points: n, a power of two.
        num_randomisations: R, how many times the points are scrambled anew.
        batch_size: rows of X at a time. Values are kept for one randomisation: S n D G numbers.
        progress_bar: show a progress bar.

    Returns:
        Names, values of the columns (D, G), and :class:`Integrals` with arrays (R, S, D, G), in units of f.

    Raises:
        ValueError: as :func:`sobol_indices`, but for constant functions, which have flat curves.

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
    require_key("main_effects", key)
    require_count("main_effects", "num_values", num_values, "21")
    columns = input_columns("main_effects", inputs)
    function_key, point_key = jax.random.split(key)
    D = len(columns.names)
    points = unit_points("main_effects", point_key, num_randomisations, num_points, D)
    example = columns.at(points[0, :2])
    function = function_draws("main_effects", emulator, function_key, num_functions, batch_size, example)
    lines = columns.lines(num_values)
    found = []
    for unit in tqdm.tqdm(points, desc="randomisations", disable=not progress_bar):
        rows = np.tile(columns.at(unit), (D, num_values, 1, 1))  # (D, G, n, D)
        for d, line in enumerate(lines):
            rows[d, :, :, d] = line[:, None]
        values = function(rows.reshape(-1, D)).astype(float)
        found.append(values.reshape(-1, D, num_values, num_points).mean(-1))
    return MainEffects(columns.names, lines, Integrals(np.stack(found)))
