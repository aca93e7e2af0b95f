import os
import subprocess
import sys
import time
import zlib

import jax
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)

_BEGIN = time.monotonic()

QUICK = "smoke and not slow"  # what -m smoke stands for: a test in the selection may have slow cases


def _compile_quickly():
    """XLA's older emitters compile these small programs in half the time; not every jaxlib still has them."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
    probe = [sys.executable, "-c", "import jax; jax.devices()"]
    if subprocess.run(probe, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True).returncode == 0:
        os.environ["XLA_FLAGS"] = flags  # workers inherit it


def pytest_addoption(parser):
    parser.addoption(
        "--minutes",
        type=float,
        help="begin no test after so many minutes, and skip the rest; files come in a new order in every run",
    )


def pytest_configure(config):
    """Compiled programs are kept between modules and runs: most of the time here goes into compilation."""
    if config.option.markexpr == "smoke":
        config.option.markexpr = QUICK
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _compile_quickly()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")  # files are not written atomically
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax") / worker))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(config, items):
    """With ``--minutes``, files in an order that differs between runs and is the same for all workers of one."""
    if config.option.minutes is not None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        items.sort(key=lambda item: zlib.crc32(f"{run} {item.path}".encode()))


def pytest_runtest_setup(item):
    """Counted from the start of the worker."""
    minutes = item.config.option.minutes
    if minutes is not None and time.monotonic() - _BEGIN > 60 * minutes:
        pytest.skip(f"more than {minutes:g} minutes, --minutes")


def pytest_ignore_collect(collection_path, config):
    """``-m smoke`` reads only the files that have such tests, so that it needs what these import and nothing else."""
    chosen = config.option.markexpr == QUICK and collection_path.match("test_*.py")
    return True if chosen and "@pytest.mark.smoke" not in collection_path.read_text() else None


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Programs of a finished module only fill memory."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _own_random_numbers(request):
    """A module's ``rng`` starts anew in every test: its numbers do not depend on which tests ran before."""
    rng = getattr(request.module, "rng", None)
    if rng is not None:
        rng.bit_generator.state = np.random.default_rng(zlib.crc32(request.node.name.encode())).bit_generator.state


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture
def x32():
    """Run a test with 64-bit numbers switched off, as most users do."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)
