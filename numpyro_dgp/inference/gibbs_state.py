"""The state of chains of ``dgp.Gibbs``."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpyro_dgp._typing import Array
from numpyro_dgp.inference.block_moves import Block

__all__ = ["GibbsState"]


class GibbsState(NamedTuple):
    """State of ``dgp.Gibbs``; names in ``extra_fields`` of ``MCMC.run``.

    Args:
        z: values in unconstrained space.
        potential_energy: negative log joint density there, as NUTS has it.
        blocks: the state of every block that moves, by the names of its sites joined by ``+``: ``"blocks.h_white"``.
        evaluations: of the density in the last sweep, without a gradient.
        gradients: evaluations of the density with its gradient in the last sweep.
        diverging: whether a trajectory of NUTS diverged.
        rng_key: for the next sweep.
    """

    z: Block
    potential_energy: Array
    blocks: dict[str, Any]
    evaluations: Array
    gradients: Array
    diverging: Array
    rng_key: Array
