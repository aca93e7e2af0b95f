"""Quantiles of y: in closed form where y is Gaussian given each draw or a label, else from draws of y."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, is_concrete, require_levels
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.densities import Mixture
from numpyro_dgp.jaxprs.row_by_row import rows_apart
from numpyro_dgp.likelihoods.outcomes import moments, value_range
from numpyro_dgp.predict.fitted import Fit, Target
from numpyro_dgp.predict.quantities import is_gaussian, label_probabilities, observed_distribution

__all__ = ["Levels", "spread", "spread_of"]

_DRAWS_OF_Y = 50
"""Of every draw of the latent variables: they cost little next to that one."""


class _Labels(NamedTuple):
    """Probabilities (N, K) of the labels ``first``, ``first + 1``, ..."""

    probabilities: Array
    first: Array


class _Draws(NamedTuple):
    """Draws of y (N, ..., R)."""

    y: Array


def spread_of(fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any) -> Mixture | _Labels | _Draws:
    """What quantiles of y are read off, in one run of the model."""
    run_key, y_key = jax.random.split(key)
    if target.batch is not None:
        y_key = jax.random.fold_in(y_key, target.batch)
    return spread(observed_distribution(fit, target, run_key, sample, args, kwargs), y_key)


def spread(fn: Any, key: Array) -> Mixture | _Labels | _Draws:
    """Moments of a distribution that is Gaussian, probabilities of labels, or draws."""
    found = value_range(fn)
    found.require_order()
    if found.finite and not fn.event_shape:
        return _Labels(label_probabilities(fn), jnp.asarray(int(found.low or 0)))
    if is_gaussian(fn):
        return Mixture(*moments(fn))
    return _Draws(jnp.moveaxis(rows_apart(lambda k: fn.sample(k, (_DRAWS_OF_Y,)))(key), 0, -1))


@dataclasses.dataclass(frozen=True)
class Levels:
    """From what :func:`spread` gives of all draws to quantiles.

    Args:
        q: the levels, in order.
        shape: of the array that they came in.
    """

    q: tuple[float, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(q: ArrayLike) -> Levels:
        """Known levels as a part of the program that computes quantiles."""
        require_levels(q)
        expect(is_concrete(q), "known levels q", "traced ones", "pass numbers that jax.jit does not trace")
        levels = np.asarray(q, float)
        return Levels(tuple(levels.ravel().tolist()), levels.shape)

    def __call__(self, found: Mixture | _Labels | _Draws) -> Array:
        """Quantiles, the axes of the levels first."""
        if isinstance(found, Mixture):
            return found.quantile(np.asarray(self.q).reshape(self.shape))
        quantiles = self._of_labels(found) if isinstance(found, _Labels) else self._of_draws(found.y)
        return quantiles.reshape(*self.shape, *quantiles.shape[1:])

    def _of_labels(self, found: _Labels) -> Array:
        """The first label that at most it has at least this probability."""
        below = found.probabilities.mean(0).cumsum(-1)  # P(y <= k), averaged over draws
        reached = [(below < q * below[..., -1:]).sum(-1) for q in self.q]  # the first k with P(y <= k) >= q
        return found.first[0] + jnp.stack(reached)

    def _of_draws(self, y: Array) -> Array:
        """The smallest of all draws that at least a part q of them does not exceed: whole for counts."""
        together = jnp.sort(jnp.moveaxis(y, 0, -1).reshape(*y.shape[1:-1], -1), -1)
        places = [math.ceil(q * together.shape[-1]) - 1 for q in self.q]  # the ceil(q n)-th of n
        return jnp.moveaxis(together[..., np.array(places)], -1, 0)
