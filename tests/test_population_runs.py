"""Several runs of sequential Monte Carlo: each is one of its own, and what is made of all of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from small_designs import family
from test_population import BLOCKS, draw, exact, log_ratios

from numpyro_dgp.deepening.depth_weights import stacking_weights
from numpyro_dgp.deepening.fit_best import fit_best
from numpyro_dgp.deepening.integrated_fit import fit_integrated
from numpyro_dgp.deepening.left_out import left_out
from numpyro_dgp.deepening.weighed_runs import runs_by_evidence, runs_by_rows_left_out, with_further_runs
from numpyro_dgp.inference.population import populate
from numpyro_dgp.inference.population_runs import evidence_of_runs, independent_runs, points_by_weights

KEY = jax.random.key(0)
X = jnp.linspace(0, 1, 12)[:, None]
STEP = jnp.where(X[:, 0] > 0.5, 1.0, -1.0)


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


@pytest.mark.slow
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


def test_points_are_taken_in_proportion_to_the_weights_of_runs():
    np.testing.assert_array_equal(points_by_weights(np.full(3, 1 / 3), 12, 12), np.arange(12))
    chosen = points_by_weights(np.array([0.75, 0.0, 0.25]), 8, 12)
    assert ((chosen < 4) == (np.arange(8) < 6)).all()
    assert (chosen[6:] >= 8).all()
    assert len(set(chosen)) == 6  # all four of the first run, and two of the last
    assert len(points_by_weights(np.array([1.0]), 5, 400)) == 5


def test_a_fit_has_the_runs_that_its_weights_name():
    with jax.enable_x64(True):
        x, y = (jnp.asarray(np.asarray(a), float) for a in (X, STEP))
        model = family(2, x)
        fit = fit_integrated(model, KEY, (x, y), 4, 1, 3, False)
        before = fit.ended
        assert before.log_evidence.shape == (3,)
        assert fit.log_evidence == evidence_of_runs(before.log_evidence, before.variance)[0]
        by_evidence = runs_by_evidence(fit, 12)
        found, densities = runs_by_rows_left_out(fit, model, KEY, (x, y), 12)
        going_on = fit_integrated(model, KEY, (x, y), 2, 1, 1, False, fit)
        single = left_out(model, KEY, (x, y), {n: u[4:8] for n, u in before.numbers.items()})
    weights = np.exp(before.log_evidence - before.log_evidence.max())
    likely = int(weights.argmax())
    taken = np.isin(by_evidence.at["noise"], before.numbers["noise"][4 * likely : 4 * likely + 4]).mean()
    assert taken == pytest.approx(weights[likely] / weights.sum(), abs=0.1)
    rows = left_out_of_runs(model, x, y, before)
    np.testing.assert_allclose(rows[:, 1], single[:, 0], rtol=1e-6)
    shares = stacking_weights(rows)
    # by the posterior: weights of stacking have seen the rows
    np.testing.assert_allclose(np.exp(densities), np.exp(rows) @ weights / weights.sum(), rtol=1e-6)
    assert np.log(np.exp(rows) @ shares).sum() > densities.sum() + 0.01
    for r in range(3):
        share = np.isin(found.at["noise"], before.numbers["noise"][4 * r : 4 * r + 4]).mean()
        assert share == pytest.approx(shares[r], abs=0.1)
    samples = found.posterior.samples
    np.testing.assert_allclose(np.log(samples["noise"]), found.at["noise"], rtol=1e-6)
    assert going_on.ended.log_evidence.shape == (3,)  # of its runs, whatever it is asked for
    # the same data again: nothing is added
    np.testing.assert_allclose(going_on.ended.log_evidence, before.log_evidence, atol=1e-6)


def test_further_runs_are_added_to_those_that_there_are():
    x, y, model = X, STEP, family(2, X)
    one = fit_integrated(model, KEY, (x, y), 6, 2, 1, False)
    three = with_further_runs(one, model, jax.random.key(1), (x, y), 6, 2, 3)
    alone = fit_integrated(model, jax.random.key(1), (x, y), 6, 2, 2, False)
    expected = np.concatenate([one.ended.log_evidence, alone.ended.log_evidence])
    np.testing.assert_array_equal(three.ended.log_evidence, expected)
    assert (three.log_evidence, three.error) == evidence_of_runs(expected, three.ended.variance)
    for name, u in three.ended.numbers.items():
        np.testing.assert_array_equal(u, jnp.concatenate([one.ended.numbers[name], alone.ended.numbers[name]]))
    assert len(three.ended.samples["noise"]) == 18
    assert with_further_runs(three, model, KEY, (x, y), 6, 2, 3) is three
    at_the_mode = fit_integrated(family(1, X), KEY, (x, y), 6, 1, 1, True)
    assert with_further_runs(at_the_mode, family(1, X), KEY, (x, y), 6, 1, 3) is at_the_mode


@pytest.mark.slow
def test_programs_with_a_weight_have_further_runs():
    """A step is worth a layer; what one layer says alone is not run again."""
    options = {"depths": (1, 2), "num_draws": 40, "num_sweeps": 4}
    with jax.enable_x64(True):
        x, y = (jnp.asarray(np.asarray(a), float) for a in (X, STEP))
        one = fit_best(lambda depth: family(depth, x), KEY, x, y, **options)
        three = fit_best(lambda depth: family(depth, x), KEY, x, y, num_runs=3, **options)
    assert one.weights[2] > 0.5
    assert [len(part.ended.log_evidence) for part in three.parts.values()] == [1, 3]
    np.testing.assert_array_equal(three.parts[2].ended.log_evidence[:1], one.parts[2].ended.log_evidence)
    assert three.held_out[1] == one.held_out[1]
    assert three.held_out[2] != one.held_out[2]
    assert len(three.parts[2].posterior.samples["noise"]) == 40
    smooth = fit_best(lambda depth: family(depth, X), KEY, X, jnp.sin(3 * X[:, 0]), num_runs=3, **options)
    assert smooth.weights == {1: 1.0, 2: 0.0}
    assert [len(part.ended.log_evidence) for part in smooth.parts.values()] == [1, 1]


def test_a_run_that_found_nothing_has_no_weight():
    """Of whose draws at the start none had a finite likelihood."""
    x, y = X, STEP
    fit = fit_integrated(family(2, x), KEY, (x, y), 2, 1, 3, False)
    numbers = {n: u.at[2:4].set(jnp.nan) for n, u in fit.ended.numbers.items()}
    lost = dataclasses.replace(
        fit.ended, numbers=numbers, log_evidence=np.where(np.arange(3) == 1, -np.inf, fit.ended.log_evidence)
    )
    found, densities = runs_by_rows_left_out(fit._replace(ended=lost), family(2, x), KEY, (x, y), 6)
    assert np.isfinite(densities).all()
    assert np.isfinite(found.at["noise"]).all()
    assert np.isfinite(runs_by_evidence(fit._replace(ended=lost), 6).at["noise"]).all()

    def often_lost(X, y=None):
        """Of a thousand draws of the prior few are finite, so that some runs of many find none."""
        u = numpyro.sample("u", dist.Uniform())
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(0.0, jnp.where(u < 0.004, 1.0, jnp.nan)), obs=y)

    several = fit_integrated(often_lost, KEY, (x, y), 2, 1, 10, False)
    lost = ~np.isfinite(several.ended.log_evidence)
    assert 0 < lost.sum() < 10
    assert np.isfinite([several.log_evidence, several.error]).all()


def left_out_of_runs(model, x, y, ended):
    with jax.enable_x64(True):
        return left_out(model, KEY, (x, y), ended.numbers, len(ended.log_evidence))
