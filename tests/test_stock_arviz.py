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
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import potential_energy
from programs import X, Y, Z, shallow
from scipy.stats import norm

import numpyro_dgp as dgp
from numpyro_dgp.diagnostics import left_out as left_out_scores

x, y = np.asarray(X)[::3], np.asarray(Y)[::3]
SD = 0.6
KEY = jax.random.key(0)


def features(z):
    """a (N, M) and c (N,) of the layer of ``programs.shallow``."""
    L = np.linalg.cholesky(rbf(z, z, 1.2, 0.7) + 1.2e-10 * np.eye(len(z)))
    A = np.linalg.solve(L, rbf(z, x, 1.2, 0.7)).T
    return A, 1.2 - (A**2).sum(1)


def gaussian(A, noise, kept=slice(None), y=y):
    """Mean and covariance of p(v | y) with variances ``noise`` (N,) given v."""
    scaled = A[kept].T / noise[kept]
    covariance = np.linalg.inv(np.eye(A.shape[1]) + scaled @ A[kept])
    return covariance @ (scaled @ y[kept]), covariance


def left_out(A, c, y=y, folds=range(10)):
    """log p(y_n | y outside of the fold of n), where every y has the variance c_n + s^2 given v."""
    scores, folds = [], np.asarray(folds)
    for n in range(len(y)):
        mean, covariance = gaussian(A, c + SD**2, folds != folds[n], y)
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
        norm(s * (x[:, 0] @ y - x[n, 0] * y[n]) / SD**2 * x[n, 0], np.sqrt(x[n, 0] ** 2 * s + SD**2)).logpdf(y[n])
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


