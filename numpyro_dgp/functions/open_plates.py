"""Checks of a distribution against the plates around it."""

from __future__ import annotations

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._numpyro import plates_around

__all__ = ["require_outside", "require_rows_of_plates"]


def require_rows_of_plates(batch_shape: tuple[int, ...]) -> None:
    """Raise unless a likelihood has as many rows as the plates around it.

    NumPyro broadcasts a plate of one row to any number; for other sizes its message names only the shapes.

    Args:
        batch_shape: of the likelihood.

    Raises:
        ValueError: such a plate is open.
    """
    for around in plates_around():
        dim, size = around.dim, around.subsample_size
        if dim is None or len(batch_shape) < -dim or batch_shape[dim] in (1, size):
            continue
        raise expected(
            f"{size} row{('s' if size != 1 else '')}, as many as plate {around.name!r} has",
            f"f(x) at {batch_shape[dim]}",
            "predict at new rows by dgp.Posterior(...); in a subsampled plate use X[i] and y[i]",
        )


def require_outside(what: str, rows: int, before: tuple[int, ...], batch_shape: tuple[int, ...]) -> None:
    """Raise where one joint draw of all rows is inside the plate of these rows, which would repeat it for each row.

    Args:
        what: the owner of the message.
        rows: how many values are drawn together.
        before: the batch shape of the draw.
        batch_shape: what it is expanded to.

    Raises:
        ValueError: such a plate is open, and the draw has no dimension for it.
    """
    for around in plates_around() if rows > 1 else ():
        dim = around.dim
        if dim is None or len(batch_shape) < -dim or not batch_shape[dim] == around.subsample_size == rows:
            continue
        expect(
            len(before) >= -dim and before[dim] != 1,
            "a joint draw of all rows outside the plate of these rows",
            f"{rows} rows in plate {around.name!r}, which would count all {rows} times",
            f"write the site before the plate; for independent groups expand it there, f(X).expand([{rows}])",
            at=what,
        )
