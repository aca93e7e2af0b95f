"""Examples that ask for double precision also run in single precision, and what they print is finite."""

import re
import runpy
from pathlib import Path

import jax
import numpyro
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
DOUBLE = [path.name for path in sorted(EXAMPLES.glob("*.py")) if "enable_x64" in path.read_text()]


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # a few steps do not always reach a maximum, about which Laplace's guide warns
@pytest.mark.parametrize("name", DOUBLE)
def test_runs_in_single_precision(name, x32, tmp_path, monkeypatch, capsys):
    update = jax.config.update
    monkeypatch.setattr(jax.config, "update", lambda k, v: None if k == "jax_enable_x64" else update(k, v))
    monkeypatch.setattr(numpyro, "enable_x64", lambda use_x64=True: None)
    monkeypatch.setattr("sys.argv", [name, "--smoke", "--out", str(tmp_path)])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert not jax.config.jax_enable_x64
    assert printed
    assert not re.search(r"\b(nan|inf)\b", printed)
    assert list(tmp_path.glob("*.png"))