@pytest.mark.long
def test_chains_are_resampled_one_by_one():
    """What the sampler says of a draw follows it; its energies stay in order, as ``arviz_stats.bfmi`` needs them."""
    program = lambda X, y=None: shallow(X, y, Z=Z[::2], noise=SD)  # noqa: E731
    kernel = NUTS(dgp.for_mcmc(program, collapse=False))
    mcmc = MCMC(kernel, num_warmup=100, num_samples=200, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(KEY, x, y, extra_fields=("energy", "num_steps"))
    found = dgp.diagnostics.to_arviz(mcmc, KEY, x, y, num_samples=5)
    raw, fields = mcmc.get_samples(group_by_chain=True)["g"], mcmc.get_extra_fields(group_by_chain=True)
    np.testing.assert_array_equal(found.sample_stats["energy"], fields["energy"])
    assert "log_weight" in found.sample_stats
    for chain in range(2):
        drawn = found.posterior["g"].to_numpy()[chain]
        order = [int(np.flatnonzero((raw[chain] == v).all(-1))[0]) for v in drawn]
        assert order == sorted(order)
        moved = [(raw[chain] == v).all(-1).sum() == 1 for v in drawn]  # a chain may stay where it is
        steps = fields["num_steps"][chain][np.array(order)]
        np.testing.assert_array_equal(found.sample_stats["n_steps"][chain][moved], steps[np.array(moved)])
    sizes = arviz_stats.ess(found.posterior.to_dataset(), method="mean")["g"].to_numpy()
    assert 0.5 < found.log_likelihood.attrs["ess"] / sizes.mean() < 2


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


@pytest.fixture(scope="module")
def outlier():
    """A tree in which a datum decides the posterior, its fit and its data."""
    from numpyro_dgp.guides import Collapsed

    def program(X, y=None):
        return shallow(X, y, Z=x, noise=SD)

    def fit(X, y):
        return dgp.Posterior(program, Collapsed(program).on(X, y), {})

    odd = y + 2.0 * (np.arange(len(y)) == 4)
    return fit, odd, dgp.diagnostics.to_arviz(fit(x, odd), KEY, x, odd, num_samples=2000)


@pytest.mark.slow
def test_refits_are_exact(outlier):
    """Without each row, one layer with the data as inducing inputs has a closed form."""
    fit, odd, tree = outlier
    wrapper = dgp.diagnostics.refits(tree, fit, KEY, x, odd)
    score = dgp.diagnostics.loo(tree)
    bad = (score.pareto_k > 0.7).to_numpy()
    assert 0 < bad.sum() < 4
    found = arviz_stats.reloo(wrapper, score, k_threshold=0.7, pointwise=True)
    np.testing.assert_allclose(found.elpd_i[bad], left_out(*features(x), odd)[bad], atol=1e-6)
    folds = np.array([1, 1, 2, 2, 2, 2, 1, 1, 2, 1])
    found = arviz_stats.loo_kfold(tree, wrapper, folds=folds, pointwise=True)
    np.testing.assert_allclose(found.elpd_i, left_out(*features(x), odd, folds), atol=1e-6)


@pytest.mark.slow
def test_moments_of_draws_without_a_datum_are_matched(outlier):
    fit, odd, tree = outlier
    before = dgp.diagnostics.loo(tree)
    bad = (before.pareto_k > before.good_k).to_numpy()
    assert bad.any()
    found = dgp.diagnostics.loo_moment_match(before, tree, fit(x, odd), KEY, x, odd)
    exact = left_out(*features(x), odd)
    assert np.abs(before.elpd_i - exact).max() > 0.3
    assert found.pareto_k.max() < found.good_k
    np.testing.assert_allclose(found.elpd_i[bad], exact[bad], atol=0.04)
    np.testing.assert_array_equal(found.elpd_i[~bad], before.elpd_i[~bad])
    np.testing.assert_allclose(found.elpd, found.elpd_i.sum())
    assert np.isnan(found.log_weights[bad]).all()
    partial = dgp.diagnostics.loo(tree, observations=3)
    with pytest.raises(ValueError, match=r"expected a score of dgp.diagnostics.loo\(tree\), of all data, got 3 data"):
        dgp.diagnostics.loo_moment_match(partial, tree, fit(x, odd), KEY, x, odd)


@pytest.mark.slow
def test_moments_are_matched_to_the_posterior_that_was_sampled():
    """Chains under few inducing points and little noise, whose draws are not those of normalised densities."""
    sd = 0.15
    program = lambda X, y=None: shallow(X, y, Z=Z[::2], noise=sd)  # noqa: E731
    mean, draws = draws_of(Z[::2], np.full(len(y), sd**2), 2000)
    posterior = dgp.Posterior(program, samples={"g": jnp.array(draws)})
    tree = dgp.diagnostics.to_arviz(posterior, KEY, x, y, num_samples=5)
    assert "log_likelihood_uncorrected" in tree.children
    score = dgp.diagnostics.loo(tree)
    found = dgp.diagnostics.loo_moment_match(score, tree, posterior, KEY, x, y)
    A, c = features(np.asarray(Z[::2]))
    exact = []
    for n in range(len(y)):
        mean, covariance = gaussian(A, np.full(len(y), sd**2), np.arange(len(y)) != n)
        exact.append(norm(A[n] @ mean, np.sqrt(A[n] @ covariance @ A[n] + c[n] + sd**2)).logpdf(y[n]))
    bad = (score.pareto_k > score.good_k).to_numpy()
    assert bad.any()
    assert found.pareto_k.max() < found.good_k
    np.testing.assert_allclose(found.elpd_i[bad], np.array(exact)[bad], atol=0.1)


def noisy_slope(X, y=None):
    sd = numpyro.sample("sd", dist.LogNormal(-1.0, 0.5))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(b * X[:, 0], sd), obs=y)


@pytest.mark.slow
def test_density_on_the_unconstrained_scale_is_numpyros():
    rng = np.random.default_rng(0)
    samples = {"sd": np.exp(rng.normal(-0.5, 0.1, 30)), "b": rng.normal(0.8, 0.1, 30)}
    posterior = dgp.Posterior(noisy_slope, samples=samples)
    tree = dgp.diagnostics.to_arviz(posterior, KEY, x, y, num_samples=2, local_samples=1)
    tree["log_likelihood"] = tree.get("log_likelihood", tree.get("log_likelihood_uncorrected"))
    u, densities = left_out_scores._densities(tree, "y", posterior, KEY, 1, (x, y), {})
    found = densities(u + 0.1)
    for s in range(3):
        free = dict(zip(("sd", "b"), u[s] + 0.1, strict=True))
        np.testing.assert_allclose(found.fitted[s], -potential_energy(noisy_slope, (x, y), {}, free), rtol=1e-6)
    np.testing.assert_array_equal(found.drawn, found.fitted)
    exact = norm(samples["b"][:, None] * x[:, 0], samples["sd"][:, None]).logpdf(y)
    np.testing.assert_allclose(densities(u).predictive, exact, rtol=1e-6)
    prior = norm(-1.0, 0.5).logpdf(np.log(samples["sd"])) - np.log(samples["sd"])
    np.testing.assert_allclose(tree.log_prior["sd"][0], prior, rtol=1e-6)
