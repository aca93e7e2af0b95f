"""What the kernels for NumPyro's ``MCMC`` in this package share: programs, and one chain or several at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_dgp._typing import Array

__all__ = ["ProgramKernel", "for_chains", "split_keys"]


def split_keys(rng_key: Array, num: int) -> list[Array]:
    """Keys split from that of one chain, or from those of several chains."""
    split = partial(jax.random.split, num=num)
    return list(split(rng_key) if is_prng_key(rng_key) else jax.vmap(split, out_axes=1)(rng_key))


def for_chains(function: Callable[..., Any], rng_key: Array, *args: Any) -> Any:
    """``function(*args)`` for the key of one chain, over the first axis of ``args`` for those of several."""
    return function(*args) if is_prng_key(rng_key) else jax.vmap(function)(*args)


class ProgramKernel(MCMCKernel):
    """A kernel that samples the sites of a program on the unconstrained scale, as the field ``z`` of its states.

    Args:
        owner: the name of the kernel, for messages.
        model: the program.
        init_strategy: NumPyro's.

    Raises:
        ValueError: a program or a strategy that is no function.
    """

    def __init__(self, owner: str, model: Any, init_strategy: Any) -> None:
        if not callable(model) or not callable(init_strategy):
            raise ValueError(
                f"{owner}: expected a program and an init_strategy, both functions, got "
                f"{type(model).__name__} and {type(init_strategy).__name__}"
            )
        self._init_strategy = init_strategy

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return "z", "diverging"

    def sample(self, state: Any, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None) -> Any:
        """The next state, of one chain or of several."""
        step = partial(self.step, args=model_args, kwargs=model_kwargs or {})
        return for_chains(step, state.rng_key, state)

    @abstractmethod
    def step(self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The next state of one chain."""
