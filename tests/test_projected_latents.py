"""``dgp.project``: latents of new rows, whole or in part, under a fit that stays, against quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dgp as dgp

Z = jnp.linspace(-2.5, 2.5, 9)[:, None]
NOISE, SPREAD = 0.3, 0.1
L = np.linalg.cholesky(np.exp(-0.5 * np.square(Z - Z.T)) + 1e-6 * np.eye(9))
VALUES = np.stack([2 * Z[:, 0], np.sin(Z[:, 0]), np.cos(Z[:, 0])])  # at Z, under q
PARAMS = {
    "f_auto_loc": jnp.asarray(np.linalg.solve(L, VALUES.T).T),
    "f_auto_scale_tril": jnp.tile(SPREAD * jnp.eye(9), (3, 1, 1)),
}
TRUE = np.array([-1.2, 0.3, 0.9])
Y = np.stack([2 * TRUE, np.sin(TRUE), np.cos(TRUE)], 1) + 0.1 * np.random.default_rng(0).normal(size=(3, 3))
PARTIAL = np.where(np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0]], bool), np.nan, Y)
KEY = jax.random.key(0)


def model(values, known=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=3)
    with numpyro.plate("data", len(values)):
        w = dgp.latent("w", None, dim=1)
        given = dgp.Likelihood(f(w), lambda v: dist.Normal(v, NOISE).to_event(1), observed=known)
        numpyro.sample("y", given, obs=values)


def by_quadrature(y):
    """Mean and sd of p(w) exp E[log p(y | f(w))] on a grid, by dense algebra."""
    w = np.linspace(-4, 4, 2001)
    A = np.linalg.solve(L, np.exp(-0.5 * np.square(w[:, None] - Z.T)).T).T
    mean = A @ np.asarray(PARAMS["f_auto_loc"]).T
    variance = 1 - (A**2).sum(1) + SPREAD**2 * (A**2).sum(1)
    found = []
    for row in y:
        each = -0.5 * (np.square(row - mean) + variance[:, None]) / NOISE**2
        log = -0.5 * w**2 + np.where(np.isnan(row), 0, each).sum(1)
        p = np.exp(log - log.max())
        p /= p.sum()
        found.append(((p * w).sum(), np.sqrt((p * w**2).sum() - (p * w).sum() ** 2)))
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize("y", [Y, PARTIAL], ids=["whole", "partial"])
def test_latents_of_unseen_y(y):
    guide = dgp.guides.InducingPoint(
        model, latent=dgp.guides.Normal(0.1, loc=jnp.zeros((20, 1)))
    )  # of the rows of a fit
    fitted = dgp.Posterior(model, guide, PARAMS)
    found = dgp.project(fitted, KEY, *dgp.likelihoods.missing(y), num_steps=300, progress_bar=False)
    for name, value in PARAMS.items():
        np.testing.assert_array_equal(found.params[name], value)
    expected = by_quadrature(y)
    np.testing.assert_allclose(found.params["w_auto_loc"][:, 0], expected[:, 0], atol=0.05)
    draws = found.guide.sample_posterior(KEY, found.params, *dgp.likelihoods.missing(y), sample_shape=(2000,))["w"]
    np.testing.assert_allclose(draws.std(0)[:, 0], expected[:, 1], rtol=0.15)
    f, inputs = found.layers(KEY, *dgp.likelihoods.missing(y))["y"]
    assert np.abs(np.asarray(f(inputs).mean) - Y).max() < 0.8


@pytest.mark.slow
def test_guides_that_know_latents_take_no_step():
    guide = dgp.guides.InducingPoint(model, latent=dgp.guides.Quadrature(300))
    found = dgp.project(dgp.Posterior(model, guide, PARAMS), KEY, *dgp.likelihoods.missing(PARTIAL), progress_bar=False)
    draws = found.guide.sample_posterior(KEY, found.params, *dgp.likelihoods.missing(PARTIAL), sample_shape=(2000,))[
        "w"
    ]
    np.testing.assert_allclose(draws.mean(0)[:, 0], by_quadrature(PARTIAL)[:, 0], atol=0.03)


@pytest.mark.slow
def test_wrong_calls():
    with pytest.raises(ValueError, match="project: expected a Posterior with a guide, got one with draws of MCMC"):
        dgp.project(dgp.Posterior(model, samples={"f": np.zeros((1, 3, 9))}), KEY, Y)
    with pytest.raises(ValueError, match="project: expected num_steps to be a positive integer, got 0"):
        dgp.project(dgp.Posterior(model, dgp.guides.InducingPoint(model), PARAMS), KEY, Y, num_steps=0)
