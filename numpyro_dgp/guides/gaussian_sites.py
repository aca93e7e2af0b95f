"""Which posteriors of a guide are Gaussian, and the names of their parameters, for natural gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.model.program import structure
from numpyro_dgp.model.sites import Trace, site_kind

__all__ = ["GaussianSite", "gaussian_sites"]


class GaussianSite(NamedTuple):
    """The parameters of a Gaussian posterior.

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


def gaussian_sites(guide: Any, sites: Trace) -> dict[str, GaussianSite]:
    """The sites whose posterior is Gaussian (on the unconstrained scale), by name.

    For guides of this package, ``AutoNormal`` and ``AutoMultivariateNormal``. The last has one Gaussian over all sites,
    whose name here is that of its auxiliary site, ``"_<prefix>_latent"``. Other guides have none: the dict is empty.

    Args:
        guide: the guide.
        sites: messages of a run of it, by name.
    """
    if isinstance(guide, Guide):
        companion = {} if guide.companion is None else gaussian_sites(guide.companion, sites)
        return companion | _of_rules(sites)
    if isinstance(guide, AutoNormal):
        return _of_autonormal(guide)
    return _of_joint(guide) if isinstance(guide, AutoMultivariateNormal) else {}


def _of_rules(sites: Trace) -> dict[str, GaussianSite]:
    found: dict[str, GaussianSite] = {}
    for name, site in sites.items():
        record = record_of(site)
        if not record.learned or record.gaussian is None:
            continue
        scale = f"{record.stem}_{record.gaussian.scale}"
        found[name] = GaussianSite(
            kind=record.kind,
            is_inner=record.inner,
            loc=f"{record.stem}_loc",
            scale=scale,
            constraint=sites[scale]["kwargs"]["constraint"],
            diagonal=record.gaussian.diagonal,
            plate_scale=_plate_scale(site),
        )
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
