"""How the programs of tests and doctests are compiled and kept, and ``--minutes``."""

import gc
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import pytest

jax.config.update("jax_disable_most_optimizations", True)

_BEGIN = time.monotonic()

# Files whose slow tests take longest. They come first, so that no worker is alone with one at the end.
LONG = ("test_docs.py", "test_calibration.py", "test_gibbs.py")


def _compile_quickly():
    """XLA's older emitters compile these small programs in half the time, each as one piece; not every jaxlib still
    has them."""
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {quick}"
    probe = [sys.executable, "-c", "import jax; jax.devices()"]
    if subprocess.run(probe, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True).returncode == 0:
        os.environ["XLA_FLAGS"] = flags  # workers and the processes that tests start inherit it


def _share_programs(folder):
    """Before they start, all workers get the programs that any of them compiled in earlier runs."""
    workers = [path for path in folder.iterdir() if path.is_dir()]
    programs = {path.name: path for worker in workers for path in worker.iterdir()}
    for worker in workers:
        for name in programs.keys() - {path.name for path in worker.iterdir()}:
            os.link(programs[name], worker / name)


def pytest_addoption(parser):
    parser.addoption(
        "--minutes",
        type=float,
        help="begin no test after so many minutes, and skip the rest; long files first, others in a new order",
    )


def pytest_configure(config):
    """Compiled programs are kept between modules and runs: most of the time here goes into compilation."""
    folder = Path(config.cache.mkdir("jax"))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _share_programs(folder)
        _compile_quickly()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")  # files are not written atomically
    jax.config.update("jax_compilation_cache_dir", str(folder / worker))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    gc.set_threshold(200_000, 50, 100)  # traces are many small objects, most of which live as long as their program


def pytest_collection_modifyitems(config, items):
    """With ``--minutes``, files in an order that differs between runs and is the same for all workers of one."""
    if config.option.minutes is not None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        last = len(LONG)
        place = {name: i for i, name in enumerate(LONG)}
        items.sort(key=lambda item: (place.get(item.path.name, last), zlib.crc32(f"{run} {item.path}".encode())))


def pytest_runtest_setup(item):
    """Counted from the start of the worker."""
    minutes = item.config.option.minutes
    if minutes is not None and time.monotonic() - _BEGIN > 60 * minutes:
        pytest.skip(f"more than {minutes:g} minutes, --minutes")
