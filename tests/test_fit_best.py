"""``dgp.fit_best``: programs of several depths, and their weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp
from numpyro.handlers import seed
from numpyro.infer.util import log_density
from sizes import mostly_long
from small_designs import X, densities, family, log_evidence, without_plate

import numpyro_dgp as dgp
from numpyro_dgp.analysis.program import inspect_program
from numpyro_dgp.depth.fit_best import left_out
from numpyro_dgp.depth.integrated_fit import Density, IntegratedFit, fit_integrated, highest_end
from numpyro_dgp.depth.weighted_posterior import WeightedPosterior, evidence_weights, stacking_weights

KEY = jax.random.key(0)
STEP = jnp.where(X[:, 0] < 0.47, -1.0, 1.0)


@pytest.mark.long
def test_the_evidence_of_one_layer_is_that_of_a_grid():
    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray(X), float)
        y = jnp.sin(6 * x[:, 0])
        best = dgp.fit_best(family, KEY, x, y, depths=(1,), one_layer="draws", num_runs=1)
        part, evidence = best.parts[1], log_evidence(x, y)
        assert best.weights == {1: 1.0}
        assert abs(part.log_evidence - evidence) < 4 * part.error
        assert part.error < 0.3
        assert len(part.posterior.samples["noise"]) == 400


NOISY = jnp.sin(6 * X[:, 0]) + 0.1 * jnp.cos(40 * X[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mostly_long(["float32"], ["float32", "float64"]))
def test_one_layer_predicts_at_the_largest_density_of_its_logarithms(dtype):
    """As a dense Gaussian process does with the hyperparameters of the highest point of a grid."""
    with jax.enable_x64(dtype == "float64"):
        x, y = jnp.asarray(np.asarray(X), dtype), jnp.asarray(np.asarray(NOISY), dtype)
        best = dgp.fit_best(lambda d: family(d, x), KEY, x, y, depths=(1,), num_draws=10, num_sweeps=1)
        found = best.parts[1].posterior.params
        new = x[:4] + 0.04
        mixture = best.predict(KEY, new)
    assert mixture.means.shape == (1, 4)  # one draw says all
    assert mixture.means.dtype == dtype
    values, a, b = densities(X, NOISY)
    row, column = np.unravel_index(values.argmax(), values.shape)
    scale, noise = np.exp(a[row]), np.exp(b[column])
    np.testing.assert_allclose(np.log(found["scale_auto_loc"]), a[row], atol=0.07)
    np.testing.assert_allclose(np.log(found["noise_auto_loc"]), b[column], atol=0.09)
    kernel = dgp.kernels.Matern52(1.0, scale)
    C, c = kernel(X, X) + noise**2 * jnp.eye(len(X)), kernel(jnp.asarray(np.asarray(new), float), X)
    np.testing.assert_allclose(mixture.mean, c @ jnp.linalg.solve(C, NOISY), atol=5e-3)
    variance = 1.0 - jnp.sum(c * jnp.linalg.solve(C, c.T).T, 1) + noise**2
    np.testing.assert_allclose(mixture.variance, variance, rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("log_noise", [-3.0, -7.0, -12.0, -14.0, -18.0, -20.0, -25.0])
def test_an_integral_that_rounding_makes_has_no_density(log_noise):
    """Near the dense value, or none: samplers, and ascents, went to where rounding errors of tens of nats were."""
    with jax.enable_x64(True):
        x, y = jnp.asarray(np.asarray(X), float), jnp.asarray(np.asarray(NOISY), float)
        values = {"scale": jnp.array(0.3), "noise": jnp.exp(log_noise)}
        found, _ = log_density(dgp.for_mcmc(seed(family(1, x), 0)), (x, y), {}, values)
        K = dgp.kernels.Matern52(1.0, 0.3)(x, x) + (1e-10 + jnp.exp(2 * log_noise)) * jnp.eye(len(x))
        expected = dist.MultivariateNormal(jnp.zeros(len(x)), K).log_prob(y)
        expected += dist.LogNormal(-0.5, 1.0).log_prob(0.3) + dist.LogNormal(-4.0, 1.0).log_prob(values["noise"])
    assert np.isfinite(found) == (log_noise > -16)
    if np.isfinite(found):
        np.testing.assert_allclose(found, expected, atol=1e-4 if log_noise > -13 else 2.0)


@pytest.mark.long
@pytest.mark.parametrize("rows", [7, 12])  # fewer rows before, and the same rows in other units
def test_a_fit_goes_on_from_the_draws_of_the_one_before(rows):
    """To the evidence of a grid and the posterior of a fit from the prior."""
    with jax.enable_x64(True):
        x, y = (jnp.asarray(np.asarray(a), float) for a in (X, NOISY))
        seen, found, options = x[:rows], [], (400, 8, 1, False)
        for key in jax.random.split(jax.random.key(11), 8):
            before = fit_integrated(family(1, seen), key, (seen, 1.3 * y[:rows] - 0.2), *options)
            found.append(fit_integrated(family(1, x), key, (x, y), *options, before))
        anew, evidence = fit_integrated(family(1, x), KEY, (x, y), *options), log_evidence(x, y)
    values = np.array([part.log_evidence for part in found])
    sd = values.std(ddof=1)
    assert abs(values.mean() + sd**2 / 2 - evidence) < 4 * sd / np.sqrt(len(values))
    assert 0.3 < np.sqrt(np.mean([part.error**2 for part in found])) / sd < 3
    means = np.array([np.log(p.posterior.samples["noise"]).mean() for p in found])
    expected = np.log(anew.posterior.samples["noise"])
    error = np.hypot(means.std(ddof=1) / np.sqrt(len(means)), expected.std() / np.sqrt(50))  # 50 chains
    assert abs(means.mean() - expected.mean()) < 4 * error


@pytest.mark.long
def test_a_fit_of_two_layers_goes_on_with_more_rows():
    """Hidden values of the first rows are those of the draws before, with the same evidence as a fit from the prior."""
    options = {"depths": (1, 2), "num_draws": 200, "num_runs": 1}
    order = np.array([0, 2, 4, 6, 8, 10, 11, 1, 5, 3, 7, 9])
    with jax.enable_x64(True):
        x, y = (jnp.asarray(np.asarray(a)[order], float) for a in (X, STEP))
        keys = [jax.random.key(i) for i in (4, 5, 6)]
        many = options | {"num_draws": 800, "weigh": "evidence"}  # that of 200 is too low by a nat
        best = [dgp.fit_best(lambda d: family(d, x), key, x, y, **many) for key in keys]
        going = None
        for rows in (7, 10, 12):
            seen = x[:rows]
            going = dgp.fit_best(lambda d, at=seen: family(d, at), KEY, seen, y[:rows], previous=going, **options)
        mixture = going.predict(KEY, x)
    for depth in (1, 2):
        part, values = going.parts[depth], np.array([b.parts[depth].log_evidence for b in best])
        # of two layers the printed errors are less than the standard deviation over keys
        assert abs(part.log_evidence - values.mean()) < 4 * np.hypot(part.error, values.std(ddof=1))
    assert going.parts[1].posterior.samples is None
    assert going.weights[2] > 0.9
    np.testing.assert_allclose(mixture.mean, y, atol=0.1)


@pytest.mark.slow
def test_every_number_moves_in_a_sweep():
    """Hyperparameters by site and all together, whitened values in ten parts of nearly one size."""
    program = family(2)
    density = Density(dgp.for_mcmc(program), (X, STEP), KEY, inspect_program(program, (X, STEP), {}))
    blocks = density.blocks()
    white = np.array(density.filled({n: u for n, u in density.shapes.items() if not density.white[n]}, jnp.nan))
    white = np.isnan(white)
    hyper, parts = blocks[:4], blocks[4:]
    np.testing.assert_array_equal(hyper.sum(0), np.where(white, 0, 2))
    np.testing.assert_array_equal(parts.sum(0), white)
    assert len(parts) == 10
    assert np.ptp(parts.sum(1)) <= 1


@pytest.mark.long
def test_of_two_runs_the_one_with_more_evidence_is_kept():
    options = {"depths": (1,), "num_draws": 10, "num_sweeps": 1, "num_runs": 1}
    anew = dgp.fit_best(family, KEY, X, NOISY, **options)

    def going_on(said):
        """From a fit that says of itself to have so much evidence."""
        part = anew.parts[1]
        ended = dataclasses.replace(part.ended, log_evidence=part.ended.log_evidence + said - part.log_evidence)
        before = WeightedPosterior({1: part._replace(ended=ended)}, {1: 1.0})
        return dgp.fit_best(family, KEY, X, NOISY, previous=before, **options).parts[1].log_evidence

    assert going_on(-50.0) == anew.parts[1].log_evidence
    assert going_on(50.0) == pytest.approx(50.0)  # from data to the same data


@pytest.mark.long
def test_how_one_layer_predicts_does_not_change_what_is_said_of_it():
    options = {"depths": (1,), "num_draws": 10, "num_sweeps": 1, "num_runs": 1}
    draws, mode = (dgp.fit_best(family, KEY, X, NOISY, one_layer=how, **options) for how in ("draws", "mode"))
    assert draws.parts[1].log_evidence == mode.parts[1].log_evidence
    assert draws.weights == mode.weights
    assert mode.parts[1].posterior.samples is None
    assert len(draws.parts[1].posterior.samples["scale"]) == 10


@pytest.mark.slow
@pytest.mark.parametrize("one_layer", ["mode", pytest.param("draws", marks=pytest.mark.long)])
def test_hyperparameters_may_be_in_a_plate(one_layer):
    """They are those of one site with a dimension, and predictions know them."""

    def program(in_plate):
        def model(X_, y=None):
            if in_plate:
                with numpyro.plate("columns", 1):
                    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 1.0))
            else:
                scale = numpyro.sample("scale", dist.LogNormal(-0.5, 1.0).expand([1]).to_event(1))
            f = dgp.gp("f0", dgp.kernels.Matern52(1.0, scale), dgp.Points(X))
            with numpyro.plate("data", len(X_)):
                value = numpyro.deterministic("twice", 2.0 * X_[:, 0])  # one for each row: no number of the fit
                numpyro.sample("y", dgp.Likelihood(f(X_), lambda v: dist.Normal(v + 0 * value, 0.05)), obs=y)

        return model

    options = {"depths": (1,), "num_draws": 6, "num_sweeps": 1, "num_runs": 1, "one_layer": one_layer}
    found = [dgp.fit_best(lambda _, p=p: program(p), KEY, X, NOISY, **options) for p in (True, False)]
    assert ("scale" in (found[0].parts[1].posterior.samples or {})) == (one_layer == "draws")
    new = X[:3] + 0.04
    np.testing.assert_allclose(*(best.predict(KEY, new).mean for best in found), rtol=1e-6)


@pytest.mark.long
def test_layers_that_are_not_integrated_predict_by_draws():
    """Under a Bernoulli likelihood, and with a latent input in a plate."""

    def counts(depth):
        def model(X_, y=None):
            scale = numpyro.sample("scale", dist.LogNormal(-0.5, 1.0))
            f = dgp.gp("f", dgp.kernels.Matern52(1.0, scale), dgp.Points(X))
            with numpyro.plate("data", len(X_)):
                numpyro.sample("y", dgp.Likelihood(f(X_), lambda v: dist.Bernoulli(logits=v)), obs=y)

        return model

    best = dgp.fit_best(counts, KEY, X, (STEP > 0).astype(int), depths=(1,), num_draws=8, num_sweeps=1)
    assert len(best.parts[1].posterior.samples["scale"]) == 8


def test_an_ascent_ends_where_it_is_highest_and_never_below_its_start():
    def slope(point):  # two hills, of heights 1 and 2, and no number beyond them
        hills = np.exp(-((point[0] + 2) ** 2)), 2 * np.exp(-((point[0] - 2) ** 2))
        value = sum(hills) if abs(point[0]) < 3 else np.nan
        return value, np.array([-2 * (point[0] + 2) * hills[0] - 2 * (point[0] - 2) * hills[1]])

    np.testing.assert_allclose(highest_end(slope, np.array([[-2.5], [1.5]])), [2.0], atol=1e-4)
    np.testing.assert_allclose(highest_end(slope, np.array([[-2.5]])), [-2.0], atol=1e-4)
    assert slope(highest_end(slope, np.array([[2.9]])))[0] >= slope(np.array([2.9]))[0]


@pytest.fixture(scope="module")
def deep():
    return dgp.fit_best(family, KEY, X, STEP, depths=(1, 2), num_draws=20, num_sweeps=1)


@pytest.mark.long
def test_it_predicts_as_a_posterior(deep):
    assert sum(deep.weights.values()) == pytest.approx(1.0)
    new = X[:3] + 0.01
    mixture = deep.using(num_samples=20).predict(KEY, new)
    assert mixture.means.shape == deep.using(num_samples=20).predict_function(KEY, new).means.shape == (20, 3)
    assert deep.using(num_samples=20).sample(KEY, new).shape == (20, 3)
    shallow = dataclasses.replace(deep, weights={1: 1.0, 2: 0.0})  # without draws, which quantiles have of their own
    np.testing.assert_allclose(shallow.quantile(KEY, 0.3, new), shallow.predict(KEY, new).quantile(0.3))
    drawn = deep.using(num_samples=6).functions(KEY)
    values = drawn(new)["y"]
    assert values.shape == (6, 3)
    np.testing.assert_array_equal(values, drawn(new)["y"])
    assert "layers   log evidence (error)" in repr(deep)
    assert deep.weights[2] > 0.9  # a step


@pytest.mark.long
@pytest.mark.parametrize(("options", "odds"), [({}, 0.25), ({"layer_odds": 1.0}, 1.0)])
def test_layers_have_the_odds_that_they_are_given(options, odds):
    best = dgp.fit_best(
        family,
        KEY,
        X[:4],
        STEP[:4],
        depths=(1, 3),
        weigh="evidence",
        num_draws=10,
        num_sweeps=1,
        num_runs=1,
        least_odds=0,
        **options,
    )
    shallow, deep = best.parts[1].log_evidence, best.parts[3].log_evidence
    np.testing.assert_allclose(np.log(best.weights[3] / best.weights[1]), deep - shallow + 2 * np.log(odds), rtol=1e-5)


def test_programs_out_of_the_window_have_no_weight():
    log_evidence = np.log([0.6, 0.5, 0.02])
    np.testing.assert_allclose(evidence_weights(log_evidence), np.array([0.6, 0.5, 0.02]) / 1.12)
    rising = log_evidence[::-1]
    np.testing.assert_allclose(evidence_weights(rising), np.array([0.02, 0.5, 0.6]) / 1.12)
    np.testing.assert_allclose(evidence_weights(rising, least_odds=0.05), np.array([0.0, 0.5, 0.6]) / 1.1)
    # the simpler of two has to be the less probable one
    np.testing.assert_array_equal(evidence_weights(log_evidence, least_odds=0.05), [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(evidence_weights(log_evidence, least_odds=1.0), [1.0, 0.0, 0.0])
    # prior odds count
    found = evidence_weights(log_evidence, np.log([0.01, 1.0, 1.0]), least_odds=0.05)
    np.testing.assert_array_equal(found, [0.0, 1.0, 0.0])


@pytest.mark.slow
def test_predictions_do_not_look_at_parts_without_weight():
    """Nor at how many draws these have: one layer at its largest density has one."""
    silent = IntegratedFit(dgp.Posterior(lambda: None, samples={"a": jnp.zeros(10)}), 0.0, 0.0, 5)
    alone = IntegratedFit(constant(0.0).posterior, 0.0, 0.0, 5)
    mixture = WeightedPosterior({1: alone, 2: silent}, {1: 1.0, 2: 0.0})
    assert mixture.predict(KEY, X[:3]).means.shape == (10, 3)
    few = IntegratedFit(dgp.Posterior(lambda: None, samples={"a": jnp.zeros(4)}), 0.0, 0.0, 5)
    assert WeightedPosterior({1: alone, 2: few}, {1: 1.0, 2: 0.0}).predict(KEY, X[:3]).means.shape == (10, 3)


@pytest.mark.long
def test_acquisitions_take_the_mixture(deep):
    """Its joint moments are those of the parts, in their shares, and a criterion of it can be compiled and mapped."""
    new = X[:3] + 0.03
    drawn = deep.using(num_samples=20)
    joint, mixture = (f(KEY, new) for f in (drawn.predict_jointly, drawn.predict_function))
    assert joint.covariances.shape == (20, 3, 3)
    variances = jnp.diagonal(joint.covariances, axis1=1, axis2=2)
    sides = joint.mean, mixture.mean, joint.covariance.diagonal() ** 0.5, mixture.variance**0.5
    np.testing.assert_allclose(sides[0], sides[1], atol=0.15)  # hidden layers are drawn anew in each
    np.testing.assert_allclose(sides[2], sides[3], atol=0.15)
    assert (variances >= 0).all()
    vigf = dgp.design.VIGF(drawn, KEY, X, STEP)
    batches = jnp.array([[[0.0]], [[0.5]], [[0.99]]])  # at the step, and where two runs say all
    values = jax.jit(jax.vmap(vigf))(batches)
    assert values.argmax() == 1
    np.testing.assert_allclose(values[1], vigf(batches[1]), rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("y", [STEP, 0.5 * jnp.square(X[:, 0])], ids=["a step", "a parabola"])
def test_a_layer_has_to_predict_rows_that_are_left_out(y):
    """Weights are those of stacking, of what draws of two layers and one layer at its largest density say."""
    best = dgp.fit_best(family, KEY, X, y, depths=(1, 2), num_draws=40, num_sweeps=2, num_runs=1)
    parts = best.parts.items()
    found = [left_out(family(depth), KEY, (X, y), part.at) for depth, part in parts]
    np.testing.assert_allclose(list(best.held_out.values()), np.mean(found, 1), rtol=1e-4)
    expected = stacking_weights(np.stack(found, 1), least_gain=1.0)
    np.testing.assert_allclose(list(best.weights.values()), expected, atol=1e-3)
    assert best.weights[2] > 0.9 if y is STEP else best.weights == {1: 1.0, 2: 0.0}


@pytest.mark.long
def test_stacking_weighs_predictions_of_held_out_rows():
    best = dgp.fit_best(family, KEY, X, STEP, depths=(1,), weigh="stacking", folds=2, num_draws=20, num_sweeps=1)
    assert best.weights == {1: pytest.approx(1.0)}
    assert best.held_out.keys() == {1}
    assert np.isfinite(best.held_out[1])


@pytest.mark.long
def test_tables_are_arrays_and_data_are_kept():
    """In folds too, whatever the index; what is written to the data after the fit does not change predictions."""
    pandas = pytest.importorskip("pandas")
    options = {"depths": (1,), "folds": 2, "num_draws": 8, "num_sweeps": 1, "num_runs": 1}
    x, y = np.array(X), np.array(STEP)
    best = dgp.fit_best(family, KEY, x, y, **options)
    of_tables = dgp.fit_best(family, KEY, pandas.DataFrame(x), pandas.Series(y, index=range(30, 42)), **options)
    assert of_tables.held_out == best.held_out
    x[:], y[:] = 0.0, 5.0
    found = best.predict(KEY, X[:3] + 0.04).mean
    np.testing.assert_array_equal(found, of_tables.predict(KEY, X[:3] + 0.04).mean)


def constant(value):
    def model(X_, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(1e-6), dgp.Points(X[:2]))
        with numpyro.plate("data", len(X_)):
            numpyro.sample("y", dgp.Likelihood(f(X_), lambda v: dist.Normal(v + value, 0.1)), obs=y)

    return IntegratedFit(dgp.Posterior(model, samples={"f": jnp.zeros((10, 2))}), 0.0, 0.0, 5)


@pytest.mark.long
def test_the_density_has_the_weights_and_the_draws_their_shares():
    mixture = WeightedPosterior({1: constant(0.0), 2: constant(1.0)}, {1: 0.7, 2: 0.3})
    y = np.array([0.0, 1.0])
    each = [part.posterior.log_density(KEY, y, X[:2]) for part in mixture.parts.values()]
    expected = logsumexp(jnp.stack(each), axis=0, b=jnp.array([[0.7], [0.3]]))
    np.testing.assert_allclose(mixture.log_density(KEY, y, X[:2]), expected, rtol=1e-5)
    np.testing.assert_allclose(mixture.using(num_samples=10).predict(KEY, X[:2]).mean, 0.3, atol=1e-3)


@pytest.mark.parametrize("number", range(3))
def test_stacking_weights_are_the_maximum(number):
    densities = np.random.default_rng(number).normal(size=(30, 3)) + np.array([0.3, 0.0, -0.5])
    weights = stacking_weights(densities)

    def score(w):
        return np.log(np.exp(densities) @ w).mean()

    axis = np.linspace(0, 1, 201)
    grid = [score(np.array([a, b, 1 - a - b])) for a in axis for b in axis if a + b <= 1]
    assert max(grid) - 1e-5 < score(weights) < max(grid) + 1e-3


def test_a_program_has_to_gain_standard_errors():
    """The second by 2.0 nats in sum, with an error of 1.0; the third loses."""
    shallow = np.linspace(-1.0, 1.0, 4)
    better = shallow + np.array([0.0, 1.0, 0.0, 1.0])
    found = np.stack([shallow, better, shallow - 0.1], 1)
    np.testing.assert_allclose(stacking_weights(found), [0.0, 1.0, 0.0], atol=1e-2)
    np.testing.assert_allclose(stacking_weights(found, least_gain=1.9), [0.0, 1.0, 0.0], atol=1e-2)
    np.testing.assert_array_equal(stacking_weights(found, least_gain=2.1), [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(stacking_weights(found[:, [2, 0, 2]], least_gain=0.0) > 0, [True, True, True])
    np.testing.assert_array_equal(stacking_weights(found[:, [0, 2]], least_gain=0.0), [1.0, 0.0])


def test_evidence_weights_are_posterior_probabilities():
    np.testing.assert_allclose(evidence_weights([-1000.0, -1001.0]), [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))])
    np.testing.assert_allclose(evidence_weights([-1000.0, -1000.0], np.log([3.0, 1.0])), [0.75, 0.25])


MIXTURE = WeightedPosterior({1: constant(0.0)}, {1: 1.0})


@pytest.mark.long
def test_a_previous_fit_may_have_another_prior():
    """The evidence, and the mean of the hyperparameter, are those of the prior of now, by a grid."""
    x, loc = np.linspace(0, 1, 6), 1.5
    y = np.sin(5 * x)

    def of_prior(loc):
        def model(X, y=None):
            variance = numpyro.sample("variance", dist.LogNormal(loc, 0.5))
            f = dgp.gp("f", dgp.kernels.RBF(variance, 0.3), dgp.Points(x[:, None]))
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.2)), obs=y)

        return model

    grid = np.linspace(loc - 4, loc + 4, 401)
    K = np.exp(-0.5 * np.square((x[:, None] - x) / 0.3))
    covariances = np.exp(grid)[:, None, None] * K + 0.04 * np.eye(6)
    logs = -0.5 * (y @ np.linalg.inv(covariances) @ y + np.linalg.slogdet(2 * np.pi * covariances)[1])
    logs = logs - 0.5 * np.square((grid - loc) / 0.5) - np.log(0.5 * np.sqrt(2 * np.pi))
    evidence = logsumexp(logs) + np.log(grid[1] - grid[0])
    weights = np.exp(logs - logsumexp(logs))
    mean = (weights * grid).sum()
    sd = np.sqrt((weights * np.square(grid - mean)).sum())

    args = jnp.asarray(x[:, None], float), jnp.asarray(y, float)
    before = fit_integrated(of_prior(0.0), KEY, args, 400, 8, 1, False)
    found = fit_integrated(of_prior(loc), KEY, args, 400, 8, 1, False, before)
    assert abs(found.log_evidence - evidence) < 4 * found.error
    assert found.error < 0.25
    assert abs(jnp.log(found.posterior.samples["variance"]).mean() - mean) < 4 * sd / 50**0.5  # of 50 chains


@pytest.mark.long
def test_a_previous_fit_is_one_of_the_same_sites():
    def renamed(depth):
        def model(X_, y=None):
            scale, noise = numpyro.sample("length", dist.LogNormal(-0.5, 1.0)), 0.1
            f = dgp.gp("f0", dgp.kernels.Matern52(1.0, scale), dgp.Points(X))
            with numpyro.plate("data", len(X_)):
                numpyro.sample("y", dgp.Likelihood(f(X_), lambda v: dist.Normal(v, noise)), obs=y)

        return model

    options = {"num_draws": 6, "num_sweeps": 1, "num_runs": 1}
    before = dgp.fit_best(family, KEY, X, NOISY, depths=(1, 2), **options)
    with pytest.raises(ValueError, match=r"expected the sites of previous, \['noise', 'scale'\], got \['length'\]"):
        dgp.fit_best(renamed, KEY, X, NOISY, depths=(1,), previous=before, **options)
    fewer = lambda depth: family(depth, X[:5])  # noqa: E731
    with pytest.raises(ValueError, match=r"the site 'f1' to have its shape in previous, \(1, 12\).*\(1, 5"):
        dgp.fit_best(fewer, KEY, X[:5], NOISY[:5], depths=(2,), previous=before, **options)
    with pytest.raises(ValueError, match="finite at some draws of previous, got none"):
        fit_integrated(family(1), KEY, (X, 1e30 * NOISY), 6, 1, 1, True, before.parts[1])


def beside_a_table_as_long_and_as_wide(depth):
    """Its rows are those of the inputs or others: which can be left out with them is not plain."""

    def model(X_, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(-0.5, 1.0))
        f = dgp.gp("f", dgp.kernels.Matern52(1.0, scale), dgp.Points(X))
        with numpyro.plate("data", len(X_)):
            numpyro.sample("y", dgp.Likelihood(f(X_), lambda v: dist.Normal(v, 0.1)), obs=y)
        if y is not None:
            with numpyro.plate("columns", len(X), dim=-1), numpyro.plate("lines", len(X), dim=-2):
                numpyro.sample("table", dist.Normal(jnp.log(scale), 1.0), obs=jnp.zeros((len(X), len(X))))

    return model


@pytest.mark.long
def test_rows_are_left_out_only_where_programs_are_weighed():
    options = {"depths": (1,), "num_draws": 8, "num_sweeps": 1}
    best = dgp.fit_best(beside_a_table_as_long_and_as_wide, KEY, X, STEP, **options)
    assert (best.weights, best.held_out) == ({1: 1.0}, {})
    with pytest.raises(ValueError, match="so that each can be left out"):
        dgp.fit_best(beside_a_table_as_long_and_as_wide, KEY, X, STEP, **options | {"depths": (1, 2)})
    alone = dgp.fit_best(beside_a_table_as_long_and_as_wide, KEY, X, STEP, one_layer="draws", num_runs=2, **options)
    assert alone.predict(KEY, X[:3]).mean.shape == (3,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dgp.fit_best(3, KEY, X, STEP), "fit_best: expected family, a function from the number of layers"),
        (lambda: dgp.fit_best(lambda depth: None, KEY, X, STEP), r"expected family\(depth\) to be a program"),
        (lambda: dgp.fit_best(family, KEY, X, STEP[:3]), "inputs first and observations last, of equal length"),
        (lambda: dgp.fit_best(family, KEY, X, STEP, depths=(2, 1)), "depths as ascending numbers of layers"),
        (lambda: dgp.fit_best(family, KEY, X, STEP, depths=(1, (2, 1), 1)), r"ascending.*got \(1, \(2, 1\), 1\)"),
        (lambda: dgp.fit_best(family, KEY, X, STEP, depths=(1, (2, 0))), "pairs of one with the columns"),
        (lambda: dgp.fit_best(family, KEY, X, STEP, depths=(1, (2, 1), (2, 1))), "ascending numbers of layers"),
        (lambda: dgp.fit_best(family, KEY, X, STEP, depths=(1, (2, 1, 1))), "pairs of one with the columns"),
        (lambda: dgp.fit_best(family, KEY, X, STEP, depths=True), "ascending numbers of layers"),
        (
            lambda: dgp.fit_best(lambda depth: family(depth), KEY, X, STEP, depths=(1, (2, 1))),
            r"two numbers, layers and columns .*for the pair \(2, 1\).*too many positional arguments.*width=None",
        ),
        (lambda: dgp.fit_best(family, KEY, X, STEP, weigh="loo"), 'expected weigh="stacking" or "evidence"'),
        (
            lambda: dgp.fit_best(family, KEY, X, STEP, least_gain=-1),
            "expected least_gain of 0 or more standard errors, got -1: 1.0",
        ),
        (lambda: dgp.fit_best(family, KEY, X, STEP, least_gain=np.inf), "expected least_gain of 0 or more .* got inf"),
        (
            lambda: dgp.fit_best(family, KEY, X, STEP, weigh="evidence", folds=3),
            'expected folds of weigh="stacking" only, got folds=3',
        ),
        (
            lambda: dgp.fit_best(lambda d: without_plate, KEY, X, STEP),
            "expected observations in a numpyro.plate of the 12 rows",
        ),
        (
            lambda: dgp.fit_best(family, KEY, X, STEP, one_layer="map"),
            'expected one_layer="mode" or "draws", got \'map',
        ),
        (lambda: dgp.fit_best(family, KEY, X, STEP, weigh="stacking", folds=50), "expected from 2 to 12 folds"),
        (
            lambda: dgp.fit_best(family, KEY, X, X, STEP, folds=2),
            "inputs and observations as the only arguments with 12 rows for folds, .* close over it",
        ),
        (
            lambda: dgp.fit_best(family, KEY, X, [0.1] * 12, STEP, folds=3),
            "the only arguments with 12 rows for folds",
        ),
        (lambda: dgp.fit_best(family, KEY, X, STEP * np.nan), "finite"),
        (lambda: stacking_weights(np.zeros(3)), r"expected log densities of shape \(N, K\)"),
        (
            lambda: dgp.fit_best(family, KEY, X, STEP, layer_odds=0.0),
            "expected layer_odds as a positive number, got 0.0",
        ),
        (lambda: dgp.fit_best(family, KEY, X, STEP, layer_odds=[1, 2]), "expected layer_odds as a positive number"),
        (lambda: dgp.fit_best(family, KEY, X, STEP, layer_odds="even"), "expected layer_odds as a positive number"),
        (
            lambda: dgp.fit_best(family, KEY, X, STEP, least_odds=1.5),
            "expected least_odds as a number from 0, .* got 1.5",
        ),
        (lambda: dgp.fit_best(family, KEY, X, STEP, least_odds=[0, 1]), "expected least_odds as a number from 0"),
        (
            lambda: dgp.fit_best(family, KEY, X, STEP, previous=3),
            "fit_best: expected previous, a result of fit_best, got int",
        ),
        (
            lambda: dgp.fit_best(family, KEY, X, STEP, previous=MIXTURE),
            r"previous with all depths, \(1, 2, 3\), got one without \[1, 2, 3\]",
        ),
        (
            lambda: dgp.fit_best(family, KEY, X, STEP, previous=MIXTURE, folds=3),
            "expected no folds with previous, got folds=3",
        ),
        (lambda: dgp.fit_best(family, KEY, X, STEP, num_runs=0), "fit_best: expected num_runs .* got 0: try 4"),
        (lambda: evidence_weights([np.nan]), "finite log_evidence"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
