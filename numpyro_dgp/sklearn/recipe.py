"""How the estimators train: sizes and numbers of steps by the number of rows, one fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult

from numpyro_dgp._typing import Array
from numpyro_dgp.guides import Guide
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import fit
from numpyro_dgp.optim.natural import NaturalGradient, log_linear

__all__ = ["default_num_inducing", "default_num_steps", "filled_up", "train"]

_RAMP = log_linear(1e-4, 0.2, 40)


def default_num_inducing(rows: int) -> int:
    """M for that many rows."""
    return 100 if rows <= 2000 else 200


def default_num_steps(rows: int) -> int:
    """Steps for that many rows."""
    return min(max(1000, rows), 5000)


def filled_up(rows: int) -> int:
    """The number of rows that a fit runs at, so that folds of nearly one size share a compiled program.

    Example:
        >>> [filled_up(n) for n in (10, 353, 354, 1000)]
        [16, 384, 384, 1024]
    """
    step = max(16, 2 ** (rows.bit_length() - 4))
    return -(-rows // step) * step


def train(
    program: Callable[..., Any],
    guide: Callable[..., Any],
    X: Array,
    y: Array,
    weights: np.ndarray | None = None,
    *,
    num_steps: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
    progress_bar: bool,
) -> tuple[SVIRunResult, tuple[Array, Array, Array]]:
    """Fit a program; step sizes fall to zero by a cosine.

    Gaussian q(v) of the last layer take natural steps, of size 0.2 after a ramp; all other parameters take steps of
    Adam.

    Args:
        program: a program of X, y, which rows are known, and the rows of a minibatch.
        guide: its guide.
        X: inputs (N, D).
        y: observations (N, ...).
        weights: how many times each row counts (N,), once by default.
        num_steps: number of steps.
        learning_rate: of Adam in the first step.
        batch_size: rows of a minibatch, where there are more.
        seed: of random numbers.
        progress_bar: show a progress bar.

    Returns:
        The fit, and the data that it ran at.
    """
    size = filled_up(len(X))
    index = np.minimum(np.arange(size), len(X) - 1)
    known = jnp.arange(size) < len(X)
    counts = known if weights is None else known * jnp.asarray(weights[index], X.dtype)
    data = jnp.asarray(np.asarray(X)[index]), jnp.asarray(np.asarray(y)[index]), counts
    fall = optax.cosine_decay_schedule(1.0, num_steps)
    adam = optax.adam(lambda step: learning_rate * fall(step))
    natural = isinstance(guide, Guide) and guide.choices.rules["inducing"].gaussian is not None
    optimizer = NaturalGradient(guide, lambda step: _RAMP(step) * fall(step), adam) if natural else adam  # type: ignore[arg-type]
    rows = batch_size if batch_size < size else None
    svi = SVI(program, guide, optimizer, ELBO())
    return fit(svi, jax.random.key(seed), num_steps, *data, rows, progress_bar=progress_bar), data
