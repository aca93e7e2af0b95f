"""The benchmark of MCMC runs at a small size: every program that needs no data files, and every kind of sampler."""

import re
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # guides of twenty steps warn
def test_smoke(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    out = tmp_path / "mcmc.jsonl"
    monkeypatch.setattr("sys.argv", ["mcmc.py", "--smoke", "--out", str(out)])
    runpy.run_path(str(BENCHMARKS / "mcmc.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.findall(r"\*\*(.+)\*\*", printed) == ["step 12", "Booth", "latent", "ring"]
    rows = [line.split(" | ")[1] for line in printed.splitlines() if re.match(r"\| \d", line)]
    assert rows == ["collapsed, guide", "SGHMC", "Gibbs, 4 ellipses, slice", "collapsed", "stock, dense"]
    assert "- collapsed: for_mcmc: " in printed  # counts are Poisson: no layer of the ring can be integrated
    assert not re.search(r"\b(nan|inf)\b", printed)
    assert not out.exists()
