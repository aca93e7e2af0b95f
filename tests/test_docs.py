"""The code in the README and the documentation runs as it stands."""

import re
from pathlib import Path

import jax
import matplotlib
import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).parent.parent
BUILT, NOTEBOOKS = "_build", "notebooks"  # notebooks run when the site is built
WRITTEN = sorted(page for page in (ROOT / "docs").rglob("*.md") if BUILT not in page.parts)
PAGES = [ROOT / "README.md", *(page for page in WRITTEN if NOTEBOOKS not in page.parts)]
CODE = {str(page.relative_to(ROOT)): re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES}


@pytest.mark.long
@pytest.mark.parametrize("page", [name for name, blocks in CODE.items() if blocks])
def test_code_runs(page, x32, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    assert not jax.config.jax_enable_x64
    exec(compile("\n".join(CODE[page]), page, "exec"), {})
    plt.close("all")


WIDTH = 100  # of code on a page, before it has to be scrolled (docs/_static/site.css)
FENCES = re.compile(r"^( *)```(python|text|sh|\{code-cell\}[^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_the_page(page):
    wide = [line for *_, code in FENCES.findall(page.read_text()) for line in code.splitlines() if len(line) > WIDTH]
    assert not wide


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 110


@pytest.mark.slow
def test_every_benchmark_is_listed():
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = [path for folder in ("benchmarks", "benchmarks/sources") for path in (ROOT / folder).glob("*.py")]
    assert not [path.name for path in scripts if f"`{path.name}" not in listed]
