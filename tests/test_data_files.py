"""Benchmarks read regression sets as people hand them around."""

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

FILE = Path(__file__).parent.parent / "benchmarks" / "implementations" / "data_files.py"
SPEC = importlib.util.spec_from_file_location("data_files", FILE)
data_files = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(data_files)

TABLE = np.random.default_rng(0).normal(size=(20, 4))
X, Y = TABLE[:, :-1], TABLE[:, -1]


def text(path, separator, names=""):
    np.savetxt(path, TABLE, delimiter=separator, header=names, comments="")


WRITERS = {
    "a.npz": lambda path: np.savez(path, X=X, y=Y[:, None]),
    "a.mat": lambda path: savemat(path, {"data": TABLE}),
    "a.npy": lambda path: np.save(path, TABLE),
    "a.csv": lambda path: text(path, ",", "a,b,c,y"),
    "a.txt": lambda path: text(path, " "),
    "a.data": lambda path: text(path, ";"),
    "a.csv.gz": lambda path: text(path, ","),
}


@pytest.mark.parametrize("name", WRITERS)
def test_all_kinds_are_read_alike(name, tmp_path):
    WRITERS[name](tmp_path / name)
    for found, expected in zip(data_files.load(tmp_path / name), (X, Y), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected)


def test_rows_with_missing_numbers_and_constant_columns_are_left_out(tmp_path):
    lines = ["a,b,y", "1,7,2", "nan,7,3", ",7,3", "4,7,5"]
    with gzip.open(tmp_path / "b.csv.gz", "wt") as file:
        file.write("\n".join(lines))
    found_X, found_y = data_files.load(tmp_path / "b.csv.gz")
    np.testing.assert_array_equal(found_X, [[1.0], [4.0]])
    np.testing.assert_array_equal(found_y, [2.0, 5.0])


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected \.npz with arrays X and y"):
        data_files.load(tmp_path / "a.parquet")
