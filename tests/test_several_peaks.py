"""Predictive densities of several peaks, of heavy tails and kinks, against a sum over two hundred thousand points."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy.special import log_ndtr, logsumexp
from scipy.stats import norm

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues


def dense(log_p, mean, sd, places):
    """log E[exp(log_p(v))] for v ~ N(mean, sd^2), over intervals that shrink towards given places."""
    away = np.geomspace(1e-7, 1e3, 900) * sd
    ends = [mean + sd * np.linspace(-40, 40, 8001), *(np.concatenate([p - away, [p], p + away]) for p in places)]
    ends = np.unique(np.concatenate(ends))
    nodes, weights = np.polynomial.legendre.leggauss(8)
    half = 0.5 * np.diff(ends)
    v = 0.5 * (ends[1:] + ends[:-1])[:, None] + half[:, None] * nodes
    logs = np.asarray(log_p(jnp.asarray(v))) + norm.logpdf(v, mean, sd)
    return logsumexp(np.where(np.isnan(logs), -np.inf, logs) + np.log(half[:, None] * weights))


def mixture(v, shifts, scales, weights):
    parts = dist.Normal(v[..., None] + jnp.asarray(shifts), jnp.asarray(scales))
    return dist.MixtureSameFamily(dist.Categorical(probs=jnp.asarray(weights)), parts)


def random_mixture(seed):
    rng = np.random.default_rng(seed)
    shifts, scales, weights = rng.normal(size=3), 10.0 ** rng.uniform(-3, 0.5, 3), rng.dirichlet(np.ones(3))
    y = float(rng.normal() * 3)
    return (lambda v: mixture(v, shifts, scales, weights)), [y], 0.3, 1.0, lambda y: y - shifts


TWICE = [(s + 2 * np.pi * k) / 3 for k in range(-9, 10) for s in (np.arcsin(0.5), np.pi - np.arcsin(0.5))]
# conditional, observations, mean and standard deviation of v, where its peaks and kinks are
CASES = {
    "heavy tails": (lambda v: dist.StudentT(2.5, v, 0.02), [4.0, 0.1, 30.0], 0.0, 1.0, lambda y: [y]),
    "very narrow": (lambda v: dist.Cauchy(v, 1e-3), [2.0, -0.3, 12.0], 0.3, 1.0, lambda y: [y]),
    "very wide": (lambda v: dist.StudentT(4.0, v, 1e3), [2.0, 5e3], 0.3, 1.0, lambda y: []),
    "two widths": (lambda v: mixture(v, [0, 0], [0.05, 3], [0.9, 0.1]), [6.0, 1.0], 0.0, 3.0, lambda y: [y]),
    "folded": (lambda v: dist.Normal(abs(v), 0.1), [1.0, 0.05], 0.3, 1.0, lambda y: [y, -y, 0.0]),
    "periodic": (lambda v: dist.Normal(jnp.sin(3 * v), 0.05), [0.5], 0.3, 1.0, lambda y: TWICE),
    "periodic, unknown": (lambda v: dist.Normal(jnp.sin(3 * v), 0.05), [0.5], 0.3, 3.0, lambda y: TWICE),
    "kinked": (lambda v: dist.Laplace(2 * v, 0.01), [1.0, 30.0], 0.3, 1.0, lambda y: [y / 2]),
    "kinked at zero": (lambda v: dist.Normal(jax.nn.relu(v), 0.2), [0.1, 3.0], 0.3, 1.0, lambda y: [0.0, y]),
    "transformed": (
        lambda v: dist.TransformedDistribution(dist.Cauchy(v, 0.01), dist.transforms.ExpTransform()),
        [3.0, 1e-3],
        0.3,
        1.0,
        lambda y: [np.log(y)],
    ),
    "counts": (lambda v: dist.Poisson(jnp.exp(v)), [0, 3, 10_000], 5.0, 3.0, lambda y: [np.log(max(y, 1))]),
    "scale": (lambda v: dist.Normal(0.0, jnp.exp(v)), [5.0, 1e-3], -2.0, 1.0, lambda y: []),
} | {f"mixture {seed}": random_mixture(seed) for seed in range(3)}
QUICK = ["heavy tails", "two widths", "folded", "periodic", "kinked at zero", "mixture 0"]
cases = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CASES]
)


@pytest.mark.slow
@cases
def test_densities_are_those_of_a_dense_sum(name):
    conditional, y, mean, sd, places = CASES[name]
    f_x = FunctionValues(jnp.full(len(y), mean), jnp.full(len(y), sd**2), event_dim=0)
    found = dgp.Likelihood(f_x, conditional).log_marginal(jnp.asarray(y))
    true = [dense(lambda v, one=one: conditional(v).log_prob(one), mean, sd, places(one)) for one in y]
    np.testing.assert_allclose(found, true, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_values_and_slopes_in_both_precisions_compiled_or_not():
    def density(mean, variance, scale):
        f_x = FunctionValues(mean, variance, event_dim=0)
        return dgp.Likelihood(f_x, lambda v: dist.StudentT(2.5, v, scale)).log_marginal(jnp.array([4.0, 0.2])).sum()

    def true(mean, variance, scale):
        log_p = lambda y: lambda v: dist.StudentT(2.5, v, scale).log_prob(y)  # noqa: E731
        return sum(dense(log_p(y), m, np.sqrt(variance), [y]) for m, y in zip(mean, (4.0, 0.2), strict=True))

    at, h = (np.array([0.0, 0.5]), 1.3, 0.02), 1e-4
    value, slopes = jax.jit(jax.value_and_grad(density, (1, 2)))(*map(jnp.asarray, at))
    np.testing.assert_allclose(value, true(*at), atol=1e-6)
    np.testing.assert_allclose(
        slopes[0], (true(at[0], 1.3 + h, 0.02) - true(at[0], 1.3 - h, 0.02)) / (2 * h), rtol=1e-5
    )
    step = h * 0.02
    expected = (true(at[0], 1.3, 0.02 + step) - true(at[0], 1.3, 0.02 - step)) / (2 * step)
    np.testing.assert_allclose(slopes[1], expected, rtol=1e-5)
    np.testing.assert_allclose(density(*map(jnp.asarray, at)), value, rtol=1e-12)
    with jax.enable_x64(False):
        single = jax.jit(density)(*(jnp.asarray(a, jnp.float32) for a in at))
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, value, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("y", "mean", "sd"), [(5.0, -2.0, 1.0), (30.0, -2.0, 0.3)])
def test_a_normal_with_a_scale_of_its_own_in_the_tail(y, mean, sd):
    f, s = (FunctionValues(jnp.full(1, m), jnp.full(1, v), event_dim=0) for m, v in ((0.0, 0.1), (mean, sd**2)))
    found = dgp.Likelihood((f, s), lambda v, s: dist.Normal(v, jnp.exp(s))).log_marginal(jnp.full(1, y))
    true = dense(lambda s: norm.logpdf(y, 0.0, np.sqrt(0.1 + np.exp(2 * np.asarray(s)))), mean, sd, [])
    np.testing.assert_allclose(found, true, atol=1e-6)


@pytest.mark.long
def test_a_scale_that_columns_share_in_the_tail():
    """Given it they are independent: the integral over it is outside of their product."""
    f = FunctionValues(jnp.zeros((1, 2)), jnp.full((1, 2), 0.1))
    s = FunctionValues(jnp.full(1, -2.0), jnp.ones(1), event_dim=0)
    y = jnp.array([[5.0, -3.0]])
    likelihood = dgp.Likelihood((f, s), lambda v, s: dist.Normal(v, jnp.exp(s)[..., None]).to_event(1))

    def log_p(s):
        scale = np.sqrt(0.1 + np.exp(2 * np.asarray(s)))
        return norm.logpdf(5.0, 0.0, scale) + norm.logpdf(-3.0, 0.0, scale)

    np.testing.assert_allclose(likelihood.log_marginal(y), dense(log_p, -2.0, 1.0, []), atol=1e-5)
    seen = likelihood.mask(jnp.array([[True, False]])).log_marginal(y)
    one = dense(lambda s: norm.logpdf(5.0, 0.0, np.sqrt(0.1 + np.exp(2 * np.asarray(s)))), -2.0, 1.0, [])
    np.testing.assert_allclose(seen, one, atol=1e-5)


@pytest.mark.slow
def test_an_improbable_class():
    mean, variance = np.array([-3.0, 2.0, 0.0]), np.array([2.0, 0.1, 0.1])
    f_x = FunctionValues(jnp.tile(mean, (3, 1)), jnp.tile(variance, (3, 1)))
    found = dgp.Likelihood(f_x, lambda v: dgp.likelihoods.RobustMax(v, 1e-6)).log_marginal(jnp.arange(3))
    for c, value in enumerate(found):
        others = [i for i in range(3) if i != c]
        below = lambda v, others=others: sum(log_ndtr((v - mean[i]) / np.sqrt(variance[i])) for i in others)  # noqa: E731
        first = np.exp(dense(lambda v, below=below: below(np.asarray(v)), mean[c], np.sqrt(variance[c]), []))
        np.testing.assert_allclose(value, np.log(first * (1 - 1e-6) + (1 - first) * 5e-7), atol=1e-6)


@pytest.mark.slow
def test_labels_where_little_is_known_of_v():
    """A logistic function is a step beside a v of standard deviation thirty."""
    f_x = FunctionValues(jnp.array([10.0, -200.0]), jnp.full(2, 900.0), event_dim=0)
    found = dgp.Likelihood(f_x, lambda v: dist.Bernoulli(logits=v)).log_marginal(jnp.array([1, 1]))
    true = [dense(lambda v: jax.nn.log_sigmoid(v), m, 30.0, [0.0]) for m in (10.0, -200.0)]
    np.testing.assert_allclose(found, true, atol=1e-6)


POINTED = {
    "StudentT": (lambda v, s: dist.StudentT(3.0, v, s), 1e-4),
    "Cauchy": (lambda v, s: dist.Cauchy(v, s), 1e-4),
    "Logistic": (lambda v, s: dist.Logistic(v, s), 1e-4),
    "Laplace": (lambda v, s: dist.Laplace(v, s), 1e-9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POINTED)
def test_expected_densities_of_heavy_tails_and_kinks(name):
    """Where the standard deviation of v is a hundredth, one and thirty scales; the slope of the location is not one."""
    conditional, tolerance = POINTED[name]
    y, scales, m, sd = np.array([0.2, 1.5, -1.3, 4.0]), (60.0, 0.6, 0.02), 0.3, 0.3
    for scale in scales:
        f_x = FunctionValues(jnp.full(4, m), jnp.full(4, sd**2), event_dim=0)
        found = dgp.Likelihood(f_x, lambda v: conditional(0.5 - 2 * v, scale)).log_prob(jnp.asarray(y))
        ends = (0.5 - y)[:, None] / 2 + sd * np.concatenate([-np.geomspace(30, 1e-8, 400), np.geomspace(1e-8, 30, 400)])
        ends = np.sort(
            np.clip(np.concatenate([ends, np.tile(m + sd * np.linspace(-9, 9, 99), (4, 1))], 1), -2.4, 3.0), 1
        )
        nodes, weights = np.polynomial.legendre.leggauss(8)
        half = 0.5 * np.diff(ends)[..., None]
        v = 0.5 * (ends[:, 1:] + ends[:, :-1])[..., None] + half * nodes
        log_p = np.asarray(conditional(0.5 - 2 * jnp.asarray(v), scale).log_prob(y[:, None, None]))
        true = (log_p * norm.pdf(v, m, sd) * half * weights).sum((1, 2))
        np.testing.assert_allclose(found, true, rtol=tolerance, atol=tolerance)
