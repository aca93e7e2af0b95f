"""Small networks whose weights are parameters of a site."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpyro

from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.guides.rules.rule import Site

__all__ = ["TanhNetwork", "tanh_network"]


@pytree
class TanhNetwork:
    """Layers of tanh units, linear in the first and in the last step.

    Args:
        weights: of every step, (inputs, outputs).
        biases: of every step, (outputs,).
    """

    weights: tuple[Array, ...]
    biases: tuple[Array, ...]

    def __call__(self, rows: Array) -> Array:
        """From rows (..., inputs) to rows (..., outputs)."""
        for i, (W, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            rows = matmul(jnp.tanh(rows) if i else rows, W) + b
        return rows


def tanh_network(
    site: Site, widths: Sequence[int], dtype: jnp.dtype, *, prefix: str = "", starts_at_zero: bool = False
) -> TanhNetwork:
    """A network with the parameters ``W0``, ``b0``, ``W1``, ... of a site.

    Args:
        site: whose parameters they are.
        widths: of the rows that go in, of the hidden layers, and of the rows that come out.
        dtype: of the parameters.
        prefix: what their names begin with.
        starts_at_zero: whether the last weights start at zero, so that all that comes out does.
    """
    pairs = list(itertools.pairwise(widths))
    found = []
    for i, shape in enumerate(pairs):
        zero = starts_at_zero and i == len(pairs) - 1
        start = partial(jnp.zeros, shape, dtype) if zero else partial(_glorot, shape, dtype)
        found.append(
            (site.param(f"{prefix}W{i}", start), site.param(f"{prefix}b{i}", partial(jnp.zeros, shape[1:], dtype)))
        )
    weights, biases = zip(*found, strict=True)
    return TanhNetwork(weights, biases)


def _glorot(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    return math.sqrt(2 / sum(shape)) * jax.random.normal(numpyro.prng_key(), shape, dtype)
