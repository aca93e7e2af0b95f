r"""Several runs at the same input, pooled by their sufficient statistics.

Under Gaussian noise the runs :math:`y_{nj}`, :math:`j = 1 \dots c_n`, at the input :math:`x_n` enter the likelihood by
their number, their mean :math:`\bar y_n` and the sum of squares :math:`W_n = \sum_j (y_{nj} - \bar y_n)^2` only:

.. math:: \prod_j N(y_{nj}; f, s^2)
          = N\!\left(\bar y_n; f, \tfrac{s^2}{c_n}\right)
            \frac{(2\pi s^2)^{-(c_n - 1)/2}}{\sqrt{c_n}} \exp\!\left(-\frac{W_n}{2 s^2}\right).

Source: Binois et al. (2018), section 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import (
    MISSING,
    expect,
    is_concrete,
    require_finite,
    require_inputs,
    require_positive,
    require_squares,
    violated,
)
from numpyro_dgp._data import as_array, as_floats, known_numbers
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike

__all__ = ["Pooled", "pooled", "within_replicates"]


class Pooled(NamedTuple):
    """What :func:`pooled` returns, a row for each distinct input.

    Args:
        X: distinct inputs (U, D), in the order in which they first come.
        y: means of the runs at each (U,), or (U, P).
        counts: numbers of runs (U,).
        squares: sums of squares of the runs around their mean, of the shape of y.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.design import pooled
        >>> print(pooled(np.array([[0.0], [1.0], [0.0]]), np.array([1.0, 5.0, 3.0])).counts)
        [2. 1.]
    """

    X: Array
    y: Array
    counts: Array
    squares: Array

    def __repr__(self) -> str:
        return brief(self)


def pooled(X: ArrayLike, y: ArrayLike) -> Pooled:
    """Distinct inputs, with the mean, the number and the sum of squares of the runs at each.

    Args:
        X: inputs with repeated rows (N, D). Rows are the same where all their numbers are.
        y: outputs (N,), or (N, P).

    Returns:
        Arrays of U rows, one for each distinct input, as ``X, y, counts, squares``.

    Raises:
        ValueError: other shapes, NaN or infinite numbers, arrays that are traced, numbers that the default precision
            cannot represent or distinguish.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> def model(X, y=None, counts=1.0, squares=0.0):
        ...     noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise / jnp.sqrt(counts))), obs=y)
        ...         if y is not None:
        ...             numpyro.factor("within", dgp.design.within_replicates(noise, counts, squares))
        >>> X = jnp.repeat(jnp.linspace(0, 1, 4), 25)[:, None]
        >>> y = jnp.sin(6 * X[:, 0]) + 0.1 * jax.random.normal(jax.random.key(0), (100,))
        >>> svi = numpyro.infer.SVI(model, dgp.guides.InducingPoint(model), optax.adam(0.02), dgp.ELBO())
        >>> rows = dgp.design.pooled(X, y)  # 4 rows in place of 100
        >>> result = svi.run(jax.random.key(0), 10, *rows, progress_bar=False)

    Source: Binois et al. (2018), section 2.
    """
    expect(is_concrete(X, y), "known arrays", "traced ones", "pool the rows before jax.jit or jax.vmap")
    rows, values = known_numbers("X", X), known_numbers("y", y)
    require_inputs(rows, None)
    expect(
        rows.ndim == 2 and values.ndim in (1, 2) and len(values) == len(rows),
        "X of shape (N, D) and y of shape (N,) or (N, P)",
        f"{rows.shape} and {values.shape}",
        "a row of y for each row of X",
    )
    require_finite("X", rows, "drop the rows with missing inputs")
    require_finite("y", values, MISSING)
    require_squares("y", values)
    held = as_array("X", X)
    _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    group = np.argsort(order)[group.reshape(-1)]
    counts = np.bincount(group).astype(float)
    wide = values.astype(float).reshape(len(values), -1)

    def totals(columns: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(group, column) for column in columns.T], -1)

    means = totals(wide) / counts[:, None]
    squares = totals(np.square(wide - means[group]))  # W_n, of residuals: nothing cancels
    shape = (len(counts), *values.shape[1:])
    sizes = (jnp.asarray(a, jnp.result_type(float)) for a in (counts, squares.reshape(shape)))
    return Pooled(held[first[order]], as_floats("means of y", means.reshape(shape)), *sizes)


def within_replicates(noise: ArrayLike, counts: ArrayLike, squares: ArrayLike) -> Array:
    r"""The part of the log-likelihood of all runs that their means do not have, for ``numpyro.factor``:

    .. math:: -\tfrac12 (c_n - 1) \log(2\pi s^2) - \tfrac12 \log c_n - \frac{W_n}{2 s^2}.

    With it, the likelihood ``dist.Normal(v, noise / jnp.sqrt(counts))`` of the means is that of all runs, and so are
    the bound and its derivatives, of one layer and of many.

    Args:
        noise: standard deviation of a run: a number, one for each of P outputs, or whatever broadcasts to ``squares``.
        counts: numbers of runs (U,), from :func:`pooled`, or one number for all inputs.
        squares: sums of squares (U,) or (U, P), from :func:`pooled`.

    Returns:
        Log densities (U,); with P outputs their sums.

    Raises:
        ValueError: noise or counts that are not positive, shapes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.design import within_replicates
        >>> first, second = within_replicates(0.5, jnp.array([2.0, 3.0]), jnp.array([0.1, 0.1]))
        >>> print(f"{first:.3f} {second:.3f}")
        -0.772 -1.201

    Source: Binois et al. (2018), section 2.
    """
    require_positive("noise", noise)
    require_positive("counts", counts, "they are numbers of runs, from dgp.design.pooled")
    expect(
        not violated(lambda w: w >= 0, squares),
        "sums of squares of at least zero",
        "a negative one",
        "they are the squares of X, y, counts, squares = dgp.design.pooled(X, y)",
    )
    noise, counts, squares = jnp.asarray(noise), jnp.asarray(counts), jnp.asarray(squares)
    sides = zip(noise.shape[::-1], squares.shape[::-1], strict=False)
    fits = noise.ndim <= squares.ndim <= 2 and all(size in (1, whole) for size, whole in sides)
    expect(
        fits and (not counts.ndim or counts.shape == squares.shape[:1]),
        "counts (U,) and squares (U,) or (U, P), and noise that broadcasts to squares",
        f"counts {counts.shape}, squares {squares.shape} and noise {noise.shape}",
        "X, y, counts, squares = dgp.design.pooled(X, y); noise is (), per output (P,) or per input (U, 1)",
    )
    counts = jnp.broadcast_to(counts, squares.shape[:1])
    runs = counts[:, None] if squares.ndim == 2 else counts
    # -(c - 1) log(2 pi s^2) / 2 - log(c) / 2
    logs = -0.5 * (runs - 1) * jnp.log(2 * math.pi * jnp.square(noise)) - 0.5 * jnp.log(runs)
    found = logs - 0.5 * squares / jnp.square(noise)  # - W / (2 s^2)
    return found.sum(-1) if squares.ndim == 2 else found
