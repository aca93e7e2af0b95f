"""Pages, docstrings and messages use the words of docs/style.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PHRASES = [
    "leaves open",
    "leave open",
    "left open",
    "counts nothing",
    "count nothing",
    "in words",
    "is told",
    "are told",
    "left behind",
    "what is none",
    "of which it sees",
    "says of",
    "say of",
    "a number of y",
    "numbers of y",
    "numbers of v",
]
OWN = {ROOT / "docs" / "style.md"}
FILES = sorted({*(ROOT / "numpyro_dgp").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"} - OWN)


@pytest.mark.parametrize("phrase", PHRASES)
def test_phrases_of_the_past_stay_away(phrase):
    found = [
        f"{path.relative_to(ROOT)}: {text[max(0, at - 60) : at + 60]}"
        for path in FILES
        if "_build" not in path.parts
        for text in [" ".join(path.read_text().split())]
        for at in [match.start() for match in re.finditer(re.escape(phrase), text, re.IGNORECASE)]
    ]
    assert not found, "\n".join(found)
