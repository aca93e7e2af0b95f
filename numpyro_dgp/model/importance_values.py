"""K values of a layer per datum, all from one draw of its function, for importance weighting."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.model.function_values import FunctionValues, Propagated

__all__ = ["CopiedValues"]


class CopiedValues(Propagated):
    """Values of batch shape (K, ..., N), dependent over the first axis as the values of one function are.

    Importance weighting compares K latent values of one datum. The functions of the layers above must be the same draw
    for all K values: independent draws do not give a bound. Process noise is independent between the K values.

    Args:
        values: what ``f(x)`` returned for K inputs per datum.

    Source: Salimbeni (2020), section 5.2.3.
    """

    def __init__(self, values: FunctionValues) -> None:
        c, spread = values.conditional_variance, values.spread
        super().__init__(values.loc, c, spread, values.event_dim, origin=values.origin)

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        return self.sample(key, sample_shape), []

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        draw = self._draw
        for _ in sample_shape:
            draw = jax.vmap(draw)
        return draw(jax.random.split(key, sample_shape) if sample_shape else key)

    def _draw(self, key: Array) -> Array:
        function_key, noise_key = jax.random.split(key)
        x = jnp.broadcast_to(self.inputs, (*self.batch_shape, self.inputs.shape[-1]))
        drawn = jnp.moveaxis(self.function.draw(function_key, jnp.moveaxis(x, 0, -2)), -2, 0).reshape(self.loc.shape)
        if self.noise is None:
            return drawn
        return drawn + self.noise * jax.random.normal(noise_key, drawn.shape, drawn.dtype)
