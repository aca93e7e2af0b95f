"""The simulated trips of ``benchmarks/sources/salimbeni_densities.py``, and its kernel density estimates."""

import importlib.util
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "sources" / "salimbeni_densities.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_true_density_of_trips_integrates_to_one(script):
    side = np.linspace(-1.6, 1.6, 401)
    y = jnp.asarray(np.stack(np.meshgrid(side, side), -1).reshape(-1, 2))
    for x in ([0.1, -0.2], [0.6, 0.5]):
        density = np.exp(script.true_density(jnp.broadcast_to(jnp.asarray(x), y.shape), y))
        assert density.sum() * (side[1] - side[0]) ** 2 == pytest.approx(1.0, abs=5e-3)


def test_the_true_density_is_that_of_the_draws(script):
    """E[q / p] = 1 under draws of p, for densities q of two kinds of trips; the ratios are below 1 / 0.3."""
    x, y = (np.asarray(a, float) for a in script.trips(4000, 0))
    log_density = np.asarray(script.true_density(jnp.asarray(x), jnp.asarray(y)))
    station = norm.logpdf(y, [0.5, -0.5], 0.1).sum(1)
    avenue = norm.logpdf(y[:, 0], x[:, 0], 0.03) + np.where(abs(y[:, 1]) < 1, -math.log(2), -math.inf)
    for kind in (station, avenue):
        ratios = np.exp(kind - log_density)
        assert abs(ratios.mean() - 1) < 4 * ratios.std(ddof=1) / math.sqrt(len(ratios))


def test_kernel_estimates_against_a_loop(script):
    """The width that is best on rows left out, and the mean over the fifty nearest beginnings."""
    (X, y), (X_test, y_test) = (tuple(np.asarray(a, float) for a in script.trips(n, s)) for n, s in ((60, 0), (3, 1)))

    def log_mean(points, one, width):
        squares = (((points - one) / width) ** 2).sum(1)
        return np.log(np.mean(np.exp(-0.5 * squares)) / (2 * math.pi * width**2))

    def left_out(width):
        return sum(log_mean(np.delete(y, n, 0), y[n], width) for n in range(len(y)))

    width = max(np.geomspace(0.02, 0.5, 20), key=left_out)
    near = [np.argsort(np.linalg.norm(X - one, axis=1))[:50] for one in X_test]
    found = script.kernel_estimates(jnp.asarray(X), jnp.asarray(y))
    values = {name: density(jnp.asarray(X_test), jnp.asarray(y_test)) for name, density in found.items()}
    np.testing.assert_allclose(values["KDE of all ends"], [log_mean(y, one, width) for one in y_test], rtol=1e-4)
    expected = [log_mean(y[rows], one, width) for rows, one in zip(near, y_test, strict=True)]
    np.testing.assert_allclose(values["KDE of 50 neighbours"], expected, rtol=1e-4)
