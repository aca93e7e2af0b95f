"""The estimators with scikit-learn's interface: what it asks of them, and that they are the programs they say."""

import importlib
import inspect
import pickle
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import numpyro_dgp as dgp
from numpyro_dgp.sklearn import DeepGPClassifier, DeepGPRegressor
from numpyro_dgp.sklearn.base_estimator import filled_up
from numpyro_dgp.sklearn.layered_program import LayeredProgram, NormalOutcome, starts_of

SMALL = {"layers": 1, "num_steps": 30, "num_inducing": 5, "num_samples": 5, "random_state": 0}
# Those of scikit-learn's checks that need few fits or none; `benchmarks/estimators.py --checks` runs all.
CHECKS = """
    check_do_not_raise_errors_in_init_or_set_param check_estimator_cloneable check_estimator_repr check_set_params
    check_estimator_tags_renamed check_get_params_invariance check_mixin_order check_no_attributes_set_in_init
    check_parameters_default_constructible check_valid_tag_types
    check_estimators_unfitted check_fit1d check_fit2d_1sample check_complex_data check_estimators_empty_data_messages
    check_estimator_sparse_tag check_estimator_sparse_array check_requires_y_none check_estimators_nan_inf
    check_regressors_no_decision_function check_classifiers_regression_target
    """.split()


def rows(number, seed=0):
    X = np.random.default_rng(seed).uniform(-1, 1, (number, 2))
    return 1e3 * X, 50 + 7 * np.sin(3 * X[:, 0])


@pytest.fixture(scope="module")
def fitted():
    X, y = rows(30)
    return DeepGPRegressor(**SMALL).fit(X, y)


def checks(*chosen):
    found = []
    for estimator in (DeepGPRegressor(**SMALL), DeepGPClassifier(**SMALL)):
        for _, check in estimator_checks_generator(estimator):
            name = getattr(check, "func", check).__name__
            if name in chosen:
                found.append(pytest.param(estimator, check, id=f"{type(estimator).__name__}-{name}"))
    return found


def test_the_checks_are_found():
    assert len(checks(*CHECKS)) > 30


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("estimator", "check"), checks(*CHECKS[:10]))
def test_is_an_estimator(estimator, check):
    check(clone(estimator))


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("estimator", "check"), checks(*CHECKS[10:]))
def test_refuses_what_estimators_refuse(estimator, check):
    check(clone(estimator))


@pytest.mark.long
def test_a_row_is_predicted_alike_in_any_company(fitted):
    X, _ = rows(8, seed=1)
    mean, std = fitted.predict(X, return_std=True)
    assert mean.shape == std.shape == (8,)
    assert mean.dtype == np.float64
    np.testing.assert_allclose(fitted.predict(X[[5, 2]]), mean[[5, 2]], rtol=1e-5)
    assert 40 < mean.mean() < 60  # in units of y
    assert (std > 0).all()


@pytest.mark.long
def test_it_hands_out_the_program(fitted):
    X, _ = rows(4, seed=1)
    inputs = fitted.units_X_(X)
    found = fitted.posterior_.using(num_samples=5).predict(jax.random.key(0), inputs)
    np.testing.assert_allclose(fitted.units_y_.inverse(found.mean), fitted.predict(X), rtol=1e-4)  # one layer: no draws
    assert isinstance(fitted.guide_, dgp.guides.InducingPoint)
    assert fitted.model_ is fitted.posterior_.model
    assert fitted.losses_.shape == (30,)


