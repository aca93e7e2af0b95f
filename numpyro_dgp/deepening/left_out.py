r"""What a fitted program says of each row when the others are all that is known, from draws of its posterior.

Let u be all that is sampled when the last layer is integrated. Given a draw of it, a row has the density

.. math:: p(y_n \mid y_{-n}, u) = p(y \mid u) / p(y_{-n} \mid u),

two integrals over the last layer, the second with the row masked. Draws of :math:`p(u \mid y)` that have the weights
:math:`1 / p(y_n \mid y_{-n}, u)` are draws of :math:`p(u \mid y_{-n})`, so that

.. math:: p(y_n \mid y_{-n}) = \bigl(E\, [1 / p(y_n \mid y_{-n}, u)]\bigr)^{-1}, \qquad u \sim p(u \mid y).

Source: Gelfand et al. (1992) for the mean of inverses; Vehtari et al. (2016) for integrating what is Gaussian first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.primitives import Messenger
from scipy.special import logsumexp

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.compiled import Compiled
from numpyro_dgp.deepening.integrated_density import Density, Numbers
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.inference.mcmc import for_mcmc
from numpyro_dgp.inference.population import each
from numpyro_dgp.model.program import inspect_program, run_on_shapes
from numpyro_dgp.model.sites import Message, mask_rows

__all__ = ["left_out", "log_densities_given_draws", "require_rows"]


class _RowsThatCount(Messenger):
    """Handler that masks the rows of observations that do not count.

    Args:
        counted: which rows do (N,).
    """

    def __init__(self, counted: Array) -> None:
        self.counted = counted
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            for axis in _axes_of_rows(msg, len(self.counted)):
                mask_rows(msg, self.counted, axis)


def _axes_of_rows(site: Message, rows: int) -> list[int]:
    """The batch axes of a site that are as long as there are rows, counted from the end."""
    shape = site["fn"].batch_shape
    return [i - len(shape) for i, size in enumerate(shape) if size == rows]


def require_rows(model: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raise unless it is plain what the rows of the observations of a program are.

    Raises:
        ValueError: no observed site, or one with several axes, of the length of the first argument.
    """
    arrays, rebuild = split_arguments(args, {})
    rows, sites = len(args[0]), run_on_shapes(model, rebuild(arrays)[0], {})[0]
    observed = {name: site for name, site in sites.items() if site["type"] == "sample" and site["is_observed"]}
    axes = {name: _axes_of_rows(site, rows) for name, site in observed.items()}
    shapes = {name: tuple(site["fn"].batch_shape) for name, site in observed.items()}
    if not any(axes.values()) or any(len(found) > 1 for found in axes.values()):
        raise ValueError(
            f"fit_best: expected observations in a numpyro.plate of the {rows} rows of the inputs, so that each can be "
            f'left out, got observed sites with the batch shapes {shapes}: write the plate, or weigh="evidence"'
        )


def log_densities_given_draws(
    model: Callable[..., Any], rng_key: Array, args: tuple[Any, ...], at: Mapping[str, Array]
) -> Array:
    r"""The log densities :math:`\log p(y_n \mid y_{-n}, u_s)` (S, N).

    Args:
        model: the program.
        rng_key: PRNG key.
        args: of the program, observations included.
        at: S draws of its unconstrained numbers, by site.
    """

    def counting(counted: Array, *args: Any) -> Any:
        with _RowsThatCount(counted):
            return model(*args)

    arrays, rebuild = split_arguments(args, {})
    structure, rows, count = inspect_program(model, args, {}), len(args[0]), len(next(iter(at.values())))

    def run(key: Array, at: Numbers, arrays: list[Array]) -> Array:
        given = rebuild(arrays)[0]
        program = for_mcmc(counting)
        flat = jax.vmap(lambda numbers: ravel_pytree(numbers)[0])(at)
        counted = ~jnp.eye(rows + 1, rows, dtype=bool)  # all but one, and all

        def log_likelihood(pair: tuple[Array, Array]) -> Array:
            draw, kept = pair
            return Density(program, (counted[kept], *given), key, structure)(flat[draw])[1]

        draws, kept = (a.reshape(-1) for a in jnp.meshgrid(jnp.arange(count), jnp.arange(rows + 1), indexing="ij"))
        found = each(log_likelihood, (draws, kept), len(draws)).reshape(count, rows + 1)
        return found[:, -1:] - found[:, :-1]

    given = rng_key, dict(at), arrays
    return Compiled(run).at(*given)(*given)


def left_out(model: Callable[..., Any], rng_key: Array, args: tuple[Any, ...], at: Mapping[str, Array]) -> np.ndarray:
    r"""The log densities :math:`\log p(y_n \mid y_{-n})` (N,), by draws, or by one point.

    Arguments are those of :func:`log_densities_given_draws`.
    """
    given = np.asarray(log_densities_given_draws(model, rng_key, args, at), float)
    return math.log(len(given)) - logsumexp(-given, axis=0)
