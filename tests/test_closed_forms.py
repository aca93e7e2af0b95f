"""Closed forms of times, censored or not, and of angles, against adaptive quadrature of SciPy's densities."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI
from scipy import integrate, stats
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues

LOC, VARIANCE = np.array([0.3, -0.5, 1.1]), np.array([0.4, 1.2, 0.05])
F = FunctionValues(jnp.array(LOC), jnp.array(VARIANCE), event_dim=0)
Y, CENSORED = np.array([0.5, 1.0, 3.0]), np.array([True, False, True])


def right(d):
    return dist.RightCensoredDistribution(d, CENSORED)


# conditional, SciPy's distribution, which tail is known of censored observations, whether there is a closed form
CASES = {
    "weibull": (
        lambda v: dist.Weibull(2 * jnp.exp(-v), 1.7),
        lambda v: stats.weibull_min(1.7, scale=2 * np.exp(-v)),
        None,
        True,
    ),
    "censored weibull": (
        lambda v: right(dist.Weibull(jnp.exp(v), 1.7)),
        lambda v: stats.weibull_min(1.7, scale=np.exp(v)),
        "logsf",
        True,
    ),
    "censored exponential": (
        lambda v: right(dist.Exponential(3 * jnp.exp(v))),
        lambda v: stats.expon(scale=np.exp(-v) / 3),
        "logsf",
        True,
    ),
    "log-normal": (
        lambda v: dist.LogNormal(2 * v + 1, 0.6),
        lambda v: stats.lognorm(0.6, scale=np.exp(2 * v + 1)),
        None,
        True,
    ),
    "censored log-normal": (
        lambda v: right(dist.LogNormal(v, 0.6)),
        lambda v: stats.lognorm(0.6, scale=np.exp(v)),
        "logsf",
        False,
    ),
    "censored normal": (lambda v: right(dist.Normal(v, 0.6)), lambda v: stats.norm(v, 0.6), "logsf", False),
    "left-censored weibull": (
        lambda v: dist.LeftCensoredDistribution(dist.Weibull(jnp.exp(v), 1.7), CENSORED),
        lambda v: stats.weibull_min(1.7, scale=np.exp(v)),
        "logcdf",
        False,
    ),
    "angles": (lambda v: dist.VonMises(2 * v + 1, 4.0), lambda v: stats.vonmises(4.0, loc=2 * v + 1), None, True),
}


def expected(scipys, tail, n, exponential=False):
    """E[log p(y_n | v)], or log E[p(y_n | v)]."""
    name = tail if tail is not None and CENSORED[n] else "logpdf"

    def integrand(v):
        log_p = getattr(scipys(v), name)(Y[n])
        return (np.exp(log_p) if exponential else log_p) * stats.norm.pdf(v, LOC[n], VARIANCE[n] ** 0.5)

    reach = 9 * VARIANCE[n] ** 0.5
    value = integrate.quad(integrand, LOC[n] - reach, LOC[n] + reach, epsabs=1e-8, limit=200)[0]
    return np.log(value) if exponential else value


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(["censored weibull"], CASES))
def test_expectations_against_adaptive_quadrature(name):
    conditional, scipys, tail, closed = CASES[name]
    likelihood = dgp.Likelihood(F, conditional)
    assert ("closed form" in repr(likelihood)) == closed
    found = [expected(scipys, tail, n) for n in range(3)]
    np.testing.assert_allclose(likelihood.log_prob(Y), found, rtol=1e-6 if closed else 1e-3)
    fine = dgp.Likelihood(F, conditional, integrate=dgp.likelihoods.GaussHermite(250))
    found = [expected(scipys, tail, n, exponential=True) for n in range(3)]
    np.testing.assert_allclose(fine.log_marginal(Y), found, rtol=1e-5)


@pytest.mark.long
def test_censored_observations_in_the_tail_have_a_density_and_a_slope(x32):
    """Where the distribution function rounds to one, NumPyro's own density is that of the rounding error."""
    f = FunctionValues(jnp.array([0.0]), jnp.array([0.01]), event_dim=0)

    def log_prob(loc, base):
        values = FunctionValues(loc, f.variance, event_dim=0)
        censored = dgp.Likelihood(values, lambda v: dist.RightCensoredDistribution(base(v), jnp.array([True])))
        return censored.log_prob(jnp.array([60.0]))[0]

    for base, value in (
        (lambda v: dist.Exponential(jnp.exp(v)), -60.3),
        (lambda v: dist.LogNormal(v, 0.5), stats.norm.logsf(np.log(60) / 0.5) - 0.02),
    ):
        np.testing.assert_allclose(log_prob(f.loc, base), value, rtol=1e-3)
        assert abs(jax.grad(log_prob)(f.loc, base)[0]) > 10


@pytest.mark.slow
@pytest.mark.parametrize("concentration", [1.0, 1.5])
def test_times_of_zero_and_below_leave_no_nan(concentration):
    def log_prob(k):
        likelihood = dgp.Likelihood(F, lambda v: right(dist.Weibull(jnp.exp(v), k)))
        likelihood.outcomes = type(likelihood.outcomes)()  # as in a compiled step, where values are not looked at
        return likelihood.log_prob(jnp.array([0.0, 1.0, -1.0]))

    values = log_prob(concentration)
    np.testing.assert_array_equal(np.isfinite(values), [True, True, False])
    assert values[0] == 0
    assert np.isfinite(jax.grad(lambda k: log_prob(k)[:2].sum())(concentration))


