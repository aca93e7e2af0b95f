"""Sequential Monte Carlo by elliptical slices against integrals that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal

from numpyro_dgp.mcmc.population import populate

PRECISION, PLACE = 3000.0, 1.5
BLOCKS = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def log_ratios(z):
    """The prior of the second number is N(1, 1/2), so that r is not zero; both are observed with noise."""
    prior = -jnp.square(z[1] - 1) + 0.5 * jnp.log(2.0) + 0.5 * jnp.square(z[1])
    return prior, -0.5 * PRECISION * (jnp.square(z[0] - PLACE) + jnp.square(z[1] - z[0]))


def draw(key):
    return jnp.array([0.0, 1.0]) + jnp.array([1.0, 0.5**0.5]) * jax.random.normal(key, (2,))


def exact():
    """Means, the standard deviation of the first number, and log of the integral: z and what is seen are Gaussian."""
    seen, variance = np.array([[1.0, 0.0], [-1.0, 1.0]]), np.diag([1.0, 0.5])
    observed, prior = np.array([PLACE, 0.0]), np.array([0.0, 1.0])
    total = seen @ variance @ seen.T + np.eye(2) / PRECISION
    gain = variance @ seen.T @ np.linalg.inv(total)
    mean = prior + gain @ (observed - seen @ prior)
    log_integral = multivariate_normal(seen @ prior, total).logpdf(observed) + np.log(2 * np.pi / PRECISION)
    return mean, np.sqrt((variance - gain @ seen @ variance)[0, 0]), log_integral


def run(key, count=300, log_ratios=log_ratios, sweeps=4):
    start_key, key = jax.random.split(key)
    return populate(log_ratios, key, jax.random.split(start_key, 50 * count), draw, BLOCKS, count, sweeps)


@pytest.mark.long
@pytest.mark.parametrize("sweeps", [1, 4, 7])
def test_evidence_and_posterior_are_those_of_algebra(sweeps):
    mean, scale, log_integral = exact()
    keys = jax.random.split(jax.random.key(0), 30)
    found = jax.jit(jax.vmap(lambda key: run(key, sweeps=sweeps)))(keys)
    values = np.asarray(found.log_evidence, float)
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() + values.var() / 2 - log_integral) < 4 * error
    assert 0.3 < np.sqrt(np.mean(found.variance)) / values.std(ddof=1) < 2
    means = np.asarray(found.points, float).mean(1)
    assert found.points.shape == (30, 300, 2)
    assert (abs(means.mean(0) - mean) < 4 * means.std(0, ddof=1) / np.sqrt(len(means))).all()
    assert np.asarray(found.points, float)[..., 0].std() == pytest.approx(scale, rel=0.05)
    assert 3 <= found.temperatures.min() <= found.temperatures.max() <= 10


@pytest.mark.long
def test_moves_need_few_evaluations_where_slices_are_narrow():
    """One sweep in eight searches the whole ellipse, which takes a dozen tries for each move at the end."""
    count, sweeps, chains = [], 8, 12

    def narrow(z):
        jax.debug.callback(lambda: count.append(None))
        return jnp.zeros(()), -0.5 * 1e8 * jnp.square(z - PLACE).sum()

    found = jax.jit(lambda key: run(key, chains * sweeps, narrow, sweeps))(jax.random.key(0))
    jax.block_until_ready(found)
    jax.effects_barrier()
    rounds = int(found.temperatures) + 1
    tries = (len(count) - 50 * chains * sweeps) / (rounds * chains * sweeps) - 1  # of the moves of a sweep
    assert rounds > 8
    assert 1.5 < tries / len(BLOCKS) < 5.5
    assert np.asarray(found.points).std(0) == pytest.approx(1e-4, rel=0.3)


@pytest.mark.long
def test_an_optimum_that_few_draws_are_near_is_found():
    """The narrow one, with most of the mass: from as many draws as points, two of these runs found it."""

    def two(z):
        narrow = 12.0 - 0.5 * jnp.square(z - 2.0).sum() / 0.05**2
        return jnp.zeros(()), jnp.logaddexp(narrow, -0.5 * jnp.square(z + 0.5).sum())

    found = jax.jit(jax.vmap(lambda key: run(key, 40, two)))(jax.random.split(jax.random.key(0), 20))
    assert np.mean(np.asarray(found.points)[..., 0] > 1.5) > 0.8


@pytest.mark.long
def test_points_that_are_impossible_have_no_weight():
    def half(z):
        prior, likelihood = log_ratios(z)
        return prior, jnp.where(z[0] < 0, jnp.nan, likelihood)

    found = jax.jit(lambda key: run(key, 40, half))(jax.random.key(0))
    assert np.isfinite(found.log_evidence)
    assert (np.asarray(found.points)[:, 0] >= 0).all()
    nothing = jax.jit(lambda key: run(key, 10, lambda z: (z[0], jnp.nan * z[0])))(jax.random.key(0))
    assert nothing.log_evidence == -jnp.inf
