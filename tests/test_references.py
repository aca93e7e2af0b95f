"""Every source that is cited has an entry in docs/references.md, and every entry is cited."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
from source_links import CITATION, anchor, in_docstring, in_page, key  # noqa: E402

PAGE = ROOT / "docs" / "references.md"
FOLDERS = ("numpyro_dgp", "docs", "tests", "benchmarks", "examples")
PAGES = [page for page in (ROOT / "docs").rglob("*.md") if not {"_build", "notebooks"} & set(page.parts)]
FILES = [ROOT / "README.md", *PAGES]
FILES += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_build" not in path.parts]
TEXTS = {path.relative_to(ROOT): path.read_text() for path in FILES if path not in (PAGE, Path(__file__))}
# Written so that it does not find itself.
PRIVATE = re.compile("seed " + r"00\d|\bchecks? " + r"\d+\b", re.IGNORECASE)


def citations(text):
    """Keys, also across lines of a paragraph or a comment."""
    return {key(match) for match in CITATION.finditer(re.sub(r"\s*\n\s*(?:# )?", " ", text))}


def sources(text):
    """Paragraphs that begin with "Source:", in docstrings and comments."""
    return re.findall(r"\bSource: (?!TypeAlias)(.*?)(?=\n\s*#?\s*\n|\"\"\"|\Z)", text, re.DOTALL)


def entries(page):
    """Labels and keys of the bibliography, in order."""
    return re.findall(r"^\((ref-[a-z0-9-]+)\)=\n\*\*([^*]+)\.\*\* ", page, re.MULTILINE)


ENTRIES = entries(PAGE.read_text())
KEYS = [name for _, name in ENTRIES]


def test_entries_are_unique_sorted_and_labelled_by_their_key():
    page = PAGE.read_text()
    assert len(ENTRIES) == page.count("\n(ref-") > 25
    assert len(set(KEYS)) == len(KEYS)
    assert sorted(KEYS, key=anchor) == KEYS
    assert [label for label, _ in ENTRIES] == [anchor(name) for name in KEYS]


@pytest.mark.slow
def test_every_citation_has_an_entry():
    missing = {str(path): found for path, text in TEXTS.items() if (found := citations(text) - set(KEYS))}
    assert not missing
    assert citations(PAGE.read_text()) <= set(KEYS)


@pytest.mark.slow
def test_every_entry_is_cited():
    assert not set(KEYS) - set().union(*map(citations, TEXTS.values()))


def test_every_source_names_an_entry():
    found = [(str(path), source) for path, text in TEXTS.items() for source in sources(text)]
    assert len(found) > 90
    own = [page for _, source in found for page in re.findall(r"docs/[\w/]+\.md", source)]  # what we measured ourselves
    assert all((ROOT / page).exists() for page in own)
    assert not [pair for pair in found if not citations(pair[1]) and not re.search(r"docs/[\w/]+\.md", pair[1])]


def test_no_private_numbers():
    found = [(str(path), match[0]) for path, text in TEXTS.items() for match in PRIVATE.finditer(text)]
    assert not found
    assert not PRIVATE.search(PAGE.read_text())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Source: Nobody (1999), section 2; Titsias (2009).", {"Nobody (1999)", "Titsias (2009)"}),
        ("After Some and Body-Else (2001), and others et\n    al. (2002)", {"Some and Body-Else (2001)"}),
        ("# of Nobody et\n# al. (2003, equation 4)", {"Nobody et al. (2003)"}),
        ("(Nobody, 2001; Some et al., 2015) and (as in Body, 2002)", {"Nobody (2001)", "Some et al. (2015)"}),
        ("S = (2000, 400), Adam, 2000 steps, January 2004, Grid (2000 points)", set()),
    ],
)
def test_the_collector(text, expected):
    assert citations(text) == expected
    assert not citations(text) & set(KEYS) - {"Titsias (2009)"}


def test_the_collector_of_sources():
    text = '"""One.\n\n    Source: Nobody (1999), whose\n    proof is short.\n    """\nSource: TypeAlias = int\n'
    text += "# Source: a letter.\n"
    assert [source.split()[0] for source in sources(text)] == ["Nobody", "a"]
    assert [bool(citations(source)) for source in sources(text)] == [True, False]
    assert PRIVATE.search("seed " + "007")
    assert not PRIVATE.search("seed=0, five checks, seed 0")


def test_links_go_on_in_the_next_line():
    lines = ["    Source: Sarkka and", "    Solin (2019);  # A", "    Titsias (2009)"]
    in_docstring(None, "module", "any", None, None, lines)
    assert "\n".join(lines) == (
        "    Source: :ref:`Sarkka and\n    Solin (2019) <ref-sarkka-and-solin-2019>`;  # A\n"
        "    :ref:`Titsias (2009) <ref-titsias-2009>`"
    )


@pytest.mark.slow
def test_links_leave_code_alone():
    source = ["Titsias (2009) and `Titsias (2009)`\n```python\nTitsias (2009)\n```\n(Neal, 2001, section 2)"]
    in_page(None, "any", source)
    assert source[0].count("{ref}`") == 2
    assert source[0].startswith("{ref}`Titsias (2009) <ref-titsias-2009>` and `Titsias (2009)`\n```python\nTitsias")
    assert source[0].endswith("({ref}`Neal, 2001 <ref-neal-2001>`, section 2)")
