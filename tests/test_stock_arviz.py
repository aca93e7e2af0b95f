"""Stock calls of ArviZ on trees of guides and chains, against exact posteriors.

One layer under Gaussian noise: given whitened inducing values v, y_n has the mean a_n v and the variance c_n + s^2, so
that posteriors and leave-one-out densities are Gaussian.
"""

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from dense import rbf
from programs import X, Y, Z, shallow
from scipy.stats import norm

import numpyro_dgp as dgp

x, y = np.asarray(X)[::3], np.asarray(Y)[::3]
SD = 0.6
KEY = jax.random.key(0)


def features(z):
    """a (N, M) and c (N,) of the layer of ``programs.shallow``."""
    L = np.linalg.cholesky(rbf(z, z, 1.2, 0.7) + 1.2e-10 * np.eye(len(z)))
    A = np.linalg.solve(L, rbf(z, x, 1.2, 0.7)).T
    return A, 1.2 - (A**2).sum(1)


def gaussian(A, noise, kept=slice(None)):
    """Mean and covariance of p(v | y) with variances ``noise`` (N,) given v."""
    scaled = A[kept].T / noise[kept]
    covariance = np.linalg.inv(np.eye(A.shape[1]) + scaled @ A[kept])
    return covariance @ (scaled @ y[kept]), covariance


def left_out(A, c):
    """log p(y_n | y_-n) where every y has the variance c_n + s^2 given v."""
    scores = []
    for n in range(len(y)):
        mean, covariance = gaussian(A, c + SD**2, np.arange(len(y)) != n)
        scores.append(norm(A[n] @ mean, np.sqrt(A[n] @ covariance @ A[n] + c[n] + SD**2)).logpdf(y[n]))
    return np.array(scores)


def slope(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(b * X[:, 0], SD), obs=y)


PRECISION = 1 + (x[:, 0] ** 2).sum() / SD**2
MEAN = (x[:, 0] @ y) / SD**2 / PRECISION


def tree_of_slope(shift=0.0, width=1.0, num_samples=2000):
    """The tree of a guide whose q(b) is the posterior, moved and widened in units of its scale."""

    def guide(X, y=None):
        numpyro.sample("b", dist.Normal(MEAN + shift * PRECISION**-0.5, width * PRECISION**-0.5))

    return dgp.diagnostics.to_arviz(dgp.Posterior(slope, guide, {}), KEY, x, y, num_samples=num_samples)


def test_draws_of_a_guide_are_resampled_where_its_weights_are_good():
    found = tree_of_slope(0.8, 1.3)
    attributes, b = found.log_likelihood.attrs, found.posterior["b"].to_numpy()
    assert attributes["khat"] == dgp.diagnostics.khat(found) < 0.5
    assert len(np.unique(b)) < 1700
    error = (PRECISION * attributes["ess"]) ** -0.5
    assert abs(b.mean() - MEAN) < 4 * error
    np.testing.assert_allclose(b.std(), PRECISION**-0.5, rtol=0.1)
    # Duplicates are neighbours, so that ArviZ's effective sample size counts them once.
    np.testing.assert_allclose(arviz_stats.ess(found.posterior, method="mean")["b"], attributes["ess"], rtol=0.1)
    assert attributes["reff"] == attributes["ess"] / 2000
    exact = [
        norm(m := s * (x[:, 0] @ y - x[n, 0] * y[n]) / SD**2 * x[n, 0], np.sqrt(x[n, 0] ** 2 * s + SD**2)).logpdf(y[n])
        for n in range(len(y))
        if (s := 1 / (PRECISION - x[n, 0] ** 2 / SD**2))
    ]
    for score in (arviz_stats.loo(found, pointwise=True, reff=attributes["reff"]), dgp.diagnostics.loo(found)):
        np.testing.assert_allclose(score.elpd_i, exact, atol=0.02)
        assert (score.pareto_k < score.good_k).all()
    u = arviz_stats.loo_pit(found)["y"].to_numpy()
    assert ((u > 0) & (u < 1)).all()


