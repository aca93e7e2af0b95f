"""Inputs and targets from files as regression sets are handed around."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

KINDS = ".npz with arrays X and y; .mat with a matrix data; .npy, .csv, .txt or .data, also .gz: y in the last column"


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, D) and targets (N,) in their own units, without rows in which a number is missing.

    Of tables, inputs that are constant are left out too. The sets that papers on large Gaussian processes use (pol,
    elevators, kin40k, 3droad, houseelectric) are matrices of numbers whose last column is y, as ``data`` in a ``.mat``
    file or as text, with or without a line of names.
    """
    names = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    kind = names[-1] if names else ""
    if kind == ".npz":
        with np.load(path) as file:
            X, y = file["X"].astype(float), file["y"].astype(float).reshape(len(file["X"]))
    elif kind in (".mat", ".npy", ".csv", ".txt", ".data"):
        if kind == ".mat":
            from scipy.io import loadmat

            table = loadmat(path)["data"]
        else:
            table = np.load(path) if kind == ".npy" else numbers(path)
        X, y = table[:, :-1].astype(float), table[:, -1].astype(float)
        X = X[:, np.nanstd(X, 0) > 0]
    else:
        raise ValueError(f"{path}: expected {KINDS}")
    whole = np.isfinite(X).all(1) & np.isfinite(y)
    return X[whole], y[whole]


def numbers(path: Path) -> np.ndarray:
    """A table of numbers, separated by commas, semicolons or blanks, below a line of names or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        first = file.readline()
    separator = next((mark for mark in ",;" if mark in first), None)
    try:
        named = 0
        for cell in first.split(separator):
            float(cell)
    except ValueError:
        named = 1
    return np.genfromtxt(path, delimiter=separator, skip_header=named)
