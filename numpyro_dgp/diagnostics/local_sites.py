"""The structure of a fitted program for diagnostics: its traces, its plates, names of its dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import ALL_ROWS, require
from numpyro_dgp.analysis.program import structure
from numpyro_dgp.analysis.sites import Message, Trace, site_kind, unwrap
from numpyro_dgp.functions.weights import StandardNormal
from numpyro_dgp.guides import run
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.predict.draws import over_all_rows, trace_over_all_rows
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["LocalSites", "is_value", "local_sites", "site_kinds", "traces"]


@dataclasses.dataclass(frozen=True)
class LocalSites:
    """The sites with one value per datum.

    Args:
        frames: plates of every observed site, outermost first.
        first: for every observed site, the first one in the same plates, itself where there is no other.
        local: for every latent site with one value per datum, the first observed site of the same data.
        kinds: of latent and deterministic sites, as :func:`site_kinds` has them.
        weighted: whether the guide gives its latents importance weights or quadrature nodes.
        dims: names of the dimensions of every site, plates first.
        centred: hidden layers that are sites of the program as it is.
    """

    frames: dict[str, tuple[Any, ...]]
    first: dict[str, str]
    local: dict[str, str]
    kinds: dict[str, str]
    weighted: bool
    dims: dict[str, list[str]]
    centred: list[str]


def local_sites(posterior: Posterior, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalSites:
    """Trace the program with shapes only, and find the sites with one value per datum.

    Raises:
        ValueError: no observations, a plate that subsamples, plates of observed sites that overlap, or a guide or draws
            of another program.
    """
    found: list[LocalSites] = []
    arrays, rebuild = split_arguments(args, kwargs)
    args, kwargs = rebuild(arrays)

    def inspect(key: Array) -> Array:
        given = {name: values[0] for name, values in (posterior.samples or {}).items()}
        with require(ALL_ROWS):
            guide_trace, sites = traces(posterior, key, given, {}, args, kwargs)
        found.append(_inspect(guide_trace, sites))
        _require_sites(found[0], sites, guide_trace if posterior.guide is not None else given)
        return jnp.zeros(())

    jax.eval_shape(inspect, jax.random.key(0))
    return found[0]


def traces(
    posterior: Posterior, key: Array, sample: dict[str, Array], shared: dict[str, Array], args: Any, kwargs: Any
) -> tuple[Trace, Trace]:
    """Traces of the guide (empty for MCMC) and of the model at its values, everything drawn but ``shared``."""
    guide_key, model_key = jax.random.split(key)
    model = posterior.seeded(posterior.model, model_key)
    if posterior.guide is None:
        return {}, trace_over_all_rows(posterior.given(sample, model, args, kwargs), args, kwargs)
    guide = handlers.substitute(posterior.seeded(posterior.guide, guide_key), data=shared)
    return run.traces(model, guide, args, kwargs, over_all_rows)


def _inspect(guide_trace: Trace, sites: Trace) -> LocalSites:
    samples = {name: site for name, site in sites.items() if site["type"] == "sample"}
    frames = {
        name: tuple(sorted(site["cond_indep_stack"], key=lambda frame: frame.dim))
        for name, site in samples.items()
        if site["is_observed"] and not _is_factor(site)
    }
    expect(frames, "a program that observes data", "none", "pass the observations as in the fit")
    for name, plates in frames.items():
        batch = jnp.shape(samples[name]["value"])[: jnp.ndim(samples[name]["value"]) - samples[name]["fn"].event_dim]
        if plates and len(batch) > -plates[0].dim:
            raise expected(
                f"a plate for every axis of the observations {name!r}",
                f"shape {batch} in {_listed(plates)}",
                f'for several y of one f(x) open numpyro.plate("replicates", {batch[0]}, dim={-len(batch)}) around it',
            )
    first: dict[str, str] = {}
    taken: set[Any] = set()
    for name, plates in frames.items():
        first[name] = next((y for y in first if plates and frames[y] == plates), name)
        if first[name] == name and taken & set(plates):
            raise expected(
                "observed sites in the same plates or in plates of their own",
                f"{sorted(frames)} in plates that overlap",
                "join them to one site with two columns",
            )
        taken |= set(plates)
    # In an autoguide that draws all sites together, no site belongs to single data.
    joint = any(site["type"] == "sample" and name not in sites for name, site in guide_trace.items())
    local = {}
    for name, site in samples.items():
        beside = [y for y, plates in frames.items() if plates and set(plates) <= set(site["cond_indep_stack"])]
        if beside and name not in frames and not joint:
            local[name] = beside[0]
    weighted = any(record_of(site).num_replicates is not None for site in guide_trace.values())
    dims = {name: _dims(name, site) for name, site in sites.items() if site["type"] in ("sample", "deterministic")}
    centred = [name for name, site in samples.items() if site_kind(site) == "hidden"]
    return LocalSites(frames, first, local, site_kinds(sites), weighted, dims, centred)


def site_kinds(sites: Trace) -> dict[str, str]:
    """The kind of every site: ``hyperparameter``, ``inducing``, ``hidden``, ``exact``, ``latent``, ``deterministic``.

    Args:
        sites: a trace of a program on its data.
    """
    program = structure(sites)
    kinds = {}
    for name, site in sites.items():
        if site["type"] == "deterministic":
            kinds[name] = "deterministic"
        elif site["type"] == "sample" and is_value(site):
            kind = site_kind(site)
            latent = isinstance(unwrap(site["fn"]), StandardNormal) or not program.is_shared(site)
            kinds[name] = ("latent" if latent else "hyperparameter") if kind in ("other", "latent") else kind
    return kinds


def _listed(plates: tuple[Any, ...]) -> str:
    return ", ".join(f"plate {frame.name!r} of {frame.size} rows" for frame in plates)


def _require_sites(known: LocalSites, sites: Trace, given: Mapping[str, Any]) -> None:
    """Raise unless a guide or draws give every site of the program that all data share."""
    shared = [
        name
        for name, site in sites.items()
        if site["type"] == "sample"
        and not site["is_observed"]
        and not (name in known.local or site["cond_indep_stack"])
    ]
    missing = sorted(set(shared) - set(given))
    expect(
        not missing,
        f"a guide or draws of the program's sites {shared}",
        f"none of {missing}",
        "was it made for another program, dgp.Posterior(model, guide, params)?",
    )


def _dims(name: str, site: Message) -> list[str]:
    """Names for the dimensions of a site; generic where a dimension has no known meaning."""
    plates = {frame.dim: frame.name for frame in site["cond_indep_stack"]}
    depth = max([-dim for dim in plates], default=0)
    batch = [plates.get(dim, f"{name}_batch_{-dim}") for dim in range(-depth, 0)]
    if site["type"] == "deterministic":
        return batch + [f"{name}_output"] * (jnp.ndim(site["value"]) == depth + 1)
    fn = unwrap(site["fn"])
    by_kind = {
        "inducing": [f"{name}_output", f"{name}_inducing"],
        "exact": [f"{name}_row"] + [f"{name}_output"] * (fn.event_dim == 2),
        "other": [],
    }
    event = site["infer"].get("event_dims") or by_kind.get(site_kind(site), [f"{name}_output"])
    return batch + list(event)[max(0, len(event) - fn.event_dim) :]


def _is_factor(site: Message) -> bool:
    return isinstance(unwrap(site["fn"]), dist.Unit)


def is_value(site: Message) -> bool:
    """Whether a site of a run is a latent or deterministic value."""
    if site["type"] == "sample":
        return not site["is_observed"] and not _is_factor(site)
    return site["type"] == "deterministic"