def test_not_fitted():
    with pytest.raises(NotFittedError):
        DeepGPRegressor().predict([[0.0]])
    with pytest.raises(NotFittedError):
        DeepGPClassifier().predict([[0.0]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0}, "expected layers to be a positive integer, got 0: try 2"),
        ({"num_steps": -1}, "expected num_steps to be a positive integer, got -1: try num_steps=None"),
        ({"learning_rate": 0.0}, "expected learning_rate > 0, got 0.0: 0.05"),
        ({"kernel": "Matern25"}, "expected kernel to be one of .*Matern52.*, got 'Matern25': kernel='Matern"),
        ({"guide": "inducing"}, "expected guide to be one of .*InducingPoint.*, got 'inducing'"),
        ({"likelihood": "laplace"}, "expected likelihood to be one of normal, student-t, got 'laplace'"),
        ({"likelihood": ["normal"]}, r"expected likelihood to be one of normal, student-t, got \['normal'\]"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=rf"DeepGPRegressor\.fit: {message}"):
        DeepGPRegressor(**settings).fit(*rows(10))


@pytest.mark.parametrize("bad", [np.nan, np.inf, "text"])
def test_wrong_data(bad):
    X, y = rows(10)
    X = X.astype(object)
    X[3, 1] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity|convert string"):
        DeepGPRegressor().fit(X, y)


def test_kernels_with_a_name_take_a_lengthscale_per_column():
    X, y = rows(10)
    with pytest.raises(ValueError, match=r"expected kernel to be one of RBF, .*, got 'Gibbs'") as raised:
        DeepGPRegressor(kernel="Gibbs").fit(X, y)
    for name in re.search("one of (.*), got", str(raised.value))[1].split(", "):
        assert getattr(dgp.kernels, name)(1.0, np.ones(2))(X, X).shape == (10, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x64", "far", "message"),
    [
        (False, 1e25, r"X, standardised as in the fit, with squared distances below 3e\+38, the largest float32"),
        (False, 1e60, "expected standardised values within the range of float32"),
        (True, 1e170, r"X, standardised as in the fit, with squared distances below 2e\+308, the largest float64"),
        (True, 1.7e308, r"X, standardised as in the fit, with squared distances below 2e\+308"),
    ],
)
def test_inputs_too_far_away(fitted, x64, far, message):
    with jax.enable_x64(x64), pytest.raises(ValueError, match=message):
        fitted.predict([[far, 0.0]])


