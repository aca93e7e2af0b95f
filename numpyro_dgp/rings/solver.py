"""How a ``RingNormal`` with unobserved points, or with noise that differs from point to point, is solved."""

from __future__ import annotations

import dataclasses

from numpyro_dgp._checks import require_count, require_positive
from numpyro_dgp._shown import brief

__all__ = ["Solver"]


@dataclasses.dataclass(frozen=True)
class Solver:
    """How a :class:`RingNormal` with gaps, or with noise of its own at every point, is solved.

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
    probes: int = 8
    steps: int = 60
    tol: float = 1e-8
    maxiter: int = 1000
    seed: int = 0

    __repr__ = brief

    def __post_init__(self) -> None:
        for name, hint in (("probes", "8"), ("steps", "60"), ("maxiter", "1000")):
            require_count("Solver", name, getattr(self, name), hint)
        if type(self.exact) is not int or self.exact < 0:
            raise ValueError(
                f"Solver: expected exact to be an integer of at least zero, got {self.exact!r}: 0 estimates whatever "
                "is not circulant, 3000 is the default"
            )
        if self.probes < 2:
            raise ValueError(
                f"Solver: expected probes to be at least 2, got {self.probes}: their scatter is the error of the "
                "log determinant"
            )
        require_positive("Solver", "tol", self.tol, "try 1e-8")
        if type(self.seed) is not int:
            raise ValueError(f"Solver: expected seed to be an integer, got {self.seed!r}: try 0")
