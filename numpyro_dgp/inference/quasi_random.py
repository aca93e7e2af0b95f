r"""Quasi-random numbers for what is drawn row by row: the particles of a row cover the unit cube evenly.

Particle s of S has at every row n the standard normal numbers

.. math:: z_{sn} = \Phi^{-1}\bigl((t_s + u_n) \bmod 1\bigr), \qquad u_n \sim \mathrm{Uniform}[0, 1]^d

with the points :math:`t_1 \dots t_S` of Sobol's sequence in d dimensions, one for every number that is drawn for a row.
Each :math:`z_{sn}` is standard normal, so that averages over particles stay unbiased; for smooth functions of few
numbers their error falls nearly like 1/S, and not like :math:`1 / \sqrt S`.

Source: Cranley and Patterson (1976) for the shifts; Buchholz et al. (2018) for variational inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.inference.white_numbers import coordinates_of
from numpyro_dgp.math.quadrature import shifted_normals, sobol_points

__all__ = ["QuasiRandom", "require_power_of_two"]


def require_power_of_two(owner: str, num_particles: int) -> None:
    """Refuse numbers of points at which the sequence is not balanced."""
    if num_particles < 2 or num_particles & (num_particles - 1):
        raise ValueError(
            f"{owner}: expected num_particles to be a power of two, at least 2, with quasi_random=True, got "
            f"{num_particles}: at 2, 4, 8, 16, ... Sobol's points cover the unit cube evenly"
        )


class QuasiRandom(Messenger):
    """Draws the Gaussian numbers of single rows from those of one particle of several.

    Args:
        fn: a guide.
        key: PRNG key of the shifts, the same for all particles.
        particle: number of the particle.
        num_particles: S, a power of two.
    """

    def __init__(self, fn: Callable[..., Any], key: Array, particle: Array | int, num_particles: int) -> None:
        self.key, self.particle, self.num_particles = key, particle, num_particles
        self.used = 0
        super().__init__(fn)

    def __enter__(self) -> Any:
        self.used = 0
        return super().__enter__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or msg["is_observed"] or msg["value"] is not None or not msg["cond_indep_stack"]:
            return
        if record_of(msg).num_replicates is not None:
            raise ValueError(
                f"ELBO(quasi_random=True): expected one draw of the latents of a row per particle, got several of "
                f"{msg['name']!r}: leave quasi_random out, or num_samples and Quadrature"
            )
        numbers = coordinates_of(msg["fn"])
        if numbers is None or not numbers.each:
            return
        event = numbers.shape[len(msg["fn"].batch_shape) :]
        points = sobol_points(self.num_particles, self.used, int(np.prod(event)))
        shift = jax.random.uniform(jax.random.fold_in(self.key, self.used), numbers.shape, numbers.dtype)
        own = jnp.asarray(points, numbers.dtype)[self.particle].reshape(event)
        msg["value"] = numbers.value(shifted_normals(own, shift))
        self.used += points.shape[1]
