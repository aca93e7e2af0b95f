"""Densities from draws: the published metric and its bias, normality, draws of y."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import NOISE, X, Y, Z, deep, random_params
from scipy.stats import gaussian_kde, kstest, norm, shapiro

import numpyro_dgp as dgp
from numpyro_dgp.densities import kde_log_density, shapiro_wilk

rng = np.random.default_rng(0)
NEW = jnp.linspace(-1.5, 1.5, 4)[:, None]


@pytest.fixture(scope="module")
def posterior():
    guide = dgp.guides.InducingPoint(deep)
    return dgp.Posterior(deep, guide, random_params(deep, guide, X, Y))


@pytest.mark.smoke
def test_kernel_density_estimate_is_scipys_with_the_published_bandwidth():
    draws, y = rng.gamma(2.0, size=(300, 1300)), rng.gamma(2.0, size=1300)
    ours = kde_log_density(draws, y)
    for n in (0, 7, 1299):
        # SciPy's bandwidth is a multiple of the standard deviation with S - 1.
        reference = gaussian_kde(draws[:, n], bw_method=1.06 * 300**-0.2 * np.sqrt(299 / 300))
        np.testing.assert_allclose(ours[n], reference.logpdf(y[n])[0], rtol=1e-9)


def test_bias_of_the_published_metric():
    """Five standard deviations out the exact log density is -13.4; the estimate falls off with the bandwidth."""
    draws = rng.normal(size=(2000, 400))
    far = kde_log_density(draws, np.full(400, 5.0))
    assert far.mean() < -25
    assert norm.logpdf(5.0) > -13.5
    centre = kde_log_density(draws, np.zeros(400))
    widened = 1 + 1.06**2 * 2000**-0.4
    expected = -0.5 * np.log(2 * np.pi * widened)
    # The mean of a log lies below the log of the mean by half the relative variance.
    slack = 0.5 * centre.var() + 4 * centre.std() / 20
    assert abs(centre.mean() - expected) < slack + 1e-3


def test_normality_is_tested_point_by_point():
    draws = np.stack([rng.normal(3.0, 2.0, 800), rng.exponential(size=800)], 1)
    tests = shapiro_wilk(draws)
    for n in range(2):
        np.testing.assert_allclose([tests.statistic[n], tests.p_value[n]], shapiro(draws[:, n]), rtol=1e-6, atol=1e-12)
    assert tests.p_value[0] > 0.01 > tests.p_value[1]
    many = rng.normal(size=(20_000, 1))
    assert shapiro_wilk(many).statistic > 0.998


@pytest.mark.long
def test_draws_of_y_follow_the_mixture(posterior, key):
    draws = posterior.using(num_samples=4000).sample(key, NEW)
    assert draws.shape == (4000, 4)
    mixture = posterior.using(num_samples=4000).predict(key, NEW)
    assert (jnp.abs(draws.mean(0) - mixture.mean) < 5 * jnp.sqrt(mixture.variance / 2000)).all()
    np.testing.assert_allclose(draws.var(0) / mixture.variance, 1, atol=0.15)
    # Their distribution function is that of the mixture, which log_density integrates to.
    levels = jnp.linspace(-8, 8, 801)
    grid = jnp.broadcast_to(levels[:, None], (801, 4))
    density = np.exp(posterior.using(num_samples=1000).log_density(key, grid, NEW))
    assert density.shape == (801, 4)
    np.testing.assert_allclose(density.sum(0) * 0.02, 1, atol=1e-4)
    cumulative = density.cumsum(0) * 0.02
    for n in range(4):
        p = kstest(np.asarray(draws[:, n]), lambda y, n=n: np.interp(y, levels, cumulative[:, n])).pvalue
        assert p > 1e-3


@pytest.mark.long
def test_mixture_and_estimate_agree_on_smooth_densities(posterior, key):
    y = posterior.predict(key, NEW).mean
    estimate = kde_log_density(posterior.using(num_samples=4000).sample(key, NEW), y)
    np.testing.assert_allclose(estimate, posterior.using(num_samples=1000).log_density(key, y, NEW), atol=0.15)


@pytest.mark.slow
def test_draws_of_programs_with_explicit_last_draws_and_from_mcmc(key):
    def model(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            v = numpyro.sample("v", g(X))
            numpyro.sample("y", dist.Normal(v, NOISE), obs=y)

    samples = {"g": jax.random.normal(key, (30, 8))}
    draws = dgp.Posterior(model, samples=samples, site="y").using(num_samples=30).sample(key, NEW)
    assert draws.shape == (30, 4)
    assert len(np.unique(draws)) == 120


def test_float32(x32):
    draws = jax.random.normal(jax.random.key(0), (5000, 3))
    values = kde_log_density(draws, jnp.zeros(3))
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, norm.logpdf(0), atol=0.1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: kde_log_density(np.ones(3), np.ones(3)), r"kde_log_density: expected draws of shape \(S, N\)"),
        (lambda: kde_log_density(rng.normal(size=(5, 3)), np.ones(4)), r"expected observations y of shape \(3,\)"),
        (lambda: kde_log_density(np.full((5, 1), np.nan), np.ones(1)), "expected finite draws"),
        (lambda: kde_log_density(rng.normal(size=(5, 1)), np.array([np.inf])), "expected finite observations y"),
        (lambda: kde_log_density(np.ones((5, 1)), np.ones(1)), "expected draws that differ at every test point"),
        (lambda: shapiro_wilk(np.ones((2, 3))), r"shapiro_wilk: expected draws of shape \(S, N\) with S >= 3"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()
