"""Public names and signatures are those of the stored listing, so that none changes without being noticed."""

import difflib
import re
from pathlib import Path

import pytest
from public_api import OPTIONAL, STORED, STORED_OPTIONAL, default, modules, optional_modules, signature, text


@pytest.mark.smoke
def test_the_listing_is_the_stored_one():
    compare(STORED, text())


def test_so_is_that_of_modules_that_need_more():
    for package in OPTIONAL.values():
        pytest.importorskip(package)
    compare(STORED_OPTIONAL, text(optional_modules()))


def compare(path, now):
    changes = [*difflib.unified_diff(path.read_text().splitlines(), now.splitlines(), "stored", "now", n=0)]
    assert not changes, "\n".join(
        [*changes, "if that is meant: python tests/public_api.py, and a line in CHANGELOG.md"]
    )


API = Path(__file__).parent.parent / "docs" / "api.md"


def names(path):
    """Public names of a listing, without the members of classes."""
    lines = path.read_text().splitlines()
    return {re.sub(r"^class |\(.*", "", line) for line in lines if not line.startswith(" ")}


def test_the_reference_has_every_public_name_and_no_other():
    """Entries of docs/api.md are the names of the listings; modules have no entry."""
    listed, without_entry = [], {prefix for prefix, _ in modules()}
    for block in re.findall(r"```{eval-rst}\n(.*?)```", API.read_text(), re.DOTALL):
        module = re.search(r"^\.\. currentmodule:: numpyro_(.*)$", block, re.MULTILINE)[1]
        listed += [f"{module}.{name}" for name in re.findall(r"^   ([\w.]+)$", block, re.MULTILINE)]
    assert len(set(listed)) == len(listed)
    assert set(listed) == (names(STORED) | names(STORED_OPTIONAL)) - without_entry


def test_options_have_names():
    """Arguments that any name may have are those of a program, and the plates of ``minibatch``."""
    unnamed = [line for line in text().splitlines() if "**" in line]
    assert 20 < len(unnamed) < 60
    assert not [line for line in unnamed if not line.endswith(("**kwargs)", "dgp.minibatch(fn=None, **rows)"))]


@pytest.mark.slow
def test_signatures_without_what_differs_between_machines():
    def function(self, x: int, *rest, key=object(), size: float = 2.0, **options) -> str: ...

    assert signature(function) == "(x, *rest, key=..., size=2.0, **options)"
    assert default((1, None)) == "(1, None)"
    assert default((1, print)) == "..."
