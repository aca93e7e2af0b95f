"""What a release says of itself in several files is the same everywhere."""

import importlib.util
import re
from pathlib import Path

import numpyro_dgp

ROOT = Path(__file__).parent.parent


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_version():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert numpyro_dgp.__version__ == cited == newest


def test_the_lower_bounds_are_those_of_the_table_of_tested_versions():
    """Where a bound of pyproject.toml changes, ci/matrix.py has to run again, and its table goes into the page."""
    matrix = load(ROOT / "ci" / "matrix.py")
    page = (ROOT / "docs" / "design.md").read_text()
    for python in matrix.PYTHONS:
        shown = re.search(rf"^\| {re.escape(python)} \| oldest \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
        tested = dict(zip(matrix.SHOWN, shown, strict=False))
        for pin in matrix.oldest(python):
            name, version = pin.split("==")
            assert name not in tested or (tested[name] + ".").startswith(f"{version}."), pin
        assert re.fullmatch(r"\d+ passed", shown[-1])
