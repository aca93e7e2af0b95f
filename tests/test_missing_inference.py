"""Chains, predictions, diagnostics and streams of observations with missing entries, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from programs import X, Z, bound
from test_missing import GAPPY, KEY, KNOWN, NOISE, OBSERVED, WITH_NAN, N, P, Y, columns, normal

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.diagnostics import loo

KERNEL = dgp.kernels.RBF(1.2, 0.7)


def together(X, y=None, observed=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    f = dgp.gp("f", KERNEL, dgp.Points(Z), outputs=P)
    with numpyro.plate("data", len(X)):
        likelihood = dgp.Likelihood(f(X), lambda v: normal(v, scale * NOISE), observed=observed)
        numpyro.sample("y", likelihood, obs=y)


def dropped(X, y, collapse="bound"):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    for p in range(P):
        f, rows = dgp.gp(f"f{p}", KERNEL, dgp.Points(Z)), np.flatnonzero(KNOWN[:, p])
        with numpyro.plate(f"data{p}", len(rows)):
            likelihood = dgp.Likelihood(f(X[rows]), partial(dist.Normal, scale=scale * NOISE[p]), collapse=collapse)
            numpyro.sample(f"y{p}", likelihood, obs=y[rows, p])


def one(X, y=None, observed=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    f = dgp.gp("f", KERNEL, dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, scale), observed=observed), obs=y)


def by_obs_mask(X, y=None, observed=None):
    f = dgp.gp("f", KERNEL, dgp.Points(Z), outputs=P)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), normal), obs=y, obs_mask=observed)


# Chains.


@pytest.mark.long
@pytest.mark.parametrize("collapse", [True, False])
def test_density_of_a_chain(collapse):
    """The density that NUTS sees, with the layer integrated or not, against a function and a plate per column."""
    f = jax.random.normal(KEY, (P, len(Z)))
    here = {"scale": 0.8} if collapse else {"scale": 0.8, "f": f}
    there = {"scale": 0.8} if collapse else {"scale": 0.8} | {f"f{p}": f[p] for p in range(P)}
    found, _ = log_density(dgp.for_mcmc(together, collapse=collapse), (X, GAPPY, OBSERVED), {}, here)
    expected, _ = log_density(dgp.for_mcmc(dropped, collapse=collapse), (X, Y), {}, there)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.long
def test_chains_in_coordinates_of_a_guide():
    guide = G.InducingPoint(together, other=G.Normal())
    svi = SVI(together, guide, optax.sgd(0.0), dgp.ELBO())
    params = svi.get_params(svi.init(KEY, X, GAPPY, OBSERVED))
    program = dgp.for_mcmc(together, params, guide=guide)
    density = [log_density(program, (X, y, OBSERVED), {}, {"scale_white": jnp.array(0.3)})[0] for y in (GAPPY, Y)]
    np.testing.assert_allclose(*density, rtol=1e-5)


@pytest.mark.long
def test_leave_one_out():
    """Rows without y count nothing: the densities and the estimate of the program without these rows."""
    kept, keys = OBSERVED[:, 0], jax.random.split(KEY)
    centre = jnp.linalg.lstsq(KERNEL(Z, Z), jnp.sin(2 * Z[:, 0]))[0]
    draws = {
        "f": centre + 0.3 * jax.random.normal(keys[0], (200, len(Z))),
        "scale": jnp.exp(0.2 * jax.random.normal(keys[1], (200,))),
    }
    trees = [
        dgp.diagnostics.to_arviz(dgp.Posterior(one, samples=draws), KEY, *args)
        for args in ((X, GAPPY[:, 0], kept), (X[kept], Y[kept, 0]))
    ]
    masked, without = (tree["log_likelihood"]["y"].values for tree in trees)
    np.testing.assert_allclose(masked, without, rtol=1e-5)
    assert trees[0]["log_likelihood_target"]["data"].values.tolist() == np.flatnonzero(kept).tolist()
    assert trees[0]["posterior_predictive"]["y"].shape == (1, 200, N)
    np.testing.assert_array_equal(np.isnan(trees[0]["observed_data"]["y"].values), ~kept)
    assert "y" not in trees[0]["constant_data"]
    found, expected = (loo(tree) for tree in trees)
    np.testing.assert_allclose((found.elpd, found.p, found.se), (expected.elpd, expected.p, expected.se), rtol=1e-5)
    assert found.n_data_points == expected.n_data_points


# Predictions.


@pytest.mark.long
def test_predictions_of_what_is_missing():
    """Every entry is predicted, with the mask or without; the posterior is that of one function per column."""
    data = X, GAPPY, OBSERVED
    posterior = dgp.Posterior(columns, G.Collapsed(columns).on(*data), {})
    found = posterior.using(num_samples=1).predict(KEY, X)
    A = jnp.linalg.solve(jnp.linalg.cholesky(KERNEL(Z, Z)), KERNEL(Z, X)).T
    for p in range(P):
        k = KNOWN[:, p]
        precision = jnp.eye(len(Z)) + A[k].T @ A[k] / NOISE[p] ** 2
        mean = A @ jnp.linalg.solve(precision, A[k].T @ Y[k, p]) / NOISE[p] ** 2
        np.testing.assert_allclose(found.mean[:, p], mean, atol=2e-3)
    assert (jnp.abs(found.mean - jnp.sin(2 * X))[~KNOWN[:, 0], 0] < 0.5).all()


@pytest.mark.long
def test_densities_of_predictions():
    posterior = dgp.Posterior(columns, G.Collapsed(columns).on(X, GAPPY, OBSERVED), {})
    found = posterior.using(num_samples=1).log_density(KEY, GAPPY, X, observed=OBSERVED)
    moments = posterior.using(num_samples=1).predict(KEY, X, observed=OBSERVED)
    np.testing.assert_allclose(moments.mean, posterior.using(num_samples=1).predict(KEY, X).mean, rtol=1e-5)
    single = dist.Normal(moments.mean, jnp.sqrt(moments.variance)).log_prob(Y)
    np.testing.assert_allclose(found, jnp.where(OBSERVED, single, 0).sum(1), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"expected finite observations y.*dgp.likelihoods.missing\(y\)"):
        posterior.log_density(KEY, WITH_NAN, X)


def labels(X, y=None, observed=None):
    f = dgp.gp("f", KERNEL, dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Bernoulli(logits=v), observed=observed), obs=y)


@pytest.mark.long
def test_probabilities_of_missing_labels():
    """Labels that are missing have probabilities too; -1 may stand for them."""
    kept, guide = OBSERVED[:, 0], G.InducingPoint(labels)
    y = jnp.where(kept, Y[:, 0] > 0, -1)
    svi = SVI(labels, guide, optax.adam(0.1), dgp.ELBO())
    params = svi.run(KEY, 100, X, y, kept, progress_bar=False).params
    posterior = dgp.Posterior(labels, guide, params)
    np.testing.assert_allclose(
        posterior.using(num_samples=1).probs(KEY, X, observed=kept),
        posterior.using(num_samples=1).probs(KEY, X),
        rtol=1e-5,
    )
    np.testing.assert_allclose(posterior.using(num_samples=1).probs(KEY, X).sum(1), 1, rtol=1e-5)


# Streams.


class Gaps:
    """A source of batches, of rows with NaN."""

    num_rows = N

    def __init__(self, read):
        self.read = read

    def batch(self, step):
        i = np.arange(6) + 6 * (step % 5)
        return np.asarray(X)[i], *self.read(WITH_NAN[i])


@pytest.mark.long
def test_streams():
    guide = G.InducingPoint(columns)
    svi = SVI(dgp.minibatch(columns, data=N), dgp.minibatch(guide, data=N), optax.adam(0.1), dgp.ELBO())
    losses = dgp.fit_stream(svi, KEY, 50, Gaps(dgp.likelihoods.missing), progress_bar=False).losses
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()
    with pytest.raises(ValueError, match=r"data in the batch of step 0.*dgp.likelihoods.missing\(y\) gives what"):
        dgp.fit_stream(svi, KEY, 10, Gaps(lambda y: (y,)), progress_bar=False)


# Refusals.


def run_of(guide, objective=None):
    return lambda: bound(objective or dgp.ELBO(), {}, by_obs_mask, guide(by_obs_mask), X, Y, OBSERVED[:, 0])


REFUSED = {
    "inducing-point": run_of(G.InducingPoint),
    "importance-weighted": run_of(partial(G.ImportanceWeighted, num_samples=2)),
    "collapsed": run_of(G.Collapsed),
    "by NumPyro's objective": run_of(G.InducingPoint, Trace_ELBO()),
    "chain": lambda: log_density(dgp.for_mcmc(by_obs_mask), (X, Y, OBSERVED[:, 0]), {}, {"f": jnp.zeros((P, len(Z)))}),
    "entries": lambda: dgp.ELBO().loss(KEY, {}, by_obs_mask, G.InducingPoint(by_obs_mask), X, Y, OBSERVED),
    "prediction": lambda: dgp.Posterior(by_obs_mask, G.InducingPoint(by_obs_mask), {}).predict(
        KEY, X, observed=OBSERVED[:, 0]
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_obs_mask_beside_a_likelihood(name):
    with pytest.raises(ValueError, match=r"site 'y': expected a Likelihood with .* got obs_mask=.*observed=mask"):
        REFUSED[name]()


@pytest.mark.slow
def test_obs_mask_under_samplers_and_autoguides_of_numpyro():
    says = r"expected observations in every run .*for missing entries dgp.Likelihood\(..., observed=mask\)"
    with pytest.raises(ValueError, match=says):
        NUTS(by_obs_mask).init(KEY, 1, None, (X, Y, OBSERVED[:, 0]), {})
    with pytest.raises(ValueError, match=says), numpyro.handlers.seed(rng_seed=0):
        AutoNormal(by_obs_mask)(X, Y, OBSERVED[:, 0])


@pytest.mark.long
def test_obs_mask_of_other_distributions():
    """Where NumPyro infers the rest, it is a latent of the guide, and the posterior of all others is as if dropped."""

    def program(X, y=None, observed=None):
        f = dgp.gp("f", KERNEL, dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            v = numpyro.sample("v", f(X))
            numpyro.sample("y", dist.Normal(v, 0.3), obs=y, obs_mask=observed)

    guide, kept = G.InducingPoint(program), OBSERVED[:, 0]
    svi = SVI(program, guide, optax.adam(0.05), dgp.ELBO())
    params = svi.run(KEY, 500, X, Y[:, 0], kept, progress_bar=False).params
    drawn = Predictive(guide, params=params, num_samples=500)(KEY, X, Y[:, 0], kept)["y_unobserved"]
    assert (jnp.abs(drawn.mean(0) - Y[:, 0])[~kept] < 0.5).all()
