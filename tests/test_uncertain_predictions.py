"""Predictions at inputs that are known with an error: ``X_variance``."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dgp as dgp
from numpyro_dgp.kernels import expectations as psi

rng = np.random.default_rng(0)
Z, X = rng.uniform(-1, 1, size=(6, 2)), rng.uniform(-1, 1, size=(9, 2))
V = rng.uniform(0, 0.2, size=(9, 2)) * (np.arange(9) > 0)[:, None]
KERNEL, NOISE = dgp.kernels.RBF(1.3, np.array([0.6, 0.9])), 0.2


def one(X, y=None):
    f = dgp.gp("f", KERNEL, dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)


def two(X, y=None):
    f = dgp.gp("f", KERNEL, dgp.Points(Z), outputs=2, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", KERNEL, dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)


def labels(X, y=None):
    f = dgp.gp("f", KERNEL, dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Bernoulli(logits=v)), obs=y)


def fitted(model, key):
    guide = dgp.guides.InducingPoint(model)
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.1), dgp.ELBO())
    y = np.sin(3 * X[:, 0])
    y = jnp.asarray(y > 0, int) if model is labels else jnp.asarray(y, float)
    return dgp.Posterior(model, guide, svi.run(key, 20, jnp.asarray(X, float), y, progress_bar=False).params)


def moments(posterior, key, x):
    """Mean and variance of the function at known inputs."""
    found = posterior.using(num_samples=1).predict_function(key, x)
    return np.asarray(found.mean), np.asarray(found.variance)


def closed_form(posterior, key):
    """Mean and variance of f at Gaussian inputs, by expectations of the kernel under them.

    The mean is k(x, Z) a and the variance k(x, x) - k(x, Z) B k(Z, x), with a and B from the moments at many places.
    """
    x = jnp.array(rng.uniform(-1.5, 1.5, size=(60, 2)))
    K, (mean, variance) = np.asarray(KERNEL(x, Z)), moments(posterior, key, x)
    a = np.linalg.lstsq(K, mean, rcond=None)[0]
    i, j = np.triu_indices(6)
    b = np.linalg.lstsq(K[:, i] * K[:, j] * np.where(i == j, 1, 2), 1.3 - variance, rcond=None)[0]
    B = np.zeros((6, 6))
    B[i, j] = B[j, i] = b
    mean = np.asarray(psi.psi1(KERNEL, X, V, Z)) @ a
    second = np.stack([np.asarray(psi.psi2(KERNEL, X[n : n + 1], V[n : n + 1], Z)) for n in range(len(X))])
    return mean, 1.3 - np.einsum("nij,ij->n", second, B) + np.einsum("i,nij,j->n", a, second, a) - mean**2


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, 1000])
def test_one_layer_as_in_closed_form(key, count):
    """The error falls nearly like 1/S, not like its root: at 1000 draws it is below 0.1 % of the standard deviation."""
    posterior = fitted(one, key)
    mean, variance = closed_form(posterior, key)
    found = posterior.using(num_samples=count).predict_function(key, X, X_variance=V)
    assert np.abs(found.mean - mean).max() < 1.0 / count * 2
    np.testing.assert_allclose(found.variance, variance, atol=2.0 / count)
    observed = posterior.using(num_samples=count).predict(key, X, X_variance=V)
    np.testing.assert_allclose(observed.variance, found.variance + NOISE**2, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("model", [one, two])
def test_no_variance_is_no_change(key, model):
    posterior = fitted(model, key)
    known = posterior.using(num_samples=20).predict(key, X)
    found = posterior.using(num_samples=20).predict(key, X, X_variance=0.0)
    np.testing.assert_allclose(found.mean, known.mean, rtol=1e-12)
    np.testing.assert_allclose(found.variance, known.variance, rtol=1e-12)


@pytest.mark.slow
def test_two_layers_as_over_many_inputs(key):
    """Against inputs that are drawn by hand, all at one row."""
    posterior = fitted(two, key)
    n, count = 4, 4000
    many = X[n] + jnp.sqrt(V[n]) * jax.random.normal(key, (count, 2))
    by_hand = posterior.using(num_samples=50).predict(key, many)
    means = np.asarray(by_hand.means)
    found = posterior.using(num_samples=count).predict(key, X, X_variance=V)
    error = np.hypot(np.asarray(found.means)[:, n].std() / np.sqrt(count), means.mean(0).std() / np.sqrt(count))
    error = np.hypot(error, means.mean(1).std() / np.sqrt(50))
    assert abs(found.mean[n] - means.mean()) < 4 * error
    total = float(np.mean(by_hand.variances) + means.var())
    np.testing.assert_allclose(found.variance[n], total, rtol=0.1)


@pytest.mark.long
def test_a_row_alone_and_in_batches(key):
    """The same numbers, whatever other rows are predicted with it and however many at a time."""
    posterior = fitted(two, key)
    whole = posterior.predict_function(key, X, X_variance=V)
    alone = fitted(one, key).predict(key, X[3:4], X_variance=V[3:4])
    together = fitted(one, key).predict(key, X, X_variance=V)
    np.testing.assert_allclose(alone.mean, together.mean[3:4], rtol=1e-9)
    parts = posterior.using(batch_size=5, progress_bar=False).predict_function(key, X, X_variance=V)
    assert parts.mean.shape == whole.mean.shape
    one_by_five = fitted(one, key).using(batch_size=5, progress_bar=False).predict(key, X, X_variance=V)
    np.testing.assert_allclose(one_by_five.mean, together.mean, rtol=1e-9)


@pytest.mark.long
def test_other_predictions(key):
    posterior = fitted(one, key)
    y = np.sin(3 * X[:, 0])
    mixture = posterior.predict(key, X, X_variance=V)
    density = posterior.log_density(key, y, X, X_variance=V)
    each = dist.Normal(mixture.means, np.sqrt(mixture.variances)).log_prob(y)
    np.testing.assert_allclose(density, jax.nn.logsumexp(each, 0) - np.log(len(each)), rtol=1e-8)
    low = posterior.quantile(key, 0.1, X, X_variance=V)
    np.testing.assert_allclose(low, mixture.quantile(0.1), rtol=1e-6)
    p = fitted(labels, key).probs(key, X, X_variance=10.0)
    known = fitted(labels, key).probs(key, X)
    np.testing.assert_allclose(p.sum(-1), 1.0, rtol=1e-9)
    assert np.abs(p[:, 0] - p[:, 0].mean()).max() < np.abs(known[:, 0] - known[:, 0].mean()).max()


@pytest.mark.slow
def test_draws_of_a_chain(key):
    """With draws of the inducing values, one for each."""
    samples = {"f": jax.random.normal(key, (30, 6))}
    posterior = dgp.Posterior(one, samples=samples)
    found = posterior.predict(key, X, X_variance=V)
    assert found.means.shape == (30, 9)
    np.testing.assert_allclose(found.mean[0], posterior.predict(key, X).mean[0], rtol=1e-9)  # a variance of zero
    assert np.abs(found.mean[1:] - posterior.predict(key, X).mean[1:]).max() > 1e-3


@pytest.mark.slow
def test_traced_and_in_single_precision(key, x32):
    posterior = fitted(one, key)
    found = posterior.predict(key, X, X_variance=V)
    assert found.mean.dtype == jnp.float32
    inside = jax.jit(lambda v: posterior.predict(key, jnp.asarray(X, jnp.float32), X_variance=v).mean)(0.1)
    outside = posterior.predict(key, jnp.asarray(X, jnp.float32), X_variance=0.1).mean
    np.testing.assert_allclose(inside, outside, rtol=1e-4, atol=1e-5)


def named(X, y=None, X_variance=None):
    one(X, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, k: p.predict(k, X, X_variance=-0.1), "X_variance of 0 or more, got -0.1"),
        (lambda p, k: p.predict(k, X, X_variance=np.full(2, np.nan)), "X_variance of 0 or more"),
        (lambda p, k: p.predict(k, X, X_variance=np.ones(3)), r"broadcasts to the inputs \(9, 2\), got \(3,\)"),
        (lambda p, k: p.predict(k, X=X, X_variance=0.1), "array of real inputs as the first argument.*got none"),
        (lambda p, k: p.predict(k, X, X_varience=0.1), "X_varience"),
        (lambda p, k: p.sample(k, X, X_variance=0.1), "X_variance"),
        (lambda p, k: dgp.Posterior(named, p.guide, p.params).predict(k, X, X_variance=0.1), "give it another name"),
    ],
    ids=["negative", "NaN", "shape", "by name", "misspelt", "sample", "taken"],
)
def test_messages(key, call, message):
    posterior = dgp.Posterior(one, dgp.guides.InducingPoint(one), fitted(one, key).params)
    with pytest.raises(ValueError, match=message):
        call(posterior, key)
