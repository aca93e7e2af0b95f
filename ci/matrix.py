"""Tests with the oldest dependencies that pyproject.toml allows, the newest, and the newest beside flax, on every
Python that it names.

Each combination gets a virtual environment of its own. ``python ci/matrix.py`` runs all of them, ``python ci/matrix.py
--python 3.11 --ends oldest`` one. At the end it prints a table of what was installed and what came out, and exits with
1 if something failed. Interpreters are looked for by name (``python3.12``) and under pyenv; ``--require-all`` makes a
missing one a failure. Needs ``packaging``, which pytest brings.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
ENDS = ["oldest", "newest", "flax"]
SHOWN = ["jax", "numpyro", "arviz-base", "numpy", "scipy", "optax", "flax"]
RUNNER = ["pytest", "pytest-xdist"]  # all that the tests marked smoke need beside the package


def oldest(python: str) -> list[str]:
    """The lowest versions that the project allows on a Python: one constraint for each dependency."""
    pins = []
    for requirement in map(Requirement, PROJECT["dependencies"]):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            lowest = [s.version for s in requirement.specifier if s.operator == ">="]
            if len(lowest) != 1:
                raise SystemExit(f"{requirement}: expected one lower bound, got {lowest}")
            pins.append(f"{requirement.name}=={lowest[0]}")
    return pins


def interpreter(python: str) -> str | None:
    """A Python of that version that runs, or ``None``."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(pyenv.glob(f"versions/{python}.*/bin/python"))
    for path in filter(None, [*map(str, found), shutil.which(f"python{python}")]):
        if subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    return None


def environment(folder: Path, python: str, end: str, extra: str) -> str:
    """The Python of a new virtual environment with the package and its dependencies at one end of their range."""
    subprocess.run([interpreter(python), "-m", "venv", "--clear", folder], check=True)
    inside = str(folder / "bin" / "python")
    limits = folder / "constraints.txt"
    limits.write_text("\n".join(oldest(python) if end == "oldest" else []))
    extras = ",".join(filter(None, [extra, "flax" if end == "flax" else ""]))
    package = [f"{ROOT}[{extras}]" if extras else str(ROOT), *([] if extra else RUNNER)]
    install = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-c", limits, *package], check=True)
    return inside


def versions(python: str) -> dict[str, str]:
    """What an environment holds, by name."""
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, check=True).stdout
    return {row["name"].lower().replace("_", "-"): row["version"] for row in json.loads(listed)}


def run(python: str, end: str, folder: Path, options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Install and test one combination: what came out, in words, and the versions."""
    start = time.perf_counter()
    try:
        inside = environment(folder, python, end, options.extra)
    except subprocess.CalledProcessError:
        return "not installed", {}
    command = [inside, "-m", "pytest", "-m", options.tests, "-n", options.workers, "-o", f"cache_dir={folder}/cache"]
    # The installed wheel is tested, not the checkout: ``python -m pytest`` would put the folder it runs in first.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"MPLBACKEND": "Agg", "PYTHONSAFEPATH": "1"}
    done = subprocess.run([*command, *options.arguments], cwd=ROOT, env=environ, capture_output=True, text=True)
    (folder / "pytest.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", flush=True)
    counted = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", done.stdout[-300:])
    result = ", ".join(counted) or f"exit {done.returncode}"
    print(f"{python} {end}: {result}, {time.perf_counter() - start:.0f} s", flush=True)
    return result if not done.returncode else f"FAILED: {result}", versions(inside)


def main() -> int:
    """Run what the command line asks for: 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS, choices=PYTHONS, metavar="VERSION")
    parser.add_argument("--ends", nargs="+", default=ENDS, choices=ENDS)
    parser.add_argument("--tests", default="smoke", help="what pytest's -m selects")
    parser.add_argument("--extra", default="", help="an extra to install, such as dev: all tests but smoke need it")
    parser.add_argument("--workers", default="auto", help="pytest's -n")
    parser.add_argument("--venvs", type=Path, help="keep the environments and logs in this folder")
    parser.add_argument("--require-all", action="store_true", help="fail where an interpreter is missing")
    parser.add_argument("arguments", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args()
    rows, good = [], True
    with tempfile.TemporaryDirectory() as scratch:
        for python in options.python:
            for end in options.ends:
                if interpreter(python) is None:
                    result, found = "no such Python here", {}
                    good &= not options.require_all
                else:
                    folder = (options.venvs or Path(scratch)).resolve() / f"{python}-{end}"
                    result, found = run(python, end, folder, options)
                    good &= result[0].isdigit()
                rows.append([python, end, *(found.get(name, "") for name in SHOWN), result])
    print("| Python | dependencies |", " | ".join(SHOWN), "| tests |")
    print("|---" * (len(SHOWN) + 3) + "|")
    for row in rows:
        print("|", " | ".join(row), "|")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
