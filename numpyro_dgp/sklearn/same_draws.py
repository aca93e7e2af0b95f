"""Predictions of rows that do not depend on which other rows are asked for: every row sees the same random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.compiled import Compiled
from numpyro_dgp.predict import Posterior
from numpyro_dgp.prediction.row_batches import round_up

__all__ = ["SameDraws"]

_BLOCK = 500


class SameDraws:
    """Predictions of a fit, row by row, from the same draws of the latent numbers at every row.

    The draws at a row have the distribution that they have in ``posterior.predict``; so has the mixture there. As
    functions of the row they are smooth, and a row is predicted alike alone, in any order and in any company.

    Args:
        posterior: the fit.
        seed: of the draws.
        num_samples: the number of draws, S.
    """

    def __init__(self, posterior: Posterior, seed: int, num_samples: int) -> None:
        self.posterior, self.seed, self.num_samples = posterior, seed, num_samples
        self._programs: dict[Any, Compiled] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickled and copied without its compiled programs."""
        return {**vars(self), "_programs": {}}

    def moments(self, X: Array) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances (N, ...) of y at rows of X (N, D)."""
        mean, variance = self._at("predict", X)
        return mean, variance

    def log_density(self, X: Array, y: Array) -> np.ndarray:
        """Log densities (N,) of observations."""
        return self._at("log_density", X, y)

    def quantile(self, X: Array, q: tuple[float, ...]) -> np.ndarray:
        """Quantiles (Q, N, ...) of y."""
        return np.moveaxis(self._at("quantile", X, settings=q), 1, 0)

    def probs(self, X: Array) -> np.ndarray:
        """Probabilities (N, K) of labels."""
        return self._at("probs", X)

    def _at(self, method: str, *rows: Array, settings: tuple[Any, ...] = ()) -> Any:
        """A method of the posterior at every row, a block of rows at a time; blocks of few sizes share programs."""
        name = method, settings
        if name not in self._programs:
            of_row = partial(self._of_row, method, settings)
            self._programs[name] = Compiled(lambda params, key, *rows: jax.vmap(partial(of_row, params, key))(*rows))
        program, total = self._programs[name], len(rows[0])
        size = min(_BLOCK, round_up(total))
        key, found = jax.random.key(self.seed), []
        for start in range(0, total, size):
            index = np.minimum(np.arange(start, start + size), total - 1)
            block = program(dict(self.posterior.params), key, *(jnp.asarray(np.asarray(a)[index]) for a in rows))
            found.append(jax.tree.map(lambda a, stop=total - start: np.asarray(a)[:stop], block))
        return jax.tree.map(lambda *blocks: np.concatenate(blocks), *found)

    def _of_row(self, method: str, settings: tuple[Any, ...], params: Any, key: Array, x: Array, *others: Array) -> Any:
        posterior = dataclasses.replace(self.posterior, params=params)  # arguments, so that fits share the program
        before: tuple[Any, ...] = (np.array(settings),) if settings else tuple(other[None] for other in others)
        run: Callable[..., Any] = getattr(posterior, method)
        found = run(key, *before, x[None], num_samples=self.num_samples)
        if method == "predict":
            return found.mean[0], found.variance[0]
        return found[:, 0] if settings else found[0]
