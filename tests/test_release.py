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
    """Where a bound of pyproject.toml changes, ci/matrix.py has to run again, and its versions go into the page."""
    matrix = load(ROOT / "ci" / "matrix.py")
    page = (ROOT / "docs" / "design.md").read_text()
    pythons = re.search(r"^\| package \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
    assert pythons == [f"Python {python}" for python in matrix.PYTHONS]
    found = {name: re.search(rf"^\| {name}\b.*? \| (.*) \|$", page, re.MULTILINE)[1] for name in matrix.SHOWN}
    rows = {name: cells.split(" | ") for name, cells in found.items()}
    for python, *versions in zip(matrix.PYTHONS, *rows.values(), strict=True):
        tested = dict(zip(rows, versions, strict=True))
        for pin in matrix.oldest(python):
            name, version = pin.split("==")
            assert name not in tested or f"{tested[name].split(', ')[0]}.".startswith(f"{version}."), pin