@pytest.mark.parametrize("moved", [{}, {"shift": 0.8, "width": 1.3}])
def test_sensitivity_is_that_of_the_conjugate_posterior(moved):
    """Kallioinen et al. (2024): prior and likelihood to the power alpha, distances between distribution functions."""
    found = tree_of_slope(**moved, num_samples=4000)
    b = found.posterior["b"].to_numpy()

    def distance(grid, P, Q):
        def divergence(P, Q):
            return (P * np.log2(2 * P / (P + Q))).sum() + 0.5 / np.log(2) * (Q - P).sum()

        return np.sqrt((divergence(P, Q) + divergence(Q, P)) / (P + Q).sum())

    def sensitivity(posterior):
        gradients = []
        for alpha in (0.99, 1.01):
            both = []
            for sign in (1, -1):
                grid = np.sort(sign * np.linspace(b.min(), b.max(), 20_001))
                P, Q = (norm(sign * m, s).cdf(grid) for m, s in (posterior(1.0), posterior(alpha)))
                both.append(distance(grid, P, Q))
            gradients.append(max(both) / abs(np.log2(alpha)))
        return np.mean(gradients)

    def prior(alpha):
        precision = alpha + PRECISION - 1
        return MEAN * PRECISION / precision, precision**-0.5

    def likelihood(alpha):
        precision = 1 + alpha * (PRECISION - 1)
        return alpha * MEAN * PRECISION / precision, precision**-0.5

    table = arviz_stats.psense_summary(found, round_to=9)
    for name, scaled in {"prior": prior, "likelihood": likelihood}.items():
        np.testing.assert_allclose(table.loc["b", name], sensitivity(scaled), rtol=0.1)


def draws_of(z, noise, num_samples):
    """From the posterior with variances ``noise`` given v."""
    mean, covariance = gaussian(features(np.asarray(z))[0], noise)
    return mean, np.random.default_rng(0).multivariate_normal(mean, covariance, num_samples)


def tree_of_chains(z, noise=SD, num_samples=4000):
    """Of draws from the posterior that NUTS samples, whose log density has -c_n / 2 s^2 in place of its variance."""
    program = lambda X, y=None: shallow(X, y, Z=z, noise=noise)  # noqa: E731
    samples = {"g": jnp.array(draws_of(z, np.full(len(y), noise**2), num_samples)[1])}
    return dgp.diagnostics.to_arviz(dgp.Posterior(program, samples=samples), KEY, x, y, num_samples=5)


@pytest.mark.slow
def test_chains_with_inducing_points_are_resampled():
    """Prior times normalised densities: the posterior with variances c_n + s^2, and its leave-one-out scores."""
    z = Z[::2]
    A, c = features(np.asarray(z))
    found = tree_of_chains(z)
    attributes = found.log_likelihood.attrs
    assert 100 < attributes["ess"] < 3900
    mean, covariance = gaussian(A, c + SD**2)
    v = found.posterior["g"].to_numpy()[0]
    before = gaussian(A, np.full(len(y), SD**2))[0]
    error = np.sqrt(np.diag(covariance) / attributes["ess"])
    assert (np.abs(v.mean(0) - mean) < 4 * error).all()
    assert np.abs(v.mean(0) - before).max() > 8 * error.max()
    stock = arviz_stats.loo(found, pointwise=True)
    np.testing.assert_allclose(stock.elpd_i, left_out(A, c), atol=0.06)
    # The package's own is that of the posterior that was sampled.
    scores = []
    for n in range(len(y)):
        mean, covariance = gaussian(A, np.full(len(y), SD**2), np.arange(len(y)) != n)
        scores.append(norm(A[n] @ mean, np.sqrt(A[n] @ covariance @ A[n] + c[n] + SD**2)).logpdf(y[n]))
    np.testing.assert_allclose(dgp.diagnostics.loo(found).elpd_i, scores, atol=0.06)
    with pytest.raises(ValueError, match="one without densities of a guide"):
        dgp.diagnostics.khat(found)


@pytest.mark.slow
def test_chains_too_far_from_the_normalised_posterior_stay():
    found = tree_of_chains(Z[::2], noise=0.1)
    assert "log_likelihood" not in found.children
    reason = found.log_likelihood_uncorrected.attrs["reason"]
    assert reason.startswith("draws of chains of log_likelihood_target, whose importance weights")
    assert "log_prior" not in found.children  # a program without hyperparameters
    with pytest.raises(TypeError, match="log likelihood not found"):
        arviz_stats.loo(found)
    assert np.isfinite(dgp.diagnostics.loo(found).elpd)
