"""Test functions of emulation, on the unit cube, each with its source.

``SIMULATORS[name]`` has the function, from points (N, D) of the unit cube to numbers (N,), and the number of inputs.
Add a function by decorating it with ``@simulator``, with the ranges of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Simulator(NamedTuple):
    """A deterministic code: ``run`` takes points of the unit cube, ``ranges`` are those of its own inputs."""

    run: Callable[[np.ndarray], np.ndarray]
    dims: int
    ranges: tuple[tuple[float, float], ...]


SIMULATORS: dict[str, Simulator] = {}


def simulator(ranges: Sequence[tuple[float, float]]) -> Callable[[Callable], Callable]:
    """Register a function of the columns of its inputs, in their own units."""
    low, high = np.array(ranges, float).T

    def register(function: Callable) -> Callable:
        SIMULATORS[function.__name__] = Simulator(
            lambda X: function(*(low + (high - low) * X).T), len(ranges), tuple(map(tuple, ranges))
        )
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


@simulator([(0.5, 2.5)])
def grlee(x):
    """Gramacy and Lee (2012), section 3."""
    return np.sin(10 * np.pi * x) / (2 * x) + (x - 1) ** 4


@simulator([(0, 1)] * 2)
def franke(x, y):
    """Franke (1979), the first of his functions."""
    return (
        0.75 * np.exp(-((9 * x - 2) ** 2) / 4 - (9 * y - 2) ** 2 / 4)
        + 0.75 * np.exp(-((9 * x + 1) ** 2) / 49 - (9 * y + 1) / 10)
        + 0.5 * np.exp(-((9 * x - 7) ** 2) / 4 - (9 * y - 3) ** 2 / 4)
        - 0.2 * np.exp(-((9 * x - 4) ** 2) - (9 * y - 7) ** 2)
    )


@simulator([(-1, 1)] * 2)
def ridge(x, y):
    """A function of one direction of the inputs: Constantine (2015), chapter 1."""
    return np.exp(0.7 * x + 0.3 * y)


@simulator([(0, 1)] * 2)
def jump(x, y):
    """The discontinuous function of Genz (1984), with slopes 5 and edges 1/2."""
    return np.where((x > 0.5) | (y > 0.5), 0.0, np.exp(5 * x + 5 * y))


@simulator([(0, 1)] * 3)
def detpep(x, y, z):
    """The curved function of Dette and Pepelyshev (2010), equation 4.1."""
    return 4 * (x - 2 + 8 * y - 8 * y**2) ** 2 + (3 - 4 * y) ** 2 + 16 * np.sqrt(z + 1) * (2 * z - 1) ** 2


@simulator([(0, 1)] * 8)
def detpep8(*x):
    """The function of eight inputs of Dette and Pepelyshev (2010)."""
    sums = np.cumsum(np.stack(x[2:]), 0)[1:]
    return detpep(*x[:3]) + (np.arange(4, 9)[:, None] * np.log1p(sums)).sum(0)


@simulator([(0, 2 * np.pi)] * 4 + [(0, 1)] * 4)
def robot_arm(*x):
    """How far an arm of four segments reaches: An and Owen (2001)."""
    angles, lengths = np.cumsum(np.stack(x[:4]), 0), np.stack(x[4:])
    return np.hypot((lengths * np.cos(angles)).sum(0), (lengths * np.sin(angles)).sum(0))


@simulator(
    [
        (150, 200),
        (220, 300),
        (6, 10),
        (-10, 10),
        (16, 45),
        (0.5, 1),
        (0.08, 0.18),
        (2.5, 6),
        (1700, 2500),
        (0.025, 0.08),
    ]
)
def wing_weight(area, fuel, aspect, sweep, pressure, taper, thickness, load, gross, paint):
    """The weight in pounds of the wing of a light aircraft: Forrester et al. (2008), section 1.2; sweep in degrees."""
    cos = np.cos(np.deg2rad(sweep))
    factors = area**0.758 * fuel**0.0035 * (aspect / cos**2) ** 0.6 * pressure**0.006 * taper**0.04
    return 0.036 * factors * (100 * thickness / cos) ** -0.3 * (load * gross) ** 0.49 + area * paint


@simulator([(-0.5, 0.5)] * 20)
def welch(*x):
    """Example 2 of Welch et al. (1992); two of its twenty inputs do nothing."""
    linear = {2: 0.05, 3: 0.08, 5: 1, 6: -0.03, 7: 0.03, 9: -0.09, 10: -0.01, 11: -0.07, 14: -0.04, 15: 0.06, 17: -0.01,
              18: -0.03, 19: -5}  # fmt: skip
    x = dict(enumerate(x, 1))
    return (
        5 * x[12] / (1 + x[1])
        + 5 * (x[4] - x[20]) ** 2
        + 40 * x[19] ** 3
        + 0.25 * x[13] ** 2
        + sum(slope * x[i] for i, slope in linear.items())
    )
