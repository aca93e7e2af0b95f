"""Quantiles and intervals of predictions: of mixtures of Gaussians, of labels, of draws; functions without noise."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import NOISE, X, Y, Z, deep, random_params, shallow
from scipy import optimize, stats

import numpyro_dgp as dgp
from numpyro_dgp.densities import MomentsOnly

rng = np.random.default_rng(0)
MEANS = rng.normal(size=(30, 5)) * [0.1, 1, 5, 50, 0]
VARIANCES = np.exp(rng.normal(size=(30, 5)) * [0.1, 1, 1, 2, 0.5])
MIXTURE = dgp.densities.Mixture(jnp.array(MEANS), jnp.array(VARIANCES))
NEW = jnp.linspace(-2.5, 2.5, 9)[:, None]
GUIDE = dgp.guides.InducingPoint(deep)
PARAMS = random_params(deep, GUIDE, X, Y)
POSTERIOR = dgp.Posterior(deep, GUIDE, PARAMS)


def root(n, q):
    """The quantile of one entry by Brent's method, from the tail that has more digits."""
    below = stats.norm(MEANS[:, n], np.sqrt(VARIANCES[:, n]))
    if q > 0.5:
        return optimize.brentq(lambda y: below.sf(y).mean() - (1 - q), -1e4, 1e4, xtol=1e-13)
    return optimize.brentq(lambda y: below.cdf(y).mean() - q, -1e4, 1e4, xtol=1e-13)


@pytest.mark.long
def test_quantiles_of_a_mixture_exactly():
    levels = [1e-9, 0.05, 0.37, 0.93, 1 - 1e-9]
    expected = [[root(n, q) for n in range(5)] for q in levels]
    np.testing.assert_allclose(MIXTURE.quantile(levels), expected, rtol=1e-9, atol=1e-8)
    np.testing.assert_allclose(MIXTURE.cdf(MIXTURE.quantile(levels))[:, 0], levels, rtol=1e-7)
    np.testing.assert_allclose(MIXTURE.interval(0.9), MIXTURE.quantile([0.05, 0.95]), rtol=1e-12)
    assert MIXTURE.quantile(0.3).shape == (5,)
    assert MIXTURE.quantile(np.full((2, 1), 0.3)).shape == (2, 1, 5)


@pytest.mark.smoke
def test_quantiles_of_certain_values_and_of_numpy_arrays():
    certain = dgp.densities.Mixture(np.array([[0.0], [1.0], [2.0], [3.0]]), np.zeros((4, 1)))
    np.testing.assert_allclose(certain.quantile([0.2, 0.4, 0.9])[:, 0], [0, 1, 3], atol=1e-9)
    np.testing.assert_array_equal(certain.cdf([1.0]), [0.5])
    one = dgp.densities.Mixture(np.array([[2.0]]), np.array([[9.0]]))
    np.testing.assert_allclose(one.interval(0.9)[:, 0], stats.norm.interval(0.9, 2, 3), rtol=1e-12)


@pytest.mark.slow
def test_quantiles_have_derivatives():
    def quantile(means, variances, q):
        return dgp.densities.Mixture(means, variances).quantile(q)[1]

    at = MIXTURE.means, MIXTURE.variances, 0.8
    slopes = jax.grad(quantile, (0, 1, 2))(*at)
    step, e = jnp.zeros((30, 5)).at[3, 1].set(1e-5), 1e-5
    for i, move in enumerate([step, step, e]):
        ends = (quantile(*(a + sign * move if j == i else a for j, a in enumerate(at))) for sign in (1, -1))
        found = slopes[i][3, 1] if np.ndim(slopes[i]) else slopes[i]
        np.testing.assert_allclose(found, (next(ends) - next(ends)) / (2 * e), rtol=1e-5)


def test_float32(x32):
    mixture = dgp.densities.Mixture(*(jnp.asarray(a, jnp.float32) for a in (MEANS, VARIANCES)))
    found = mixture.quantile([1e-6, 0.05, 0.95, 1 - 1e-6])
    assert found.dtype == jnp.float32
    expected = np.array([[root(n, q) for n in range(5)] for q in (1e-6, 0.05, 0.95)])
    np.testing.assert_allclose(found[:3], expected, rtol=1e-4, atol=1e-4)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("tail", [0.4, 1e-6, 1e-8, 1e-12])