@pytest.mark.slow
def test_a_rate_of_zero_leaves_no_nan():
    """Where nothing was exposed, no event is certain."""

    def log_prob(loc):
        f = FunctionValues(loc, jnp.array(VARIANCE), event_dim=0)
        return dgp.Likelihood(f, lambda v: dist.Poisson(jnp.array([0.0, 1.0, 0.0]) * jnp.exp(v))).log_prob(y)

    y = jnp.array([0, 2, 1])
    expected = 2 * LOC[1] - np.exp(LOC[1] + VARIANCE[1] / 2) - np.log(2)
    np.testing.assert_allclose(log_prob(jnp.array(LOC)), [0.0, expected, -np.inf])
    slopes = jax.grad(lambda loc: log_prob(loc)[:2].sum())(jnp.array(LOC))
    np.testing.assert_allclose(slopes, [0.0, 2 - np.exp(LOC[1] + VARIANCE[1] / 2), 0.0])


@pytest.mark.long
def test_censoring_is_not_a_bias(key):
    """Half of the times are cut off: with their flags the fit finds the median, without them it is too short."""
    x = jnp.linspace(-1, 1, 300)[:, None]
    scale = jnp.exp(1 + jnp.sin(2 * x[:, 0]))
    times_key, ends_key = jax.random.split(key)
    times = dist.Weibull(scale, 1.5).sample(times_key)
    ends = scale * jax.random.uniform(ends_key, scale.shape, minval=0.2, maxval=1.5)
    y, censored = jnp.minimum(times, ends), times > ends
    assert 0.3 < censored.mean() < 0.7

    def model(x, censored=False, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(1.0, 1.0), dgp.Points(jnp.linspace(-1, 1, 8)[:, None]))
        shape = numpyro.param("shape", 1.0, constraint=dist.constraints.positive)

        def times(v):
            return dist.RightCensoredDistribution(dist.Weibull(jnp.exp(v), shape), censored)

        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dgp.Likelihood(f(x), times), obs=y)

    guide, medians = dgp.guides.InducingPoint(model), {}
    for name, flags in (("flags", censored), ("none", jnp.zeros_like(censored))):
        svi = SVI(model, guide, optax.adam(0.02), dgp.ELBO())
        params = svi.run(key, 800, x, flags, y, progress_bar=False).params
        medians[name] = dgp.Posterior(model, guide, params).quantile(key, 0.5, x)
    truth = scale * np.log(2) ** (1 / 1.5)
    assert abs(np.log(medians["flags"] / truth)).mean() < 0.15
    assert np.log(medians["none"] / truth).mean() < -0.3


def censored_program(x, censored=False, y=None, *, deep=False):
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.0), dgp.Points(jnp.linspace(-1, 1, 4)[:, None]))
    f = deep and dgp.gp("f", dgp.kernels.RBF(1.0, 1.0), dgp.Points(jnp.linspace(-1, 1, 4)[:, None]), outputs=1)
    with numpyro.plate("data", len(x)):
        x = numpyro.sample("h", f(x)) if f else x
        base = dist.RightCensoredDistribution
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: base(dist.Weibull(jnp.exp(v), 1.5), censored)), obs=y)


ROWS = jnp.linspace(-1, 1, 6)[:, None], jnp.arange(6) % 2 == 0, jnp.linspace(0.2, 3, 6)


@pytest.mark.long
@pytest.mark.parametrize("make", [dgp.guides.InducingPoint, dgp.guides.MeanField])
def test_guides_take_censored_times(make, key):
    model = partial(censored_program, deep=True)
    svi = SVI(model, make(model), optax.adam(0.01), dgp.ELBO())
    assert np.isfinite(svi.run(key, 3, *ROWS, progress_bar=False).losses).all()


@pytest.mark.long
def test_chains_take_censored_times(key):
    mcmc = MCMC(NUTS(dgp.for_mcmc(censored_program)), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(key, *ROWS)
    posterior = dgp.Posterior(censored_program, samples=mcmc.get_samples())
    assert np.isfinite(posterior.predict(key, ROWS[0]).mean).all()


@pytest.mark.slow
def test_the_collapsed_guide_refuses_censored_times(key):
    guide = dgp.guides.Collapsed(censored_program)
    with pytest.raises(ValueError, match=r"Collapsed: expected a Gaussian likelihood at 'y'"):
        SVI(censored_program, guide, optax.adam(0.01), dgp.ELBO()).init(key, *ROWS)


def test_a_row_comes_before_methods_of_the_distribution():
    class Own(dist.HalfNormal):
        def expected_log_prob(self, y, mean, variance):
            raise AssertionError("the distribution's own method")

    constant = dgp.extend.ClosedForms(lambda y, mean, variance: 0 * y - 7.0)
    row = dgp.extend.Form(Own, {"scale": (dgp.extend.Dependence.LOG_AFFINE,)}, lambda conditional: constant)
    likelihood = dgp.Likelihood(F, lambda v: Own(jnp.exp(v)), integrate=row)
    np.testing.assert_allclose(likelihood.log_prob(jnp.array(Y)), -7.0)
