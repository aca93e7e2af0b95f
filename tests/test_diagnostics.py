"""Importance weights, leave-one-out, calibration and comparison, against closed forms."""

from functools import partial

import arviz_stats
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest
from arviz_base import from_dict
from dense import log_normal, rbf
from matplotlib.patches import StepPatch
from numpyro.infer import MCMC, NUTS, SVI, psis_diagnostic
from numpyro.infer.autoguide import AutoNormal
from programs import NOISE, X, Y, Z, random_params, shallow
from scipy.stats import norm

import numpyro_dgp as dgp
from numpyro_dgp import plots
from numpyro_dgp.diagnostics import (
    Simulated,
    comparison,
    coverage,
    khat,
    local_khat,
    loo,
    pareto_shape,
    pit,
    uniformity,
)
from numpyro_dgp.diagnostics.comparison import has_converged

few, few_y = X[::3], Y[::3]
x, y = np.asarray(few), np.asarray(few_y)
SD = 0.6  # no datum decides the posterior alone
exact = partial(shallow, Z=few, noise=SD)
rng = np.random.default_rng(0)


def optimum(z):
    """Features, and the optimal q(v) in closed form: precision I + A'A / s^2."""
    L = np.linalg.cholesky(rbf(z, z, 1.2, 0.7) + 1.2e-10 * np.eye(len(z)))
    A = np.linalg.solve(L, rbf(z, x, 1.2, 0.7)).T
    return A, np.eye(len(z)) + A.T @ A / SD**2


def fit_of(z, width=1.0):
    """The program with inducing points z and its optimal guide, ``width`` times as wide."""
    A, precision = optimum(np.asarray(z))
    mean = np.linalg.solve(precision, A.T @ y) / SD**2
    root = np.linalg.cholesky(np.linalg.inv(precision))
    program = partial(shallow, Z=z, noise=SD)
    params = {"g_auto_loc": jnp.array(mean), "g_auto_scale_tril": jnp.array(width * root)}
    return dgp.Posterior(program, dgp.guides.InducingPoint(program), params)


def leave_one_out(z):
    """Scores of every datum: its normalised density under the posterior from which its bound is taken."""
    A, precision = optimum(np.asarray(z))
    c = 1.2 - (A**2).sum(1)
    scores = []
    for n, a in enumerate(A):
        without = precision - np.outer(a, a) / SD**2
        mean = np.linalg.solve(without, A.T @ y - a * y[n]) / SD**2
        scores.append(norm(a @ mean, np.sqrt(a @ np.linalg.solve(without, a) + c[n] + SD**2)).logpdf(y[n]))
    return np.array(scores)


@pytest.fixture(scope="module")
def trees():
    key = jax.random.key(0)
    return {
        "exact": dgp.diagnostics.to_arviz(fit_of(few), key, few, few_y, num_samples=4000),
        "sparse": dgp.diagnostics.to_arviz(fit_of(Z[::2], 1.2), key, few, few_y, num_samples=4000),
        "narrow": dgp.diagnostics.to_arviz(fit_of(few, 0.3), key, few, few_y, num_samples=4000),
    }


def test_shapes_of_known_tails():
    u = rng.uniform(size=(20_000, 3))
    expected = np.array([0.3, 0.7, 1.2])
    np.testing.assert_allclose(pareto_shape(-expected * np.log(u)), expected, atol=0.12)
    assert pareto_shape(np.full(100, 3.0)) == -np.inf
    rounded = np.float32(20.0) + np.float32(1e-5) * rng.integers(0, 3, 100).astype(np.float32)
    assert pareto_shape(rounded) == -np.inf  # single precision: nothing but rounding
    of_many_rows = (-expected * np.log(u) - 2e5).astype(np.float32)
    np.testing.assert_allclose(pareto_shape(of_many_rows), expected, atol=0.12)
    with pytest.raises(ValueError, match=r"expected at least 25 weights, got shape \(24,\)"):
        pareto_shape(np.zeros(24))
    with pytest.raises(ValueError, match=r"expected log weights, no NaN"):
        pareto_shape(np.full(50, np.nan))


