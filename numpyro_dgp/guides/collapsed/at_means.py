"""The run of a program at the means of its Gaussian sites: what the functions are used for, and at which inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from numpyro import handlers

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, is_row_by_row, site_kind, unwrap
from numpyro_dgp.functions.site_distribution import declared
from numpyro_dgp.functions.weights import Belief, StandardNormal
from numpyro_dgp.guides.collapsed.gaussian_uses import (
    Column,
    Gaussian,
    Use,
    arrays_of,
    input_columns,
    is_projected,
    moved_by,
    uses_of,
)
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.guides.rules.structured import LinearValues

__all__ = ["AtMeans", "matrix_belief", "run_at_means", "values_of_projections"]


class AtMeans(NamedTuple):
    """A run of the program at fixed values.

    Args:
        sites: its trace.
        uses: the hidden layers and likelihoods in it.
        columns: what each input column of these is, by site.
        known: posteriors of Gaussian sites, with those of projections and the means that depend on other sites.
    """

    sites: dict[str, Message]
    uses: dict[str, Use]
    columns: dict[str, tuple[Column, ...]]
    known: dict[str, Gaussian]


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
            inputs; several values of one projection; or as :func:`~numpyro_dgp.guides.collapsed.gaussian_uses.uses_of`.
    """
    plates = {name: site for name, site in guide_sites.items() if site["type"] == "plate"}
    hidden = handlers.block(hide_fn=lambda msg: msg["type"] != "param")
    rows, seeded = handlers.replay(trace=plates), handlers.seed(rng_seed=key)

    def mean(msg: Message) -> Array | None:
        """Of Gaussian values that depend on others."""
        if msg["type"] != "sample" or msg["name"] not in guide_sites:
            return None
        fn, q = (unwrap(of["fn"]) for of in (msg, guide_sites[msg["name"]]))
        if isinstance(q, LinearValues):
            return q.mean_at(fn.inputs)  # type: ignore[attr-defined]  # G E[x] + t
        return fn.loc if is_projected(fn) else None  # type: ignore[attr-defined]  # m(x) + E[A] x

    given, following = handlers.substitute(data=values), handlers.substitute(substitute_fn=mean)
    with hidden, handlers.trace() as sites, seeded, rows, following, given:
        program()
    for name in values_of_projections(guide_sites).values():
        fn: Any = unwrap(sites[name]["fn"])
        known = known | {name: Gaussian(fn.loc, fn.variance)}
    values = values | {name: sites[name]["value"] for name in known}
    known = {name: g._replace(loc=values[name]) for name, g in known.items()}
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
    return AtMeans(sites, uses_of(sites, known), input_columns(dependencies, gaussian), known)


def values_of_projections(guide_sites: dict[str, Message]) -> dict[str, str]:
    """The sites of the matrices of projections, and of their values.

    Raises:
        ValueError: several values of one projection, which are correlated.
    """
    found: dict[str, str] = {}
    for name, site in guide_sites.items():
        if site["type"] != "sample" or not is_projected(site["fn"]):
            continue
        matrix: Any = declared(unwrap(site["fn"])).layer
        expect(
            matrix not in found,
            f"one site of values of the projection {matrix!r}",
            f"{found.get(matrix)!r} and {name!r}",
            "the two are correlated; use guides.InducingPoint(), which draws them",
        )
        found[matrix] = name
    return found


def matrix_belief(name: str, site: Message) -> Belief:
    """The Gaussian of the matrix of a projection.

    Raises:
        ValueError: another distribution.
    """
    fn, variational = unwrap(site["fn"]), record_of(site).is_variational
    expect(
        isinstance(fn, Belief),
        f"a Gaussian rule for the matrix of projection {name!r}",
        type(fn).__name__ if variational else "none",
        f"sites={{{name!r}: dgp.guides.Full()}}, or dgp.guides.Diagonal() for many columns",
    )
    return cast(Belief, fn)


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
