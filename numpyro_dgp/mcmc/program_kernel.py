"""The base class of this package's kernels for NumPyro's ``MCMC``, for one chain or several at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_dgp._checks import expect
from numpyro_dgp._typing import Array

__all__ = ["ProgramKernel", "first_position", "for_chains", "split_keys"]


def split_keys(rng_key: Array, num: int) -> list[Array]:
    """Keys split from that of one chain, or from those of several chains."""
    split = partial(jax.random.split, num=num)
    return list(split(rng_key) if is_prng_key(rng_key) else jax.vmap(split, out_axes=1)(rng_key))


def for_chains(function: Callable[..., Any], rng_key: Array, *args: Any) -> Any:
    """``function(*args)`` for the key of one chain, over the first axis of ``args`` for those of several."""
    return function(*args) if is_prng_key(rng_key) else jax.vmap(function)(*args)


def first_position(init_params: Mapping[str, Any] | None, found: dict[str, Array]) -> dict[str, Array]:
    """Where a chain begins: ``init_params`` of ``MCMC.run``, or without them what the strategy has found.

    Args:
        init_params: unconstrained values of all sites.
        found: likewise.

    Raises:
        ValueError: values of other sites or of other shapes. A site without one would be drawn from its prior in every
            step, and would be none of the chain.
    """
    if init_params is None:
        return found
    expected = {name: jnp.shape(value) for name, value in found.items()}
    got = {name: jnp.shape(value) for name, value in init_params.items()}
    expect(
        got == expected,
        f"init_params with an unconstrained value of every site, of shapes {expected}",
        got,
        f"for some sites, or for constrained values, init_strategy=init_to_value(values={...})",
    )
    return {name: jnp.asarray(init_params[name], value.dtype) for name, value in found.items()}


class ProgramKernel(MCMCKernel):
    """A kernel that samples the sites of a program on the unconstrained scale, as the field ``z`` of its states.

    Args:
        model: the program.
        init_strategy: NumPyro's.

    Raises:
        ValueError: a program or a strategy that is no function.
    """

    def __init__(self, model: Any, init_strategy: Any) -> None:
        expect(
            callable(model) and callable(init_strategy),
            "a program and an init_strategy, both functions",
            f"{type(model).__name__} and {type(init_strategy).__name__}",
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