@pytest.mark.long
def test_shape_of_a_whole_fit(trees):
    """The exact posterior has equal weights, and they are the evidence; a narrow one has a heavy tail."""
    assert khat(trees["exact"]) < 0.5
    assert khat(trees["sparse"]) < 0.5
    assert khat(trees["narrow"]) > 0.7
    stats = trees["exact"].sample_stats
    evidence = log_normal(y, np.zeros(10), rbf(x, x, 1.2, 0.7) + SD**2 * np.eye(10))
    np.testing.assert_allclose(stats["lp"] - stats["log_q"], evidence, rtol=1e-6)


@pytest.mark.long
def test_shape_is_that_of_numpyro_where_nothing_is_local(key):
    """NumPyro's own diagnostic, from its traces of the same guide, and other draws."""
    posterior = fit_of(Z[::2], 0.8)
    tree = dgp.diagnostics.to_arviz(posterior, key, few, few_y, num_samples=8000)
    theirs = psis_diagnostic(key, posterior.params, posterior.model, posterior.guide, few, few_y, num_particles=8000)
    assert abs(khat(tree) - theirs) < 0.15
    assert khat(tree) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "z"), [("exact", few), ("sparse", Z[::2])])
def test_leave_one_out_is_the_closed_form(trees, name, z):
    score = loo(trees[name])
    assert score.pareto_k.max() < 0.7
    np.testing.assert_allclose(score.elpd_i, leave_one_out(z), atol=0.06)
    np.testing.assert_allclose(score.elpd, leave_one_out(z).sum(), atol=0.15)


def test_closed_form_is_that_of_the_process():
    """Where inducing points are the data: the textbook formula by the inverse of the covariance."""
    inverse = np.linalg.inv(rbf(x, x, 1.2, 0.7) + SD**2 * np.eye(10))
    variance = 1 / np.diag(inverse)
    textbook = norm(y - variance * (inverse @ y), np.sqrt(variance)).logpdf(y)
    np.testing.assert_allclose(leave_one_out(few), textbook, rtol=1e-5)


@pytest.mark.slow
def test_leave_one_out_of_chains_and_of_a_part_of_the_data(trees):
    tree = trees["exact"]
    chain = tree.copy()
    del chain["sample_stats"]  # the draws are exact, as those of a chain
    score = loo(chain)
    np.testing.assert_allclose(score.elpd_i, loo(tree).elpd_i, atol=0.03)
    with pytest.raises(ValueError, match=r"expected the tree of a fit, got one without densities of a guide"):
        khat(chain)
    part = loo(tree, observations=6, seed=1)
    assert part.subsample_size == 6
    assert abs(part.elpd - loo(tree).elpd) < 4 * part.subsampling_se
    np.testing.assert_allclose(loo(chain, observations=6, seed=1).elpd, part.elpd, atol=0.05)
    with pytest.raises(ValueError, match=r"expected at most as many observations as data, 10, got 11"):
        loo(tree, observations=11)
    with pytest.raises(ValueError, match=r"expected site= one of \['y'\], got 'z'"):
        loo(tree, site="z")
    del chain["log_likelihood_target"]
    with pytest.raises(ValueError, match=r"expected a tree from dgp.diagnostics.to_arviz"):
        loo(chain)


@pytest.mark.long
def test_stock_scores_of_chains(trees, key):
    """Where inducing points are the data, they are those of this package."""
    draws = jnp.array(trees["exact"].posterior["g"].to_numpy()[0])
    chain = dgp.diagnostics.to_arviz(dgp.Posterior(exact, samples={"g": draws}), key, few, few_y, num_samples=5)
    np.testing.assert_allclose(arviz_stats.loo(chain, pointwise=True).elpd_i, loo(chain).elpd_i, atol=1e-3)


def latent(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.9), dgp.Points(jnp.hstack([Z, jnp.sin(9 * Z)])))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(dgp.latent("w", X, 1)), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.long
def test_shapes_of_single_data(key):
    guide = dgp.guides.InducingPoint(latent)
    params = random_params(latent, guide, X, Y) | {"w_auto_loc": jnp.zeros((30, 1))}
    scales = jnp.where(jnp.arange(30) % 2, 1.0, 0.2)[:, None]  # every other datum has a proposal that is too narrow
    found = local_khat(dgp.Posterior(latent, guide, params | {"w_auto_scale": scales}), key, X, Y)["y"]
    assert found.shape == (1, 30)
    assert (found[0, 1::2] < 0.7).all()
    assert np.median(found[0, ::2]) > 0.7
    assert (local_khat(fit_of(few), key, few, few_y, num_globals=2)["y"] == np.full((2, 10), -np.inf)).all()
    with pytest.raises(ValueError, match=r"expected a fit with a guide, got draws of MCMC"):
        local_khat(dgp.Posterior(latent, samples={"g": jnp.zeros((2, 8))}), key, X, Y)


