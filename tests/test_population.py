"""Sequential Monte Carlo by elliptical slices against integrals that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dgp.inference.population import populate

PRECISION, PLACE = 30.0, 1.5


def log_ratios(z):
    """The prior of the second number is N(1, 1/2), so that r is not zero; both are observed with noise."""
    prior = -jnp.square(z[1] - 1) + 0.5 * jnp.log(2.0) + 0.5 * jnp.square(z[1])
    return prior, -0.5 * PRECISION * (jnp.square(z[0] - PLACE) + jnp.square(z[1] - z[0]))


def exact():
    """Moments and log of the integral, by quadrature."""
    a, b = np.meshgrid(np.linspace(-6, 6, 1201), np.linspace(-6, 6, 1201), indexing="ij")
    log = -0.5 * a**2 - (b - 1) ** 2 - np.log(2 * np.pi) + 0.5 * np.log(2)
    log = log - 0.5 * PRECISION * ((a - PLACE) ** 2 + (b - a) ** 2)
    weights = np.exp(log)
    mean = np.array([(weights * a).sum(), (weights * b).sum()]) / weights.sum()
    return mean, np.sqrt((weights * a**2).sum() / weights.sum() - mean[0] ** 2), np.log(weights.sum() * 0.01**2)


def run(key, count=300, log_ratios=log_ratios):
    normal = jax.random.normal(jax.random.fold_in(key, 1), (count, 2))
    starts = jnp.stack([normal[:, 0], 1 + normal[:, 1] / jnp.sqrt(2)], -1)
    return populate(log_ratios, key, starts, jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), 2)


@pytest.mark.slow
def test_evidence_and_posterior_are_those_of_quadrature():
    mean, scale, log_integral = exact()
    keys = jax.random.split(jax.random.key(0), 20)
    found = jax.jit(jax.vmap(run))(keys)
    values = np.asarray(found.log_evidence, float)
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() + values.var() / 2 - log_integral) < 4 * error
    assert 0.3 < np.sqrt(np.mean(found.variance)) / values.std(ddof=1) < 2
    means = np.asarray(found.points, float).mean(1)
    assert (abs(means.mean(0) - mean) < 4 * means.std(0, ddof=1) / np.sqrt(len(means))).all()
    assert np.asarray(found.points, float)[..., 0].std() == pytest.approx(scale, rel=0.05)
    assert 2 <= found.temperatures.min() <= found.temperatures.max() <= 10


@pytest.mark.slow
def test_points_that_are_impossible_have_no_weight():
    def half(z):
        prior, likelihood = log_ratios(z)
        return prior, jnp.where(z[0] < 0, jnp.nan, likelihood)

    found = jax.jit(lambda key: run(key, 40, half))(jax.random.key(0))
    assert np.isfinite(found.log_evidence)
    assert (np.asarray(found.points)[:, 0] >= 0).all()
    nothing = jax.jit(lambda key: run(key, 10, lambda z: (z[0], jnp.nan * z[0])))(jax.random.key(0))
    assert nothing.log_evidence == -jnp.inf
