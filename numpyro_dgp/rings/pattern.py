"""The mask of observed points of a ring, known when a program is compiled, and the settings of the solver of a
``RingNormal``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from numpyro_dgp._checks import expect, expected, is_concrete
from numpyro_dgp._fields import Checked, count, positive
from numpyro_dgp._repr import brief
from numpyro_dgp.rings.spectra import Ring, require_ring

__all__ = ["LONGEST", "Pattern", "Runs", "Solver"]

Runs = tuple[tuple[int, int], ...]
# Longer runs are cut: their blocks of a matrix are factorised as dense ones.
LONGEST = 2048


class Pattern:
    """Observed and unobserved points of a ring: part of a program's structure, equal where the masks are.

    Args:
        mask: which points are observed (M,), the last dimension of the grid running fastest.
        sizes: points of the ring in every dimension.
    """

    __slots__ = ("_key", "missing", "present", "sizes")

    def __init__(self, mask: np.ndarray, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.present, self.missing = np.flatnonzero(mask), np.flatnonzero(~mask)
        self._key = (sizes, np.packbits(mask).tobytes())

    @classmethod
    def of(cls, ring: Ring, observed: Any) -> Pattern:
        """From what a user gives as ``observed``: ``None`` for all, or a mask.

        Raises:
            ValueError: what is not a ring; a mask that is traced, of another shape, or that marks no point.
        """
        require_ring(ring)
        size = math.prod(ring.sizes)
        if observed is None:
            return cls(np.ones(size, bool), ring.sizes)
        expect(
            is_concrete(observed),
            "observed to be known when the program is compiled",
            "a traced array",
            "make the mask outside of the program, and do not pass it as an argument of the model",
        )
        given = np.asarray(observed)
        binary = given.dtype == bool or (given.dtype.kind in "iuf" and np.isin(given, (0, 1)).all())
        if given.shape not in ((size,), ring.sizes) or not binary:
            shapes = f"({size},)" if len(ring.sizes) == 1 else f"({size},) or {ring.sizes}"
            raise expected(
                f"observed to be a mask of shape {shapes}, True where a grid point has a value",
                f"{given.dtype} of shape {given.shape}",
                f"mask = np.zeros({size}, bool); mask[indices] = True; for a series dgp.rings.regular(x, margin)",
            )
        expect(
            given.any(),
            f"observed grid points among {size}",
            "none marked",
            "for a series use dgp.rings.regular(x, margin)",
        )
        return cls(given.astype(bool).reshape(-1), ring.sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def size(self) -> int:
        """Points of the ring M."""
        return len(self.present) + len(self.missing)

    @property
    def is_one_gap(self) -> bool:
        """Whether the unobserved points of a ring in one dimension are one run of neighbours, round the back or not."""
        return len(self.sizes) == 1 and int((np.diff(self.missing) != 1).sum() + self._passes_the_end()) == 1

    def _passes_the_end(self) -> bool:
        """Whether the first and the last unobserved points are not neighbours round the back."""
        return bool((self.missing[0] - self.missing[-1]) % self.size != 1)

    def runs(self) -> tuple[np.ndarray, Runs]:
        """The unobserved points by runs of neighbours in the last dimension, shorter runs first.

        Returns:
            Their indices in that order, and how many runs there are of which length. Runs of more than 2048 points are
            cut into pieces.
        """
        last = self.sizes[-1]
        begins = np.diff(self.missing, prepend=-2) != 1
        begins |= self.missing % last == 0  # a new row of the grid is a new run
        start = np.flatnonzero(begins)
        within = np.arange(len(self.missing)) - np.repeat(start, np.diff(start, append=len(self.missing)))
        start = np.flatnonzero(within % LONGEST == 0)  # longer runs begin again every 2048 points
        lengths = np.diff(start, append=len(self.missing))
        order = np.argsort(np.repeat(lengths, lengths), kind="stable")
        found, counts = np.unique(lengths, return_counts=True)
        return self.missing[order], tuple(zip(counts.tolist(), found.tolist(), strict=True))


@dataclasses.dataclass(frozen=True)
class Solver(Checked):
    """Settings of the solver of a :class:`RingNormal` with gaps or with noise per point.

    Args:
        exact: up to so many unobserved, or so many observed, points by a dense factorisation of that size: exact.
        probes: above that, random signs from which the log determinant is estimated, from 2 on.
        steps: of Lanczos' recursion per probe, at most. Each keeps a vector with one number per unobserved point, or,
            where noise differs from point to point, per point of the ring.
        tol: relative residual at which conjugate gradients stop.
        maxiter: steps of conjugate gradients, at most.
        seed: of the signs. They depend on nothing else, so that a log density is a function of its arguments.

    Raises:
        ValueError: numbers that are not positive integers, or a tolerance that is not positive; a single probe.

    Example:
        >>> from numpyro_dgp.rings import Solver
        >>> Solver(probes=32).exact
        3000

    Source: Gardner et al. (2018); Ubaru et al. (2017).
    """

    exact: int = 3000
    probes: int = count(8)
    steps: int = count(60)
    tol: float = positive(1e-8, "try 1e-8")
    maxiter: int = count(1000)
    seed: int = 0

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.exact) is not int or self.exact < 0:
            raise expected("exact, an integer of 0 or more", repr(self.exact), "0 to estimate all, 3000 by default")
        if self.probes < 2:
            raise expected("probes to be at least 2", self.probes, "their scatter is the error of the log determinant")
        if type(self.seed) is not int:
            raise expected("seed to be an integer", repr(self.seed), "try 0")
