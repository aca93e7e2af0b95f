"""Which parameters of a deeper program are those of a fitted one, by the names of sites, and which are new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_dgp._checks import with_nearest
from numpyro_dgp._typing import Array
from numpyro_dgp.inference.program_sites import SitesOfFit

__all__ = ["SharedSites", "shared_sites", "taken_parameters"]


class SharedSites(NamedTuple):
    """The sample sites of a deeper program.

    Args:
        old: by name, the name that the site has in the fitted program.
        new: those that the fitted program does not have.
        prefixes: of the names of parameters, in the guide of the deeper program and in that of the fitted one.
    """

    old: dict[str, str]
    new: tuple[str, ...]
    prefixes: tuple[str, str]

    def owner(self, parameter: str) -> tuple[str, str]:
        """The site that a parameter of the deeper program belongs to, and the rest of its name; ``""`` for none."""
        found = [site for site in (*self.old, *self.new) if parameter.startswith(f"{site}_")]
        site = max(found, key=len, default="")
        return site, parameter[len(site) :]


def shared_sites(
    deeper: SitesOfFit, fitted: SitesOfFit, names: Mapping[str, str], prefixes: tuple[str, str]
) -> SharedSites:
    """Tell old sites from new ones: a site is that of its name in ``names``, else the one of the same name.

    Raises:
        ValueError: ``names`` with names that there are not, or the same one twice; a site of the fitted program that
            the deeper one does not have.
    """
    ours, theirs = (
        [name for name, site in sites.model.items() if site.kind == "sample" and not site.auxiliary]
        for sites in (deeper, fitted)
    )
    known = {*ours, *deeper.parameters}, {*theirs, *fitted.parameters}
    for which, given, there in (("deeper", names.keys(), known[0]), ("fitted", names.values(), known[1])):
        if missing := set(given) - there:
            raise ValueError(
                f"deepen: expected names of sites or parameters of the {which} program in names, got "
                f"{with_nearest(missing, there)}: names={{deeper: fitted}}, such as {{'f1': 'f0'}}"
            )
    if len(set(names.values())) < len(names):
        raise ValueError(
            f"deepen: expected every site of the fitted program once in names, got {dict(names)}: the new layer has no "
            "entry"
        )
    old = {site: source for site in ours if (source := _source(site, names)) in theirs}
    if lost := set(theirs) - set(old.values()):
        raise ValueError(
            f"deepen: expected every site of the fitted program in the deeper one, got none for "
            f"{with_nearest(lost, set(ours) - old.keys())}: say what it is called there, "
            f"names={{deeper: fitted}}, such as {{'f1': 'f0'}}"
        )
    return SharedSites(old, tuple(site for site in ours if site not in old), prefixes)


def _source(name: str, names: Mapping[str, str]) -> str | None:
    """The name in the fitted program, if it is not taken by another name."""
    return names.get(name, None if name in names.values() else name)


def taken_parameters(
    initial: Mapping[str, Any], fitted: Mapping[str, Array], sites: SharedSites, names: Mapping[str, str]
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The values of the fit under their names in the deeper program, and the names of the parameters that are new.

    Args:
        initial: all parameters of the deeper program, or their shapes.
        fitted: those of the fit.
        sites: of the deeper program.
        names: from names of the deeper program to those of the fitted one.

    Raises:
        ValueError: parameters of a site of the fit that are not in the other guide, or have another shape.
    """
    taken: dict[str, Array] = {}
    sources: dict[str, str] = {}
    new = []
    for name, value in initial.items():
        site, rest = sites.owner(name)
        if site in sites.new and name not in names:
            new.append(name)
            continue
        ours, theirs = (f"_{prefix}_" for prefix in sites.prefixes)
        rest = theirs + rest[len(ours) :] if site and rest.startswith(ours) else rest
        source = sites.old[site] + rest if site and name not in names else _source(name, names)
        if source is None or source not in fitted:
            if site and name not in names:
                raise ValueError(
                    f"deepen: expected a parameter {source!r} in the fit, for {name!r}, got none: take guides with the "
                    "same rules for the sites that both programs have"
                )
            new.append(name)
            continue
        shapes = [jax.tree.map(np.shape, leaf) for leaf in (value, fitted[source])]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"deepen: expected {name!r} to have the shape of {source!r} of the fit, {shapes[1]}, got {shapes[0]}: "
                "see that names says which layer of the fit each one is, names={'f1': 'f0'}, and that a new layer has "
                "as many outputs as inputs; take the same numbers of inducing points and the same rules, for "
                "hyperparameters rules of single sites"
            )
        taken[name], sources[source] = fitted[source], name
    if lost := fitted.keys() - sources.keys():
        raise ValueError(
            f"deepen: expected every parameter of the fit in the deeper program, got none for "
            f"{with_nearest(lost, new)}: say what it is called there, names={{deeper: fitted}}, and take guides with "
            "the same rules"
        )
    return taken, tuple(new)
