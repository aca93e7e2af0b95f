"""Wrong calls of public functions, a table for each part of the package (``wrong_calls/``): each ends in an error or a
warning that says what was expected and what came."""

import importlib
import re
from pathlib import Path

import pytest

TABLES = sorted(p.stem for p in (Path(__file__).parent / "wrong_calls").glob("*.py") if p.stem != "wrong")
CASES = [(table, wrong) for table in TABLES for wrong in importlib.import_module(f"wrong_calls.{table}").WRONG]


@pytest.mark.parametrize("wrong", [pytest.param(w, id=f"{table}-{w.name}") for table, w in CASES])
def test_message(wrong):
    if issubclass(wrong.raises, Warning):
        with pytest.warns(wrong.raises, match=wrong.match) as found:
            wrong.call()
        message = "".join(str(w.message) for w in found)
    else:
        with pytest.raises(wrong.raises, match=wrong.match) as raised:
            wrong.call()
        message = str(raised.value)
    assert len(message) < 1500, "a message is to be read: no array or table is printed whole"
    assert not re.search(r"Traced<|JitTracer", message)


@pytest.mark.slow
def test_names_are_unique():
    names = [(table, wrong.name) for table, wrong in CASES]
    assert len(names) == len(set(names))
