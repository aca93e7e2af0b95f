"""Which posteriors of a guide are Gaussian, and where their numbers are: what natural gradients need to know."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_dgp._typing import Array
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.model.program import inspect_program, site_kind, structure

__all__ = ["GaussianSite", "gaussian_sites"]


class GaussianSite(NamedTuple):
    """Where the numbers of a Gaussian posterior are.

    Args:
        kind: of the site: ``inducing``, ``exact``, ``hidden``, ``latent`` or ``other``.
        is_inner: whether it holds the inducing values of an inner layer.
        loc: name of the parameter that holds means.
        scale: name of the parameter that holds triangular factors, or standard deviations.
        constraint: of that parameter.
        diagonal: whether it holds standard deviations.
        plate_scale: how much a minibatch multiplies the terms of this site.
    """

    kind: str
    is_inner: bool
    loc: str
    scale: str
    constraint: Any
    diagonal: bool
    plate_scale: float


def gaussian_sites(guide: Any) -> dict[str, GaussianSite]:
    """The sites whose posterior is Gaussian (on the unconstrained scale), by name.

    For guides of this package, ``AutoNormal``, and ``AutoMultivariateNormal``, whose one Gaussian over everything goes
    by the name of its own site, ``"_<prefix>_latent"``. None for guides of other kinds. The guide must have run.

    Raises:
        ValueError: a guide of ours that has not been called yet.
    """
    if isinstance(guide, Guide):
        companion = {} if guide.companion is None else gaussian_sites(guide.companion)
        return companion | _of_rules(guide)
    if isinstance(guide, AutoNormal):
        return _of_autonormal(guide)
    return _of_joint(guide) if isinstance(guide, AutoMultivariateNormal) else {}


def _of_rules(guide: Guide) -> dict[str, GaussianSite]:
    args, kwargs = guide.arguments()
    found: dict[str, GaussianSite] = {}

    def run(key: Array) -> Array:
        with handlers.block():
            sites = handlers.trace(handlers.seed(guide, key)).get_trace(*args, **kwargs)
        inner = inspect_program(guide.model, args, kwargs).inner
        for name, site in sites.items():
            stem = f"{name}_{guide.prefix}"
            scales = [f"{stem}_{end}" for end in ("scale_tril", "scale") if f"{stem}_{end}" in sites]
            if site.get("own") and scales and f"{stem}_loc" in sites:
                constraint = sites[scales[0]]["kwargs"]["constraint"]
                found[name] = GaussianSite(
                    kind=site["kind"],
                    is_inner=name in inner,
                    loc=f"{stem}_loc",
                    scale=scales[0],
                    constraint=constraint,
                    diagonal=scales[0].endswith("scale"),
                    plate_scale=_plate_scale(site),
                )
        return jnp.zeros(())

    jax.eval_shape(run, jax.random.key(0))
    return found


def _of_autonormal(guide: AutoNormal) -> dict[str, GaussianSite]:
    sites = guide.prototype_trace
    inner = structure(sites).inner
    return {
        name: GaussianSite(
            kind=site_kind(sites[name]),
            is_inner=name in inner,
            loc=f"{name}_{guide.prefix}_loc",
            scale=f"{name}_{guide.prefix}_scale",
            constraint=guide.scale_constraint,
            diagonal=True,
            plate_scale=_plate_scale(sites[name]),
        )
        for name in guide._init_locs
    }


def _of_joint(guide: AutoMultivariateNormal) -> dict[str, GaussianSite]:
    prefix = guide.prefix
    constraint = guide.scale_tril_constraint
    return {
        f"_{prefix}_latent": GaussianSite(
            "inducing", False, f"{prefix}_loc", f"{prefix}_scale_tril", constraint, diagonal=False, plate_scale=1.0
        )
    }


def _plate_scale(site: dict[str, Any]) -> float:
    return 1.0 if site["scale"] is None else float(site["scale"])
