"""Which sites of a program ``dgp.Gibbs`` moves together, and how: defaults, and what the user says instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from numpyro_dgp._checks import with_nearest
from numpyro_dgp.inference.block_moves import Update
from numpyro_dgp.inference.elliptical_slice import EllipticalSlice
from numpyro_dgp.inference.gaussian_blocks import Latents

__all__ = ["PlannedBlock", "planned", "require_updates"]

_Chosen: TypeAlias = dict[tuple[str, ...], Update]


class PlannedBlock(NamedTuple):
    """Sites that move together.

    Args:
        sites: their names.
        update: how they move.
        gaussian: whether the move needs their priors.
        standard: whether these are standard normal whatever the values of other sites.
    """

    sites: tuple[str, ...]
    update: Update
    gaussian: bool
    standard: bool


def require_updates(blocks: Any, rest: Any) -> _Chosen:
    """The blocks of the user by their sites; raise unless they are updates by site."""
    if not isinstance(blocks, Mapping | None):
        raise ValueError(
            f"Gibbs: expected blocks as a dict of updates by site, got {type(blocks).__name__}: "
            'blocks={"h": dgp.updates.EllipticalSlice()}'
        )
    chosen = {(sites,) if isinstance(sites, str) else tuple(sites): update for sites, update in (blocks or {}).items()}
    for sites, update in chosen.items():
        _require_update(f"for the block {' + '.join(map(repr, sites))}", update)
    _require_update("as rest", rest)
    if isinstance(rest, EllipticalSlice):
        raise ValueError(
            "Gibbs: expected rest to be an update of any site, got EllipticalSlice, which needs Gaussian priors: "
            "dgp.updates.NUTS() or dgp.updates.Slice()"
        )
    return chosen


def _require_update(where: str, update: Any) -> None:
    if isinstance(update, type) or not isinstance(update, Update):
        got = f"the class {update.__name__}" if isinstance(update, type) else type(update).__name__
        raise ValueError(
            f"Gibbs: expected an update {where}, got {got}: dgp.updates.NUTS(), dgp.updates.Slice(), or for "
            "Gaussian sites dgp.updates.EllipticalSlice()"
        )


def planned(found: Latents, chosen: _Chosen, rest: Update) -> dict[str, PlannedBlock]:
    """The blocks of a sweep in their order, by the names of their sites.

    Args:
        found: its latent sites.
        chosen: updates by the sites of a block, as the user says.
        rest: the update of sites that are in no block.

    Raises:
        ValueError: blocks that do not fit the program.
    """
    updates = _named(found, chosen)
    taken = {name for sites in updates for name in sites}
    for name in found.moved:
        if name not in taken:
            updates[(name,)] = EllipticalSlice()
            taken.add(name)
    others = tuple(name for name in found.names if name not in taken)
    blocks = {"rest": PlannedBlock(others, rest, gaussian=False, standard=False)} if others else {}
    for sites in sorted(updates, key=lambda sites: found.names.index(sites[0])):
        update = updates[sites]
        sliced = isinstance(update, EllipticalSlice)
        if sliced:
            _require_gaussian(found, sites)
        standard = found.standard.issuperset(sites)
        blocks["+".join(sites)] = PlannedBlock(sites, update, gaussian=sliced, standard=standard)
    return blocks


def _named(found: Latents, chosen: _Chosen) -> _Chosen:
    """Updates by latent sites: a layer's name stands for its non-centred values."""
    updates: _Chosen = {}
    seen: set[str] = set()
    for given, update in chosen.items():
        whites = {name: f"{name}_white" for name in given if name not in found.names}
        sites = tuple(whites.get(name, name) for name in given)
        if integrated := found.integrated.intersection(given):
            raise ValueError(
                f"Gibbs: expected blocks of latent sites, got {min(integrated)!r}, which is integrated and drawn "
                "exactly: leave it out, or pass collapse=False"
            )
        if unknown := [name for name in given if whites.get(name, name) not in found.names]:
            raise ValueError(
                f"Gibbs: expected blocks of latent sites of the program, got {with_nearest(unknown, found.names)}: "
                f"they are {list(found.names)}"
            )
        if twice := sorted(seen.intersection(sites)) or [name for name in sites if sites.count(name) > 1]:
            raise ValueError(f"Gibbs: expected every site in one block, got {twice[0]!r} in two: leave one out")
        seen |= set(sites)
        updates[sites] = update
    return updates


def _require_gaussian(found: Latents, sites: tuple[str, ...]) -> None:
    if others := [name for name in sites if name not in found.gaussian]:
        raise ValueError(
            f"Gibbs: expected sites with a Gaussian prior for EllipticalSlice, got {others[0]!r}: use "
            "dgp.updates.Slice() or dgp.updates.NUTS()"
        )
    if len(sites) > 1 and (others := [name for name in sites if name not in found.standard]):
        raise ValueError(
            "Gibbs: expected standard normal sites where EllipticalSlice moves several together, got "
            f"{others[0]!r}, whose prior may depend on the others: give it a block of its own"
        )
