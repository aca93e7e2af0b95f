"""Inducing sites in whose values the log joint density of a program is quadratic, so that they can be integrated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from numpyro import handlers

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.jaxprs import walk
from numpyro_dgp.model.function_values import MixedValues
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.model.sites import Message, Trace, site_kind, unwrap

__all__ = ["quadratic_sites"]


def quadratic_sites(program: Callable[[], Any], sites: Trace) -> dict[str, bool]:
    r"""The inducing sites that only Gaussian likelihoods see, by name; the value is whether outputs are mixed.

    Given everything else in the program, the whitened values v of such a site have a density proportional to
    :math:`\exp(b^\top v - \tfrac12 v^\top (I + \Phi) v)`, a Gaussian. Where outputs are not mixed, it is a product over
    outputs. Costs tracing, no arithmetic.

    Args:
        program: the program with its arguments bound, and seeded.
        sites: a trace of it.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> def model():
        ...     g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(jnp.zeros((2, 1))))
        ...     numpyro.sample("y", dgp.Likelihood(g(jnp.ones((3, 1))), lambda v: dist.Normal(v, 0.1)), obs=jnp.ones(3))
        >>> program = handlers.seed(model, 0)
        >>> quadratic_sites(program, handlers.trace(program).get_trace())
        {'g': False}
    """
    seen = [(site, _function_site(site)) for site in sites.values() if _is_gaussian(site)]
    found = {
        name: any(isinstance(unwrap(site["fn"]).f_x, MixedValues) for site, seen_by in seen if seen_by == name)
        for name, msg in sites.items()
        if msg["type"] == "sample" and not msg["is_observed"] and site_kind(msg) == "inducing"
        if any(seen_by == name for _, seen_by in seen)
    }
    elsewhere = _seen_elsewhere(program, {name: sites[name]["value"] for name in found}) if found else set()
    return {name: mixed for name, mixed in found.items() if name not in elsewhere}


def _is_gaussian(site: Message) -> bool:
    """Whether a site is an observation whose log density is quadratic in the values of its function."""
    fn = unwrap(site["fn"]) if site["type"] == "sample" and site["is_observed"] else None
    return isinstance(fn, Likelihood) and fn.collapse == "bound" and fn.normal_form() is not None


def _function_site(site: Message) -> str | None:
    return getattr(unwrap(site["fn"]).f_x.function, "site", None)


def _seen_elsewhere(program: Callable[[], Any], values: dict[str, Array]) -> set[str]:
    """Which of the sites ``values`` anything depends on but the means of their own functions in likelihoods."""

    def run(values: dict[str, Array]) -> list[Any]:
        with handlers.block(), handlers.trace() as sites, handlers.substitute(data=values):
            program()
        return [_but_means(site) for name, site in sites.items() if site["type"] == "sample" and name not in values]

    closed = jax.make_jaxpr(run)(values)
    nothing: frozenset[str] = frozenset()

    def apply(equation: Any, facts: list[frozenset[str]]) -> list[frozenset[str]]:
        return [nothing.union(*facts)] * len(equation.outvars)

    starts = [frozenset([name]) for name in sorted(values)]
    return set(nothing.union(*walk(closed.jaxpr, starts, apply, nothing)))


def _but_means(site: Message) -> Any:
    """What the density at a site is computed from, without the mean of the function under a Gaussian likelihood."""
    if not _is_gaussian(site):
        return site["fn"].log_prob(site["value"]), site["scale"]
    fn = unwrap(site["fn"])
    return fn.normal_form(), fn.f_x.conditional_variance, fn.f_x.inputs, site["value"], site["scale"]