@pytest.mark.slow
def test_classes_of_inputs_too_far_away():
    X, _ = rows(10)
    found = DeepGPClassifier(**SMALL | {"num_steps": 2}).fit(X, X[:, 0] > 0)
    for ask in (found.predict, found.predict_proba):
        with pytest.raises(ValueError, match="X, standardised as in the fit, with squared distances below"):
            ask([[1e170, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("q", "message"),
    [
        ([[0.1, 0.9]], r"expected q to be one or more levels, got shape \(1, 2\): q="),
        ([], r"expected q to be one or more levels, got shape \(0,\): q="),
        ([0.5, 1.0], "expected levels between 0 and 1, got 1"),
    ],
)
def test_wrong_levels(fitted, q, message):
    with pytest.raises(ValueError, match=f"DeepGPRegressor.predict_quantiles: {message}"):
        fitted.predict_quantiles(rows(4)[0], q)


@pytest.mark.parametrize("shape", [(), (3,), (4, 2), (1, 4)])
def test_densities_of_other_shapes(fitted, shape):
    message = rf"DeepGPRegressor.log_density: expected y of shape \(4,\), .*, got shape {re.escape(str(shape))}: give y"
    with pytest.raises(ValueError, match=message):
        fitted.log_density(rows(4)[0], np.ones(shape))


@pytest.mark.slow
def test_densities_of_other_outputs():
    X, y = rows(10)
    found = DeepGPRegressor(**SMALL | {"num_steps": 2}).fit(X, np.stack([y, -y], 1))
    for shape in [(4,), (2, 4), (4, 1)]:
        with pytest.raises(ValueError, match=r"expected y of shape \(4, 2\), .*, got shape"):
            found.log_density(X[:4], np.ones(shape))


@pytest.mark.slow
def test_densities_of_a_column(fitted):
    X, y = rows(4)
    np.testing.assert_array_equal(fitted.log_density(X, y[:, None]), fitted.log_density(X, y))


@pytest.mark.parametrize(("shape", "width"), [((12, 40), 11), ((40, 40), 30), ((12, 30), 30), ((2, 31), 1)])
def test_widths_of_wide_data(shape, width):
    first, last = starts_of(np.random.default_rng(0).normal(size=shape), 2, 5, seed=0)
    assert first.Z.shape[1] == shape[1]
    assert last.Z.shape[1] == width


@pytest.mark.long
def test_draws_of_a_collapsed_fit():
    X, y = rows(30)
    found = DeepGPRegressor(**SMALL | {"guide": "Collapsed"}).fit(X, y)
    draws = found.sample_y(X[:2], 2000)
    mean, std = found.predict(X[:2], return_std=True)
    np.testing.assert_allclose(draws.mean(1), mean, atol=5 * std.max() / 2000**0.5)
    np.testing.assert_allclose(draws.std(1), std, rtol=0.1)


def test_one_class():
    with pytest.raises(ValueError, match="expected at least two classes, got one class, \\['a'\\]"):
        DeepGPClassifier().fit([[0.0], [1.0]], ["a", "a"])


def test_settings_are_the_same_for_both():
    """But for the likelihood: both take what the program and the recipe need."""
    regressor, classifier = (inspect.signature(e).parameters for e in (DeepGPRegressor, DeepGPClassifier))
    assert {n: p.default for n, p in regressor.items() if n != "likelihood"} == {
        n: p.default for n, p in classifier.items()
    }


def test_folds_run_at_one_size():
    assert filled_up(353) == filled_up(354) == 384
    assert all(n <= filled_up(n) <= max(16 * -(-n // 16), 1.13 * n) for n in range(2, 3000))


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.utils.validation", None)
    monkeypatch.delitem(sys.modules, "numpyro_dgp.sklearn")
    with pytest.raises(ImportError, match="got none or an older one: pip install 'numpyro-dgp"):
        importlib.import_module("numpyro_dgp.sklearn")


@pytest.mark.long
def test_round_trips_and_other_predictions(fitted):
    X, y = rows(6, seed=1)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_allclose(again.predict(X), fitted.predict(X), rtol=1e-6)
    low, high = fitted.predict_quantiles(X, [0.16, 0.84])
    mean, std = fitted.predict(X, return_std=True)
    np.testing.assert_allclose((high - low) / 2, 0.9945 * std, rtol=1e-2)
    normal = -0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(fitted.log_density(X, y), normal, rtol=1e-3)
    draws = fitted.sample_y(X, n_samples=2000)
    assert draws.shape == (6, 2000)
    np.testing.assert_allclose(draws.mean(1), mean, atol=5 * std.max() / 2000**0.5)
    np.testing.assert_allclose(draws.std(1), std, rtol=0.1)


@pytest.mark.long
def test_several_outputs():
    X, y = rows(30)
    found = DeepGPRegressor(**SMALL, likelihood="student-t").fit(X, np.stack([y, -100 * y], 1))
    mean, std = found.predict(X[:4], return_std=True)
    assert mean.shape == std.shape == (4, 2)
    assert (mean[:, 1] < -3000).all()
    assert found.sample_y(X[:4], 3).shape == (4, 2, 3)
    assert found.predict_quantiles(X[:4], [0.5]).shape == (1, 4, 2)
    assert found.log_density(X[:4], np.stack([y, -100 * y], 1)[:4]).shape == (4,)


@pytest.mark.long
@pytest.mark.parametrize("labels", [["no", "yes"], [3, 5, 9]])
def test_classes(labels):
    X, _ = rows(60)
    y = np.array(labels)[np.digitize(X[:, 0], np.linspace(-1000, 1000, len(labels) + 1)[1:-1])]
    found = DeepGPClassifier(**SMALL | {"layers": 2, "num_steps": 200}).fit(X, y)
    p = found.predict_proba(X)
    assert p.shape == (60, len(labels))
    np.testing.assert_allclose(p.sum(1), 1)
    assert found.score(X, y) > 0.9
    np.testing.assert_allclose(found.predict_proba(X[40:43]), p[40:43], rtol=1e-4)


@pytest.mark.long
def test_in_a_search_and_a_pipeline():
    X, y = rows(40)
    search = GridSearchCV(make_pipeline(StandardScaler(), DeepGPRegressor(**SMALL)),
                          {"deepgpregressor__kernel": ["RBF", "Matern32"]}, cv=2)  # fmt: skip
    assert np.isfinite(search.fit(X, y).cv_results_["mean_test_score"]).all()


COUNTS = np.array([2, 1, 0, 3, 1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("Estimator", [DeepGPRegressor, pytest.param(DeepGPClassifier, marks=pytest.mark.long)])
def test_a_weight_is_a_number_of_equal_rows(Estimator):
    """And none a row that is not there: units, bound and predictions."""
    X, y = rows(6)
    y = y if Estimator is DeepGPRegressor else np.array(["a", "b", "c", "a", "b", "a"])
    settings = SMALL | {"num_steps": 3}
    weighted = Estimator(**settings).fit(X, y, sample_weight=COUNTS)
    repeated = Estimator(**settings).fit(np.repeat(X, COUNTS, 0), np.repeat(y, COUNTS))
    np.testing.assert_allclose(weighted.units_X_.loc, repeated.units_X_.loc, rtol=1e-12)
    np.testing.assert_allclose(weighted.units_X_.scale, repeated.units_X_.scale, rtol=1e-12)
    np.testing.assert_allclose(weighted.losses_[0], repeated.losses_[0], rtol=1e-9)
    np.testing.assert_allclose(weighted.losses_, repeated.losses_, rtol=1e-3)
    if Estimator is DeepGPRegressor:
        np.testing.assert_allclose(weighted.units_y_.scale, repeated.units_y_.scale, rtol=1e-12)
        found, expected = (e.predict(X, return_std=True) for e in (weighted, repeated))
        np.testing.assert_allclose(found, expected, rtol=1e-3)
    else:
        assert list(weighted.classes_) == ["a", "b"]
        np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), rtol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("guide", ["InducingPoint", "MeanField", "Collapsed"])
def test_weighted_bounds(guide):
    """Of programs with weights, at parameters away from the start."""
    X, y = rows(6)
    inputs, targets = jnp.asarray(X / 1e3), jnp.asarray((y - 50) / 7)
    program = LayeredProgram(starts_of(inputs, 1, 3, 0), dgp.kernels.RBF, NormalOutcome())
    made = getattr(dgp.guides, guide)(program)

    def loss(X, y, counts):
        svi = numpyro.infer.SVI(program, made, optax.sgd(0.1), dgp.ELBO())
        state = svi.init(jax.random.key(0), X, y, counts)
        params = jax.tree.map(lambda a: a + 0.1, svi.get_params(state))
        return dgp.ELBO().loss(jax.random.key(1), params, program, made, X, y, counts)

    often = np.repeat(np.arange(6), COUNTS)
    expected = loss(inputs[often], targets[often], jnp.ones(len(often), bool))
    np.testing.assert_allclose(loss(inputs, targets, jnp.asarray(COUNTS, float)), expected, rtol=1e-6)


@pytest.mark.slow
def test_wrong_weights():
    X, y = rows(6)
    for bad, message in (
        ([1, 1], "sample_weight.shape"),
        (-COUNTS, "5 negative and 0 positive"),
        (np.eye(6)[0], "1 p"),
    ):
        with pytest.raises(ValueError, match=message):
            DeepGPRegressor(**SMALL).fit(X, y, sample_weight=bad)
    with pytest.raises(ValueError, match=r"NaN"):
        DeepGPRegressor(**SMALL).fit(X, y, sample_weight=np.full(6, np.nan))
    with pytest.raises(ValueError, match=r"Standardizer.fit: expected weights of shape \(6,\)"):
        dgp.initial.Standardizer.fit(X, weights=[1.0])
