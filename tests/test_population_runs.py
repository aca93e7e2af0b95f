"""Several runs of sequential Monte Carlo: each is one of its own, and what is made of all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from small_designs import family
from test_population import BLOCKS, draw, exact, log_ratios

from numpyro_dgp.depth.fit_best import fit_best, with_further_runs
from numpyro_dgp.depth.integrated_fit import fit_integrated
from numpyro_dgp.mcmc.population import evidence_of_runs, independent_runs, populate

KEY = jax.random.key(0)
X = jnp.linspace(0, 1, 12)[:, None]
STEP = jnp.where(X[:, 0] > 0.5, 1.0, -1.0)


@pytest.mark.long
def test_each_run_is_one_of_its_own_with_a_share_of_points_and_seeds():
    seeds = jax.random.split(jax.random.key(1), 302)
    found = independent_runs(log_ratios, draw, BLOCKS, KEY, seeds, 20, 2, 3)
    assert found.points.shape == (3, 7, 2)  # a third of twenty, rounded up
    for r, key in enumerate(jax.random.split(KEY, 3)):
        alone = populate(log_ratios, key, seeds[100 * r : 100 * (r + 1)], draw, BLOCKS, 7, 2)
        np.testing.assert_allclose(found.points[r], alone.points, rtol=1e-4)
        np.testing.assert_allclose(found.log_evidence[r], alone.log_evidence, rtol=1e-4)
    assert independent_runs(log_ratios, draw, BLOCKS, KEY, seeds, 2, 2, 3).points.shape == (2, 1, 2)


def test_the_evidence_of_runs_is_their_mean():
    log_evidence, error = evidence_of_runs(np.log([1.0, 2.0, 6.0]), np.zeros(3))
    assert log_evidence == pytest.approx(np.log(3.0))
    assert error == pytest.approx(np.std([1.0, 2.0, 6.0], ddof=1) / np.sqrt(3) / 3.0)
    assert evidence_of_runs(np.full(4, -2.0), np.full(4, 0.04)) == (pytest.approx(-2.0), pytest.approx(0.1))
    assert evidence_of_runs(np.array([-5.0]), np.array([0.09])) == (pytest.approx(-5.0), pytest.approx(0.3))
    assert evidence_of_runs(np.array([-np.inf, 0.0]), np.zeros(2))[0] == pytest.approx(-np.log(2.0))


@pytest.mark.long
def test_the_evidence_of_runs_is_that_of_algebra():
    keys, log_integral = jax.random.split(jax.random.key(2), 30), exact()[2]

    def run(key):
        start, key = jax.random.split(key)
        return independent_runs(log_ratios, draw, BLOCKS, key, jax.random.split(start, 6000), 120, 4, 3)

    found = jax.jit(jax.vmap(run))(keys)
    pairs = zip(*(np.asarray(a, float) for a in (found.log_evidence, found.variance)), strict=True)
    values, errors = np.array([evidence_of_runs(*pair) for pair in pairs]).T
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() + values.var() / 2 - log_integral) < 4 * error
    assert 0.4 < np.sqrt(np.mean(errors**2)) / values.std(ddof=1) < 2.5


@pytest.mark.long
def test_a_fit_goes_on_from_where_it_ended():
    with jax.enable_x64(True):
        x, y = (jnp.asarray(np.asarray(a), float) for a in (X, STEP))
        model = family(2, x)
        fit = fit_integrated(model, KEY, (x, y), 4, 1, 1, False)
        going_on = fit_integrated(model, KEY, (x, y), 2, 1, 1, False, fit)
    assert going_on.ended.log_evidence.shape == (1,)
    # the same data again: nothing is added
    np.testing.assert_allclose(going_on.ended.log_evidence, fit.ended.log_evidence, atol=1e-6)


@pytest.mark.long
def test_half_of_the_draws_are_of_further_runs():
    x, y, model = X, STEP, family(2, X)
    one = fit_integrated(model, KEY, (x, y), 6, 2, 1, False)
    three = with_further_runs(one, model, jax.random.key(1), (x, y), 6, 2, 3)
    others = fit_integrated(model, jax.random.key(1), (x, y), 2, 2, 2, False)
    assert len(others.ended.log_evidence) == 2
    for name, u in three.posterior.samples.items():
        own, added = one.posterior.samples[name], others.posterior.samples[name]
        np.testing.assert_array_equal(u, jnp.concatenate([own[jnp.array([0, 2, 5])], added[jnp.array([0, 2, 3])]]))
    # what is said of the program, and where others go on, is of the first run
    assert three._replace(posterior=None) == one._replace(posterior=None)
    assert with_further_runs(one, model, KEY, (x, y), 6, 2, 1) is one
    at_the_mode = fit_integrated(family(1, X), KEY, (x, y), 6, 1, 1, True)
    assert with_further_runs(at_the_mode, family(1, X), KEY, (x, y), 6, 1, 3) is at_the_mode


@pytest.mark.long
def test_there_may_be_more_runs_than_draws():
    one = fit_integrated(family(2, X), KEY, (X, STEP), 3, 1, 1, False)
    found = with_further_runs(one, family(2, X), KEY, (X, STEP), 3, 1, 5)
    assert len(found.posterior.samples["noise"]) == 3


@pytest.mark.long
def test_programs_with_a_weight_have_further_runs():
    """A step is worth a layer; what one layer says alone is not run again."""
    options = {"depths": (1, 2), "num_draws": 40, "num_sweeps": 4}
    with jax.enable_x64(True):
        x, y = (jnp.asarray(np.asarray(a), float) for a in (X, STEP))
        one = fit_best(lambda depth: family(depth, x), KEY, x, y, num_runs=1, **options)
        three = fit_best(lambda depth: family(depth, x), KEY, x, y, num_runs=3, **options)
    assert one.weights[2] > 0.5
    assert (three.weights, three.held_out) == (one.weights, one.held_out)  # by the first run
    assert three.parts[2].log_evidence == one.parts[2].log_evidence
    noise, first = three.parts[2].posterior.samples["noise"], one.parts[2].posterior.samples["noise"]
    assert len(noise) == 40
    np.testing.assert_array_equal(noise[:20], first[np.linspace(0, 39, 20).round().astype(int)])
    assert not np.isin(noise[20:], first).any()
    smooth = fit_best(lambda depth: family(depth, X), KEY, X, jnp.sin(3 * X[:, 0]), num_runs=3, **options)
    assert smooth.weights == {1: 1.0, 2: 0.0}
    assert len(smooth.parts[2].posterior.samples["noise"]) == 40


@pytest.mark.long
def test_a_run_that_found_nothing_has_no_share():
    """Of whose draws at the start none had a finite likelihood."""

    def often_lost(X, y=None):
        """Of a thousand draws of the prior few are finite, so that some runs of many find none."""
        u = numpyro.sample("u", dist.Uniform())
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(0.0, jnp.where(u < 0.004, 1.0, jnp.nan)), obs=y)

    several = fit_integrated(often_lost, KEY, (X, STEP), 2, 1, 10, False)
    lost = ~np.isfinite(several.ended.log_evidence)
    assert 0 < lost.sum() < 10
    assert np.isfinite([several.log_evidence, several.error]).all()
    first = fit_integrated(often_lost, jax.random.key(3), (X, STEP), 40, 1, 1, False)
    joined = with_further_runs(first, often_lost, KEY, (X, STEP), 22, 1, 11)
    assert len(joined.posterior.samples["u"]) == 11 + min(11, 2 * (10 - lost.sum()))
    assert (joined.posterior.samples["u"] < 0.004).all()