@pytest.mark.parametrize("draw", [rng.normal, lambda size: rng.poisson(2.0, size=size)])
def test_transforms_are_uniform_where_predictions_are_right(draw, key):
    u = pit(draw(size=(19, 5000)), draw(size=5000), key)
    assert uniformity(u) > 0.01
    assert uniformity(pit(2 * rng.normal(size=(19, 5000)), rng.normal(size=5000), key)) < 1e-6
    found = coverage(u)
    assert (np.abs(found.share - found.levels) < 4 * found.error).all()


def test_coverage_counts():
    found = coverage([0.0, 0.05, 0.5, 0.94, 0.96], [0.5, 0.9])
    np.testing.assert_allclose(found.share, [0.2, 0.6])
    np.testing.assert_allclose(found.error, np.sqrt([0.05, 0.018]))
    with pytest.raises(ValueError, match=r"expected u in \[0, 1\] and levels in \(0, 1\)"):
        coverage([0.5], [1.0])
    with pytest.raises(ValueError, match=r"expected u in \[0, 1\]"):
        coverage([1.5])


def test_transforms_refuse_bad_input(key):
    with pytest.raises(ValueError, match=r"expected draws of shape \(S, \.\.\.\) over observations of shape \(3,\)"):
        pit(np.zeros((5, 4)), np.zeros(3), key)
    with pytest.raises(ValueError, match=r"expected finite observations y, got 1"):
        pit(np.zeros((5, 2)), np.array([0.0, np.nan]), key)
    with pytest.raises(ValueError, match=r"expected at least 50 rows for 10 bins, got shape \(49,\)"):
        uniformity(np.zeros(49))


@pytest.mark.long
def test_transforms_of_a_fit_on_data_of_its_own(key):
    """Drawn from the exact process given the training data, test data have uniform transforms."""
    posterior = fit_of(few)
    new = jnp.linspace(-2, 2, 2000)[:, None]
    truth = posterior.using(num_samples=1).sample(jax.random.key(9), new)[0]
    u = pit(posterior.using(num_samples=99).sample(key, new), truth, key)
    assert uniformity(u) > 0.01


def test_figure_of_transforms():
    figure = plots.calibration(np.linspace(0.001, 0.999, 200), bins=10)
    (ax,) = figure.axes
    bars = [patch.get_height() for patch in ax.patches if patch.get_width() < 0.5]
    np.testing.assert_allclose(bars, 20, atol=1)
    assert ax.get_ylabel() == "data"


