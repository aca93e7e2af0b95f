"""Public names and signatures are those of the stored listing, so that none changes without being noticed."""

import difflib

import pytest
from public_api import STORED, default, signature, text


@pytest.mark.smoke
def test_the_listing_is_the_stored_one():
    changes = [*difflib.unified_diff(STORED.read_text().splitlines(), text().splitlines(), "stored", "now", n=0)]
    assert not changes, "\n".join(
        [*changes, "if that is meant: python tests/public_api.py, and a line in CHANGELOG.md"]
    )


def test_options_have_names():
    """Arguments that any name may have are those of a program, and the plates of ``minibatch``."""
    unnamed = [line for line in text().splitlines() if "**" in line]
    assert 20 < len(unnamed) < 60
    assert not [line for line in unnamed if not line.endswith(("**kwargs)", "dgp.minibatch(fn=None, **rows)"))]


def test_signatures_without_what_differs_between_machines():
    def function(self, x: int, *rest, key=object(), size: float = 2.0, **options) -> str: ...

    assert signature(function) == "(x, *rest, key=..., size=2.0, **options)"
    assert default((1, None)) == "(1, None)"
    assert default((1, print)) == "..."
