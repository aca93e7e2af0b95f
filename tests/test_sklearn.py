"""The estimators with scikit-learn's interface: what it asks of them, and that they are the programs they say."""

import importlib
import inspect
import pickle
import sys

import jax
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import numpyro_dgp as dgp
from numpyro_dgp.sklearn import DeepGPClassifier, DeepGPRegressor
from numpyro_dgp.sklearn.recipe import filled_up

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


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("estimator", "check"), checks(*CHECKS[10:]))
def test_refuses_what_estimators_refuse(estimator, check):
    check(clone(estimator))


@pytest.mark.slow
def test_a_row_is_predicted_alike_in_any_company(fitted):
    X, _ = rows(8, seed=1)
    mean, std = fitted.predict(X, return_std=True)
    assert mean.shape == std.shape == (8,)
    assert mean.dtype == np.float64
    np.testing.assert_allclose(fitted.predict(X[[5, 2]]), mean[[5, 2]], rtol=1e-5)
    assert 40 < mean.mean() < 60  # in units of y
    assert (std > 0).all()


@pytest.mark.slow
def test_it_hands_out_the_program(fitted):
    X, _ = rows(4, seed=1)
    inputs = fitted.units_X_(X)
    found = fitted.posterior_.predict(jax.random.key(0), inputs, num_samples=5)
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
        ({"learning_rate": 0.0}, "expected a positive learning_rate, got 0.0: try 0.05"),
        ({"kernel": "Matern25"}, "expected kernel to be one of .*Matern52.*, got 'Matern25': kernel='Matern"),
        ({"guide": "inducing"}, "expected guide to be one of .*InducingPoint.*, got 'inducing'"),
        ({"likelihood": "laplace"}, "expected likelihood to be one of normal, student-t, got 'laplace'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=f"DeepGPRegressor: {message}"):
        DeepGPRegressor(**settings).fit(*rows(10))


@pytest.mark.parametrize("bad", [np.nan, np.inf, "text"])
def test_wrong_data(bad):
    X, y = rows(10)
    X = X.astype(object)
    X[3, 1] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity|convert string"):
        DeepGPRegressor().fit(X, y)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_several_outputs():
    X, y = rows(30)
    found = DeepGPRegressor(**SMALL, likelihood="student-t").fit(X, np.stack([y, -100 * y], 1))
    mean, std = found.predict(X[:4], return_std=True)
    assert mean.shape == std.shape == (4, 2)
    assert (mean[:, 1] < -3000).all()
    assert found.sample_y(X[:4], 3).shape == (4, 2, 3)
    assert found.predict_quantiles(X[:4], [0.5]).shape == (1, 4, 2)
    assert found.log_density(X[:4], np.stack([y, -100 * y], 1)[:4]).shape == (4,)


@pytest.mark.slow
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


@pytest.mark.slow
def test_in_a_search_and_a_pipeline():
    X, y = rows(40)
    search = GridSearchCV(make_pipeline(StandardScaler(), DeepGPRegressor(**SMALL)),
                          {"deepgpregressor__kernel": ["RBF", "Matern32"]}, cv=2)  # fmt: skip
    assert np.isfinite(search.fit(X, y).cv_results_["mean_test_score"]).all()
