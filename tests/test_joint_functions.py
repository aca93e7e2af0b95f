"""Joint moments of the function under a likelihood: dense algebra, consistency across calls, tracers, refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import NOISE, X, Y, Z, deep, random_params, shallow
from sizes import mostly_long

import numpyro_dgp as dgp

KERNEL = dgp.kernels.RBF(1.2, 0.7)
NEW = jnp.array([[-1.7], [-0.4], [0.1], [0.15], [1.3]])
GUIDE = dgp.guides.InducingPoint(deep)
PARAMS = random_params(deep, GUIDE, X, Y)
DEEP = dgp.Posterior(deep, GUIDE, PARAMS)
OWN = {name: value for name, value in PARAMS.items() if name[0] == "g"}
SHALLOW = dgp.Posterior(shallow, dgp.guides.InducingPoint(shallow), OWN)


def dense(Sigma=None, v=None):
    """Mean and covariance at NEW of the last function of ``shallow``, by solves with k(Z, Z)."""
    Kzz = np.asarray(KERNEL(Z, Z)) + 1e-10 * 1.2 * np.eye(8)
    L = np.linalg.cholesky(Kzz)
    A = np.linalg.solve(L, np.asarray(KERNEL(Z, NEW))).T
    C = np.asarray(KERNEL(NEW, NEW)) - A @ A.T
    return A @ v, C if Sigma is None else C + A @ Sigma @ A.T


@pytest.mark.slow
def test_one_layer_is_dense_algebra(key):
    R = np.asarray(OWN["g_auto_scale_tril"])
    m, C = dense(R @ R.T, np.asarray(OWN["g_auto_loc"]))
    found = SHALLOW.using(num_samples=2).predict_jointly(key, NEW)
    assert found.means.shape == (2, 5)
    assert found.covariances.shape == found.prior_covariances.shape == (2, 5, 5)
    for s in range(2):
        np.testing.assert_allclose(found.means[s], m, atol=1e-10)
        np.testing.assert_allclose(found.covariances[s], C, atol=1e-10)
    np.testing.assert_allclose(found.prior_covariances[0], KERNEL(NEW, NEW), atol=1e-14)
    np.testing.assert_allclose(found.covariance, C, atol=1e-10)
    marginals = SHALLOW.using(num_samples=2).predict_function(key, NEW)
    for ours, theirs in zip(found.marginals, marginals, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.long
def test_draws_of_a_chain_condition_the_last_layer(key):
    v = np.random.default_rng(1).normal(size=(3, 8))
    found = dgp.Posterior(shallow, samples={"g": jnp.array(v)}).predict_jointly(key, NEW)
    for s in range(3):
        m, C = dense(v=v[s])
        np.testing.assert_allclose(found.means[s], m, atol=1e-10)
        np.testing.assert_allclose(found.covariances[s], C, atol=1e-9)  # the diagonal is at least the jitter


@pytest.mark.long
def test_layers_below_are_whole_functions(key):
    """The same at every call, given other rows; and in expectation those of the draws of functions."""
    found = DEEP.using(num_samples=6).predict_jointly(key, NEW)
    part = DEEP.using(num_samples=6).predict_jointly(key, NEW[1:3])
    np.testing.assert_allclose(part.means, found.means[:, 1:3], atol=1e-12)
    np.testing.assert_allclose(part.covariances, found.covariances[:, 1:3, 1:3], atol=1e-9)
    assert np.linalg.eigvalsh(found.covariances).min() > -1e-8
    many = jax.jit(lambda k: DEEP.using(num_samples=400).predict_jointly(k, NEW, num_features=64))(key)
    draws = np.asarray(DEEP.using(num_samples=1000).functions(jax.random.key(9), num_features=64)(NEW)["y"])
    error = np.sqrt(draws.var(0) / 1000 + np.asarray(many.means).var(0) / 400)
    assert (abs(draws.mean(0) - many.mean) < 4 * error).all()
    assert abs(np.cov(draws.T, bias=True) - many.covariance).max() < 0.1 * many.covariance.max()


@pytest.mark.long
def test_traced_rows(key):
    """Compiled, mapped over batches and differentiated by the rows, as finite differences say."""

    def number(x):
        found = DEEP.using(num_samples=3).predict_jointly(key, x, num_features=32)
        return (found.means.sum(0) * jnp.arange(1.0, 3)).sum() + 3 * found.covariances[:, 0, 1].sum()

    batches = jnp.stack([NEW[:2], NEW[2:4] + 0.3])
    values = jax.jit(jax.vmap(number))(batches)
    np.testing.assert_allclose(values[1], number(batches[1]), rtol=1e-9)
    slope = jax.jit(jax.grad(number))(batches[0])
    step = jnp.zeros((2, 1)).at[0, 0].set(1e-5)
    differences = (number(batches[0] + step) - number(batches[0] - step)) / 2e-5
    np.testing.assert_allclose(slope[0, 0], differences, rtol=1e-5)


def two_functions(X, y=None, *, shared=False):
    f = dgp.gp("f", KERNEL, dgp.Points(Z))
    g = (lambda x: f(-x)) if shared else dgp.gp("g", KERNEL, dgp.Points(Z), outputs=2)
    with numpyro.plate("data", len(X)):
        y_of = dgp.Likelihood((f(X), g(X)), lambda v, w: dist.Normal(v, jnp.exp(w if shared else w[..., 0])))
        numpyro.sample("y", y_of, obs=y)


def mixed(X, y=None):
    g = dgp.gp("g", KERNEL, dgp.Points(Z), outputs=2)
    with numpyro.plate("data", len(X)):
        y_of = dgp.Likelihood(
            g(X).mix(jnp.array([[1.0, 2.0], [0.5, 0.0], [0.0, 3.0]])), lambda v: dist.Normal(v, 1.0).to_event(1)
        )
        numpyro.sample("y", y_of, obs=y)


@pytest.mark.parametrize("model", mostly_long([], [mixed, two_functions]))
def test_outputs_one_by_one(model, key):
    """P covariance matrices between inputs, with the variances of ``predict_function`` on the diagonal."""
    samples = {"f": jnp.ones((2, 8)), "g": jnp.arange(32.0).reshape(2, 2, 8) / 9}
    posterior = dgp.Posterior(model, samples=samples)
    found = posterior.predict_jointly(key, NEW)
    assert found.means.shape == (2, 5, 3)
    assert found.covariances.shape == found.prior_covariances.shape == (2, 3, 5, 5)
    assert found.sample(key).shape == found.means.shape
    for ours, theirs in zip(found.marginals, posterior.predict_function(key, NEW), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    ratio = [5.0, 0.25, 9.0] if model is mixed else [1.0, 1.0, 1.0]
    _, C = dense(v=np.ones(8))
    for p in range(3):
        np.testing.assert_allclose(found.covariances[1, p], ratio[p] * C, atol=2e-8)


def within_itself(X, y=None):
    f = dgp.gp("f", KERNEL, dgp.Points(Z), outputs=1)
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(f(h), lambda v: dist.Normal(v, NOISE).to_event(1)), obs=y)


@pytest.mark.long
def test_a_function_within_itself_is_known_given_a_draw(key):
    posterior = dgp.Posterior(within_itself, samples={"f": jnp.ones((2, 1, 8))})
    found = posterior.predict_jointly(key, NEW)
    np.testing.assert_allclose(found.covariances, 0, atol=1e-12)
    draws = posterior.using(num_samples=2).functions(key)(NEW)["y"]
    np.testing.assert_allclose(found.means, draws, atol=1e-12)
    assert np.isfinite(found.factors()).all()


def two_sources(X, y=None, coarse=None):
    """A coarse and a fine code: the coarse function is under a likelihood of its own, and below the fine one."""
    f = dgp.gp("f", KERNEL, dgp.Points(Z))
    g = dgp.gp("g", KERNEL, dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("coarse", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=coarse)
        numpyro.sample("y", dgp.Likelihood(g(h[:, None]), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.long
def test_a_function_below_is_whole_even_if_it_is_observed(key):
    samples = {"f": jnp.ones((2, 8)), "g": jnp.arange(16.0).reshape(2, 8) / 9}
    fine = dgp.Posterior(two_sources, samples=samples, site="y")
    found, part = (fine.using(num_samples=2).predict_jointly(key, x, num_features=32) for x in (NEW, NEW[1:3]))
    np.testing.assert_allclose(part.means, found.means[:, 1:3], atol=1e-12)


def no_likelihood(X, y=None):
    a = numpyro.sample("a", dist.Normal())
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(a * X[:, 0], 1.0), obs=y)


def exact(X, y=None):
    numpyro.sample("y", dgp.gp("f", KERNEL, None)(X, noise=0.1), obs=y)


def nearest(X_new, y=None, near=dgp.Neighbours(X, num=3)):
    f = dgp.gp("f", KERNEL, near).condition(X, Y)
    with numpyro.plate("data", len(X_new)):
        numpyro.sample("y", dgp.Likelihood(f(X_new), lambda v: dist.Normal(v, 0.1)), obs=y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (no_likelihood, r"predict_jointly: expected an observed dgp.Likelihood, .* got Normal at site 'y'"),
        (exact, "expected functions with inducing points"),
        (nearest, r"predict_jointly: expected a function with inducing values, .* got NearestFunction"),
        (partial(two_functions, shared=True), r"expected independent functions under the Likelihood, .*'f', 'f'"),
    ],
)
def test_functions_without_joint_moments(model, message, key):
    posterior = dgp.Posterior(model, samples={"a": jnp.ones(2), "f": jnp.ones((2, 8))})
    with pytest.raises(ValueError, match=message):
        posterior.predict_jointly(key, NEW)


@pytest.mark.slow
def test_wrong_calls(key):
    with pytest.raises(ValueError, match="num_features to be a positive integer, got 0"):
        SHALLOW.predict_jointly(key, NEW, num_features=0)
    with pytest.raises(ValueError, match=r"Posterior\.functions: expected num_features to be a positive .* got -1"):
        SHALLOW.functions(key, num_features=-1)
    C = jnp.eye(2)[None]
    with pytest.raises(ValueError, match=r"JointMixture\.\w+: expected a PRNG key, got 3"):
        dgp.densities.JointMixture(jnp.zeros((1, 2)), C, C).sample(3)