def test_known_levels_have_their_digits_in_float32(tail, x32):
    """One minus the level is not that of a level that is rounded first: 1 - 1e-8 is 1 in float32."""
    at, variances = (np.float32(a) for a in (MEANS, VARIANCES))
    mixture = dgp.densities.Mixture(jnp.asarray(at), jnp.asarray(variances))

    def root(n, side, probability):
        gaussians = stats.norm(side * at[:, n].astype(float), np.sqrt(variances[:, n].astype(float)))
        return side * optimize.brentq(lambda y: gaussians.sf(y).mean() - probability, -1e4, 1e4, xtol=1e-13)

    for q in (1 - tail, np.array(1 - tail)):
        expected = [root(n, 1, 1 - (1 - tail)) for n in range(5)]
        np.testing.assert_allclose(mixture.quantile(q), expected, rtol=2e-6, atol=2e-5)
    expected = [[root(n, side, 0.5 - 0.5 * (1 - tail)) for n in range(5)] for side in (-1, 1)]
    np.testing.assert_allclose(mixture.interval(1 - tail), expected, rtol=2e-6, atol=2e-5)
    assert mixture.quantile(1 - tail).dtype == jnp.float32


@pytest.mark.slow
def test_traced_levels_that_are_rounded_to_one(x32):
    """Are the number below it; of a level that is none there is no quantile."""
    mixture = dgp.densities.Mixture(jnp.zeros((1, 1)), jnp.ones((1, 1)))
    below_one = float(np.nextafter(np.float32(1), np.float32(0)))
    np.testing.assert_allclose(jax.jit(mixture.quantile)(1 - 1e-9), stats.norm.ppf(below_one), rtol=1e-5)
    ends = stats.norm.isf(0.5 - 0.5 * below_one) * np.array([[-1], [1]])
    np.testing.assert_allclose(jax.jit(mixture.interval)(1 - 1e-9), ends, rtol=1e-5)
    assert np.isfinite(mixture.quantile(1e-60)).all()
    assert np.isnan(jax.jit(mixture.quantile)(1.5)).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MIXTURE.quantile(95), r"Mixture\.quantile: expected levels between 0 and 1, got 95"),
        (lambda: MIXTURE.quantile([0.5, 1.0]), "expected levels between 0 and 1, got 1"),
        (lambda: MIXTURE.interval(0.0), r"Mixture\.interval: expected levels between 0 and 1, got 0"),
        (lambda: MIXTURE.interval([0.5, 0.9]), r"Mixture\.interval: expected one level, got shape \(2,\)"),
        (lambda: dgp.densities.Mixture(MEANS, VARIANCES[0]).quantile(0.5), "expected means and variances of one shape"),
        (lambda: MIXTURE.quantile("half"), r"expected levels to be numbers, got dtype"),
        (
            lambda: MomentsOnly(MEANS, VARIANCES).cdf(0.0),
            r"Mixture\.cdf: expected a y that is Gaussian given",
        ),
        (lambda: MomentsOnly(MEANS, VARIANCES).interval(), r"use posterior\.quantile\(key, q, X\)"),
        (
            lambda: POSTERIOR.quantile(jax.random.key(0), 5, NEW),
            r"Posterior\.quantile: expected levels between 0",
        ),
        (
            lambda: jax.jit(lambda q: POSTERIOR.quantile(jax.random.key(0), q, NEW))(0.5),
            r"Posterior\.quantile: expected known levels q, got traced ones",
        ),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def posterior_of(conditional, outputs=None, **kwargs):
    """Draws of a chain for one layer under a likelihood."""

    def model(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z), outputs=outputs)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), conditional, **kwargs), obs=y)

    shape = (100, 8) if outputs is None else (100, outputs, 8)
    return dgp.Posterior(model, samples={"g": jax.random.normal(jax.random.key(3), shape)})


@pytest.mark.long
def test_quantiles_of_y_are_those_of_the_mixture_where_it_is_gaussian(key):
    found = POSTERIOR.using(num_samples=2000).quantile(key, [0.05, 0.95], NEW)
    np.testing.assert_allclose(found, POSTERIOR.using(num_samples=2000).predict(key, NEW).interval(0.9), atol=0.1)
    assert POSTERIOR.quantile(key, 0.5, NEW).shape == (9,)


