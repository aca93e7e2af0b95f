"""Checks that a program counts the rows of a minibatch as often as the rows of its stream ask for."""

from __future__ import annotations

import math
import warnings

from numpyro_dgp.inference.program_sites import ProgramSite, SitesOfFit

__all__ = ["require_row_counts"]


def require_row_counts(sites: SitesOfFit, guide: str, batch: int, rows: int) -> None:
    """Raise where the loss of a batch is not that of all rows.

    Args:
        sites: of guide and model.
        guide: its class, for messages.
        batch: B, rows of a batch.
        rows: N, rows of the stream.

    Raises:
        ValueError: no site counts its rows N / B times, or the guide has values of its own for single rows.
    """
    observed = {name: site for name, site in sites.model.items() if site.kind == "observed"}
    plates = {p for site in observed.values() for p, size in site.plates.items() if size == batch}
    if batch != rows and observed and all(site.scale == 1 for site in observed.values()):
        where = ", ".join(f"{plate}=stream.num_rows" for plate in sorted(plates)) or "data=stream.num_rows"
        raise ValueError(
            f"fit_stream: expected observed sites that count every row of a batch {rows} / {batch} times, got "
            f"{list(observed)} that count it once: wrap the program, model = dgp.minibatch(model, {where}), and make "
            "the guide of that"
        )
    for name, site in observed.items():
        if len(site.plates) == 1 and plates & site.plates.keys() and not _close(site.scale, rows / batch):
            warnings.warn(
                f"fit_stream: expected site {name!r} to count every row of a batch {rows} / {batch} = "
                f"{rows / batch:.6g} times, got {site.scale:.6g} times: is the number of rows that dgp.minibatch has "
                "been told that of the stream, stream.num_rows?",
                UserWarning,
                stacklevel=4,
            )
    _require_amortised(sites, guide, plates)


def _require_amortised(sites: SitesOfFit, guide: str, plates: set[str]) -> None:
    """Raise where the guide has a parameter per row of a batch, or counts a latent per row otherwise than the model."""
    cure = (
        "its rows change from batch to batch: use an amortised rule, latent=dgp.guides.Amortised(), in one of "
        "dgp.guides, made of the same dgp.minibatch(model, ...)"
    )
    for name, site in sites.parameters.items():
        if site.per_row and plates & site.plates.keys():
            raise ValueError(f"fit_stream: expected no parameters per row in {guide}, got {name!r}: {cure}")
    for name, site in sites.model.items():
        q: ProgramSite | None = sites.guide.get(name)
        if site.kind != "sample" or q is None or not plates & site.plates.keys():
            continue
        if not plates & q.plates.keys() or not _close(q.scale, site.scale):
            raise ValueError(
                f"fit_stream: expected {guide} to count site {name!r}, with a value per row, as the model does, "
                f"{site.scale:.6g} times in plates {list(site.plates)}, got {q.scale:.6g} times in plates "
                f"{list(q.plates)}: {cure}"
            )


def _close(a: float | None, b: float | None) -> bool:
    """Whether two scales are equal, or one is not known before the program runs."""
    return a is None or b is None or math.isclose(a, b, rel_tol=1e-5)
