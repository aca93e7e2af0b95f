"""Predictive densities whose integrand is far narrower than the Gaussian, against adaptive quadrature."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import integrate, stats
from scipy.special import gammaln, logsumexp, voigt_profile
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.math.peaked_integral import log_expectation

HALF_LOG = 0.5 * np.log(2 * np.pi)


def quadrature(log_value, y, width):
    """log E[exp(log_value(v))] for v ~ N(0, 1), over intervals around the peak at y."""
    ends = sorted({-25.0, -9.0, 0.0, 9.0, 25.0, *(y + width * np.array([-60, -15, -4, -1, 0, 1, 4, 15, 60]))})

    def logs(v):
        return log_value(v) - 0.5 * v**2 - HALF_LOG

    # relative to its largest value, which may be the logarithm of nothing a float holds
    top = logs(np.concatenate([np.linspace(-25, 25, 4001), np.linspace(y - width, y + width, 101)])).max()
    parts = [
        integrate.quad(lambda v: np.exp(logs(v) - top), a, b, epsabs=0, epsrel=1e-9, limit=400)[0]
        for a, b in itertools.pairwise(ends)
    ]
    return top + np.log(sum(parts))


# conditional, and its log density at a residual in units of the scale, but for that of the scale
CASES = {
    "StudentT": (
        lambda v, s: dist.StudentT(4.0, v, s),
        lambda r: gammaln(2.5) - gammaln(2) - 0.5 * np.log(4 * np.pi) - 2.5 * np.log1p(r**2 / 4),
    ),
    "Laplace": (lambda v, s: dist.Laplace(v, s), lambda r: -np.abs(r) - np.log(2)),
    "Cauchy": (lambda v, s: dist.Cauchy(v, s), lambda r: -np.log(np.pi) - np.log1p(r**2)),
    "Normal of a function": (lambda v, s: dist.Normal(v + 0.0 * v**2, s), lambda r: -0.5 * r**2 - HALF_LOG),
}
PLACES, SCALES = (a.ravel() for a in np.meshgrid([0.0, 0.31, -2.9, 12.0], [1.0, 0.05, 0.003]))


@cache
def references(name):
    log_p = CASES[name][1]
    return [
        quadrature(lambda v, y=y, s=s: log_p((y - v) / s) - np.log(s), y, s)
        for y, s in zip(PLACES, SCALES, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::scipy.integrate.IntegrationWarning")
def test_narrow_densities_are_those_of_adaptive_quadrature(name, dtype):
    """In the middle, in the tails, and further out than the Gaussian reaches; noise from 1 to 0.003."""
    conditional, true = CASES[name][0], references(name)
    with jax.enable_x64(dtype == "float64"):
        f_x = FunctionValues(jnp.zeros(12, dtype), jnp.ones(12, dtype), event_dim=0)
        likelihood = dgp.Likelihood(f_x, lambda v: conditional(v, jnp.asarray(SCALES, dtype)))
        found = likelihood.log_marginal(jnp.asarray(PLACES, dtype))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, true, atol=3e-3, rtol=1e-5)


@pytest.mark.slow
def test_counts():
    """Of a thousand and ten thousand events the rate is known to a few per cent, beside a Gaussian of width three."""
    with jax.enable_x64(True):
        y = jnp.array([0, 3, 1000, 10000])
        f_x = FunctionValues(jnp.full(4, 5.0), jnp.full(4, 9.0), event_dim=0)
        found = dgp.Likelihood(f_x, lambda v: dist.Poisson(jnp.exp(v))).log_marginal(y)
    for count, value in zip(y, found, strict=True):
        peak = (np.log(max(float(count), 0.5)) - 5) / 3
        n = int(count)
        true = quadrature(lambda z, n=n: n * (5 + 3 * z) - np.exp(5 + 3 * z) - gammaln(n + 1), peak, 0.02)
        np.testing.assert_allclose(value, true, atol=1e-6)


@pytest.mark.slow
def test_smooth_integrands_are_those_of_gauss_hermite():
    with jax.enable_x64(True):
        loc, variance = jnp.linspace(-2, 2, 7), jnp.linspace(0, 3, 7)
        nodes = dgp.likelihoods.GaussHermite(150).nodes(loc, variance)
        # waves far from the peak have few nodes
        cases = (jax.nn.log_sigmoid, 1e-8), (lambda v: dist.Normal(v, 0.7).log_prob(0.3), 1e-8), (jnp.cos, 5e-5)
        for log_value, error in cases:
            expected = nodes.log_mean_exp(log_value(nodes.points))
            np.testing.assert_allclose(log_expectation(log_value, loc, variance), expected, atol=error, rtol=0)


@pytest.mark.slow
def test_slopes_are_those_of_the_closed_form():
    def ours(loc, variance, scale):
        return log_expectation(lambda v: dist.Normal(v, scale).log_prob(0.7), loc, variance).sum()

    def closed(loc, variance, scale):
        return dist.Normal(loc, jnp.sqrt(variance + scale**2)).log_prob(0.7).sum()

    with jax.enable_x64(True):
        at = jnp.array([0.0, 5.0]), jnp.array([1.0, 0.1]), jnp.array(0.02)
        for found, true in zip(jax.grad(ours, (0, 1, 2))(*at), jax.grad(closed, (0, 1, 2))(*at), strict=True):
            np.testing.assert_allclose(found, true, rtol=1e-7)


@pytest.mark.slow
def test_slopes_of_rows_that_need_few_intervals_and_many():
    """A Cauchy density of a normal mean is the Voigt profile."""

    def ours(loc, variance, scale):
        return log_expectation(lambda v: dist.Cauchy(v, scale).log_prob(0.7), loc, variance).sum()

    def closed(loc, variance, scale):
        return np.log(voigt_profile(0.7 - loc, np.sqrt(variance), scale)).sum()

    at = [np.array([0.0, 4.0, 0.7, -1.0]), np.array([1.0, 0.1, 3.0, 0.5]), np.array([3.0, 0.001, 0.02, 0.3])]
    with jax.enable_x64(True):
        slopes = jax.grad(ours, (0, 1, 2))(*map(jnp.asarray, at))
    for which, found in enumerate(slopes):
        for row in range(4):
            step = np.where(np.arange(4) == row, 1e-4 * at[2][row], 0)
            up, down = ([a + sign * step * (i == which) for i, a in enumerate(at)] for sign in (1, -1))
            true = (closed(*up) - closed(*down)) / (2 * step[row])
            np.testing.assert_allclose(found[row], true, rtol=1e-5, atol=1e-7)


OUTER = np.polynomial.hermite_e.hermegauss(12)  # of a log scale that is known to 0.3
NOISE = np.array([1.0, 0.1, 0.005, 0.1, 0.005])
AT = np.array([0.0, 0.31, 0.31, -2.9, 4.0])


@cache
def log_scale_references():
    """log E of a Student-t density of y = AT, with v ~ N(0, 1) and log s ~ N(log NOISE, 0.3^2)."""
    log_p, (z, weights) = CASES["StudentT"][1], OUTER
    means = [
        [quadrature(lambda v, y=y, s=s: log_p((y - v) / s) - np.log(s), y, s) for s in noise * np.exp(0.3 * z)]
        for y, noise in zip(AT, NOISE, strict=True)
    ]
    return np.log(np.exp(means) @ weights / weights.sum())


def together(*columns):
    """Values of functions that are scalar, or columns of one."""
    loc, variance = (
        jnp.stack([jnp.broadcast_to(a, NOISE.shape) for a in part], -1) for part in zip(*columns, strict=True)
    )
    return FunctionValues(loc, variance)


VALUE, LOG_SCALE = (0.0, 1.0), (np.log(NOISE), 0.09)
APART = [FunctionValues(*(jnp.broadcast_to(a, 5) for a in part), event_dim=0) for part in (VALUE, LOG_SCALE)]
SEVERAL = {
    "a location and a scale": (APART, lambda v, s: dist.StudentT(4.0, v, jnp.exp(s))),
    "a scale and a location": (APART[::-1], lambda s, v: dist.StudentT(4.0, v, jnp.exp(s))),
    "one column each": (
        [together(VALUE), together(LOG_SCALE)],
        lambda v, s: dist.StudentT(4.0, v, jnp.exp(s)).to_event(1),
    ),
    "two columns of one function": (
        together(VALUE, LOG_SCALE),
        lambda v: dist.StudentT(4.0, v[..., 0], jnp.exp(v[..., 1])),
    ),
    "no location known": (
        APART,
        lambda v, s: dist.TransformedDistribution(
            dist.StudentT(4.0, v, jnp.exp(s)), dist.transforms.AffineTransform(0.0, 1.0)
        ),
    ),
    "a third function": (
        [*APART, FunctionValues(jnp.zeros(5), jnp.full(5, 0.01), event_dim=0)],
        lambda v, s, w: dist.StudentT(4.0 + 0.0 * w, v, jnp.exp(s)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(["two columns of one function"], SEVERAL))
@pytest.mark.filterwarnings("ignore::scipy.integrate.IntegrationWarning")
def test_narrow_densities_of_several_functions(name):
    values, conditional = SEVERAL[name]
    likelihood = dgp.Likelihood(values, conditional)
    y = jnp.asarray(AT[:, None] if likelihood.event_dim else AT)
    found = likelihood.log_marginal(y)
    # eight nodes for each of two scales, where a third function takes a direction too
    np.testing.assert_allclose(found, log_scale_references(), atol=1e-2 if "third" in name else 2e-5)
    twice = likelihood.log_marginal(jnp.stack([y, y]))
    np.testing.assert_allclose(twice, jnp.stack([found, found]), rtol=1e-6)


@pytest.mark.long
def test_columns_that_share_a_scale():
    """Given it they are independent, so that the expectation over it is outside the product."""
    log_p, (z, weights) = CASES["StudentT"][1], OUTER
    y, logs = np.array([0.31, -1.2]), []
    for s in 0.02 * np.exp(0.3 * z):
        logs.append([quadrature(lambda v, at=at, s=s: log_p((at - v) / s) - np.log(s), at, s) for at in y])
    expected = np.log(np.exp(np.sum(logs, 1)) @ weights / weights.sum())
    pair = FunctionValues(jnp.zeros((1, 2)), jnp.ones((1, 2)))
    scale = FunctionValues(jnp.full(1, np.log(0.02)), jnp.full(1, 0.09), event_dim=0)
    shared = dgp.Likelihood((pair, scale), lambda v, s: dist.StudentT(4.0, v, jnp.exp(s)[..., None]).to_event(1))
    np.testing.assert_allclose(shared.log_marginal(y[None]), expected[None], atol=1e-4)


@pytest.mark.long
def test_a_gamma_density_with_a_large_concentration():
    """Shape and rate both move it: y / exp(v) is one to a hundredth, whatever s."""
    y = jnp.array([0.5, 1.0, 7.3])
    of_rate = FunctionValues(jnp.zeros(3), jnp.ones(3), event_dim=0)
    of_shape = FunctionValues(jnp.full(3, np.log(1e4)), jnp.full(3, 0.01), event_dim=0)
    likelihood = dgp.Likelihood((of_rate, of_shape), lambda v, s: dist.Gamma(jnp.exp(s), jnp.exp(s - v)))
    expected = stats.lognorm(1.0).logpdf(np.asarray(y))  # that of exp(v), but for 1e-4 of noise
    np.testing.assert_allclose(likelihood.log_marginal(y), expected, atol=3e-4)


@pytest.mark.slow
def test_nodes_that_a_program_asks_for_stay():
    values, conditional = SEVERAL["a location and a scale"]
    asked = dgp.Likelihood(values, conditional, integrate=dgp.likelihoods.GaussHermite(15))
    assert np.abs(asked.log_marginal(AT) - log_scale_references()).max() > 1  # why they are not the default


@pytest.mark.slow
def test_several_observations_of_one_value():
    f_x = FunctionValues(jnp.zeros(3), jnp.ones(3), event_dim=0)
    likelihood = dgp.Likelihood(f_x, lambda v: dist.StudentT(4.0, v, 0.05))
    y = jnp.array([[0.0, 0.3, 1.0], [2.0, -1.0, 0.5]])
    each = jnp.stack([likelihood.log_marginal(row) for row in y])
    np.testing.assert_allclose(likelihood.log_marginal(y), each, rtol=1e-6)


@pytest.mark.slow
def test_the_density_of_a_new_row_integrates_to_one():
    """Far from the data, where the function varies twenty times more than the noise."""
    Z = jnp.array([[-0.5], [0.5]])

    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.5), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            censored = dist.RightCensoredDistribution
            likelihood = dgp.Likelihood(f(X), lambda v: censored(dist.Normal(v, 0.05), jnp.zeros(len(X), int)))
            numpyro.sample("y", likelihood, obs=y)

    params = {"f_auto_loc": jnp.array([1.0, -1.0]), "f_auto_scale_tril": 0.1 * jnp.eye(2)}
    posterior = dgp.Posterior(model, dgp.guides.InducingPoint(model), params)
    y = jnp.linspace(-6, 6, 401)
    density = jnp.exp(posterior.log_density(jax.random.key(0), y, jnp.full((401, 1), 9.0)))
    np.testing.assert_allclose(density, stats.norm(0, np.hypot(1, 0.05)).pdf(y), rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sd", "error"), [((1.4, 0.3, 0.3), 5e-5), ((3.0, 3.0, 3.0), 4e-3), ((10.0, 10.0, 10.0), 0.12)]
)
def test_probabilities_of_three_classes(sd, error):
    """As far as CHANGELOG.md says that the nodes are right, beside a dense grid of the two differences."""
    loc, classes = np.array([-3.0, 2.0, 0.0]), [0, 1]
    found = []
    for y in classes:
        others = [c for c in range(3) if c != y]
        L = np.linalg.cholesky(np.diag([sd[c] ** 2 for c in others]) + sd[y] ** 2)
        z = np.linspace(-12, 12, 2401)
        first, second = np.meshgrid(z, z, indexing="ij")
        differences = (
            loc[others[0]] - loc[y] + L[0, 0] * first,
            loc[others[1]] - loc[y] + L[1, 0] * first + L[1, 1] * second,
        )
        log_p = -np.logaddexp(np.logaddexp(0, differences[0]), differences[1])
        found.append(logsumexp(log_p - 0.5 * (first**2 + second**2)) + 2 * np.log(z[1] - z[0]) - np.log(2 * np.pi))
    with jax.enable_x64(True):
        f_x = FunctionValues(jnp.tile(loc, (2, 1)), jnp.tile(jnp.square(jnp.array(sd)), (2, 1)))
        ours = dgp.Likelihood(f_x, lambda v: dist.Categorical(logits=v)).log_marginal(jnp.array(classes))
    np.testing.assert_allclose(ours, found, atol=error, rtol=0)
