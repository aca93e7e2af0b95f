"""Predictions of programs with exact processes, from the data of the fit: ``posterior.on(X, y)``."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dgp as dgp

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
ROWS = rng.uniform(size=(5, 2))
X, NEW = np.vstack([ROWS, ROWS[:2]]), np.vstack([ROWS[:2], rng.uniform(size=(3, 2))])  # with replicates
Y = np.sin(5 * X[:, 0]) + 0.1 * rng.normal(size=7)
SCALES, NOISE = np.array([[0.4, 0.7], [0.5, 0.3]]), np.array([0.1, 0.2])
MEAN = 0.3


def gram(a, b, scale):
    return 1.3 * np.exp(-0.5 * np.square((a[:, None] - b) / scale).sum(-1))


def dense(values, scale, noise):
    """Mean and covariance of the function at new rows given values with noise."""
    K, k = gram(X, X, scale) + noise**2 * np.eye(len(X)), gram(NEW, X, scale)
    return MEAN + k @ np.linalg.solve(K, values - MEAN), gram(NEW, NEW, scale) - k @ np.linalg.solve(K, k.T)


def regression(X, y=None):
    with numpyro.plate("columns", 2):
        scale = numpyro.sample("scale", dist.LogNormal())
    noise = numpyro.sample("noise", dist.LogNormal())
    f = dgp.gp("f", dgp.kernels.RBF(1.3, scale), None, mean=MEAN)
    numpyro.sample("y", f(X, noise=noise), obs=y)


@pytest.fixture(scope="module")
def fitted():
    return dgp.Posterior(regression, samples={"scale": SCALES, "noise": NOISE}).on(X, Y)


@pytest.mark.slow
def test_predictions_are_those_of_dense_algebra(fitted):
    """Those of y with noise, those of the function without, hyperparameters in a plate of their own."""
    expected = [dense(Y, *draw) for draw in zip(SCALES, NOISE, strict=True)]
    means, covariances = map(np.stack, zip(*expected, strict=True))
    variances = np.diagonal(covariances, axis1=1, axis2=2)
    of_y, of_f = fitted.predict(KEY, NEW), fitted.predict_function(KEY, NEW)
    for found in (of_y, of_f):
        np.testing.assert_allclose(found.means, means, atol=1e-8)
    np.testing.assert_allclose(of_y.variances, variances + NOISE[:, None] ** 2, atol=1e-8)
    np.testing.assert_allclose(of_f.variances, variances, atol=1e-8)
    np.testing.assert_allclose(fitted.predict_jointly(KEY, NEW).covariances, covariances, atol=1e-8)
    each = dist.Normal(means, np.sqrt(variances + NOISE[:, None] ** 2)).log_prob(0.7)
    density = jax.nn.logsumexp(each, 0) - np.log(2)
    np.testing.assert_allclose(fitted.log_density(KEY, np.full(5, 0.7), NEW), density, atol=1e-7)


@pytest.mark.slow
def test_points_of_a_guide_and_one_row(fitted):
    guide = dgp.guides.InducingPoint(regression, sites={"scale": dgp.guides.Delta()})
    svi = numpyro.infer.SVI(regression, guide, optax.adam(0.01), dgp.ELBO())
    assert dgp.fit(svi, KEY, 1, X, Y, progress_bar=False).params.keys() == {"scale_auto_loc", "noise_auto_loc"}
    params = {"scale_auto_loc": SCALES[1], "noise_auto_loc": NOISE[1]}
    found = dgp.Posterior(regression, guide, params).on(X, y=Y).predict(KEY, NEW[:1])
    mean, covariance = dense(Y, SCALES[1], NOISE[1])
    np.testing.assert_allclose(found.mean, mean[:1], atol=1e-8)
    np.testing.assert_allclose(found.variance, covariance[0, :1] + NOISE[1] ** 2, atol=1e-8)
    np.testing.assert_allclose(fitted.predict(KEY, NEW[:1]).means[1], mean[:1], atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.1, (0.1, 0.3)])
def test_several_outputs(noise):
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(1.3, SCALES[0]), None, outputs=2, mean=MEAN)
        numpyro.sample("y", f(X, noise=jnp.asarray(noise)), obs=y)

    values = np.stack([Y, Y[::-1]], 1)
    found = dgp.Posterior(model, samples={"unused": np.zeros(1)}).on(X, values).predict(KEY, NEW)
    for p, s in enumerate(np.broadcast_to(noise, 2)):
        mean, covariance = dense(values[:, p], SCALES[0], s)
        np.testing.assert_allclose(found.mean[:, p], mean, atol=1e-8)
        np.testing.assert_allclose(found.variance[:, p], np.diagonal(covariance) + s**2, atol=1e-8)


@pytest.mark.slow
def test_values_below_other_likelihoods_and_layers():
    """Drawn at the rows of the fit, by a chain: predictions are given these draws, with the hidden values' noise."""

    def model(X, y=None):
        h = numpyro.sample("h", dgp.gp("f", dgp.kernels.RBF(1.3, SCALES[0]), None, mean=MEAN)(X, noise=0.1))
        v = numpyro.sample("v", dgp.gp("g", dgp.kernels.RBF(), None)(h[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(v)), obs=y)

    draws = {"h": np.stack([Y, -Y]), "v": np.stack([np.cos(Y), np.zeros(7)])}
    posterior = dgp.Posterior(model, samples=jax.tree.map(lambda a: np.repeat(a, 4000, 0), draws))
    posterior = posterior.on(X, np.ones(7, int))
    hidden = posterior.using(num_samples=8000).hidden(KEY, NEW)
    for values, found in zip(draws["h"], hidden["h"].reshape(2, 4000, 5), strict=True):
        mean, covariance = dense(values, SCALES[0], 0.1)
        np.testing.assert_allclose(found.mean(0), mean, atol=0.03)
        np.testing.assert_allclose(found.var(0), np.diagonal(covariance) + 0.01, atol=0.02)
    assert posterior.sample(KEY, NEW).shape == (100, 5)
    with pytest.raises(ValueError, match=r"expected layers with inducing points below the last one, got 'h' of"):
        posterior.predict_jointly(KEY, NEW)


@pytest.mark.slow
def test_neighbours_of_all_rows_condition_as_exact_processes_do():
    kernel = dgp.kernels.RBF(1.3, SCALES[0])
    near, exact = (dgp.gp("f", kernel, how, mean=MEAN) for how in (dgp.Neighbours(X, num=7), None))
    mean, covariance = dense(Y, SCALES[0], 0.1)
    for f in (near, exact):
        found = f.condition(X, Y, noise=0.1)(NEW)
        np.testing.assert_allclose(found.mean, mean, atol=1e-7)
        np.testing.assert_allclose(found.variance, np.diagonal(covariance), atol=1e-7)


@pytest.mark.slow
def test_wrong_calls(fitted):
    without = dgp.Posterior(regression, samples={"scale": SCALES, "noise": NOISE})
    with pytest.raises(ValueError, match=r"give the data, posterior\.on\(X, y\)"):
        without.predict(KEY, NEW)
    with pytest.raises(ValueError, match=r"Posterior.on: expected the data of the fit with observations"):
        without.on(X)
    with pytest.raises(ValueError, match=r"on: expected finite data"):
        without.on(X, np.full(7, np.nan))
    with pytest.raises(ValueError, match=r"a value for every site that all data share, got none for 'noise'"):
        dgp.Posterior(regression, samples={"scale": SCALES}).on(X, Y).predict(KEY, NEW)
    with pytest.raises(ValueError, match=r"predict_jointly\(key, X\).sample\(key\)"):
        fitted.functions(KEY)(NEW)
    assert fitted.predict_jointly(KEY, NEW).sample(KEY).shape == (2, 5)


@pytest.mark.slow
def test_programs_without_exact_processes_keep_no_data():
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(ROWS))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    posterior = dgp.Posterior(model, dgp.guides.Collapsed(model), {}).on(X, Y)
    assert posterior.data is None
    assert posterior.guide.data is not None
