"""``StateSpace`` beside ``Points``: a function of one column is represented by its Markov states at given times."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from numpyro_dgp._checks import require_count
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.algebra.kalman import shock_factors
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.per_output import Kernels
from numpyro_dgp.means import Mean
from numpyro_dgp.model.beliefs import InducingPrior, whitened_values
from numpyro_dgp.state_space.state_function import StateFunction, States
from numpyro_dgp.state_space.times import checked_times, passing

__all__ = ["StateSpace"]


@pytree
class StateSpace:
    r"""Inducing states: a function of one input column is represented by itself and its derivatives at given times.

    A kernel with d states (:class:`~numpyro_dgp.StateSpaceNormal` lists them) has M d whitened values, the shocks from
    each state to the next. Given them, a value depends on the states around it only, and no matrix of the times is
    factorised: the layer opens in O(M d^3), and draws of v or of whole functions become values at N inputs in
    O((M + N) d^2). Gaussian q(v), inside ``dgp.ELBO``, build the features of all rows, N M d numbers, as ``Points`` do;
    for Matern 1/2 both are the same layer. With all inputs among the times the layer is the exact process, up to the
    jitter.

    What the waves of a ``Periodic`` kernel leave out stays in the variance of f(x) given v, so that the layer's bound
    is a bound for the kernel itself.

    Args:
        times: t (M,) or (M, 1), in order.
        order: waves of a ``Periodic`` kernel.

    Raises:
        ValueError: times that are not in order, NaN or not one column; ``order`` that is not a positive integer. Where
            the layer is opened, kernels without a state space, or of several outputs with different numbers of states.

    Example:
        >>> import numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.Matern32(), dgp.StateSpace(jnp.linspace(0, 10, 21)))
        >>> f(jnp.zeros((7, 1))).batch_shape, f.u.shape
        ((7,), (42,))

    Source: Hartikainen and Sarkka (2010); inducing states, Adam et al. (2020).
    """

    times: ArrayLike
    order: int = static(default=8)

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", checked_times("StateSpace", self.times))
        require_count("StateSpace", "order", self.order, "order=8")

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> StateFunction:
        """Open the site of layer ``name`` and return its random function."""
        dtype = jnp.result_type(jnp.asarray(self.times[:1]), float)  # type: ignore[index]
        states = tuple(self._states(k, dtype) for k in ((kernels,) if isinstance(kernels, Kernel) else kernels))
        sizes = [s.form.size for s in states]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"gp {name!r}: expected kernels with the same number of states on a StateSpace, got {sizes}: open one "
                "layer per kernel, and put their values side by side"
            )
        M = len(states[0].times) * sizes[0]
        v, site = whitened_values(f"gp {name!r}", name, InducingPrior((M,) if outputs is None else (outputs, M), dtype))
        return StateFunction(kernels, states, v, outputs, mean, site)

    def _states(self, kernel: Kernel, dtype: Any) -> States:
        form = kernel.cast(dtype).state_space(self.order)
        time = passing(self.times, dtype)
        Q: Array = jnp.moveaxis(form.noise(time), -1, 0).at[0].set(form.covariance())
        factors, inverses = shock_factors(Q)
        return States(form, jnp.asarray(self.times, dtype), time, factors, inverses)
