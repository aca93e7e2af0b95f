"""Test functions of the emulation benchmark against published optima and values."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from simulators import SIMULATORS

CASES = [
    ("forrester", [0.757249], -6.02074),
    ("grlee", [0.548563], -0.869011),
    ("booth", [1, 3], 0.0),
    ("booth", [0, 0], 74.0),
    ("branin", [np.pi, 2.275], 0.397887),
    ("shubert", [-7.08350643, -7.70831374], -186.7309),
    ("franke", [0, 0], 0.7664205912849231),
    ("hartmann3", [0.114614, 0.555649, 0.852547], -3.86278),
    ("hartmann6", [0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573], -3.32237),
    ("ridge", [1, 1], np.e),
    ("jump", [0.5, 0.5], np.exp(5)),
    ("jump", [0.51, 0.5], 0.0),
    ("detpep", [0.5, 0.75, 0.5], 0.0),
    ("detpep8", [0.5, 0.75, 0.5, 0, 0, 0, 0, 0], 30 * np.log(1.5)),
    ("robot_arm", [0, 0, 0, 0, 0.1, 0.2, 0.3, 0.4], 1.0),
    ("robot_arm", [0, np.pi, 0, 0, 0.9, 0.2, 0.3, 0.1], 0.3),
    ("wing_weight", [174, 252, 7.52, 0, 33.98, 0.672, 0.12, 3.795, 2004, 0.025], 233.9076 + 174 * 0.025),
    ("welch", [0] * 20, 0.0),
    ("friedman", [0.5, 1, 0.5, 0, 0], 10.0),
    ("step", [0.4], -1.0),
]


@pytest.mark.parametrize(("name", "x", "value"), CASES)
def test_known_values(name, x, value):
    code = SIMULATORS[name]
    low, high = np.array(code.ranges, float).T
    assert code.dims == len(x)
    assert code.run((np.array([x], float) - low) / (high - low)) == pytest.approx(value, rel=2e-5, abs=1e-4)


def test_mean_and_variance_of_ishigami():
    """Ishigami and Homma (1990): 7 / 2, and 7^2 / 8 + pi^4 / 50 + pi^8 / 1800 + 1 / 2."""
    X = (np.random.default_rng(0).permuted(np.tile(np.arange(40_000)[:, None], 3), axis=0) + 0.5) / 40_000
    y = SIMULATORS["ishigami"].run(X)
    expected = 7**2 / 8 + np.pi**4 / 50 + np.pi**8 / 1800 + 0.5
    assert y.mean() == pytest.approx(3.5, abs=0.05)
    assert y.var() == pytest.approx(expected, rel=0.03)


def test_there_are_twenty_and_all_are_finite():
    assert len(SIMULATORS) >= 20
    for code in SIMULATORS.values():
        y = code.run(np.random.default_rng(0).random((50, code.dims)))
        assert y.shape == (50,)
        assert np.isfinite(y).all()
        assert y.std() > 0
