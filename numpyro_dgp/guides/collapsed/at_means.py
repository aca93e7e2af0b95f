"""The run of a program at the means of its Gaussian sites: what the functions are used for, and at which inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numpyro import handlers

from numpyro_dgp._checks import expected
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, is_row_by_row, site_kind, unwrap
from numpyro_dgp.functions.weights import StandardNormal
from numpyro_dgp.guides.collapsed.gaussian_uses import (
    Column,
    Gaussian,
    Use,
    arrays_of,
    input_columns,
    moved_by,
    uses_of,
)

__all__ = ["AtMeans", "run_at_means"]


class AtMeans(NamedTuple):
    """A run of the program at fixed values.

    Args:
        sites: its trace.
        uses: the hidden layers and likelihoods in it.
        columns: what each input column of these is, by site.
        run: the same run with other values of some sites, from values by name to a trace.
    """

    sites: dict[str, Message]
    uses: dict[str, Use]
    columns: dict[str, tuple[Column, ...]]
    run: Callable[[dict[str, Any]], dict[str, Message]]


def run_at_means(
    program: Callable[[], Any],
    key: Array,
    guide_sites: dict[str, Message],
    known: dict[str, Gaussian],
    values: dict[str, Any],
) -> AtMeans:
    """Run ``program`` at v = 0, at the means of Gaussian values and at the draws of everything else.

    Args:
        program: the model with its arguments.
        key: PRNG key of sites without a value.
        guide_sites: trace of the rules; the program sees the rows of its plates.
        known: posteriors of hidden layers and latents, by site.
        values: a value for every latent site.

    Raises:
        ValueError: a layer that depends on the inducing values of another, or on Gaussian values by more than its
            inputs; or as :func:`~numpyro_dgp.guides.collapsed.gaussian_uses.uses_of`.
    """
    plates = {name: site for name, site in guide_sites.items() if site["type"] == "plate"}
    hidden = handlers.block(hide_fn=lambda msg: msg["type"] != "param")
    rows, seeded = handlers.replay(trace=plates), handlers.seed(rng_seed=key)
    with hidden, handlers.trace() as sites, seeded, rows, handlers.substitute(data=values):
        program()
    params = {name: site["value"] for name, site in sites.items() if site["type"] == "param"}

    def run(changed: dict[str, Any]) -> dict[str, Message]:
        data = handlers.substitute(data={**params, **values, **changed})
        rows, seeded = handlers.replay(trace=plates), handlers.seed(rng_seed=key)
        with handlers.block(), handlers.trace() as sites, seeded, rows, data:
            program()
        return sites

    def dependencies(gaussian: dict[str, Array]) -> tuple[dict[str, Array], Any]:
        return _dependencies(run(gaussian), known, set(gaussian))

    def layers(inducing: dict[str, Array]) -> dict[str, Any]:
        return {name: use.leaves() for name, use in uses_of(run(inducing), known).items()}

    inducing = {n: values[n] for n, s in sites.items() if s["type"] == "sample" and site_kind(s) == "inducing"}
    # (Phi, b, c) of one layer must not move with the v of another: E[log p] would not be quadratic.
    if moved := moved_by(layers, inducing):
        raise expected(
            "inducing inputs, kernels and noise that do not depend on integrated inducing values",
            f"such ones for the layer at {moved[0]!r}",
            "make its inducing inputs constants or a numpyro.param, or use guides.InducingPoint()",
        )
    gaussian = {n: g.loc for n, g in known.items() if is_row_by_row(guide_sites[n]["fn"])}
    return AtMeans(sites, uses_of(sites, known), input_columns(dependencies, gaussian), run)


def _dependencies(
    sites: dict[str, Message], known: dict[str, Gaussian], gaussian: set[str]
) -> tuple[dict[str, Array], Any]:
    """The inputs of every layer, and all other arrays that the bound depends on."""
    uses = uses_of(sites, known)
    rest: list[Any] = [use.leaves() for use in uses.values()]
    for name, site in sites.items():
        if site["type"] == "sample" and name not in uses:
            latent = isinstance(unwrap(site["fn"]), StandardNormal)  # its inputs do not enter its density
            rest.append([] if latent else arrays_of(site["fn"]))
            rest.append([] if name in gaussian else arrays_of(site["value"]))
        elif name in uses and site["is_observed"]:
            rest.append([uses[name].target, uses[name].target_variance])
    return {name: use.inputs for name, use in uses.items()}, rest
