"""NumPyro's NUTS as the update of one block of sites, whose target depends on the other blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.infer.hmc import hmc

from numpyro_dgp._checks import expect
from numpyro_dgp._fields import Checked, count, positive
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.mcmc.block_moves import Block, BlockTarget

__all__ = ["BlockNUTS", "TrajectoryState"]


class TrajectoryState(NamedTuple):
    """The state of a block that moves by BlockNUTS.

    Args:
        hmc: NumPyro's ``HMCState``.
        evaluations: always zero.
        gradients: of the density in the last move.
        diverging: whether the trajectory diverged.
    """

    hmc: Any
    evaluations: Array
    gradients: Array
    diverging: Array


@dataclasses.dataclass(frozen=True)
class BlockNUTS(Checked):
    """NumPyro's NUTS, for hyperparameters and whatever else has no Gaussian prior: for blocks of ``dgp.mcmc.Gibbs``.

    Step size and mass are adapted in the warm-up of the chain.

    Args:
        step_size: the first one.
        target_accept_prob: for the step size after warm-up.
        dense_mass: ``True`` for a full mass matrix, or a list of tuples of site names, as in ``numpyro.infer.NUTS``.
        max_tree_depth: a trajectory has at most two to this power of steps.

    Raises:
        ValueError: a step size that is not positive, a target outside (0, 1), or a depth that is not a positive
            integer.

    Example:
        >>> from numpyro_dgp.mcmc import BlockNUTS
        >>> BlockNUTS(dense_mass=True)
        BlockNUTS(dense_mass=True)

    Source: Hoffman and Gelman (2014).
    """

    step_size: float = positive(1.0, "try 1.0")
    target_accept_prob: float = 0.8
    dense_mass: bool | list[tuple[str, ...]] = False
    max_tree_depth: int = count(10)

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(
            isinstance(self.target_accept_prob, Real) and 0 < self.target_accept_prob < 1,
            "0 < target_accept_prob < 1",
            repr(self.target_accept_prob),
            "try 0.8, or 0.95 if it diverges",
        )

    def open(self) -> Trajectories:
        """A move with its own adaptation."""
        return Trajectories(self, *hmc(potential_fn_gen=lambda density: density, algo="NUTS"))


@dataclasses.dataclass(frozen=True)
class Trajectories:
    """The move of :class:`BlockNUTS`.

    Args:
        settings: of it.
        first: NumPyro's function that starts a chain and settles how it adapts.
        step: NumPyro's function that goes on.
    """

    settings: BlockNUTS
    first: Callable[..., Any]
    step: Callable[..., Any]

    def start(self, key: Array, z: Block, num_warmup: int, given: BlockTarget) -> TrajectoryState:
        options = dataclasses.asdict(self.settings)
        state = self.first(z, num_warmup, **options, model_args=(given.density,), rng_key=key)
        return TrajectoryState(state, jnp.zeros((), int), jnp.zeros((), int), state.diverging)

    def move(
        self, key: Array, state: TrajectoryState, z: Block, energy: Array, given: BlockTarget
    ) -> tuple[TrajectoryState, Block, Array]:
        energy, slope = jax.value_and_grad(given.density)(z)  # anew: other blocks have moved
        here = state.hmc._replace(z=z, potential_energy=energy, z_grad=slope, rng_key=key)
        there = self.step(here, model_args=(given.density,))
        gradients = jnp.asarray(there.num_steps + 1, state.gradients.dtype)
        return TrajectoryState(there, state.evaluations, gradients, there.diverging), there.z, there.potential_energy

    def describe(self, state: TrajectoryState) -> str:
        size = float(state.hmc.adapt_state.step_size)
        return f"{int(state.hmc.num_steps)} steps of {size:.1e}, acc. {float(state.hmc.mean_accept_prob):.2f}"
