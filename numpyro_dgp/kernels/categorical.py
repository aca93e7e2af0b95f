"""Kernels of categorical inputs: columns of labels 0, 1, 2, ... next to numeric columns."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import caller, expect, expect_kind, expected, require_count, require_finite, violated
from numpyro_dgp._data import own_numbers
from numpyro_dgp._fields import array, number
from numpyro_dgp._typing import Array, Number, pytree, static
from numpyro_dgp.kernels.base import ColumnError, Kernel, of_both
from numpyro_dgp.kernels.stationary import RBF
from numpyro_dgp.math.linalg import matmul

__all__ = ["Categorical", "Embedding", "is_label", "require_labels"]


def is_label(labels: Any, levels: Any) -> Any:
    """Whether numbers are labels from 0 to ``levels`` - 1."""
    return (labels % 1 == 0) & (labels >= 0) & (labels < levels)


def _require_columns(X: Any, levels: tuple[int, ...]) -> None:
    """Raise unless inputs (..., N, D) have one column for each number of levels."""
    if np.shape(X)[-1] != len(levels):
        raise expected(
            f"{len(levels)} column(s) of labels",
            f"inputs of shape {np.shape(X)}",
            f"kernel.on(*columns) picks them, {caller()}(...).on({', '.join(map(str, range(1, len(levels) + 1)))})",
        )


def require_labels(X: Any, levels: tuple[int, ...], where: str | None = None) -> None:
    """Raise where the columns of known inputs (..., N, D) are no labels from 0 to ``levels`` - 1, one number each.

    Args:
        X: the columns.
        levels: L of every column.
        where: what to call the columns; by default each has its number, which ``kernel.on`` counts among all.
    """
    _require_columns(X, levels)
    if not violated(lambda X: is_label(X, np.array(levels)), X):
        return
    bad = ~is_label(np.asarray(X), np.array(levels))
    column = int(np.argwhere(bad)[0][-1])
    worst = np.asarray(X)[bad][0]
    advice = (
        "count them with levels; a missing entry, -1 in pandas, is a level too"
        if worst % 1 == 0
        else "name the columns of labels, dgp.initial.Standardizer.fit(X, keep=[...]), "
        "dgp.initial.kmeans(X, M, labels=[...]), dgp.guides.GlobalInducing(M, labels=[...])"
    )
    before = f"{caller()}: expected labels 0 to {levels[column] - 1} in"
    after = f", got {worst:g} ({int(bad.sum())} such value(s)): {advice}"
    raise ColumnError(before, column, after) if where is None else ValueError(f"{before} {where}{after}")


def _nothing(X: Array, levels: tuple[int, ...]) -> Array:
    """Zero for rows (..., N, D) of labels and NaN for others, shape (..., N): traced values cannot raise."""
    return jnp.where(is_label(X, jnp.array(levels, X.dtype)).all(-1), jnp.zeros((), X.dtype), jnp.nan)


def _indicators(labels: Array, levels: int) -> Array:
    """Labels (..., N) as rows of zeros with a one, (..., N, levels)."""
    return (labels[..., None] == jnp.arange(levels, dtype=labels.dtype)).astype(labels.dtype)


@pytree
class Categorical(Kernel):
    r"""Exchangeable categories: :math:`\sigma^2 \prod_d \rho_d^{[c_d \ne c'_d]}`.

    With one column the functions of any two categories have correlation :math:`\rho`; with several, correlation falls
    with the Hamming distance, the number of columns in which labels differ. Multiplied by a kernel of other columns,
    ``RBF().on(0) * Categorical(3).on(1)``, it gives every category its own function, all with that
    correlation; added, an offset. Inputs have the dtype of all others, so that labels are 0.0, 1.0, 2.0, ...; what is
    no label raises an error, and in compiled programs values are then NaN. The derivative with respect to labels is
    zero: with ``dgp.Points(Z, learn=True)`` they stay where they are.

    Args:
        levels: number of categories, a positive integer, or a tuple of one per column.
        variance: :math:`\sigma^2`, squared units of the output.
        correlation: :math:`\rho`, from 0 (unrelated) to 1 (all the same); a number, or (D,) for one per column.

    Raises:
        ValueError: levels that are no positive integers, a variance that is not positive, a correlation that is not
            between 0 and 1 or of another shape; where it is called, inputs that are no labels.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Categorical
        >>> labels = jnp.array([[0.0], [1.0], [2.0]])
        >>> print(Categorical(3, correlation=0.25)(labels, labels))
        [[1.   0.25 0.25]
         [0.25 1.   0.25]
         [0.25 0.25 1.  ]]

    Source: Roustant et al. (2020), compound symmetry.
    """

    num_derivatives = 0
    of_labels = True

    levels: Any = static()
    variance: Number = number(1.0)
    correlation: Number = array(0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = tuple(self.levels) if isinstance(self.levels, list | tuple) else (self.levels,)
        expect(levels, "levels of at least one column", "()", "Categorical(3)")
        for count in levels:
            require_count("levels", count, "int(labels.max()) + 1")
        object.__setattr__(self, "levels", tuple(map(int, levels)))
        expect(
            np.shape(self.correlation) in ((), (len(levels),)),
            f"a correlation of shape () or ({len(levels)},)",
            np.shape(self.correlation),
            "one per column",
        )
        if violated(lambda r: (r >= 0) & (r <= 1), self.correlation):
            raise expected(
                "a correlation between 0 and 1",
                self.correlation,
                "give it a Beta prior or constraint=constraints.unit_interval",
            )

    def check_inputs(self, X: Any) -> None:
        require_labels(X, self.levels)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        self.check_inputs(X1)
        correlation = jnp.broadcast_to(self.correlation, len(self.levels))
        same = [X1[..., :, None, d] == X2[..., None, :, d] for d in range(len(correlation))]
        # prod_d ρ_d^[c_d != c'_d]
        product = math.prod(jnp.where(s, 1, r) for s, r in zip(same, correlation, strict=True))
        return self.variance * product + self._nothing(X1)[..., :, None] + self._nothing(X2)[..., None, :]

    def diagonal(self, X: Array) -> Array:
        return jnp.broadcast_to(self.variance, X.shape[:-1]) + self._nothing(X)

    def features(self, key: Array, X: Array, num: int) -> Array:
        correlation = jnp.broadcast_to(self.correlation, len(self.levels))
        values: Any = jnp.sqrt(self.variance)
        for d, (count, column_key) in enumerate(zip(self.levels, jax.random.split(key, len(correlation)), strict=True)):
            draws = jax.random.normal(column_key, (count + 1, num), X.dtype)  # one shared, one for each category
            own = jnp.sqrt(1 - correlation[d]) * matmul(_indicators(X[..., d], count), draws[1:])
            # sqrt(ρ) g + sqrt(1 - ρ) g_c: covariance ρ^[c != c']
            values = values * (jnp.sqrt(correlation[d]) * draws[0] + own)
        return values + self._nothing(X)[..., None]

    def _nothing(self, X: Array) -> Array:
        _require_columns(X, self.levels)
        return _nothing(X, self.levels)


@pytree
class Embedding(Kernel):
    r"""Categories with fitted embeddings: :math:`k(e_c, e_{c'})`, with a row :math:`e_c` of a table for every
    category.

    Where the places are fitted, categories that behave alike come to lie together. With ``Linear()`` in place of the
    RBF the covariance of the categories is a matrix of rank Q, :math:`E E^\top`; adding ``Categorical(L,
    correlation=0.0)`` gives every category an independent variance.

    Args:
        table: the places (L, Q), one row per category: a draw from a prior, a site "places" with the distribution
            ``dist.Normal(0, 1).expand([L, Q]).to_event(2)``, or a parameter.
        kernel: k, a kernel of Q columns; an RBF by default.

    Raises:
        ValueError: a table that is no finite matrix, another kernel than those of ``dgp.kernels``; where it
            is called, inputs that are no single column of labels 0 to L - 1.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Embedding
        >>> places = jnp.array([[0.0], [0.1], [2.0]])  # the first two categories are alike
        >>> labels = jnp.array([[0.0], [1.0], [2.0]])
        >>> print(np.array(Embedding(places)(labels, labels)).round(3))
        [[1.    0.995 0.135]
         [0.995 1.    0.164]
         [0.135 0.164 1.   ]]

    Source: Guo and Berkhahn (2016), for the table.
    """

    of_labels = True

    table: Any
    kernel: Kernel = RBF()

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", own_numbers("table", self.table))
        expect(
            np.ndim(self.table) == 2 and 0 not in np.shape(self.table),
            "a table of shape (L, Q), one row per category",
            np.shape(self.table),
            "for one number per category write table[:, None]",
        )
        require_finite("table", self.table, "draw it from a Normal")
        expect_kind(
            self.kernel,
            Kernel,
            "a kernel of the places",
            "dgp.kernels.RBF(), or dgp.kernels.as_kernel(k) for k(X1, X2)",
        )

    def check_inputs(self, X: Any) -> None:
        require_labels(X, np.shape(self.table)[:1])

    def _places(self, X: Array) -> Array:
        self.check_inputs(X)
        places = matmul(_indicators(X[..., 0], len(self.table)), self.table)  # e_c, the row c of the table
        return places + self._nothing(X)[..., None]

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.kernel.evaluate(*of_both(self._places, X1, X2))

    def diagonal(self, X: Array) -> Array:
        return self.kernel.diagonal(self._places(X)) + self._nothing(X)

    def features(self, key: Array, X: Array, num: int) -> Array:
        return self.kernel.features(key, self._places(X), num)

    def _nothing(self, X: Array) -> Array:
        return _nothing(X, np.shape(self.table)[:1])
