"""``DeepGPRegressor`` and ``DeepGPClassifier`` as they are, without tuning, beside estimators of scikit-learn.

``python benchmarks/estimators.py --data DIRECTORY`` fits scikit-learn's diabetes, iris, breast cancer and digits, and
sets of ``DIRECTORY/*.npz`` (arrays X, y), four fifths of the rows for training and at most ``--rows`` of them. It
prints R2 or accuracy, the mean log density or log probability of test rows, and seconds of the processor, compilation
included. ``--checks`` runs all of scikit-learn's own checks of estimators instead, on small fits.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from numpyro_dgp.sklearn import DeepGPClassifier, DeepGPRegressor

CLASSES = {"iris": datasets.load_iris, "cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}


def regressors(columns: int) -> Iterator[tuple[str, Any]]:
    """Estimators of numbers, by name."""
    for layers in (1, 2):
        yield f"DeepGPRegressor({layers})", DeepGPRegressor(layers, random_state=0)
    kernel = ConstantKernel() * Matern(np.full(columns, columns**0.5), (1e-2, 1e3), nu=2.5) + WhiteKernel(0.1)
    exact = GaussianProcessRegressor(kernel, normalize_y=True)
    yield "GaussianProcessRegressor", make_pipeline(StandardScaler(), exact)
    yield "HistGradientBoostingRegressor", HistGradientBoostingRegressor(random_state=0)


def classifiers(columns: int) -> Iterator[tuple[str, Any]]:
    """Estimators of classes, by name."""
    for layers in (1, 2):
        yield f"DeepGPClassifier({layers})", DeepGPClassifier(layers, random_state=0)
    laplace = GaussianProcessClassifier(ConstantKernel() * RBF(columns**0.5))
    yield "GaussianProcessClassifier", make_pipeline(StandardScaler(), laplace)
    yield "LogisticRegression", make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    yield "HistGradientBoostingClassifier", HistGradientBoostingClassifier(random_state=0)


def log_density(found: Any, X: np.ndarray, y: np.ndarray) -> float:
    """Mean log density of test rows, NaN where an estimator has none."""
    if isinstance(found, DeepGPRegressor):
        return found.log_density(X, y).mean()
    if isinstance(found, HistGradientBoostingRegressor):
        return float("nan")
    mean, std = found.predict(X, return_std=True)
    return norm.logpdf(y, mean, std).mean()


def log_probability(found: Any, X: np.ndarray, y: np.ndarray) -> float:
    """Mean log probability of the labels of test rows."""
    p = found.predict_proba(X)[np.arange(len(y)), np.searchsorted(found.classes_, y)]
    return np.log(np.maximum(p, 1e-12)).mean()


def measure(
    name: str, X: np.ndarray, y: np.ndarray, of: Callable[[int], Any], quality: Callable[..., float], arguments: Any
) -> None:
    """Print a row of the table for each estimator: means over splits."""
    for method, _ in of(X.shape[1]):
        found = []
        for seed in range(arguments.splits):
            split = train_test_split(X, y, test_size=0.2, random_state=seed)
            train, test, y_train, y_test = split
            start = time.process_time()
            estimator = dict(of(X.shape[1]))[method]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                estimator.fit(train[: arguments.rows], y_train[: arguments.rows])
            seconds = time.process_time() - start
            found.append((estimator.score(test, y_test), quality(estimator, test, y_test), seconds))
        score, density, seconds = np.mean(found, 0)
        rows = min(len(train), arguments.rows)
        print(f"| {name} | {rows} | {method} | {score:.3f} | {density:.3f} | {seconds:.0f} |", flush=True)


def run_checks(estimator: Any) -> None:
    """All checks of scikit-learn, with what fails."""
    found = check_estimator(estimator, on_fail=None)
    failed = {r["check_name"]: r["exception"] for r in found if r["status"] not in ("passed", "skipped")}
    print(f"{type(estimator).__name__}: {len(found)} checks, {len(failed)} failed")
    for name, exception in failed.items():
        print(f"  {name}: {exception!r:.300}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of .npz files")
    parser.add_argument("--sets", nargs="*", default=["diabetes", "yacht", "energy", "concrete", *CLASSES])
    parser.add_argument("--rows", type=int, default=1000, help="for training")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--checks", action="store_true", help="run scikit-learn's checks and stop")
    arguments = parser.parse_args()
    if arguments.checks:
        warnings.simplefilter("ignore")
        small = {"layers": 1, "num_steps": 200, "num_inducing": 5, "num_samples": 5}
        run_checks(DeepGPRegressor(**small))
        run_checks(DeepGPClassifier(**small))
        return
    print("| set | rows | estimator | R2 or accuracy | log density | seconds |\n|---|---|---|---|---|---|")
    for name in arguments.sets:
        if name in CLASSES:
            measure(name, *CLASSES[name](return_X_y=True), classifiers, log_probability, arguments)
        elif name == "diabetes":
            measure(name, *datasets.load_diabetes(return_X_y=True), regressors, log_density, arguments)
        else:
            file = np.load(arguments.data / f"{name}.npz")
            measure(name, file["X"].astype(float), file["y"].astype(float).ravel(), regressors, log_density, arguments)


if __name__ == "__main__":
    main()
