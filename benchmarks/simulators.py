"""Test functions of emulation, on the unit cube, each with its source.

``SIMULATORS[name]`` has the function, from points (N, D) of the unit cube to numbers (N,), and the number of inputs.
Add a function by decorating it with ``@simulator``, with the ranges of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Simulator(NamedTuple):
    """A deterministic code: ``run`` takes points of the unit cube."""

    run: Callable[[np.ndarray], np.ndarray]
    dims: int


SIMULATORS: dict[str, Simulator] = {}


def simulator(ranges: Sequence[tuple[float, float]]) -> Callable[[Callable], Callable]:
    """Register a function of the columns of its inputs, in their own units."""
    low, high = np.array(ranges, float).T

    def register(function: Callable) -> Callable:
        SIMULATORS[function.__name__] = Simulator(lambda X: function(*(low + (high - low) * X).T), len(ranges))
        return function

    return register


@simulator([(0, 1)])
def forrester(x):
    """Forrester et al. (2008), appendix."""
    return (6 * x - 2) ** 2 * np.sin(12 * x - 4)


@simulator([(0, 1)])
def step(x):
    """A step, as in the figures of most papers on deep Gaussian processes."""
    return np.where(x < 0.5, -1.0, 1.0)


@simulator([(0, 1)] * 2)
def sine(x, y):
    """The example of sequential design of dgpsi, the package of Ming et al. (2023)."""
    return np.sin(1 / ((0.7 * x + 0.3) * (0.7 * y + 0.3)))


@simulator([(-10, 10)] * 2)
def booth(x, y):
    """Booth's function: Jamil and Yang (2013)."""
    return (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2


@simulator([(-5, 10), (0, 15)])
def branin(x, y):
    """Branin's function, with the constants of Dixon and Szego (1978)."""
    return (y - 5.1 / (4 * np.pi**2) * x**2 + 5 / np.pi * x - 6) ** 2 + 10 * (1 - 1 / (8 * np.pi)) * np.cos(x) + 10


@simulator([(0, 1)] * 3)
def hartmann3(*x):
    """Hartman's function of three inputs, with the constants of Dixon and Szego (1978)."""
    A = np.array([[3.0, 10, 30], [0.1, 10, 35], [3, 10, 30], [0.1, 10, 35]])
    P = 1e-4 * np.array([[3689.0, 1170, 2673], [4699, 4387, 7470], [1091, 8732, 5547], [381, 5743, 8828]])
    return -np.exp(-(A * (np.stack(x, -1)[:, None] - P) ** 2).sum(-1)) @ np.array([1.0, 1.2, 3.0, 3.2])


@simulator([(-np.pi, np.pi)] * 3)
def ishigami(x, y, z):
    """Ishigami and Homma (1990)."""
    return np.sin(x) + 7 * np.sin(y) ** 2 + 0.1 * z**4 * np.sin(x)


@simulator([(0, 1)] * 5)
def friedman(a, b, c, d, e):
    """Friedman (1991), without the inputs that do nothing."""
    return 10 * np.sin(np.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e


@simulator([(50, 150), (25, 70), (0.5, 3), (1.2, 2.5), (0.25, 1.2), (50, 300)])
def otl_circuit(rb1, rb2, rf, rc1, rc2, beta):
    """The midpoint voltage of a push-pull circuit: Ben-Ari and Steinberg (2007)."""
    vb1, total = 12 * rb2 / (rb1 + rb2), beta * (rc2 + 9)
    return ((vb1 + 0.74) * total + 11.35 * rf + 0.74 * rf * total / rc1) / (total + rf)


@simulator([(30, 60), (0.005, 0.02), (0.002, 0.01), (1000, 5000), (90000, 110000), (290, 296), (340, 360)])
def piston(mass, area, volume, spring, pressure, ambient, filling):
    """The time of a cycle of a piston: Kenett and Zacks (1998); Ben-Ari and Steinberg (2007)."""
    force = pressure * area + 19.62 * mass - spring * volume / area
    gas = pressure * volume / filling * ambient
    v = area / (2 * spring) * (np.sqrt(force**2 + 4 * spring * gas) - force)
    return 2 * np.pi * np.sqrt(mass / (spring + area**2 * gas / v**2))


@simulator(
    [(0.05, 0.15), (100, 50000), (63070, 115600), (990, 1110), (63.1, 116), (700, 820), (1120, 1680), (9855, 12045)]
)
def borehole(rw, r, tu, hu, tl, hl, length, kw):
    """The flow of water through a borehole: Harper and Gupta (1983)."""
    log = np.log(r / rw)
    return 2 * np.pi * tu * (hu - hl) / (log * (1 + 2 * length * tu / (log * rw**2 * kw) + tu / tl))


@simulator([(-10, 10)] * 2)
def shubert(x, y):
    """Shubert's function: Jamil and Yang (2013); eighteen least values of -186.7309."""
    i = np.arange(1, 6)[:, None]
    return (i * np.cos((i + 1) * x + i)).sum(0) * (i * np.cos((i + 1) * y + i)).sum(0)


@simulator([(0, 1)] * 6)
def hartmann6(*x):
    """Hartman's function of six inputs, with the constants of Dixon and Szego (1978)."""
    A = np.array([[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8],
                  [17, 8, 0.05, 10, 0.1, 14]])  # fmt: skip
    P = 1e-4 * np.array([[1312, 1696, 5569, 124, 8283, 5886], [2329, 4135, 8307, 3736, 1004, 9991],
                         [2348, 1451, 3522, 2883, 3047, 6650], [4047, 8828, 8732, 5743, 1091, 381]])  # fmt: skip
    return -np.exp(-(A * (np.stack(x, -1)[:, None] - P) ** 2).sum(-1)) @ np.array([1.0, 1.2, 3.0, 3.2])