def test_figure_of_ranks():
    """Bars count ranks, the band is binomial, and the tests are those of the columns."""
    narrow = 49.5 + 49.5 * np.sign(rng.normal(size=200)) * rng.beta(4, 1, size=200)
    found = Simulated.of(
        {"noise": rng.integers(0, 100, 200), "g": np.stack([np.rint(narrow), np.arange(200) // 2], -1)}, 99
    )
    assert found.uniform["noise"] > 0.01
    assert found.uniform["g"][0] < 1e-6 < 0.99 < found.uniform["g"][1]
    noise, g = plots.ranks(found).axes
    (bars,) = [patch for patch in noise.patches if isinstance(patch, StepPatch)]
    np.testing.assert_array_equal(bars.get_data().values, np.histogram(found.ranks["noise"], np.arange(0, 101, 10))[0])
    lines = [patch for patch in g.patches if isinstance(patch, StepPatch)]
    np.testing.assert_array_equal(lines[1].get_data().values, 20)
    band = next(patch for patch in g.patches if not isinstance(patch, StepPatch))
    assert (band.get_y(), band.get_y() + band.get_height()) == (12, 29)  # quantiles of B(200, 0.1)
    assert g.get_title().startswith("g, p = ")
    (again,) = plots.ranks(found, axes={"g": plt.subplots()[1]}).axes
    assert again.get_title() == g.get_title()
    with pytest.raises(ValueError, match=r"expected axes for some of the sites \['noise', 'g'\], got \['h'\]"):
        plots.ranks(found, axes={"h": again})
    with pytest.raises(ValueError, match=r"expected ranks from 0 to 99, got 0 to 100 at site 'g'"):
        Simulated.of({"g": np.arange(101)}, 99)


@pytest.mark.long
def test_guides_of_one_program_are_not_ranked_by_unreliable_scores(key):
    """A guide that is far too narrow has the best leave-one-out score, of weights that are all unreliable."""
    guides = {"narrow": fit_of(few, width=0.05), "exact": fit_of(few), "wide": fit_of(few, width=1.3)}
    found = dgp.diagnostics.compare(exact, guides, (few, few_y), key=key, num_samples=200)
    assert found.table.loc["narrow", "high_k"] > 0.5
    assert found.table["loo"].idxmax() == "narrow"
    assert list(found.ranking.index) == ["exact", "wide", "narrow"]
    assert list(found.ranking["rank"]) == [0, 1, 2]
    assert "weight" not in found.ranking or np.isnan(float(found.ranking.loc["narrow", "weight"]))


def test_ranking_is_by_densities_and_bounds():
    def scores(*names):
        # the best score is that of "bad"
        tree = {name: rng.normal(0.0 if name == "bad" else -9.0, 0.1, size=(1, 400, 6)) for name in names}
        trees = {
            name: from_dict({"posterior": {"a": v[..., 0]}, "log_likelihood": {"y": v}}) for name, v in tree.items()
        }
        return {name: arviz_stats.loo(tree, pointwise=True) for name, tree in trees.items()}

    table = pd.DataFrame(
        {"bound": [-3.0, -7.0, -5.0, np.nan], "khat": [1.5, 0.3, 0.4, np.nan], "high_k": [1.0, 0.0, 0.1, 0.0]},
        index=["bad", "worse", "good", "mcmc"],
    )
    found = comparison._ranking(table, scores(*table.index))
    assert list(found.index) == ["mcmc", "good", "worse", "bad"]
    assert np.isnan(found.loc["bad", "weight"])
    np.testing.assert_allclose(found["weight"].sum(), 1.0)
    tested = comparison._ranking(table.assign(test_log_density=[0.0, -1.0, -2.0, -3.0]), scores(*table.index))
    assert list(tested.index) == ["worse", "good", "mcmc", "bad"]
    two = table.loc[["bad", "good"]]
    assert list(comparison._ranking(two, scores("bad", "good")).columns) == ["rank", "bound", "khat", "high_k"]
    assert comparison._ranking(table.loc[["bad"]], scores("bad")) is None


@pytest.mark.slow
def test_intervals_of_labels_of_classes_are_not_counted(key):
    def classes(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=3)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Categorical(logits=v)), obs=y)

    labels = jnp.arange(len(few)) % 3
    posterior = dgp.Posterior(classes, samples={"f": jnp.zeros((2, 3, len(Z)))})
    found = comparison._on_test(posterior, key, (few, labels), 2, 0.9)
    assert np.isnan(found["coverage"])
    assert np.isnan(found["rmse"])
    assert np.isfinite(found["test_log_density"])


@pytest.mark.long
def test_comparison_of_exact_fits(key):
    """Columns against closed forms where there are any; a guide that comes with its fit, and one to be fitted."""
    guide = dgp.guides.InducingPoint(exact)
    result = dgp.fit(
        SVI(exact, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.adam(0.01)), dgp.ELBO()),
        key,
        2,
        few,
        few_y,
        progress_bar=False,
    )
    guides = {"pair": (guide, result), "adam": dgp.guides.InducingPoint(exact)}
    found = dgp.diagnostics.compare(
        exact, guides, (few, few_y), key=key, test=(X, Y), num_steps=3, num_samples=1000, optim=optax.adam(0.01)
    )  # fmt: skip
    table = found.table
    evidence = log_normal(y, np.zeros(10), rbf(x, x, 1.2, 0.7) + SD**2 * np.eye(10))
    np.testing.assert_allclose(table.loc["pair", "bound"], evidence, rtol=1e-5)
    assert table.loc["adam", "bound"] < evidence - 1
    assert table.loc["pair", "khat"] < 0.5
    np.testing.assert_allclose(table.loc["pair", "loo"], leave_one_out(few).sum(), atol=0.4)
    inputs = np.asarray(X)
    gain = np.linalg.solve(rbf(x, x, 1.2, 0.7) + SD**2 * np.eye(10), rbf(x, inputs, 1.2, 0.7)).T
    mean, variance = gain @ y, 1.2 - (gain * rbf(inputs, x, 1.2, 0.7)).sum(1) + SD**2
    density = norm(mean, np.sqrt(variance)).logpdf(np.asarray(Y))
    np.testing.assert_allclose(table.loc["pair", "test_log_density"], density.mean(), rtol=1e-5)
    np.testing.assert_allclose(table.loc["pair", "rmse"], np.sqrt(np.mean((mean - np.asarray(Y)) ** 2)), rtol=1e-5)
    inside = np.mean(np.abs(norm(mean, np.sqrt(variance)).cdf(np.asarray(Y)) - 0.5) < 0.45)
    assert abs(table.loc["pair", "coverage"] - inside) < 0.1
    assert table.loc["adam", "seconds"] > 0
    assert np.isnan(table.loc["pair", "seconds"])
    assert (table["parameters"] == 10 + 100).all()
    assert sorted(found.ranking.index) == ["adam", "pair"]
    scores = ["bound", "khat", "loo", "high_k"]
    assert not table.loc["pair", scores].isna().any()
    figure = plots.comparison(found)
    assert [ax.get_xlabel() for ax in figure.axes] == ["bound, nats", "leave-one-out score, nats", "Pareto k", "step"]


