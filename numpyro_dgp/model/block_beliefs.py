"""A belief about inducing values that fall into independent blocks, one for every group of rows."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import einsum
from numpyro_dgp.model.beliefs import Belief, DiagonalBelief, FullBelief

__all__ = ["BlockBelief", "in_block"]


class BlockBelief(Belief):
    r"""A belief about L blocks of M values each, as one about L M values: :math:`q(v) = \prod_{pg} q(v_{pg})`.

    Args:
        blocks: the belief about the blocks, event shape (P L, M).
        shape: of the values together, (P, L M) or (L M,).
    """

    pytree_data_fields: tuple[str, ...] = ("blocks",)
    blocks: Belief

    def __init__(self, blocks: Belief, shape: tuple[int, ...]) -> None:
        self.blocks = blocks
        super().__init__((), shape, validate_args=False)

    @property
    def loc(self) -> Array:  # type: ignore[override]
        return self.blocks.loc.reshape(self.event_shape)

    @property
    def variance(self) -> Array:
        return self.blocks.variance.reshape(self.event_shape)

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        draw = self.blocks.sample(key, sample_shape)
        return draw.reshape(*draw.shape[: len(sample_shape)], *self.event_shape), []

    def _by_block(self, A: Array) -> Array:
        """Features (N, L M) or (P, N, L M) as those of the blocks (P L, N, M)."""
        count, size = self.blocks.event_shape
        outputs = math.prod(self.event_shape[:-1])
        split = A.reshape(-1, A.shape[-2], count // outputs, size)
        split = jnp.broadcast_to(split, (outputs, *split.shape[1:]))
        return jnp.moveaxis(split, 2, 1).reshape(count, A.shape[-2], size)

    def spread(self, A: Array) -> Array:
        found = self.blocks.spread(self._by_block(A))
        return found.reshape(len(found), math.prod(self.event_shape[:-1]), -1).sum(-1)

    def spread_covariance(self, A: Array) -> Array:
        found = self.blocks.spread_covariance(self._by_block(A))
        return found.reshape(math.prod(self.event_shape[:-1]), -1, *found.shape[1:]).sum(1)

    def moments_of(self, A: Array, groups: Array) -> tuple[Array, Array]:
        """Mean and :meth:`spread` (N, P) of rows that see one block each.

        Args:
            A: their features of that block (N, M).
            groups: its number (N,).
        """
        M = A.shape[-1]
        outputs = math.prod(self.event_shape[:-1])
        loc = self.blocks.loc.reshape(outputs, -1, M)
        mean = einsum("nm,pnm->np", A, loc[:, groups])
        if isinstance(self.blocks, FullBelief):
            root = self.blocks.scale_tril.reshape(outputs, -1, M, M)
            return mean, jnp.square(einsum("ni,pnij->pnj", A, root[:, groups])).sum(-1).T
        if isinstance(self.blocks, DiagonalBelief):
            return mean, einsum("nm,pnm->np", jnp.square(A), self.variance.reshape(outputs, -1, M)[:, groups])
        return mean, self.spread(in_block(A, groups, loc.shape[1]))


def in_block(A: Array, groups: Array, count: int) -> Array:
    """Features (N, M) of rows that see one block each as those of all of them (N, L M), which are zero elsewhere."""
    return (jax.nn.one_hot(groups, count, dtype=A.dtype)[..., None] * A[:, None]).reshape(len(A), -1)
