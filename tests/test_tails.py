"""Densities of truncated observations far in the tails, against SciPy's logarithms of tails."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats
from test_peaked_integral import quadrature

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.likelihoods.tails import log_density

BASES = {"Normal": (dist.Normal, stats.norm), "Logistic": (dist.Logistic, stats.logistic)}
BASES |= {"Laplace": (dist.Laplace, stats.laplace), "Cauchy": (dist.Cauchy, stats.cauchy)}
LOCATIONS, SCALE, LOW, HIGH, Y = np.array([-9.0, -0.4, 0.3, 0.9, 1.2, 10.0]), 0.3, 0.0, 1.0, 0.2
KINDS = {
    "low": (
        lambda d: dist.LeftTruncatedDistribution(d, LOW),
        lambda d: d.logsf(LOW),
    ),
    "high": (
        lambda d: dist.RightTruncatedDistribution(d, HIGH),
        lambda d: d.logcdf(HIGH),
    ),
    "both": (
        lambda d: dist.TwoSidedTruncatedDistribution(d, LOW, HIGH),
        # the two smaller tails
        lambda d: np.where(
            d.kwds["loc"] < LOW,
            d.logsf(LOW) + np.log(-np.expm1(d.logsf(HIGH) - d.logsf(LOW))),
            d.logcdf(HIGH) + np.log(-np.expm1(d.logcdf(LOW) - d.logcdf(HIGH))),
        ),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BASES)
def test_truncated_densities_are_those_of_scipy(name, kind, dtype):
    (base, reference), (truncated, log_inside) = BASES[name], KINDS[kind]
    whole = reference(loc=LOCATIONS, scale=SCALE)
    with jax.enable_x64(dtype == "float64"):
        found = log_density(truncated(base(jnp.asarray(LOCATIONS, dtype), SCALE)), jnp.asarray(Y, dtype))
    assert found.dtype == dtype
    error = 3e-4 if dtype == "float32" else 1e-8
    np.testing.assert_allclose(found, whole.logpdf(Y) - log_inside(whole), atol=error, rtol=error)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0, 0.3, 0.03])
def test_predictive_densities_of_positive_observations(scale):
    """What v leaves open reaches hundreds of scales below zero, where NumPyro's density is infinite."""
    y = np.array([0.02, 0.3, 2.0])
    f_x = FunctionValues(jnp.zeros(3), jnp.ones(3), event_dim=0)
    found = dgp.Likelihood(f_x, lambda v: dist.TruncatedNormal(v, scale, low=0.0)).log_marginal(jnp.asarray(y))
    for one, value in zip(y, found, strict=True):
        true = quadrature(
            lambda v, one=one: stats.norm.logpdf(one, v, scale) - stats.norm.logsf(0.0, v, scale), one, scale
        )
        np.testing.assert_allclose(value, true, atol=2e-3)


@pytest.mark.slow
def test_densities_that_are_infinite_far_away_do_not_mislead():
    """Of a distribution whose tail is not known here, where it is divided by a probability that rounds to zero."""

    class Steep(dist.Normal):
        def log_prob(self, value):
            return jnp.where(self.loc < -9.5, jnp.inf, super().log_prob(value))

    f_x = FunctionValues(jnp.zeros(2), jnp.ones(2), event_dim=0)
    found = dgp.Likelihood(f_x, lambda v: Steep(v, 0.1 + 0.0 * v)).log_marginal(jnp.array([0.3, 1.0]))
    np.testing.assert_allclose(found, stats.norm(0, np.hypot(1, 0.1)).logpdf([0.3, 1.0]), atol=1e-4)
