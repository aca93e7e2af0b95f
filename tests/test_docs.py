"""The code in the README and the documentation runs as it stands."""

import re
from pathlib import Path

import jax
import matplotlib
import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "recipes").glob("*.md"))]
CODE = {page.name: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES}


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name, blocks in CODE.items() if blocks])
def test_code_runs(page, x32, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    assert not jax.config.jax_enable_x64
    exec(compile("\n".join(CODE[page]), page, "exec"), {})
    plt.close("all")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
