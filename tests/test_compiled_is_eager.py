"""Compiled results are those of one operation after the other: kernels, losses, gradients, potentials, predictions.

In processes of their own, whose programs XLA optimises as a user's: ``as_users_compile.py`` says what is compared.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def as_a_user(part, cache):
    """Run a part without the settings that let the other tests compile quickly."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), environment.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(FOLDER / "as_users_compile.py"), part]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


LONG = [("kernels", 1000), ("programs", 80), ("random", 40), ("diagnostics", 40)]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "arrays"), [("few", 20), *(pytest.param(*p, marks=pytest.mark.long) for p in LONG)])
def test_compiled_is_eager(part, arrays, pytestconfig):
    found = as_a_user(part, pytestconfig.cache.mkdir("optimised"))
    assert found["compared"] >= arrays
    assert not found["different"], "\n".join(found["different"])
