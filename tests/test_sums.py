"""Weighted sums of values, f.linear(x, A): against dense joint Gaussians of values and sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from dense import rbf, svgp, svgp_bound, titsias
from numpyro.infer import Trace_ELBO
from programs import agree, bound, draws_of_bound, random_params
from toys.averages import Averages

import numpyro_dgp as dgp
from numpyro_dgp import kernels as k
from numpyro_dgp.analysis.program import inspect_program
from numpyro_dgp.functions.weights import KnownWeights

rng = np.random.default_rng(0)
X = jnp.array(np.sort(rng.uniform(-2, 2, size=(6, 1)), 0))
CELLS = jnp.linspace(-2, 2, 20)[:, None]
BINS = jnp.kron(jnp.eye(5), jnp.full((1, 4), 0.25))  # averages over five bins of four points each
Y, SUMS = jnp.sin(2 * X[:, 0]), BINS @ jnp.sin(2 * CELLS[:, 0])
Z = jnp.linspace(-2, 2, 6)[:, None]
V, L, NOISE = 1.2, 0.7, 0.3


def close(found, expected, tolerance):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def model(X, y=None, sums=None, batch=None, *, noise=NOISE, inducing=dgp.Points(Z)):
    f = dgp.gp("f", k.RBF(V, L), inducing, mean=lambda x: 0.5 * x)
    with numpyro.plate("values", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)
    with numpyro.plate("bins", len(BINS), subsample_size=batch) as i:
        totals = None if sums is None else sums[i]
        numpyro.sample("sums", dgp.Likelihood(f.linear(CELLS, BINS[i]), lambda v: dist.Normal(v, noise)), obs=totals)


def dense():
    """Covariances of inducing values, and of values at X and sums, with each other."""
    A = np.block([[np.eye(len(X)), np.zeros((len(X), len(CELLS)))], [np.zeros((len(BINS), len(X))), np.array(BINS)]])
    at, x = np.array(Z), np.vstack([X, CELLS])
    return rbf(at, at, V, L), rbf(at, x, V, L) @ A.T, A @ rbf(x, x, V, L) @ A.T


RESIDUAL = np.concatenate([Y - 0.5 * X[:, 0], SUMS - 0.5 * BINS @ CELLS[:, 0]])


def belief():
    guide = dgp.guides.InducingPoint(model)
    params = random_params(model, guide, X, Y, SUMS)
    factor = np.linalg.cholesky(dense()[0])
    half = factor @ params["f_auto_scale_tril"]
    return guide, params, factor @ params["f_auto_loc"], half @ half.T


@pytest.mark.long
def test_bound_is_that_of_the_dense_gaussian():
    guide, params, m, S = belief()
    expected = svgp_bound(RESIDUAL, NOISE, *dense(), m, S)
    close(bound(dgp.ELBO(), params, model, guide, X, Y, SUMS), expected, 1e-5)


@pytest.mark.long
def test_predictions_are_those_of_the_dense_gaussian():
    guide, params, m, S = belief()
    mean, covariance = svgp(*dense(), m, S)
    posterior = dgp.Posterior(model, guide, params, site="sums")
    found = posterior.using(num_samples=1).predict(jax.random.key(0), X)
    close(found.mean, mean[len(X) :] + 0.5 * BINS @ CELLS[:, 0], 1e-6)
    close(found.variance, np.diag(covariance)[len(X) :] + NOISE**2, 1e-6)
    f, _ = posterior.layers(jax.random.key(0), X)["y"]
    together = f.linear(CELLS, BINS, joint=True)
    close(together.covariance[0], covariance[len(X) :, len(X) :], 1e-6)
    draws = posterior.using(num_samples=2).functions(jax.random.key(1), num_features=50)(X)["sums"]
    values = (
        dgp.Posterior(model, guide, params, site="y").using(num_samples=2).functions(jax.random.key(1), num_features=50)
    )
    close(draws, values(CELLS)["y"] @ BINS.T, 1e-6)


@pytest.mark.long
def test_optimum_in_closed_form_is_that_of_the_dense_gaussian():
    expected, _, _ = titsias(RESIDUAL, NOISE, *dense())
    close(bound(dgp.ELBO(), {}, model, dgp.guides.Collapsed(model), X, Y, SUMS), expected, 1e-5)


@pytest.mark.long
def test_bins_may_be_subsampled():
    guide, params, _, _ = belief()
    parts = draws_of_bound(dgp.ELBO(), params, model, guide, X, Y, SUMS, 2, num=500)
    whole = float(bound(dgp.ELBO(), params, model, guide, X, Y, SUMS))
    assert agree(parts, np.full(2, whole), width=4.0)
    assert parts.std() > 0


@pytest.mark.long
@pytest.mark.parametrize("inducing", [dgp.Grid(-5.0, 5.0, 32), Averages(-3.0, 3.0, 8)])
def test_every_representation(inducing):
    with numpyro.handlers.seed(rng_seed=0):
        f = dgp.gp("f", k.RBF(V, L), inducing, outputs=2)
    sums, values = f.linear(CELLS, BINS, joint=True), f.joint(CELLS)
    close(sums.mean, BINS @ values.mean, 1e-8)
    close(sums.covariance, BINS @ values.covariance @ BINS.T, 1e-6)
    close(f.linear(CELLS, BINS).variance, sums.variance, 1e-6)


def deep(X, sums=None):
    """Sums over a function of a hidden layer: all its rows are seen together."""
    f = dgp.gp("f", k.RBF(0.3, 0.9), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", k.RBF(V, L), dgp.Points(Z))
    with numpyro.plate("cells", len(X)):
        h = numpyro.sample("h", f(X, noise=0.05))
    with numpyro.plate("bins", len(BINS)):
        numpyro.sample("sums", dgp.Likelihood(g.linear(h, BINS), lambda v: dist.Normal(v, NOISE)), obs=sums)


def test_sums_over_a_hidden_layer_couple_its_rows():
    structure = inspect_program(deep, (CELLS, SUMS), {})
    assert structure.coupled == {"f"}


@pytest.mark.long
def test_points_may_be_arguments():
    """At other points it is the same function."""

    def program(x, A, y=None):
        f = dgp.gp("f", k.RBF(V, L), dgp.Points(Z))
        with numpyro.plate("bins", len(A)):
            numpyro.sample("y", dgp.Likelihood(f.linear(x, A), lambda v: dist.Normal(v, NOISE)), obs=y)

    posterior = dgp.Posterior(program, dgp.guides.Collapsed(program).on(CELLS, BINS, SUMS), {})
    f = posterior.layers(jax.random.key(0), CELLS, BINS)["y"][0].function
    found = posterior.using(num_samples=1).predict(jax.random.key(0), X, jnp.ones((2, len(X))))
    close(found.mean, jnp.full(2, f(X).mean.sum()), 1e-6)


@pytest.mark.long
def test_deep_bound_is_that_of_numpyro():
    guide = dgp.guides.InducingPoint(deep)
    params = random_params(deep, guide, CELLS, SUMS, scale=0.1)
    assert agree(*(draws_of_bound(o, params, deep, guide, CELLS, SUMS) for o in (dgp.ELBO(), Trace_ELBO())))


@pytest.mark.long
def test_single_precision():
    def moments(dtype):
        with numpyro.handlers.seed(rng_seed=0):
            f = dgp.gp("f", k.RBF(V, L), dgp.Points(Z.astype(dtype)))
            f = dataclasses.replace(f, v=KnownWeights(jnp.ones(6, dtype)))
        values = f.linear(CELLS.astype(dtype), BINS.astype(dtype))
        return values.mean, values.variance

    for narrow, wide in zip(moments(jnp.float32), moments(jnp.float64), strict=True):
        assert narrow.dtype == jnp.float32
        close(narrow, wide, 1e-3)


def line():
    with numpyro.handlers.seed(rng_seed=0):
        return dgp.gp("f", k.Matern12(), dgp.Points(Z))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: line().linear(CELLS[None], BINS),
            r"f\.linear: expected all points x \(Q, D\)",
        ),
        (lambda: line().linear(CELLS, BINS.T), r"weights A of shape \(K, 20\), one row per sum.*got \(20, 5\)"),
        (lambda: line().linear(CELLS, BINS[0]), r"got \(20,\): a single sum is A\[None\]"),
        (lambda: line().linear(CELLS, BINS.at[0, 0].set(jnp.nan)), r"expected finite weights of f\.linear"),
        (lambda: line().linear(jnp.zeros((20, 2)), BINS), "expected inputs with D = 1 columns"),
        (lambda: dgp.gp("f", k.RBF(), None).linear(CELLS, BINS), r"got an exact process.*\.linear\(x, A\)"),
    ],
)
def test_wrong_calls(call, match):
    with pytest.raises(ValueError, match=match):
        call()
