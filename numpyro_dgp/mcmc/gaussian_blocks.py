"""The latent sites of a program: which have Gaussian priors, and which cannot be sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_dgp._checks import expect
from numpyro_dgp.analysis.sites import Message, Trace, site_kind, unwrap
from numpyro_dgp.functions.weights import StandardNormal
from numpyro_dgp.inference.white_numbers import is_drawn_from_white
from numpyro_dgp.likelihoods.families import is_family
from numpyro_dgp.mcmc.block_moves import Priors
from numpyro_dgp.mcmc.integrated_layers import integrated_in

__all__ = ["Latents", "gaussian_prior", "latents"]


class Latents(NamedTuple):
    """The latent sites of a program.

    Args:
        names: of all, in the order of the program.
        gaussian: those with a Gaussian prior given everything before them.
        standard: of these, the ones that are standard normal whatever else is drawn.
        moved: of the Gaussian ones, those that are elliptical slices by default: all but single hyperparameters.
        integrated: layers whose inducing values are no latent sites, since the program integrates them.
    """

    names: tuple[str, ...]
    gaussian: frozenset[str]
    standard: frozenset[str]
    moved: tuple[str, ...]
    integrated: frozenset[str]


def latents(program: Callable[[], Any]) -> Latents:
    """Read the latent sites of a program on shapes only.

    Args:
        program: with its arguments bound, and seeded.

    Raises:
        ValueError: a discrete site, a likelihood without observations, or no latent site at all.
    """
    found: list[Latents] = []

    def run() -> None:
        with handlers.block(), handlers.trace() as sites:
            program()
        found.append(_read(sites))

    jax.eval_shape(run)
    return found[0]


def _read(sites: Trace) -> Latents:
    free = {n: msg for n, msg in sites.items() if msg["type"] == "sample" and not msg["is_observed"]}
    for name, msg in free.items():
        expect(site_kind(msg) != "observed", f"observations at {name!r}", "none", "mcmc.run(key, X, y)")
        expect(not msg["fn"].support.is_discrete, "continuous sites", f"the discrete {name!r}", "sum it out")
    expect(free, "a program with latent sites", "none", "there is nothing to sample")
    gaussian = frozenset(name for name, msg in free.items() if _is_gaussian(msg["fn"]))
    return Latents(
        names=tuple(free),
        gaussian=gaussian,
        standard=frozenset(name for name in gaussian if isinstance(unwrap(free[name]["fn"]), StandardNormal)),
        moved=tuple(name for name, msg in free.items() if name in gaussian and _is_block(msg)),
        integrated=integrated_in(sites),
    )


def _is_block(msg: Message) -> bool:
    return site_kind(msg) != "other" or is_drawn_from_white(unwrap(msg["fn"]))


def _is_gaussian(fn: dist.Distribution) -> bool:
    fn = unwrap(fn)
    while is_family(fn, dist.Independent):
        fn = unwrap(fn.base_dist)  # type: ignore[attr-defined]
    numpyros = is_family(fn, dist.Normal, dist.MultivariateNormal, methods=("log_prob", "sample"))
    return is_drawn_from_white(fn) or numpyros


def gaussian_prior(msg: Message) -> dist.Distribution:
    """The distribution at a Gaussian site, without masks, with the shape that its values have."""
    fn: Any = unwrap(msg["fn"])
    shape = msg["fn"].shape()
    return fn.expand(shape[: len(shape) - fn.event_dim])


def priors_at(program: Callable[[], Any], values: dict[str, Any], names: tuple[str, ...]) -> Priors:
    """The Gaussian priors of sites at given values of all sites."""
    with handlers.block(), handlers.trace() as sites, handlers.substitute(data=values):
        program()
    return {name: gaussian_prior(sites[name]) for name in names}