@pytest.mark.long
def test_comparison_with_chains_and_autoguides(key):
    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        f = dgp.gp("f", dgp.kernels.RBF(0.3, 0.9), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.1))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)

    mcmc = MCMC(NUTS(dgp.for_mcmc(model)), num_warmup=300, num_samples=300, progress_bar=False)
    mcmc.run(key, few, few_y)
    guides = {
        "points": dgp.guides.InducingPoint(model, other=dgp.guides.Normal()),
        "mean field": dgp.guides.MeanField(model),
        "normal": AutoNormal(model),
    }
    found = dgp.diagnostics.compare(
        model, guides, (few, few_y), key=key, test=(X, Y), mcmc=mcmc, num_steps=1000, num_samples=200
    )
    table = found.table
    assert np.isnan(table.loc["mcmc", "bound"])
    assert (
        np.isfinite(table.drop(columns=["bound", "bound_se", "khat", "seconds", "parameters", "converged"])).all().all()
    )
    assert abs(table.loc["points", "loo"] - table.loc["mcmc", "loo"]) < 1.5
    assert (table["test_log_density"] < table.loc["mcmc", "test_log_density"] + 0.05).all()


def test_comparison_refuses_bad_input(key):
    with pytest.raises(ValueError, match=r"expected data=\(X, y\)"):
        dgp.diagnostics.compare(exact, {"a": fit_of(few)}, few, key=key)
    with pytest.raises(ValueError, match=r"expected guides=.*got neither"):
        dgp.diagnostics.compare(exact, {}, (few, few_y), key=key)
    chain = dgp.Posterior(exact, samples={"g": jnp.zeros((2, 10))})
    with pytest.raises(ValueError, match=r"expected fits in guides=, got draws of MCMC"):
        dgp.diagnostics.compare(exact, {"a": chain}, (few, few_y), key=key)


@pytest.mark.parametrize(
    ("losses", "converged"),
    [
        (np.exp(-np.linspace(0, 20, 400)), True),
        (50 - 20 * np.linspace(0, 1, 400), False),
        (50 + np.random.default_rng(0).normal(0, 30, 400), True),
        (100 + 50 * np.exp(-np.linspace(0, 2, 400)), False),
    ],
)
def test_convergence_of_a_fit(losses, converged):
    assert has_converged(losses) is converged
    assert np.isnan(has_converged(None))
    assert np.isnan(has_converged(losses[:50]))