HEAVY = {
    "student-t": lambda v: dist.StudentT(3.0, v, 0.3),
    "scale": lambda v: dist.Normal(0, jnp.exp(v)),
    "counts": lambda v: dist.Poisson(jnp.exp(v)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", HEAVY)
def test_quantiles_of_draws_have_their_level(name, key):
    posterior, levels = posterior_of(HEAVY[name]), np.array([0.05, 0.5, 0.9])
    found = np.asarray(posterior.quantile(key, levels, NEW))
    assert found.shape == (3, 9)
    draws = np.asarray(posterior.sample(jax.random.key(9), NEW))  # each with one of the hundred draws
    draws = np.concatenate([draws, *(np.asarray(posterior.sample(jax.random.key(n), NEW)) for n in range(30, 130))])
    at_most, below = ((op(draws[:, None], found)).mean(0) for op in (np.less_equal, np.less))
    assert (at_most > levels[:, None] - 0.03).all()
    assert (below < levels[:, None] + 0.03).all()
    assert (name != "counts") or (found % 1 == 0).all()
    with pytest.raises(ValueError, match="only moments"):
        posterior.predict(key, NEW).quantile(0.5)


@pytest.mark.long
def test_quantiles_of_labels_follow_their_probabilities(key):
    posterior = posterior_of(lambda v: dist.OrderedLogistic(2 * v, jnp.array([-1.0, 0.0, 2.0])))
    below = np.asarray(posterior.probs(key, NEW)).cumsum(-1)
    found = np.asarray(posterior.quantile(key, [0.2, 0.8], NEW))
    for q, labels in zip([0.2, 0.8], found, strict=True):
        np.testing.assert_array_equal(labels, (below < q).sum(-1))
    assert len(np.unique(found)) > 2


@pytest.mark.long
def test_quantiles_in_batches_of_rows(key):
    many, levels = jnp.linspace(-2, 2, 23)[:, None], np.linspace(0.1, 0.9, 23)  # as many levels as rows
    posterior = posterior_of(lambda v: dist.Normal(0, jnp.exp(v)).to_event(1), outputs=2)
    batched = posterior.using(batch_size=10, progress_bar=False).quantile(key, levels, many)
    assert isinstance(batched, np.ndarray)
    assert batched.shape == (23, 23, 2)
    assert abs(batched - posterior.quantile(key, levels, many)).mean() < 0.1
    assert POSTERIOR.using(batch_size=10, progress_bar=False).quantile(key, 0.5, many).shape == (23,)


@pytest.mark.long
def test_the_function_without_noise(key):
    guide = dgp.guides.InducingPoint(shallow)
    posterior = dgp.Posterior(shallow, guide, {k: v for k, v in PARAMS.items() if k[0] == "g"})
    f, y = posterior.predict_function(key, NEW), posterior.predict(key, NEW)
    np.testing.assert_allclose(f.mean, y.mean, rtol=1e-12)
    np.testing.assert_allclose(f.variance + NOISE**2, y.variance, rtol=1e-9)
    layer, x = posterior.layers(key, NEW)["y"]
    np.testing.assert_allclose(f.variance, layer(x).variance, rtol=1e-9)


@pytest.mark.long
def test_the_function_without_noise_is_gaussian_for_any_likelihood(key):
    posterior = posterior_of(HEAVY["counts"])
    band = posterior.predict_function(key, NEW).interval(0.9)
    draws = posterior.using(num_samples=100).functions(key)(NEW)["y"]
    assert 0.75 < ((draws > band[0]) & (draws < band[1])).mean() < 1
    batched = posterior.using(batch_size=4, progress_bar=False).predict_function(key, NEW)
    np.testing.assert_allclose(batched.interval(0.9), band, rtol=1e-6)


@pytest.mark.slow
def test_the_function_of_an_explicit_program_is_refused(key):
    def model(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            v = numpyro.sample("v", g(X))
            numpyro.sample("y", dist.Normal(v, NOISE), obs=y)

    posterior = dgp.Posterior(model, samples={"g": jnp.zeros((2, 8))}, site="y")
    with pytest.raises(ValueError, match=r"predict_function: expected an observed dgp\.Likelihood.*got Normal at site"):
        posterior.predict_function(key, NEW)
