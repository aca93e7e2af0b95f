"""What a move of a block of sites is, and what it is given: the parts that ``dgp.mcmc.Gibbs`` is put together from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dgp._typing import Array

__all__ = ["Block", "BlockTarget", "Move", "Priors", "SliceState", "Untuned", "Update"]

# Values by site, on the unconstrained scale.
Block: TypeAlias = dict[str, Array]
Priors: TypeAlias = dict[str, dist.Distribution]


class BlockTarget(NamedTuple):
    """The target of a block, given the values of all others.

    Args:
        density: from values of the block to their negative log density, up to a constant.
        priors: where all sites of the block are Gaussian a priori, those Gaussians by site; else empty.
    """

    density: Callable[[Block], Array]
    priors: Priors


class Move(Protocol):
    """A transition of the values of a block that leaves their conditional distribution as it is."""

    def start(self, key: Array, z: Block, num_warmup: int, given: BlockTarget) -> Any:
        """The first state: a tuple with the fields ``evaluations`` and ``gradients``, counts of the last move."""

    def move(self, key: Array, state: Any, z: Block, energy: Array, given: BlockTarget) -> tuple[Any, Block, Array]:
        """The next state, values and negative log density."""

    def describe(self, state: Any) -> str:
        """The text of the progress bar."""


@runtime_checkable
class Update(Protocol):
    """The settings of a :class:`Move`."""

    def open(self) -> Move:
        """A move for one run of chains."""


class SliceState(NamedTuple):
    """What a slice sampler did in its last move.

    Args:
        evaluations: of the density.
        gradients: always zero.
    """

    evaluations: Array
    gradients: Array


class Untuned:
    """The part of a slice sampler that is settings and move at once: nothing is adapted."""

    def open(self) -> Self:
        """Itself."""
        return self

    def start(self, key: Array, z: Block, num_warmup: int, given: BlockTarget) -> SliceState:
        return SliceState(jnp.zeros((), int), jnp.zeros((), int))
