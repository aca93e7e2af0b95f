"""``py.typed`` serves users: their program type-checks in strict mode against the package as it is installed."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import numpyro_dgp

PROGRAM = Path(__file__).parent / "typing" / "deep_gp.py"
# NumPyro and optax have no py.typed.
SETTINGS = "[mypy]\nstrict = True\n[mypy-numpyro.*,optax.*]\nignore_missing_imports = True\n"
WRONG = """import numpyro_dgp as dgp

dgp.Points(1, lern=True)
dgp.guides.MeanField(print, hiden=1)
x: int = dgp.load("file")
dgp.Pionts(1)
dgp.design.lop(dgp.plots.fit)
"""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """The folder of a virtual environment that sees the package as an installed one."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "venv", with_pip=False)
    packages = folder / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    root = Path(numpyro_dgp.__file__).parent.parent
    (packages / "user.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
    (folder / "mypy.ini").write_text(SETTINGS)
    (folder / "program.py").write_text(PROGRAM.read_text())
    (folder / "wrong.py").write_text(WRONG)
    return folder


def mypy(folder, name):
    python = folder / "venv" / "bin" / "python"
    command = ["mypy", "--config-file", "mypy.ini", "--python-executable", python, name]
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_mypy(user):
    assert mypy(user, "program.py").startswith("Success")
    found = mypy(user, "wrong.py")
    assert 'Unexpected keyword argument "lern" for "Points"' in found
    assert 'Unexpected keyword argument "hiden" for "MeanField"' in found
    assert "Incompatible types in assignment" in found
    assert 'Module has no attribute "Pionts"' in found
    assert 'Module has no attribute "lop"' in found
    assert "Found 5 errors" in found


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright(user):
    def errors(name):
        command = ["pyright", "--outputjson", "--pythonpath", user / "venv" / "bin" / "python", name]
        done = subprocess.run(command, cwd=user, capture_output=True, text=True)
        return [e["rule"] for e in json.loads(done.stdout)["generalDiagnostics"] if e["severity"] == "error"]

    assert errors("program.py") == []
    assert errors("wrong.py") == [
        "reportCallIssue",
        "reportCallIssue",
        "reportAssignmentType",
        *2 * ["reportAttributeAccessIssue"],
    ]


def test_the_program_runs(tmp_path):
    subprocess.run([sys.executable, PROGRAM], cwd=tmp_path, check=True, capture_output=True)
