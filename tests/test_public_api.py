"""Public names and signatures are those of the stored listing, so that none changes without being noticed."""

import difflib

import pytest
from public_api import OPTIONAL, STORED, STORED_OPTIONAL, default, optional_modules, signature, text


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
